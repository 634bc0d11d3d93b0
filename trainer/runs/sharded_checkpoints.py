"""Weights and moments in checkpoints, where a run is or was sharded (``--shard 1``).

All processes of a sharded run write at the same time, each the rows that it has, by torch's distributed
checkpoints (``torch.distributed.checkpoint``) as safetensors files:

    shard-00001-model-00001-of-00001.safetensors, shard-00002-…     one for each process

They take the place of actor.safetensors, actor_optimizer.safetensors and so on; the other files of a
checkpoint stay what they are (checkpoints.py). Either kind can be loaded by any number of processes, sharded
or not: each reads only the rows that it needs.
"""

import warnings
from contextlib import contextmanager

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint import (
    CheckpointException,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from model.shards import is_sharded, local_part
from trainer.runs.adamw import zero_moments

SHARDS = "shard-*.safetensors"


def write(folder, run):
    """Write this process' part of all weights and moments into a folder. All processes must call it."""
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    with _plain_errors():
        dcp.save(tensors_of(run), storage_writer=writer)


def load(folder, run):
    """Load what ``write`` has written, whatever the number of processes. Raises KeyError, ValueError or
    RuntimeError if it is of other models."""
    reader = HuggingFaceStorageReader(str(folder))
    stored = reader.read_metadata().state_dict_metadata
    for name, learner in run.learners.items():
        make_moments(learner, lambda key, name=name: f"{name}_optimizer.{key}.step" in stored)
    with warnings.catch_warnings(), _plain_errors():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process, which is no mistake
        dcp.load(tensors_of(run), storage_reader=reader, no_dist=not run.in_step)


@contextmanager
def _plain_errors():
    """Raise what went wrong in one of the processes, an OSError or ValueError, as itself."""
    try:
        yield
    except CheckpointException as failed:
        raise next(iter(failed.failures.values()))[0] from None


def tensors_of(run):
    """{"actor.<name>": weight, "actor_optimizer.<name>.exp_avg": moment, …}, in place."""
    found = {}
    for name, module in run.modules.items():
        found |= {f"{name}.{key}": p.detach() for key, p in module.named_parameters()}
    for name, learner in run.learners.items():
        for key, p in trained_by(learner):
            state = learner.optimizer.state.get(p, {})
            found |= {f"{name}_optimizer.{key}.{kind}": x for kind, x in state.items()}
    return found


def trained_by(learner):
    """[(name, parameter)] of what a learner trains: number n of these has number n in unsharded moments."""
    return [(name, p) for name, p in learner.model.named_parameters() if p.requires_grad]


def make_moments(learner, has):
    """Give the parameters whose names ``has`` accepts moments of zero, to be loaded into."""
    optimizer = learner.optimizer
    for key, p in trained_by(learner):
        optimizer.state.pop(p, None)
        if has(key):
            optimizer.state[p] = zero_moments(optimizer, p)


def load_from_whole(folder, run):
    """Load the checkpoint of an unsharded run into a sharded one: of each file the rows that are needed.
    Raises KeyError, ValueError or SafetensorError if it is of other models."""
    for name, module in run.modules.items():
        with _opened(folder, name) as (file, other_name):
            for key, p in module.named_parameters():
                _read(file, other_name.get(key, key), p)
    for name, learner in run.learners.items():
        with _opened(folder, f"{name}_optimizer") as (file, _):
            stored = set(file.keys())
            numbers = {key: number for number, (key, _) in enumerate(trained_by(learner))}
            make_moments(learner, lambda key, n=numbers, stored=stored: f"{n[key]}.step" in stored)
            for key, p in trained_by(learner):
                for kind, x in learner.optimizer.state.get(p, {}).items():
                    _read(file, f"{numbers[key]}.{kind}", x)


class _opened:
    """A safetensors file of a checkpoint -> (file, {name of a tied weight: under which name it is there})."""

    def __init__(self, folder, name):
        self.file = safe_open(folder / f"{name}.safetensors", framework="pt")

    def __enter__(self):
        file = self.file.__enter__()
        return file, file.metadata() or {}

    def __exit__(self, *error):
        return self.file.__exit__(*error)


@torch.no_grad()
def _read(file, name, x):
    """Copy the tensor of this name, or the rows that this process has of it, into ``x``."""
    part, shape = file.get_slice(name), list(x.shape)
    if part.get_shape() != shape:
        raise ValueError(f"{name} has shape {part.get_shape()}, not {shape}")
    if not is_sharded(x):
        x.copy_(file.get_tensor(name))
        return
    (rows, *_), (start, *_) = compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)
    if rows:
        local_part(x).copy_(part[start : start + rows])
