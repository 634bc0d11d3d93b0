"""Starting and resuming a run: where a killed run starts again, and the check that it is the same run.

``--resume auto`` or ``--resume PATH`` picks the run folder (run_folder.py) and its newest undamaged
checkpoint (checkpoints.py), or the one that PATH names. Weights, moments and ``Progress`` are loaded from it;
training continues with the next batch (``train`` in train_ppo.py and supervised.py). The log files are cut
back to that step (run_logger.py), and later checkpoints are deleted. A run that was killed before its first
checkpoint starts from the beginning. Prompt order, sampling noise and learning rates follow from seed and
step, so the result is the same as without the stop. A flag that would change it is refused by name; files are
compared by what they hold (fingerprints.py).

Every script's run (``PpoRun``, ``SupervisedRun``) is an object with

    args, flags             the flags' values; {name: ``Flag``}: default, and whether resuming may change it
    world, dtype            its processes (distributed.py); the type of mixed precision
    total_steps, progress   the number of batches; how far it has come (``Progress`` in checkpoints.py)
    loss_scale              of fp16 (``LossScale`` in compute/loss_scale.py)
    script, display         the name of its file; how it is shown (displays.py)
    modules, optimizers     {file name: module or optimizer}: what a checkpoint holds
    tensors                 {file name: object with tensors and load_tensors}: more of a checkpoint
    states                  {name: object with state_dict and load_state_dict}: the same, in state.json
    files                   [name of a file in the run folder]: a checkpoint has a copy of it
    fingerprints()          {flag: hash of what it names}: what resuming compares
    facts()                 {name: value}: what health.py says of a run's start
    prepare()               makes the models ready for training, before a checkpoint is loaded
    save_result()           writes the files that users load
    result_path, held_out   where those are, None if not yet; the records of an evaluation, or None
    result_file             the last of them that is written, there or not
    best_metric             by which evaluations are compared; "": as its display says
    about(), results()      lines of text: what the run is made of; where its files are
    about_best()            words on the weights of the best evaluation, where they are kept; "" if not
"""

import json
import os
import platform
import secrets
import sys
from pathlib import Path

import torch
from transformers import __version__ as transformers_version

from errors import InputError
from trainer.compute.kernels import kernels_of
from trainer.runs import checkpoints, trackers
from trainer.runs.commands import quoted
from trainer.runs.run_folder import RunFolder
from trainer.runs.run_logger import NullLogger, RunLogger

LOCK_PATIENCE = 60.0  # seconds in which a process that torchrun has ended may still be ending
LENGTH = ("epochs", "max_steps")  # the flags that say how long a run is
REWARDS = ("reward_model", "reward_fn", "reward_url")
CHOSEN = ("missing_eos_penalty",)  # flags that a run chooses when it begins, where they are not given


def start_or_resume(run, about, argv):
    """Choose and lock the run folder, load its checkpoint into the run if there is one -> the run's logger.

    about: lines that describe the run; argv: its command line. Raises InputError, having changed nothing, if
    the folder is in use or holds another run, or if a process of another machine does not see it.
    """
    args, world, folder = run.args, run.world, None
    with world.all_or_none():
        if world.is_main:
            trackers.check_packages(args)
            where = args.out_dir, args.run_name, args.resume, run.display.folder
            # torchrun may have just ended the process that held the lock, and started this one in its place.
            started_again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
            folder = RunFolder(*where, patience=LOCK_PATIENCE if started_again else 0.0)
            write_config(run, folder, argv)
    path, checkpoint = world.from_main(folder and (folder.path, folder.checkpoint))
    with world.all_or_none():
        if not path.is_dir():
            raise InputError(
                f"--out_dir {args.out_dir}: {platform.node()} does not see {path}; name a folder on a disk "
                "that all machines share"
            )
    run.prepare()
    with world.all_or_none():
        if checkpoint:
            checkpoints.load(checkpoint, run)
        if folder:
            checkpoints.tidy(folder.path, run.progress.step)
        logger = RunLogger(folder, run) if folder else NullLogger()
    logger.introduce(run, about)
    return logger


