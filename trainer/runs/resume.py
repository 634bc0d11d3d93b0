"""The folder of a run: where a killed run starts again, and the check that it is the same run.

What a run writes: README.md. ``--resume auto`` or ``--resume PATH`` picks the run folder and its newest
undamaged checkpoint (checkpoints.py), or the one that PATH names. Training continues with the next batch; the
log files are cut back to its step (run_logger.py), later checkpoints are deleted. A flag that would change
the result is refused by name: each without ``may_change`` where it is declared (train_ppo.py ``flag_parser``,
flags.py); files are compared by what they hold.
"""

import json
import os
import platform
import secrets
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from filelock import FileLock, Timeout

from atomic_files import write_whole, writing
from errors import InputError, as_input_error
from trainer.compute.kernels import kernels_of
from trainer.runs import checkpoints
from trainer.runs.base import ROOT, Run, quoted

# They may name other places, but not come or go:
REWARDS = ("reward_model", "reward_fn", "reward_url", "env", "tools")
CODE = ("reward_fn", "env", "tools")  # the user's: it may change, as a mistake in it may have stopped the run
Config = dict[str, Any]  # what config.json has
# Flags that data, models or first answers choose where they are not given: None until then
CHOSEN = ("critic_warmup_steps", "reasoning", "learning_rate", "critic_learning_rate", "missing_eos_penalty")
LOCK = ".lock.held"  # on Windows nobody can read a locked file, so another one names the process:
OWNER = ".lock"
WRITTEN = [
    "metrics.jsonl",
    "samples.jsonl",
    "eval_samples.jsonl",
    "summary.md",
    "report.html",
    "curves.png",
    "best.json",
    "best.pth",
    "ema.pth",
]


# ------------------------------------------------------------------------------------------ the run folder


class RunFolder:
    """The folder of a run, locked until ``close`` or the end of the process. Only the main process has one.

    ``path``: the folder; ``checkpoint``: the one to resume from, or None; ``notes``: lines to show to the
    user; ``config``: the content of config.json, once ``write_config`` has written it.
    """

    def __init__(
        self,
        out_dir: str | Path,
        run_name: str,
        resume: str,
        kind: str = "run",
        outputs: Iterable[Path] = (),
    ) -> None:
        """kind: begins the names of runs without one: <kind>_<n>, n one above the highest number so far;
        outputs: of the run. Raises InputError, having changed nothing, if the folder holds a run that is not
        to be resumed, is in use or has damaged checkpoints only, or if an output would replace a run."""
        self.config: Config = {}
        named = bool(run_name or resume)
        with writing(f"--out_dir {out_dir}"):
            while True:
                self.path, saved = choose(Path(out_dir), run_name, resume, kind)
                for output in outputs:
                    held = output / "config.json"
                    of_run = held.is_file() and '"run_id"' in held.read_text("utf-8")
                    if of_run or output.resolve() == self.path.resolve():
                        raise InputError(
                            f"{output}: is a run folder, and the result would replace its config.json; "
                            "change --run_name, --out_dir or --hf_dir, whichever names it"
                        )
                self._found = self.path.exists()  # and not made by this run
                self.path.parent.mkdir(parents=True, exist_ok=True)
                try:
                    self.path.mkdir(exist_ok=named)
                    break
                except FileExistsError:  # another new run has just taken this number
                    if named:
                        raise InputError(f"{self.path}: is a file; give another --run_name") from None
            self._held = lock(self.path)  # until this process ends or dies
            (self.path / OWNER).write_text(f"process {os.getpid()} on {platform.node()}", "utf-8")
        check_free(self.path, run_name, resume)
        self.checkpoint, self.notes = checkpoints.newest_intact(saved)
        if resume and not saved:
            self.notes.append(f"note: --resume: no checkpoint in {self.path}, so it begins at step 1")

    def write_config(self) -> None:
        """Write ``config`` to config.json."""
        path = self.path / "config.json"
        with writing(path):
            write_whole(path, json.dumps(self.config, indent=2))

    def remove_if_unused(self) -> bool:
        """Remove the folder of a run that has learned nothing -> whether it is gone, and its number free
        again. It stays if it was there before this run, or holds more than the line of a step 0 that was not
        evaluated, such as a file of a tracker or the user."""
        own = ("config.json", OWNER, LOCK)
        others = [path for path in self.path.iterdir() if path.name not in own]
        if not self._found and sum(path.stat().st_size for path in others) <= len('{"step": 0}\n'):
            shutil.rmtree(self.path, ignore_errors=True)
        return not self.path.exists()

    def close(self) -> None:
        self._held.release()


