"""What a run writes to out/ (--out_dir), and its run folder: which one it is, and the lock on it.

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
    histograms.jsonl                      PPO: the scores, lengths and KLs of each step, counted in bins
    best.pth best/                        PPO: the best actor of this run, also when a later run has one
    checkpoints/step_<n>/                 what --resume needs (checkpoints.py)
    report.html                           all of it to look at, written again and again as the run goes
    curves.png summary.md                 written when the run ends or is stopped
    swanlog/ tensorboard/ wandb/          with --tracker (trackers.py)
    .lock                                 locked while a process uses the folder

PPO and stage 1 write their result with every checkpoint, stage 2 writes it at the end. A new run gets a new
run folder, but replaces the result of an earlier run with the same name.
"""

import contextlib
import json
import re
import time
from pathlib import Path

from atomic_files import lock, write_whole, writing
from errors import InputError
from trainer.runs.checkpoints import SUMS, damage, list_checkpoints, newest_intact, step_of


class RunFolder:
    """The folder of a run, locked until ``close`` or the end of the process. Only the main process has one.

    Without ``--run_name`` a new run is called <kind>_<n>, with n one above the highest number so far.
    ``--resume auto`` resumes the run of that name (without a name: the newest run); if there is none, it
    starts a new one. ``--resume PATH`` names a run folder or one of its checkpoints. Raises InputError,
    having changed nothing, if the folder holds a run that is not to be resumed, if it is in use, or if all
    its checkpoints are damaged.

    ``path``: the folder; ``checkpoint``: the one to resume from, or None; ``notes``: lines to show to the
    user; ``config``: the content of config.json, once resume.py has written it.

    patience: seconds to wait for the lock.
    """

    def __init__(self, out_dir, run_name, resume, kind="run", patience=0.0):
        self.checkpoint, self.notes, self.kind, self.config = None, [], kind, {}
        self._patience = patience
        self.path, step = choose(out_dir, run_name, resume, kind)
        self._found = self.path.exists()  # and not made by this run
        self._unlock = self._claim(out_dir, new=not run_name and not resume)
        if resume:
            self._find_checkpoint(step)
        elif any((self.path / name).exists() for name in ("config.json", "metrics.jsonl", "checkpoints")):
            raise InputError(
                f"--run_name {run_name}: {self.path} holds a run; add --resume auto or change the name"
            )

    def _claim(self, out_dir, new):
        """Create the folder and lock it -> a function that unlocks it.

        If another process has just created the folder of a ``new`` run, this run takes the next number.
        """
        with writing(f"--out_dir {out_dir}"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            while new:
                try:
                    self.path.mkdir()
                    break
                except FileExistsError:
                    number = max(_numbered(out_dir, self.kind)) + 1
                    self.path = Path(out_dir) / f"{self.kind}_{number}"
            self._found = self._found and not new
            self.path.mkdir(exist_ok=True)
            end = time.monotonic() + self._patience
            while True:
                try:
                    return lock(self.path / ".lock")
                except BlockingIOError:
                    if time.monotonic() < end:
                        time.sleep(0.5)
                        continue
                    holder = (self.path / ".lock").read_text(encoding="utf-8")
                    raise InputError(
                        f"{self.path} is in use by {holder}; stop that process or name another run"
                    ) from None

    def _find_checkpoint(self, step):
        """Find the checkpoint to resume from: that of the named step, or the newest undamaged one."""
        if step is None:
            self.checkpoint, self.notes = newest_intact(self.path)
            if not self.checkpoint:
                self.notes.append(f"note: --resume: no checkpoint in {self.path}, so it begins at step 1")
            return
        self.checkpoint = self.path / "checkpoints" / f"step_{step}"
        if problem := damage(self.checkpoint):
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
        rows = ("samples.jsonl", "eval_samples.jsonl", "histograms.jsonl")
        written = ("config.json", "metrics.jsonl", *rows, "torchrun.json", ".lock", ".lock.held")
        with contextlib.suppress(OSError, ValueError):
            if self._found or any(path.name not in written for path in self.path.iterdir()):
                return False
            lines = (self.path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
            if any(json.loads(line).keys() != {"step"} for line in lines):
                return False
            if any(path.exists() and path.stat().st_size for path in map(self.path.joinpath, rows)):
                return False
            for name in written:
                (self.path / name).unlink(missing_ok=True)
            self.path.rmdir()
        return not self.path.exists()

    def close(self):
        self._unlock()


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
    if path in list_checkpoints(run):
        return run, step_of(path)
    # A run killed before its first checkpoint. A checkpoint on its own has a config.json too, but also SUMS.
    killed_early = (path / "config.json").is_file() and not (path / SUMS).exists()
    if list_checkpoints(path) or killed_early:
        return path, None
    raise InputError(f"--resume {resume}: no checkpoint there; name a run folder or its checkpoints/step_<n>")
