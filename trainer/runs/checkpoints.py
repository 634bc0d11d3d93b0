"""Checkpoints: the folder ``checkpoints/step_<n>/``, all that a run needs to continue after batch n.

actor.safetensors critic.safetensors        PPO: weights, fp32; with --lora_r only what trains
old_actor.safetensors                       PPO with --update_old_actor_freq above 1; else it is the actor
actor_optimizer.safetensors critic_optimizer.safetensors     PPO: the moments of AdamW
replay.safetensors                          PPO with --replay_batches: those batches
ema.safetensors                             PPO with --ema_beta: the average of the actor's weights
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

A sharded run (``--shard 1``) writes the same files: the main process gets the whole tensors, one at a time.
Any number of processes can load them, sharded or not: each takes over what it needs. Runs of older versions
have shard-00001-….safetensors instead, one for each process, which are still read.
"""

import hashlib
import json
import shutil
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import distribute_tensor

from atomic_files import move, sync, writing
from errors import InputError, first_line
from model.loading import as_input_error
from model.lora import learned
from model.weights import is_sharded, local_part, whole
from trainer.runs.adamw import zero_moments
from trainer.runs.base import Progress, Run

SUMS = "SHA256SUMS"


def save(folder: str | Path, run: Run, config: dict, keep: int) -> None:
    """Write ``folder/checkpoints/step_<n>/``, then delete all checkpoints but the newest ``keep``.

    All processes call it. The main one, which alone has a config, writes. Raises InputError if a weight is
    not finite or the disk cannot be written; older checkpoints then stay.
    """
    place = Path(folder) / "checkpoints" / f"step_{run.progress.step}"
    temporary = place.with_name(f".{place.name}.tmp")
    world = run.world
    try:
        for name, tensors, tied in _tensors(run):
            with world.all_or_none(), writing(temporary):
                kept = {}
                for key, x in tensors.items():
                    x = whole(x.detach())
                    if name in run.modules and not x.isfinite().all():
                        raise InputError(
                            f"after step {run.progress.step} the {name} has weights that are not finite: not "
                            "saved; lower the learning rates"
                        )
                    if world.is_main:
                        kept[key] = x.cpu().contiguous()
                if world.is_main:
                    temporary.mkdir(parents=True, exist_ok=True)
                    save_file(kept, temporary / f"{name}.safetensors", metadata=tied or None)
        with world.all_or_none(), writing(temporary):
            if world.is_main:
                _write_rest(temporary, run, config)
                for name in run.files:
                    shutil.copyfile(Path(folder) / name, temporary / name)
                _seal(temporary)
                move(temporary, place)
                for path in list_checkpoints(folder)[:-keep]:
                    shutil.rmtree(path)
    finally:
        if world.is_main:
            shutil.rmtree(temporary, ignore_errors=True)


def _tensors(run):
    """(file name, {key: weight or moment}, {another name of a tied weight: its key}) for each file. The keys
    of moments: "<number of the parameter>.exp_avg"."""
    for name, module in run.modules.items():
        weights = learned(module)
        first = {p: key for key, p in weights.items()}
        names = module.named_parameters(remove_duplicate=False)
        tied = {key: first[p] for key, p in names if first.get(p, key) != key}
        yield name, weights, tied
    for name, optimizer in run.optimizers.items():
        states = [optimizer.state.get(p, {}) for _, p in _numbered(run, name)]
        yield name, {f"{n}.{kind}": x for n, state in enumerate(states) for kind, x in state.items()}, {}


def _numbered(run, name):
    """[(name, parameter)] of what an optimizer trains, in the order of their numbers; of stages 1 and 2
    without names."""
    if model := run.modules.get(name.removesuffix("_optimizer")):
        return [(key, p) for key, p in model.named_parameters() if p.requires_grad]
    return [("", p) for group in run.optimizers[name].param_groups for p in group["params"]]


