"""Checkpoints: the folder ``checkpoints/step_<n>/``, all that a run needs to continue after batch n.

    actor.safetensors, critic.safetensors            weights that train; "model" in stages 1 and 2
    old_actor.safetensors                            where the old actor is a model of its own
    actor_optimizer.safetensors, …                   optimizer state: AdamW's step, exp_avg, exp_avg_sq
    state.json                                       ``Progress``, and each of ``Run.states`` by its name
    <name>.safetensors                               one of ``Run.states`` that has tensors: ema, replay
    SHA256SUMS                                       of all of them

PPO's states: raw_scores (the rewards' running scales and --missing_eos_penalty), loss_scale (fp16), kl
(--kl_target), advantage_scale, value_scale, replay, ema (run.py). Stage 2's: loss_scale, zero.

Not in it: models that do not train, which are loaded again from their own files; random states, because
sampling noise, the order of prompts and learning rates are pure functions of the seed and the step. Loading
runs no code: it reads safetensors, JSON and text. Why a checkpoint is complete or absent:
docs/reliability.md, "Checkpoints".
"""

import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from atomic_files import move, sync, writing
from errors import InputError, as_input_error, first_line
from model.lora import learned, trained
from model.weights import all_finite, full_tensor
from trainer.runs.base import Run
from trainer.runs.optimizer_step import optimizer_state

SUMS = "SHA256SUMS"


def save(run: Run) -> None:
    """Write ``checkpoints/step_<n>/``, then delete all checkpoints but the newest --keep_checkpoints.

    All processes call it: of sharded tensors the main one gets the whole, one at a time, and writes. Raises
    InputError if a number is not finite or the disk cannot be written; older checkpoints then stay.
    """
    folder = run.folder / f"checkpoints/step_{run.progress.step}"
    temporary = folder.with_name(f".{folder.name}.tmp")
    world = run.world
    try:
        for name, tensors in _tensors(run):
            with world.all_or_none(), writing(temporary):
                full_tensors = {}
                for key, x in tensors.items():
                    x = full_tensor(x.detach())
                    if not all_finite(x):
                        raise InputError(
                            f"after step {run.progress.step} the {name} has weights that are not finite: not "
                            "saved; lower the learning rates"
                        )
                    if world.is_main:
                        full_tensors[key] = x.cpu().contiguous()
                if world.is_main:
                    temporary.mkdir(parents=True, exist_ok=True)
                    save_file(full_tensors, temporary / f"{name}.safetensors")
        with world.all_or_none(), writing(temporary):
            if world.is_main:
                _write_states(temporary, run)
                move(temporary, folder)
                for path in list_checkpoints(run.folder)[: -run.args.keep_checkpoints]:
                    shutil.rmtree(path)
    finally:
        if world.is_main:
            shutil.rmtree(temporary, ignore_errors=True)


def _tensors(run: Run) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """(file name, {key: weight or moment}) for each file. A moment: "<number of the parameter>.exp_avg"; it
    is 0 before the first step of its parameter."""
    for name, module in run.modules.items():
        yield name, dict(learned(module))
    for name, train_state in run.train_states.items():
        # Numbered in the order of the model, which sharding does not change.
        states = enumerate(optimizer_state(train_state.optimizer, p) for p in trained(train_state.model))
        moments = {f"{number}.{kind}": x for number, state in states for kind, x in state.items()}
        yield f"{name}_optimizer", moments


def _write_states(folder: Path, run: Run) -> None:
    """Write what is besides weights and moments, then the checksums of all files; flush all to the disk."""
    state = asdict(run.progress)
    for name, holder in run.states.items():
        content = holder.state_dict()
        if any(isinstance(x, Tensor) for x in content.values()):
            save_file(content, folder / f"{name}.safetensors")
        else:
            state[name] = content
    (folder / "state.json").write_text(json.dumps(state), "utf-8")
    # In bytes: sha256sum reads no other ends of lines.
    (folder / SUMS).write_bytes("\n".join(_checksums(folder)).encode())
    for path in folder.iterdir():
        sync(path)


def _checksums(folder: Path) -> Iterator[str]:
    """A line for each file: its checksum, two blanks, its name."""
    for path in sorted([*folder.glob("*.safetensors"), folder / "state.json"]):
        with open(path, "rb") as file:
            yield f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.name}"


# ---------------------------------------------------------------------------------------- what is there


def tidy(folder: Path, step: int) -> None:
    """Delete the incomplete folders of killed processes, and the checkpoints later than ``step``, newest
    first.

    There are later ones if the run was resumed from an older checkpoint; their steps will be done again.
    """
    for leftover in folder.glob("checkpoints/.*.tmp"):
        shutil.rmtree(leftover)
    for path in reversed(list_checkpoints(folder)):
        if step_of(path) > step:
            shutil.rmtree(path)


def damage(path: Path) -> str:
    """What is wrong with a checkpoint's files, in a few words; '' if all match their checksums. One that was
    being deleted when its process was killed is damaged too."""
    try:
        listed = (path / SUMS).read_text("utf-8", "replace").splitlines()
        found = list(_checksums(path))
    except OSError as error:
        return first_line(error)
    for line in found:
        if line not in listed:
            return f"{line.split()[-1]} is damaged"
    return "" if len(found) == len(listed) else f"{SUMS} lists other files"


def step_of(path: Path) -> int:
    """The step of a checkpoint folder ``step_<n>``."""
    return int(path.name[5:])


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run folder, oldest first, damaged ones included."""
    found = folder.glob("checkpoints/step_*")
    return sorted((path for path in found if path.name[5:].isdecimal()), key=step_of)


def newest_intact(found: list[Path]) -> tuple[Path | None, list[str]]:
    """Checkpoints, oldest first -> (the newest undamaged one or None, a note for each damaged one after it).

    Raises InputError if all are damaged.
    """
    notes: list[str] = []
    for path in reversed(found):
        problem = damage(path)
        if not problem:
            return path, notes
        notes.append(f"note: {path} is damaged ({problem}); using the checkpoint before it")
    if found:
        raise InputError(
            f"--resume: {path} is damaged ({problem}), and there is no other: name the run folder, or start "
            "another run"
        )
    return None, notes


# ------------------------------------------------------------------------------------------------ loading


@torch.no_grad()
def load(path: Path, run: Run) -> None:
    """Load an undamaged checkpoint into a run. Raises InputError if it is of another model."""
    with as_input_error(f"--resume {path}: cannot be loaded"):
        # Learning rates and AdamW's settings come from the flags, as in a new run.
        for name, tensors in _tensors(run):
            stored = load_file(path / f"{name}.safetensors")
            for key, x in tensors.items():
                if name.endswith("_optimizer") and key not in stored:
                    continue  # older versions keep no moments of what has not been stepped yet: they are 0
                found = stored[key]
                if found.shape != x.shape:
                    raise ValueError(f"shapes {list(found.shape)} and {list(x.shape)} differ")
                if isinstance(x, DTensor):  # this process has some of its rows
                    found = distribute_tensor(
                        found.to(x.device), x.device_mesh, x.placements, src_data_rank=None
                    )
                x.copy_(found)
        saved = json.loads((path / "state.json").read_bytes())
        for name, holder in run.states.items():
            file = path / f"{name}.safetensors"
            holder.load_state_dict(load_file(file) if file.is_file() else saved.get(name, {}))
        vars(run.progress).update({name: saved[name] for name in asdict(run.progress)})
        run.saved_step = run.progress.step
        if run.saved_step > run.total_steps:
            raise InputError(f"state.json is at step {run.saved_step} of {run.total_steps}")
