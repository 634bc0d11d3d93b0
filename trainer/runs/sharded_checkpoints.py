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
from torch.distributed.tensor import distribute_tensor

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
        start = f"{name}_optimizer."
        make_moments(learner, {key.removeprefix(start) for key in stored if key.startswith(start)})
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


def make_moments(learner, stored):
    """Give parameters moments of zero, to be loaded into, where "<name>.step" is stored."""
    optimizer = learner.optimizer
    for key, p in trained_by(learner):
        optimizer.state.pop(p, None)
        if f"{key}.step" in stored:
            optimizer.state[p] = zero_moments(optimizer, p)


def load_from_whole(folder, run):
    """Load the checkpoint of an unsharded run into a sharded one: of each file the rows that are needed.
    Raises KeyError, ValueError or SafetensorError if it is of other models."""
    for name, module in run.modules.items():
        with safe_open(folder / f"{name}.safetensors", framework="pt") as file:
            other_names = file.metadata() or {}  # {name of a tied weight: under which name it is there}
            for key, p in module.named_parameters():
                _copy_rows(file, other_names.get(key, key), p)
    for name, learner in run.learners.items():
        numbers = {key: number for number, (key, _) in enumerate(trained_by(learner))}
        with safe_open(folder / f"{name}_optimizer.safetensors", framework="pt") as file:
            stored = {f"{key}.step" for key, number in numbers.items() if f"{number}.step" in file.keys()}  # noqa: SIM118
            make_moments(learner, stored)
            for key, p in trained_by(learner):
                for kind, x in learner.optimizer.state.get(p, {}).items():
                    _copy_rows(file, f"{numbers[key]}.{kind}", x)


@torch.no_grad()
def _copy_rows(file, name, x):
    """Copy the tensor of this name, or the rows that this process has of it, into ``x``."""
    stored = file.get_tensor(name)
    if stored.shape != x.shape:
        raise ValueError(f"{name} has shape {list(stored.shape)}, not {list(x.shape)}")
    if is_sharded(x):
        stored = distribute_tensor(stored.to(x.device), x.device_mesh, x.placements, src_data_rank=None)
    local_part(x).copy_(local_part(stored))
