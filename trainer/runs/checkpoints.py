"""Checkpoints: the folder ``checkpoints/step_<n>/``, all that a run needs to continue after batch n.

actor.safetensors critic.safetensors        PPO: weights, fp32; with --lora_r only what trains
old_actor.safetensors                       PPO with --update_old_actor_freq above 1; else it is the actor
actor_optimizer.safetensors critic_optimizer.safetensors     PPO: the moments of AdamW
replay.safetensors                          PPO with --replay_batches: those batches
ema.safetensors                             PPO with --ema_beta: the average of the actor's weights
shard-00001-….safetensors                   PPO with --shard: weights and moments (sharded_checkpoints.py)
model.safetensors optimizer.safetensors     stages 1 and 2: the same; the demo's also lm_head.safetensors
best.pth                                    PPO: the weights of the best evaluation so far (best.py), if any
state.json                                  ``Progress`` (below); the loss scale of fp16; PPO: the statistics
                                            of --normalize_reward, step and value of the best evaluation,
                                            the weight of the KL
config.json                                 flags, versions, fingerprints, as in the run folder
SHA256SUMS                                  checksums of all these files, for ``sha256sum -c SHA256SUMS``

Not in it: what is loaded again from its own file and only compared by fingerprint (reference, reward models,
the frozen weights under adapters), and random states: sampling noise, the order of prompts and learning rates
are pure functions of the seed and the step.

A checkpoint is written under a temporary name, flushed to the disk and then renamed, so it is complete or
absent. If a file does not match its checksum, the checkpoint is not loaded. Loading runs no code: it reads
safetensors, JSON and text, and only copies best.pth. ``modules``, ``optimizers``, ``states`` and ``files`` of
a run (``PpoRun``, ``SupervisedRun``) list what to save.
"""

import hashlib
import json
import os
import re
import shutil
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, load_model, save_file, save_model

from atomic_files import move, sync, writing
from errors import InputError, first_line
from model.loading import not_finite
from trainer.runs import sharded_checkpoints
from trainer.runs.adamw import zero_moments

SUMS = "SHA256SUMS"

# What loading may raise if a checkpoint is undamaged, but of another model.
LOAD_ERRORS = (OSError, RuntimeError, ValueError, LookupError, TypeError, AttributeError, SafetensorError)


@dataclass
class Progress:
    """How far a run has come: what changes from batch to batch besides weights and moments."""

    token_budget: int  # tokens of one micro-batch at most; halved when memory runs out
    step: int = 0  # batches done; it fixes the place in the data, the sampling noise and the learning rates
    bad_steps: int = 0  # minibatches in a row with a step left out, because a loss or gradient was not finite
    skipped_steps: int = 0  # all optimizer steps left out for this reason, of every model


class Kept:
    """An option of a run. Checkpoints keep those of its attributes that ``kept`` names."""

    kept = ()

    def state_dict(self) -> dict:
        """What a checkpoint keeps."""
        return {name: getattr(self, name) for name in self.kept}

    def load_state_dict(self, state: dict) -> None:
        """Take over what ``state_dict`` returned. Raises KeyError for anything else."""
        for name in self.kept:
            setattr(self, name, state[name])


def save(folder: str | Path, run, config: dict, keep: int) -> None:
    """Write ``folder/checkpoints/step_<n>/``, then delete all checkpoints but the newest ``keep``.

    All processes call it. The main one, which alone has a config, writes; of a sharded run each its part.
    Raises InputError if a weight is not finite or the disk cannot be written; older checkpoints then stay.
    """
    root, step, main = Path(folder) / "checkpoints", run.progress.step, run.world.is_main
    temporary = root / f".step_{step}.tmp"
    try:
        with run.world.all_or_none(), writing(temporary):
            _check_finite(run)
            if main:
                root.mkdir(exist_ok=True)
                tidy(folder, step - 1)
                temporary.mkdir()
        with run.world.all_or_none(), writing(temporary):
            if run.in_step:  # returns once all have written
                sharded_checkpoints.write(temporary, run)
            elif main:
                _write_weights(temporary, run)
            if main:
                _write_rest(temporary, run, config)
                for name in run.files:
                    shutil.copyfile(Path(folder) / name, temporary / name)
                _seal(temporary)
                move(temporary, root / f"step_{step}")
                for path in list_checkpoints(folder)[:-keep]:
                    _discard(path)
    finally:
        if main:
            shutil.rmtree(temporary, ignore_errors=True)


def _check_finite(run):
    for name, module in run.modules.items():
        if not_finite(module):
            raise InputError(
                f"after step {run.progress.step} the {name} has weights that are not finite: not saved; "
                "lower the learning rates"
            )