def lock(folder: Path) -> FileLock:
    """-> the lock of a run folder, now of this process. InputError where another one has it."""
    held = FileLock(folder / LOCK, thread_local=False)
    try:
        held.acquire(timeout=0)
    except Timeout:
        owner = (folder / OWNER).read_text("utf-8")
        raise InputError(f"{folder} is in use by {owner}; stop that process or name another run") from None
    return held


def check_free(folder: Path, run_name: str, resume: str) -> None:
    """Raise InputError where a folder holds a run that is not to be resumed, or no run but files that a run
    would replace."""
    if (folder / "config.json").exists() or checkpoints.list_checkpoints(folder):
        if not resume:
            raise InputError(
                f"--run_name {run_name}: {folder} holds a run; add --resume auto or change the name"
            )
    elif others := [name for name in WRITTEN if (folder / name).exists()]:
        raise InputError(f"{folder / others[0]}: is of no run; give another --run_name")


def choose(out_dir: Path, run_name: str, resume: str, kind: str) -> tuple[Path, list[Path]]:
    """The flags -> (the folder of the run, the checkpoints to resume from: all, or the one that --resume
    names). InputError if --resume names a folder that holds no run."""
    path = Path(resume).resolve()
    if resume in ("", "auto"):
        names = [path.name.removeprefix(f"{kind}_") for path in out_dir.glob(f"{kind}_*")]
        newest = max((int(number) for number in names if number.isdecimal()), default=0)
        number = newest if resume and newest else newest + 1
        path = out_dir / (run_name or f"{kind}_{number}")
    elif path in checkpoints.list_checkpoints(path.parent.parent):
        return path.parent.parent, [path]
    elif not (path / "config.json").exists():
        raise InputError(
            f"--resume {resume}: no checkpoint there; name a run folder or its checkpoints/step_<n>"
        )
    return path, checkpoints.list_checkpoints(path)


# ------------------------------------------------------------------------------------- is it the same run?


def check_resume(run: Run, fingerprints: Config | None = None) -> None:
    """Raise InputError, having written nothing, where the folder of this run is not to be had, or holds
    another run as far as is known before models are loaded. fingerprints: those of the texts, once they were
    read (``Run.text_fingerprints``). ``write_config`` compares all."""
    args = run.args
    with writing(f"--out_dir {args.out_dir}"):
        folder, saved = choose(Path(args.out_dir), args.run_name, args.resume, run.display.folder)
        if (folder / LOCK).exists():
            lock(folder).release()
    check_free(folder, args.run_name, args.resume)
    known = {
        **vars(args),
        "script": run.script,
        "processes": run.world.size,
        "fingerprints": fingerprints or {},
    }
    if saved or (folder / "config.json").exists():
        old, _ = compare_with_config(folder, known, args.declared)
        if old.get("saved") and not saved:
            raise InputError(
                f"--resume: {folder} has lost its checkpoints, and to begin again would erase its logs; give "
                "another --run_name, or remove the folder"
            )