def _write_rest(folder, run, config):
    state = asdict(run.progress)
    for name, holder in run.states.items():
        kept = holder.state_dict()
        if any(isinstance(x, Tensor) for x in kept.values()):
            save_file(kept, folder / f"{name}.safetensors")
        else:
            state[name] = kept
    (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def _seal(folder):
    """Write the checksums of all files in a folder, and flush all to the disk."""
    files = sorted(folder.iterdir())
    # Not write_text: on Windows its line ends would be wrong for sha256sum.
    (folder / SUMS).write_bytes("".join(f"{_sha256(path)}  {path.name}\n" for path in files).encode())
    for path in folder.iterdir():
        sync(path)


def _sha256(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---------------------------------------------------------------------------------------- what is there


def tidy(folder: str | Path, step: int) -> None:
    """Delete the incomplete folders of killed processes, and the checkpoints later than ``step``, newest
    first.

    There are later ones if the run was resumed from an older checkpoint; their steps will be done again.
    """
    for leftover in (Path(folder) / "checkpoints").glob(".*.tmp"):
        shutil.rmtree(leftover)
    for path in reversed(list_checkpoints(folder)):
        if step_of(path) > step:
            shutil.rmtree(path)


def damage(path: Path) -> str:
    """What is wrong with a checkpoint's files, in a few words; '' if all match their checksums. One that was
    being deleted when its process was killed is damaged too."""
    try:
        lines = (path / SUMS).read_text(encoding="utf-8", errors="replace").splitlines()
        wanted = {name: checksum for checksum, _, name in (line.partition("  ") for line in lines)}
        for name in ("config.json", "state.json", *wanted):
            if wanted.get(name) != _sha256(path / name):
                return f"{name} is damaged"
    except OSError as error:
        return first_line(error)
    return ""


def step_of(path: Path) -> int:
    """The step of a checkpoint folder ``step_<n>``."""
    return int(path.name[5:])


def list_checkpoints(folder: str | Path) -> list[Path]:
    """The checkpoints of a run folder, oldest first, damaged ones included."""
    found = (Path(folder) / "checkpoints").glob("step_*")
    return sorted((p for p in found if p.name[5:].isdecimal()), key=step_of)


def newest_intact(folder: str | Path) -> tuple[Path | None, list[str]]:
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


# ------------------------------------------------------------------------------------------------ loading


def load(path: Path, run: Run) -> None:
    """Load an undamaged checkpoint into a run. Raises InputError if it is of another model."""
    with as_input_error(f"--resume {path}: cannot be loaded"):
        for name, module in run.modules.items():
            weights = _stored(path, name)
            if len(weights) < len(learned(module)):
                raise InputError(f"it lacks weights of the {name}")
            for key, p in module.named_parameters(remove_duplicate=False):
                if key in weights:
                    _fill(p, weights[key])
        # Learning rates and coefficients come from the flags, as in a new run.
        for name, optimizer in run.optimizers.items():
            moments = _stored(path, name)
            for number, (key, p) in enumerate(_numbered(run, name)):
                start = number if f"{number}.step" in moments else key
                if f"{start}.step" in moments:
                    optimizer.state[p] = zero_moments(optimizer, p)
                    for kind, x in optimizer.state[p].items():
                        _fill(x, moments[f"{start}.{kind}"])
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        for name, holder in run.states.items():
            tensors = path / f"{name}.safetensors"
            holder.load_state_dict(load_file(tensors) if tensors.is_file() else state.get(name, {}))
        run.progress = Progress(**{key: state[key] for key in state.keys() & asdict(run.progress).keys()})
        if run.progress.step > run.total_steps:
            raise InputError(f"state.json is at step {run.progress.step} of {run.total_steps}")


@torch.no_grad()
def _fill(x, stored):
    """Copy a stored tensor, or the rows that this process has of it, into ``x``."""
    if stored.shape != x.shape:
        raise ValueError(f"shapes {list(stored.shape)} and {list(x.shape)} differ")
    if is_sharded(x):
        stored = distribute_tensor(stored.to(x.device), x.device_mesh, x.placements, src_data_rank=None)
    local_part(x).copy_(local_part(stored))


def _stored(path, name):
    """{key: tensor} of a file, or of the shards of an older version: there each process has written its rows,
    and moments have the names of their parameters."""
    shards = sorted(path.glob("shard-*"))
    if not shards:
        return load_file(path / f"{name}.safetensors")
    rows = defaultdict(list)
    for shard in shards:
        for key, x in load_file(shard).items():
            owner, _, key = key.partition(".")
            if owner == name:
                rows[key].append(x)
    return {key: torch.cat(parts) if parts[0].dim() else parts[0] for key, parts in rows.items()}
