"""Checkpoints: what a run needs to go on as if it had never stopped.

There is no random state to save: sampling noise and the order of prompts are pure functions of the seed and
the step. A checkpoint is written under a temporary name, flushed to disk and renamed: it is there whole or
not at all. It holds what the run calls its ``modules`` and ``optimizers`` (by file name) and ``progress``,
and lists the SHA-256 of its files, in the form that ``sha256sum -c SHA256SUMS`` reads, and only
what agrees with them is loaded. Everything is safetensors and JSON: loading runs no code.
"""

import hashlib
import json
import os
import re
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, load_model, save_file, save_model

from errors import InputError
from files import move, sync, writing
from model.checks import not_finite
from trainer.running import Running

SUMS = "SHA256SUMS"

# What a file makes its reader raise that has the right checksum and is of another model all the same.
LOAD_ERRORS = (OSError, RuntimeError, ValueError, LookupError, TypeError, SafetensorError)


@dataclass
class Progress:
    """How far a run has come: what changes from batch to batch besides weights and moments."""

    token_budget: int  # tokens of one forward; halved where memory runs out
    step: int = 0  # batches done: the position in the data, the noise and the schedules
    bad_steps: int = 0  # optimizer steps in a row that were not finite
    skipped_steps: int = 0  # and all of them
    best_score: float | None = None  # of the evaluations so far, and the step it was made at
    best_step: int = 0
    raw_scores: dict = field(default_factory=dict)  # {part of the reward: Running}, see --normalize_reward


def save(folder, run, config, keep):
    """Write ``folder/checkpoints/step_<n>/`` whole, then delete all but the newest ``keep``.

    Raises InputError if a weight is not finite or the disk refuses; what was there before is there still.
    """
    root, step = Path(folder) / "checkpoints", run.progress.step
    for name, module in run.modules.items():
        if not_finite(module):
            raise InputError(
                f"after step {step} the {name} has weights that are not finite: not saved; lower the rates"
            )
    temporary = root / f".step_{step}.tmp"
    with writing(temporary):
        root.mkdir(exist_ok=True)
        tidy(folder, step - 1)
        try:
            temporary.mkdir()
            _write_files(temporary, run, config)
            move(temporary, root / f"step_{step}")
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        for path in list_checkpoints(folder)[:-keep]:
            _discard(path)


def _write_files(folder, run, config):
    for name, module in run.modules.items():
        save_model(module, str(folder / f"{name}.safetensors"))
    for name, optimizer in run.optimizers.items():
        moments = {
            f"{number}.{key}": x
            for number, state in optimizer.state_dict()["state"].items()
            for key, x in state.items()
        }
        save_file(moments, folder / f"{name}.safetensors")
    (folder / "state.json").write_text(json.dumps(asdict(run.progress)), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    files = sorted(folder.iterdir())
    (folder / SUMS).write_text("".join(f"{_sha256(path)}  {path.name}\n" for path in files))
    for path in folder.iterdir():
        sync(path)


def tidy(folder, step):
    """Delete what killed processes have left half done, and checkpoints later than ``step``: those of a
    branch that a run leaves by going on from an earlier one."""
    for leftover in (Path(folder) / "checkpoints").glob(".*.tmp"):
        shutil.rmtree(leftover)
    for path in list_checkpoints(folder):
        if step_of(path) > step:
            _discard(path)


def _discard(path):
    """Delete a checkpoint, which is out of sight before the first of its files goes."""
    hidden = path.with_name(f".{path.name}.old.tmp")
    os.replace(path, hidden)
    shutil.rmtree(hidden)


def _sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def damage(path):
    """What is wrong with a checkpoint's files, in a few words; '' if they are as they were written."""
    try:
        lines = (path / SUMS).read_text(encoding="utf-8").splitlines()
        wanted = dict(reversed(line.split("  ", 1)) for line in lines)
    except (OSError, ValueError) as error:
        return f"{SUMS}: {error.strerror if isinstance(error, OSError) else 'not readable'}"
    for name in sorted({*wanted, "config.json", "state.json"}):
        if not (path / name).is_file():
            return f"{name} is missing"
        if wanted.get(name) != _sha256(path / name):
            return f"{name} is damaged"
    return ""


def step_of(path):
    """The step of a checkpoint folder, None for a folder of another name."""
    match = re.fullmatch(r"step_(\d+)", Path(path).name, re.ASCII)
    return int(match[1]) if match else None


def list_checkpoints(folder):
    """The checkpoints of a run folder, oldest first, damaged ones included."""
    found = (p for p in (Path(folder) / "checkpoints").glob("step_*") if p.is_dir())
    return sorted((p for p in found if step_of(p) is not None), key=step_of)


def newest_intact(folder):
    """-> (the newest undamaged checkpoint of a run folder or None, a line for each damaged one passed over).

    Raises InputError if there are checkpoints but all are damaged.
    """
    notes = []
    for path in reversed(list_checkpoints(folder)):
        problem = damage(path)
        if not problem:
            return path, notes
        notes.append(f"note: {path} is damaged ({problem}); going on from the one before it")
    if notes:
        raise InputError(f"--resume: every checkpoint in {folder} is damaged ({problem}); start another run")
    return None, notes


def load(path, run):
    """Fill a run from an undamaged checkpoint. Raises InputError if it is of another model."""
    path = Path(path)
    try:
        for name, module in run.modules.items():
            load_model(module, str(path / f"{name}.safetensors"), strict=True)
        for name, optimizer in run.optimizers.items():
            _load_moments(optimizer, path / f"{name}.safetensors")
        run.progress = _read_progress(path / "state.json", run.total_steps)
    except LOAD_ERRORS as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(f"--resume {path}: cannot be loaded ({reason}); name an older one") from None


def _read_progress(path, total_steps):
    progress = Progress(**json.loads(path.read_text(encoding="utf-8")))
    progress.raw_scores = {part: Running(**x) for part, x in dict(progress.raw_scores).items()}
    counts = [x for name, x in vars(progress).items() if name not in ("best_score", "raw_scores")]
    score = progress.best_score
    if not all(type(n) is int and n >= 0 for n in counts) or not (score is None or type(score) is float):
        raise ValueError("state.json holds something else than counts")
    if progress.step > total_steps or not progress.token_budget:
        raise ValueError(f"state.json is at step {progress.step} of {total_steps}")
    return progress


def _load_moments(optimizer, path):
    """AdamW's moments; rates and coefficients come from the flags, as in a run that never stopped."""
    state = {}
    for key, x in load_file(path).items():
        number, _, name = key.partition(".")
        state.setdefault(int(number), {})[name] = x
    groups = optimizer.state_dict()["param_groups"]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, moments in state.items():
        if moments["exp_avg"].shape != parameters[number].shape:
            raise ValueError(f"moments of parameter {number} have shape {list(moments['exp_avg'].shape)}")
    optimizer.load_state_dict({"state": state, "param_groups": groups})
