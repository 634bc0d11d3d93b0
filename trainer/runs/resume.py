"""Starting and resuming a run: its folder, where a killed run starts again, the check that it is the same.

What a run writes to out/ (--out_dir):

out/ppo_actor_{hidden_size}{_moe}.pth     PPO's result: the actor, fp16 state-dict
out/ppo_actor_{hidden_size}{_moe}/        its config, generation config and tokenizer
out/ppo_actor_{hidden_size}{_moe}_best.pth   the actor of the best evaluation, with a folder as above
out/full_sft_{hidden_size}{_moe}.pth      result of stage 1, fp16, and the same as a Hugging Face directory
out/full_sft_{hidden_size}{_moe}/         (or --hf_dir)
out/reward_{hidden_size}/                 result of stage 2, a Hugging Face directory (or --hf_dir)
out/run_1/                                the run folder of PPO; stage 1: sft_1/, stage 2: reward_run_1/
    config.json                           every flag, the versions, fingerprints of models and data
    metrics.jsonl                         one object per step; step 0 is the evaluation before training
    samples.jsonl                         PPO: prompts, responses and the parts of their scores
    eval_samples.jsonl                    PPO: the same held-out prompts' answers at every evaluation
    deciles.jsonl                         PPO: the deciles of the scores, lengths and KLs of each step
    best.pth best/                        PPO: the best actor of this run, also when a later run has one
    checkpoints/step_<n>/                 what --resume needs (checkpoints.py)
    report.html                           all of it to look at, written again and again as the run goes
    curves.png summary.md                 written when the run ends or is stopped
    swanlog/ tensorboard/ wandb/          with --tracker (trackers.py)
    .lock .lock.held                      which process uses the folder; the second is locked meanwhile

PPO and stage 1 write their result with every checkpoint, stage 2 writes it at the end. A new run gets a new
run folder, but replaces the result of an earlier run with the same name.

``--resume auto`` or ``--resume PATH`` picks the run folder and its newest undamaged checkpoint
(checkpoints.py), or the one that PATH names. Weights, moments and ``Progress`` are loaded from it; training
continues with the next batch (``train`` in train_ppo.py and supervised.py). The log files are cut back to
that step (run_logger.py), and later checkpoints are deleted. A run that was killed before its first
checkpoint starts from the beginning. Prompt order, sampling noise and learning rates follow from seed and
step, so the result is the same as without the stop. A flag that would change it is refused by name; files are
compared by what they hold, by short hashes of what was loaded from them.

Every script's run (``PpoRun``, ``SupervisedRun``) is an object with

    args, flags             the flags' values; {name: ``Flag``}: default, and whether resuming may change it
    world, dtype            its processes (distributed.py); the type of mixed precision
    total_steps, progress   the number of batches; how far it has come (``Progress`` in checkpoints.py)
    loss_scale              of fp16 (``LossScale`` in compute/loss_scale.py)
    script, display         the name of its file; how it is shown (displays.py)
    modules, optimizers     {file name: module or optimizer}: what a checkpoint holds
    states                  {name: object with state_dict and load_state_dict}: more of a checkpoint, in
                            a file of this name where it has tensors, else in state.json
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

import contextlib
import hashlib
import json
import os
import platform
import re
import secrets
import shutil
import sys
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from transformers import __version__ as transformers_version

from atomic_files import write_whole, writing
from errors import InputError
from trainer.compute.kernels import kernels_of
from trainer.runs import checkpoints
from trainer.runs.commands import quoted
from trainer.runs.run_logger import NullLogger, RunLogger

LOCK_PATIENCE = 60.0  # seconds in which a process that torchrun has ended may still be ending
LENGTH = ("epochs", "max_steps")  # the flags that say how long a run is
REWARDS = ("reward_model", "reward_fn", "reward_url")  # they may name other places, but not come or go
CHOSEN = ("missing_eos_penalty",)  # flags that a run chooses when it begins, where they are not given


def start_or_resume(run, about: str, argv: list):
    """Choose and lock the run folder, load its checkpoint into the run if there is one -> the run's logger.

    about: lines that describe the run; argv: its command line. Raises InputError, having changed nothing, if
    the folder is in use or holds another run, or if a process of another machine does not see it.
    """
    args, world, folder = run.args, run.world, None
    with world.all_or_none():
        if world.is_main:
            # torchrun may have just ended the process that held the lock, and started this one in its place.
            started_again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
            patience = LOCK_PATIENCE if started_again else 0.0
            folder = RunFolder(args.out_dir, args.run_name, args.resume, run.display.folder, patience)
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


# ------------------------------------------------------------------------------------------ the run folder


class RunFolder:
    """The folder of a run, locked until ``close`` or the end of the process. Only the main process has one.

    Without ``--run_name`` a new run is called <kind>_<n>, with n one above the highest number so far.
    ``--resume auto`` resumes the run of that name (without a name: the newest run); if there is none, it
    starts a new one. ``--resume PATH`` names a run folder or one of its checkpoints. Raises InputError,
    having changed nothing, if the folder holds a run that is not to be resumed, if it is in use, or if all
    its checkpoints are damaged.

    ``path``: the folder; ``checkpoint``: the one to resume from, or None; ``notes``: lines to show to the
    user; ``config``: the content of config.json, once ``write_config`` has written it.

    patience: seconds to wait for the lock.
    """

    def __init__(self, out_dir, run_name, resume, kind="run", patience=0.0):
        self.checkpoint, self.notes, self.config = None, [], {}
        with writing(f"--out_dir {out_dir}"):
            while True:
                self.path, step = choose(out_dir, run_name, resume, kind)
                self._found = self.path.exists()  # and not made by this run
                self.path.parent.mkdir(parents=True, exist_ok=True)
                named = bool(run_name or resume)
                try:
                    self.path.mkdir(exist_ok=named)
                    break
                except FileExistsError:  # another new run has just taken this number
                    if named:
                        raise InputError(f"{self.path}: is a file; give another --run_name") from None
            self._lock(patience)
        if resume:
            self._find_checkpoint(step)
        elif any((self.path / name).exists() for name in ("config.json", "metrics.jsonl", "checkpoints")):
            raise InputError(
                f"--run_name {run_name}: {self.path} holds a run; add --resume auto or change the name"
            )

    def _lock(self, patience):
        """Lock the folder, until this process ends or dies. What is locked is a second file, because Windows
        lets nobody read a locked one: ``.lock`` names the process."""
        self._held = FileLock(self.path / ".lock.held", thread_local=False)
        named = self.path / ".lock"
        try:
            self._held.acquire(timeout=patience)
        except Timeout:
            holder = named.read_text(encoding="utf-8")
            raise InputError(
                f"{self.path} is in use by {holder}; stop that process or name another run"
            ) from None
        named.write_text(f"process {os.getpid()} on {platform.node()}", encoding="utf-8")

    def _find_checkpoint(self, step):
        """Find the checkpoint to resume from: that of the named step, or the newest undamaged one."""
        if step is None:
            self.checkpoint, self.notes = checkpoints.newest_intact(self.path)
            if not self.checkpoint:
                self.notes.append(f"note: --resume: no checkpoint in {self.path}, so it begins at step 1")
            return
        self.checkpoint = self.path / "checkpoints" / f"step_{step}"
        if problem := checkpoints.damage(self.checkpoint):
            raise InputError(
                f"--resume: {self.checkpoint} is damaged ({problem}); name the run folder instead"
            )

    def write_config(self):
        """Write ``config`` to config.json."""
        path = self.path / "config.json"
        with writing(path):
            write_whole(path, json.dumps(self.config, indent=2))

    def remove_if_unused(self):
        """Remove the folder of a run that has learned nothing -> True if it is gone, its number free again.

        It stays if it was there before this run, or holds anything but what every run writes at its start:
        an evaluation, a sample, a checkpoint, a file of a tracker or of the user.
        """
        written = {"config.json", ".lock", ".lock.held", "metrics.jsonl"}
        written |= {"samples.jsonl", "eval_samples.jsonl", "deciles.jsonl"}
        with contextlib.suppress(OSError, ValueError):
            if self._found or any(path.name not in written for path in self.path.iterdir()):
                return False
            metrics = self.path / "metrics.jsonl"
            lines = metrics.read_text(encoding="utf-8").splitlines()
            evaluated = any(json.loads(line).keys() != {"step"} for line in lines)
            samples = [path for path in self.path.glob("*.jsonl") if path != metrics]
            if not evaluated and not any(path.stat().st_size for path in samples):
                shutil.rmtree(self.path)
        return not self.path.exists()

    def close(self):
        self._held.release()


def choose(out_dir, run_name, resume, kind):
    """The flags -> (the folder of the run, the step of the checkpoint that --resume names, else None).
    InputError if --resume names a folder that holds no run."""
    if resume and resume != "auto":
        return _named(resume)
    newest = max(_numbered(out_dir, kind), default=0)
    number = newest if resume and newest else newest + 1
    return Path(out_dir) / (run_name or f"{kind}_{number}"), None


def _numbered(out, kind):
    """The numbers n of all folders <kind>_<n> in ``out``."""
    found = Path(out).glob(f"{kind}_*")
    return [int(m[1]) for path in found if (m := re.fullmatch(rf"{kind}_(\d+)", path.name, re.ASCII))]


def _named(resume):
    """``--resume PATH`` -> (run folder, the step of the checkpoint if PATH names one, else None)."""
    path = Path(resume).resolve()
    run = path.parent.parent
    if path in checkpoints.list_checkpoints(run):
        return run, checkpoints.step_of(path)
    # A run killed before its first checkpoint. A checkpoint on its own has a config.json too, but also SUMS.
    killed_early = (path / "config.json").is_file() and not (path / checkpoints.SUMS).exists()
    if checkpoints.list_checkpoints(path) or killed_early:
        return path, None
    raise InputError(f"--resume {resume}: no checkpoint there; name a run folder or its checkpoints/step_<n>")


# ------------------------------------------------------------------------------------- is it the same run?


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


def check_same_run(old: dict, new: dict, flags: dict) -> list:
    """Compare two configurations -> notes on the differences that are allowed.

    Raises InputError, naming both values, for a difference that changes the result. flags: {name: ``Flag``}.
    A flag that did not exist when the run began counts as having its default. Batch sizes are per process, so
    they are compared after multiplying by the number of processes. With ``--lr_schedule constant`` nothing
    depends on the number of steps: it may change.
    """
    any_length, notes = new.get("lr_schedule") == "constant", []
    try:
        if old.get("script", "train_ppo.py") != new["script"]:
            raise InputError(f"--resume: this is a run of {old['script']}; name one of {new['script']}")
        for name, flag in flags.items():
            was, now, over = old.get(name, flag.default), new[name], ""
            if name in ("batch_size", "mini_batch_size"):
                was, now, over = was * old["processes"], now * new["processes"], " over all processes"
            may_change = flag.may_change and (name not in REWARDS or bool(was) == bool(now))
            may_change |= (any_length and name in LENGTH) or (name in CHOSEN and now is None)
            if was != now and not may_change:
                raise InputError(f"--resume: --{name} was {was!r} and is now {now!r}{over}; set it back")
        if old["total_steps"] != new["total_steps"] and not any_length:
            raise InputError(
                f"--resume: the run had {old['total_steps']!r} steps and now has {new['total_steps']!r}; has "
                "the data changed?"
            )
        for name, now in new["fingerprints"].items():
            was = old["fingerprints"].get(name)
            if was != now and name == "reward_fn":  # allowed: a mistake in it may have stopped the run
                notes.append(f"note: the code of --reward_fn {new[name]} has changed since the run began")
            elif was != now:
                raise InputError(
                    f"--resume: --{name} {new[name]} does not hold what the run began with (fingerprint {was}"
                    f", now {now}); name the original"
                )
        for name in ("versions", "threads", "processes"):
            if old[name] != new[name]:
                changed = f"{name} were {old[name]} and are {new[name]}"
                notes.append(f"note: {changed}: results may differ by rounding")
    except (KeyError, TypeError, AttributeError):
        raise InputError(
            "--resume: the run's config.json was not written by this program; start another run"
        ) from None
    return notes


def command(argv: list, script: str) -> list:
    """The words of the command line that starts a run, without --resume. argv: its flags."""
    before = ["", *argv]
    words = [word for last, word in zip(before, argv, strict=False) if "--resume" not in (last, word)]
    launcher = [sys.executable]
    if "WORLD_SIZE" in os.environ:
        local = os.environ["LOCAL_WORLD_SIZE"]
        nodes = str(int(os.environ["WORLD_SIZE"]) // int(local))
        launcher = ["torchrun", *(["--nnodes", nodes] if nodes != "1" else []), "--nproc_per_node", local]
    kept = [word for word in words if not word.startswith("--resume=")]
    return [*launcher, str(Path(__file__).parents[1] / script), *kept]


def _read_json(path):
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"--resume: {path} cannot be read ({error}); start another run") from None


def short_hash(content):
    """The hash of anything that JSON can hold -> 12 hexadecimal digits."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]


def weights_hash(module):
    """The hash of all parameters with their names -> 12 hexadecimal digits; exact to the last bit of fp32.

    Without the order of the numbers inside a parameter: run folders of older versions hold such hashes.
    """
    return short_hash([(name, bit_sum(p)) for name, p in module.named_parameters()])


def bit_sum(tensor):
    """The sum of a tensor's fp32 bit patterns, as an int: it depends on every bit, and not on their order."""
    return int(tensor.detach().float().view(torch.int32).sum(dtype=torch.int64))
