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
    best.pth best/                        PPO: the best actor of this run, also when a later run has one
    checkpoints/step_<n>/                 what --resume needs (checkpoints.py)
    report.html curves.png summary.md     all of it to look at, written again and again as the run goes
    swanlog/ tensorboard/ wandb/          with --tracker (trackers.py)
    .lock .lock.held                      which process uses the folder; the second is locked meanwhile

PPO and stage 1 write their result with every checkpoint, stage 2 writes it at the end. A new run gets a new
run folder, but replaces the result of an earlier run with the same name.

``--resume auto`` or ``--resume PATH`` picks the run folder and its newest undamaged checkpoint
(checkpoints.py), or the one that PATH names. Weights, moments and ``Progress`` are loaded from it; training
continues with the next batch (trainer/loop.py). The log files are cut back to
that step (run_logger.py), and later checkpoints are deleted. A run that was killed before its first
checkpoint starts from the beginning. Prompt order, sampling noise and learning rates follow from seed and
step, so the result is the same as without the stop. A flag that would change it is refused by name; files are
compared by what they hold, by short hashes of what was loaded from them.
"""

import argparse
import contextlib
import hashlib
import json
import os
import platform
import secrets
import shutil
import sys
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from transformers import __version__ as transformers_version

from atomic_files import write_whole, writing
from errors import InputError
from model.loading import as_input_error
from trainer.compute.kernels import kernels_of
from trainer.runs import checkpoints
from trainer.runs.base import Run
from trainer.runs.commands import quoted
from trainer.runs.run_logger import NullLogger, RunLogger

LENGTH = ("epochs", "max_steps")  # the flags that say how long a run is
REWARDS = ("reward_model", "reward_fn", "reward_url")  # they may name other places, but not come or go
CHOSEN = ("missing_eos_penalty",)  # flags that a run chooses when it begins, where they are not given


def start_or_resume(run: Run, about: str, argv: list[str]):
    """Choose and lock the run folder, load its checkpoint into the run if there is one -> the run's logger.

    about: lines that describe the run; argv: its command line. Raises InputError, having changed nothing, if
    the folder is in use or holds another run.
    """
    args = run.args
    world = run.world
    folder = None
    with world.all_or_none():
        if world.is_main:
            folder = RunFolder(args.out_dir, args.run_name, args.resume, run.display.folder)
            write_config(run, folder, argv)
    checkpoint = world.from_main(folder and folder.checkpoint)
    run.prepare()
    with world.all_or_none():
        if checkpoint:
            checkpoints.load(checkpoint, run)
        if folder:
            checkpoints.tidy(folder.path, run.progress.step)
        logger = RunLogger(folder, run) if folder else NullLogger()
    logger.introduce(about)
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
    """

    def __init__(self, out_dir: str | Path, run_name: str, resume: str, kind: str = "run"):
        self.notes = []
        self.config = {}
        named = bool(run_name or resume)
        with writing(f"--out_dir {out_dir}"):
            while True:
                self.path, self.checkpoint = choose(out_dir, run_name, resume, kind)
                self._found = self.path.exists()  # and not made by this run
                self.path.parent.mkdir(parents=True, exist_ok=True)
                try:
                    self.path.mkdir(exist_ok=named)
                    break
                except FileExistsError:  # another new run has just taken this number
                    if named:
                        raise InputError(f"{self.path}: is a file; give another --run_name") from None
            self._lock()
        if self.checkpoint:
            if problem := checkpoints.damage(self.checkpoint):
                raise InputError(
                    f"--resume: {self.checkpoint} is damaged ({problem}); name the run folder instead"
                )
        elif resume:
            self.checkpoint, self.notes = checkpoints.newest_intact(self.path)
            if not self.checkpoint:
                self.notes.append(f"note: --resume: no checkpoint in {self.path}, so it begins at step 1")
        elif any((self.path / name).exists() for name in ("config.json", "checkpoints")):
            raise InputError(
                f"--run_name {run_name}: {self.path} holds a run; add --resume auto or change the name"
            )

    def _lock(self):
        """Lock the folder, until this process ends or dies. What is locked is a second file, because Windows
        lets nobody read a locked one: ``.lock`` names the process."""
        self._held = FileLock(self.path / ".lock.held", thread_local=False)
        named = self.path / ".lock"
        try:
            self._held.acquire(timeout=0)
        except Timeout:
            holder = named.read_text(encoding="utf-8")
            raise InputError(
                f"{self.path} is in use by {holder}; stop that process or name another run"
            ) from None
        named.write_text(f"process {os.getpid()} on {platform.node()}", encoding="utf-8")

    def write_config(self):
        """Write ``config`` to config.json."""
        path = self.path / "config.json"
        with writing(path):
            write_whole(path, json.dumps(self.config, indent=2))

    def remove_if_unused(self) -> bool:
        """Remove the folder of a run that has learned nothing -> True if it is gone, its number free again.

        It stays if it was there before this run, or holds an evaluation or a file of a tracker or the user.
        """
        with contextlib.suppress(OSError):
            others = {path.name for path in self.path.iterdir() if path.suffix != ".jsonl"}
            logged = "".join(path.read_text(encoding="utf-8") for path in self.path.glob("*.jsonl"))
            unused = others <= {"config.json", ".lock", ".lock.held"} and logged in ("", '{"step": 0}\n')
            if unused and not self._found:
                shutil.rmtree(self.path)
        return not self.path.exists()

    def close(self):
        self._held.release()