def _write_rest(folder, run, config):
    state = asdict(run.progress)
    for name, holder in run.states.items():
        kept = holder.state_dict()
        if any(isinstance(x, torch.Tensor) for x in kept.values()):
            save_file(kept, folder / f"{name}.safetensors")
        else:
            state[name] = kept
    (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def _write_weights(folder, run):
    for name, module in run.modules.items():
        save_model(module, str(folder / f"{name}.safetensors"))
    for name, optimizer in run.optimizers.items():
        moments = {
            f"{number}.{key}": x
            for number, state in optimizer.state_dict()["state"].items()
            for key, x in state.items()
        }
        save_file(moments, folder / f"{name}.safetensors")


def _seal(folder):
    """Write the checksums of all files in a folder, and flush all to the disk."""
    files = sorted(folder.iterdir())
    # Not write_text: on Windows its line ends would be wrong for sha256sum.
    (folder / SUMS).write_bytes("".join(f"{_sha256(path)}  {path.name}\n" for path in files).encode())
    for path in folder.iterdir():
        sync(path)


def tidy(folder, step):
    """Delete the incomplete folders of killed processes, and the checkpoints later than ``step``.

    There are later ones if the run was resumed from an older checkpoint; their steps will be done again.
    """
    for leftover in (Path(folder) / "checkpoints").glob(".*.tmp"):
        shutil.rmtree(leftover)
    for path in list_checkpoints(folder):
        if step_of(path) > step:
            _discard(path)


def _discard(path):
    """Delete a checkpoint. It is renamed first, so that a half-deleted one never counts as a checkpoint."""
    hidden = path.with_name(f".{path.name}.old.tmp")
    os.replace(path, hidden)
    shutil.rmtree(hidden)


def _sha256(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def damage(path):
    """What is wrong with a checkpoint's files, in a few words; '' if all match their checksums."""
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
    """The step of a checkpoint folder ``step_<n>``, None for a folder with any other name."""
    match = re.fullmatch(r"step_(\d+)", Path(path).name, re.ASCII)
    return int(match[1]) if match else None


def list_checkpoints(folder):
    """The checkpoints of a run folder, oldest first, damaged ones included."""
    found = (p for p in (Path(folder) / "checkpoints").glob("step_*") if p.is_dir())
    return sorted((p for p in found if step_of(p) is not None), key=step_of)


def newest_intact(folder):
    """-> (the newest undamaged checkpoint of a run folder or None, a note for each damaged one after it).

    Raises InputError if there are checkpoints but all are damaged.
    """
    notes = []
    for path in reversed(list_checkpoints(folder)):
        problem = damage(path)
        if not problem:
            return path, notes
        notes.append(f"note: {path} is damaged ({problem}); using the checkpoint before it")
    if notes:
        raise InputError(f"--resume: every checkpoint in {folder} is damaged ({problem}); start another run")
    return None, notes


def load(path, run):
    """Load an undamaged checkpoint into a run. Raises InputError if it is of another model."""
    path = Path(path)
    try:
        if any(path.glob(sharded_checkpoints.SHARDS)):
            sharded_checkpoints.load(path, run)
        elif run.in_step:
            sharded_checkpoints.load_from_whole(path, run)
        else:
            _load_weights(path, run)
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        for name, holder in run.states.items():
            tensors = path / f"{name}.safetensors"
            holder.load_state_dict(load_file(tensors) if tensors.is_file() else state.get(name, {}))
        run.progress = Progress(**{f.name: state[f.name] for f in fields(Progress) if f.name in state})
        if run.progress.step > run.total_steps:
            raise ValueError(f"state.json is at step {run.progress.step} of {run.total_steps}")
    except LOAD_ERRORS as error:
        reason = first_line(error)
        raise InputError(f"--resume {path}: cannot be loaded ({reason}); name an older checkpoint") from None


def _load_weights(path, run):
    for name, module in run.modules.items():
        load_model(module, str(path / f"{name}.safetensors"), strict=True)
    for name, optimizer in run.optimizers.items():
        _load_moments(optimizer, path / f"{name}.safetensors")


def _load_moments(optimizer, path):
    """Load AdamW's moments. Learning rates and coefficients come from the flags, as in a new run."""
    stored = load_file(path)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number in {key.partition(".")[0] for key in stored}:
        p = parameters[int(number)]
        # Not load_state_dict: it would make moments in bf16 fp32.
        optimizer.state[p] = zero_moments(optimizer, p)
        for name, x in optimizer.state[p].items():
            kept = stored.pop(f"{number}.{name}")
            if kept.shape != x.shape:
                raise ValueError(f"{name} of parameter {number} has shape {list(kept.shape)}")
            x.copy_(kept)