def write_config(run: Run, folder: RunFolder) -> None:
    """Write the run folder's ``config.json``: every flag, and what else influences the result.

    If there is one already, compare the two first: InputError if it belongs to another run; differences that
    are allowed are added to the folder's notes.
    """
    facts = run.facts()
    config = {
        **vars(run.args),
        "script": run.script,
        "processes": run.world.size,
        "total_steps": run.total_steps,
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "kernels": "compiled" if kernels_of(run.world.device.type) else "torch's",
            "transformers": transformers.__version__,
        },
        "fingerprints": run.fingerprints(),
        "facts": facts,
        "resume_command": resume_command(run.args.argv, run.script, folder.path),
        "run_id": secrets.token_hex(8),  # for trackers
        "saved": folder.checkpoint is not None,  # whether it has ever had a checkpoint (session.py)
    }
    # It is there without a checkpoint if the run was killed before its first one.
    if folder.checkpoint or (folder.path / "config.json").exists():
        old, notes = compare_with_config(folder.path, config, run.args.declared)
        folder.notes += notes
        config |= {name: old.get(name) for name in CHOSEN if config.get(name, 0) is None}
        config["run_id"] = old["run_id"]
        first = checkpoints.step_of(folder.checkpoint) + 1 if folder.checkpoint else 0
        facts["evaluated_since"] = evaluated_since(old.get("facts", {}), facts["evaluated_by"], first)
    folder.config = config
    folder.write_config()


def evaluated_since(before: Config, evaluated_by: str, first: int) -> int:
    """The fact ``evaluated_since`` of a run that goes on with step ``first``: where evaluations depend on
    something else than before, those of earlier steps are not compared with them. before: the facts so far;
    those of older versions do not say it."""
    if before.get("evaluated_by") == evaluated_by:
        return min(before["evaluated_since"], first)
    return first if "evaluated_since" in before else 0


def compare_with_config(folder: Path, new: Config, flags: dict[str, Any]) -> tuple[Config, list[str]]:
    """Read the config.json of a run -> (it, the notes of ``check_same_run``). Raises InputError where it is
    damaged, or of another run."""
    path = folder / "config.json"
    with as_input_error(f"--resume: {path} does not fit"):
        old = json.loads(path.read_bytes())
        return old, check_same_run(old, new, flags)


def check_same_run(old: Config, new: Config, flags: dict[str, Any]) -> list[str]:
    """Compare two configurations -> notes on the differences that are allowed. Raises InputError, naming both
    values, for a difference that changes the result.

    new: what is known of it so far; flags: {name: ``Flag``}. One that did not exist when the run began counts
    as having its default. Batch sizes are per process, so they are compared after multiplying by the number
    of processes. Files come first, because other data may choose other flags.
    """
    notes = []
    if old["script"] != new["script"]:
        raise InputError(f"this is a run of {old['script']}; name one of {new['script']}")
    for key, now in new["fingerprints"].items():
        name, _, field = key.partition(" ")  # a field is compared if the function asked for it before, too
        was = old["fingerprints"].get(key, now if field else None)
        named = new[name] if isinstance(new[name], str) else " ".join(new[name])
        if was != now and key in CODE:
            notes.append(f"note: the code of --{name} {named} has changed since the run began")
        elif was != now:
            raise InputError(
                f"--{name} {named} does not hold what the run began with "
                f"({field or 'fingerprint'} {was}, now {now}); name the original"
            )
    for name, flag in flags.items():
        was = old.get(name, flag.default)
        now = new[name]
        over = ""
        if name in ("batch_size", "mini_batch_size"):
            was *= old["processes"]
            now *= new["processes"]
            over = " over all processes"
        may_change = flag.may_change and (name not in REWARDS or bool(was) == bool(now))
        # Nothing but a falling rate depends on how long the run is.
        may_change |= name in ("epochs", "max_steps") and new.get("lr_schedule") == "constant"
        not_chosen = now is None and name in CHOSEN
        if was != now and not (may_change or not_chosen):
            raise InputError(f"--{name} was {was!r} and is now {now!r}{over}; set it back")
    for name in ("versions", "threads", "processes"):
        if name in new and old[name] != new[name]:
            notes.append(f"note: {name} were {old[name]} and are {new[name]}: results may differ by rounding")
    return notes


def resume_command(argv: list[str], script: str, folder: Path) -> str:
    """The command line that goes on with a run on one machine. argv: the flags that it was started with."""
    launcher = [sys.executable]
    if "WORLD_SIZE" in os.environ:
        launcher += ["-m", "torch.distributed.run", "--nproc_per_node", os.environ["LOCAL_WORLD_SIZE"]]
    resume = ["--resume", str(folder)]
    flags = argv if argv[-2:] == resume else argv + resume  # the last --resume counts
    return quoted([*launcher, ROOT / "trainer" / script, *flags])