def choose(out_dir: str | Path, run_name: str, resume: str, kind: str) -> tuple[Path, Path | None]:
    """The flags -> (the folder of the run, the checkpoint that --resume names, else None). InputError if
    --resume names a folder that holds no run."""
    if resume in ("", "auto"):
        found = [path.name.removeprefix(f"{kind}_") for path in Path(out_dir).glob(f"{kind}_*")]
        newest = max((int(number) for number in found if number.isdecimal()), default=0)
        number = newest if resume and newest else newest + 1
        return Path(out_dir) / (run_name or f"{kind}_{number}"), None
    path = Path(resume).resolve()
    folder = path.parent.parent
    if path in checkpoints.list_checkpoints(folder):
        return folder, path
    if checkpoints.list_checkpoints(path) or (path / ".lock").exists():  # killed before its first checkpoint
        return path, None
    raise InputError(f"--resume {resume}: no checkpoint there; name a run folder or its checkpoints/step_<n>")


# ------------------------------------------------------------------------------------- is it the same run?


def write_config(run, folder: RunFolder, argv: list[str]) -> None:
    """Write the run folder's ``config.json``: every flag, and what else influences the result.

    If there is one already, compare the two first: InputError if it belongs to another run; differences that
    are allowed are added to the folder's notes.
    """
    kernels = "torch's" if kernels_of(run.world.device.type) is None else "compiled"
    config = {
        **vars(run.args),
        "script": run.script,
        "processes": run.world.size,
        "total_steps": run.total_steps,
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "kernels": kernels,
            "transformers": transformers_version,
        },
        "fingerprints": run.fingerprints(),
        "facts": run.facts(),
        "resume_command": quoted([*command(argv, run.script), "--resume", folder.path]),
        "run_id": secrets.token_hex(8),  # for trackers
    }
    held = (folder.checkpoint or folder.path) / "config.json"
    if held.exists():  # true without a checkpoint too, if the run was killed before its first one
        with as_input_error(f"--resume: {held} does not fit"):
            old = json.loads(held.read_text(encoding="utf-8"))
            folder.notes += check_same_run(old, config, run.args.declared)
            config["run_id"] = old.get("run_id", config["run_id"])
            config |= {name: old.get(name) for name in CHOSEN if config.get(name, 0) is None}
    folder.config = config
    folder.write_config()


def check_same_run(old: dict, new: dict, flags: dict) -> list[str]:
    """Compare two configurations -> notes on the differences that are allowed.

    Raises InputError, naming both values, for a difference that changes the result. flags: {name: ``Flag``}.
    A flag that did not exist when the run began counts as having its default. Batch sizes are per process, so
    they are compared after multiplying by the number of processes. With ``--lr_schedule constant`` nothing
    depends on the number of steps: it may change.
    """
    notes = []
    any_length = new.get("lr_schedule") == "constant"
    script = old.get("script", "train_ppo.py")  # the first versions had no other
    if script != new["script"]:
        raise InputError(f"this is a run of {script}; name one of {new['script']}")
    for name, flag in flags.items():
        was = old.get(name, flag.default)
        now = new[name]
        over = ""
        if name in ("batch_size", "mini_batch_size"):
            was *= old["processes"]
            now *= new["processes"]
            over = " over all processes"
        may_change = flag.may_change and (name not in REWARDS or bool(was) == bool(now))
        may_change |= (any_length and name in LENGTH) or (name in CHOSEN and now is None)
        if was != now and not may_change:
            raise InputError(f"--{name} was {was!r} and is now {now!r}{over}; set it back")
    for name, now in new["fingerprints"].items():
        was = old["fingerprints"].get(name)
        if was != now and name == "reward_fn":  # allowed: a mistake in it may have stopped the run
            notes.append(f"note: the code of --reward_fn {new[name]} has changed since the run began")
        elif was != now:
            raise InputError(
                f"--{name} {new[name]} does not hold what the run began with (fingerprint {was}, now {now}); "
                "name the original"
            )
    for name in ("versions", "threads", "processes"):
        if old[name] != new[name]:
            changed = f"{name} were {old[name]} and are {new[name]}"
            notes.append(f"note: {changed}: results may differ by rounding")
    return notes


def command(argv: list[str], script: str) -> list[str]:
    """The words of the command line that starts a run on one machine, without --resume. argv: its flags."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--resume")
    launcher = [sys.executable]
    if "WORLD_SIZE" in os.environ:
        launcher = ["torchrun", "--nproc_per_node", os.environ["LOCAL_WORLD_SIZE"]]
    return [*launcher, Path(__file__).parents[1] / script, *parser.parse_known_args(argv)[1]]


def short_hash(content: object) -> str:
    """The hash of anything that JSON can hold -> 12 hexadecimal digits."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]


def weights_hash(module: torch.nn.Module) -> str:
    """The hash of all parameters with their names -> 12 hexadecimal digits; exact to the last bit of fp32.

    Of a parameter it takes the sum of the bit patterns, without their order: run folders of older versions
    hold such hashes.
    """
    bits = ((name, p.detach().float().view(torch.int32)) for name, p in module.named_parameters())
    return short_hash([(name, int(x.sum(dtype=torch.int64))) for name, x in bits])