def write_config(run, folder, argv):
    """Write the run folder's ``config.json``.

    If there is one already, compare the two first: InputError if it belongs to another run; differences that
    are allowed are added to the folder's notes.
    """
    config, held = configuration(run), (folder.checkpoint or folder.path) / "config.json"
    config["command"] = quoted(command(argv, run.script))
    config["resume_command"] = quoted([*command(argv, run.script), "--resume", str(folder.path)])
    config["run_id"] = secrets.token_hex(8)  # for trackers
    if held.exists():  # true without a checkpoint too, if the run was killed before its first one
        old = _read_json(held)
        folder.notes += check_same_run(old, config, run.flags)
        config["run_id"] = old.get("run_id") or old.get("swanlab_id") or config["run_id"]
        config |= {name: old.get(name) for name in CHOSEN if config.get(name, 0) is None}
    folder.config = config
    folder.write_config()


def configuration(run):
    """The content of ``config.json``: every flag, and what else influences the result."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    versions["kernels"] = "torch's" if kernels_of(run.world.device.type) is None else "compiled"
    return {
        **vars(run.args),
        "script": run.script,
        "processes": run.world.size,
        "total_steps": run.total_steps,
        "threads": torch.get_num_threads(),
        "versions": {**versions, "transformers": transformers_version},
        "fingerprints": run.fingerprints(),
        "facts": run.facts(),
    }


def check_same_run(old, new, flags):
    """Compare two configurations -> notes on the differences that are allowed.

    Raises InputError, naming both values, for a difference that changes the result. flags: {name: ``Flag``}.
    A flag that did not exist when the run began counts as having its default. Batch sizes are per process, so
    they are compared after multiplying by the number of processes. With ``--lr_schedule constant`` nothing
    depends on the number of steps: it may change.
    """
    length_may_change = new.get("lr_schedule") == "constant"
    try:
        if old.get("script", "train_ppo.py") != new["script"]:
            raise InputError(f"--resume: this is a run of {old['script']}; name one of {new['script']}")
        for name, flag in flags.items():
            over = " over all processes" if name in ("batch_size", "mini_batch_size") else ""
            was, now = old.get(name, flag.default), new[name]
            if over:
                was, now = was * old["processes"], now * new["processes"]
            may_change = flag.may_change or (length_may_change and name in LENGTH)
            may_change |= name in CHOSEN and now is None
            if was != now and not may_change:
                raise InputError(f"--resume: --{name} was {was!r} and is now {now!r}{over}; set it back")
        if (was := old["total_steps"]) != (now := new["total_steps"]) and not length_may_change:
            raise InputError(
                f"--resume: the run had {was!r} steps and now has {now!r}; has the data changed?"
            )
        for name in REWARDS:  # their content may have changed its place, but they must not come or go
            if bool(was := old.get(name)) != bool(now := new.get(name)):
                raise InputError(f"--resume: --{name} was {was!r} and is now {now!r}; set it back")
        notes = []
        for name, now in new["fingerprints"].items():
            was = old["fingerprints"].get(name)
            if was != now and name == "reward_fn":  # allowed: a mistake in it may have stopped the run
                notes.append(
                    f"note: the code of --reward_fn {new['reward_fn']} has changed since the run began"
                )
            elif was != now:
                raise InputError(
                    f"--resume: --{name} {new[name]} does not hold what the run began with (fingerprint {was}"
                    f", now {now}); name the original"
                )
        for name in ("versions", "threads", "processes"):
            if old[name] != new[name]:
                notes.append(
                    f"note: {name} were {old[name]} and are {new[name]}: results may differ by rounding"
                )
    except (KeyError, TypeError, AttributeError):
        raise InputError(
            "--resume: the run's config.json was not written by this program; start another run"
        ) from None
    return notes


def command(argv, script):
    """The words of the command line that starts a run, without --resume. argv: its flags."""
    kept, skip = [], False
    for word in argv:
        if not skip and word != "--resume" and not word.startswith("--resume="):
            kept.append(word)
        skip = word == "--resume"
    launcher = [sys.executable]
    if "WORLD_SIZE" in os.environ:
        local = os.environ["LOCAL_WORLD_SIZE"]
        nodes = str(int(os.environ["WORLD_SIZE"]) // int(local))
        launcher = ["torchrun", *(["--nnodes", nodes] if nodes != "1" else []), "--nproc_per_node", local]
    return [*launcher, str(Path(__file__).parents[1] / script), *kept]


def _read_json(path):
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"--resume: {path} cannot be read ({error}); start another run") from None
