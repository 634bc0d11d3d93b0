"""Run folders and checkpoints: what a run needs to go on as if it had never stopped.

There is no random state to save: sampling noise and the order of prompts are pure functions of the seed and
the step. A checkpoint is written under a temporary name, flushed to disk and renamed: it is there whole or
not at all. Loading never unpickles code (safetensors, ``weights_only=True``).
"""

import json
import os
import platform
import re
import shutil
from pathlib import Path
from pickle import UnpicklingError

import torch
from safetensors import SafetensorError
from safetensors.torch import load_model, save_model
from transformers import __version__ as transformers_version

from errors import InputError

# Flags that may differ when a run is resumed: they change what one sees or where it runs, not the result.
HARMLESS = {
    "out_dir", "run_name", "resume", "device", "ddp", "num_workers", "log_interval", "save_interval",
    "keep_checkpoints", "use_wandb", "wandb_project", "eval_interval", "eval_data_path", "accumulation_steps",
    "gradient_checkpointing",
}  # fmt: skip

# What a damaged file makes its reader raise.
LOAD_ERRORS = (OSError, RuntimeError, ValueError, LookupError, EOFError, UnpicklingError, SafetensorError)


def _sync(path):
    """Force a file's or folder's content to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _parts(run):
    """What is saved of a run: (modules, optimizers), by file name."""
    modules = {"actor": run.actor, "critic": run.critic}
    if run.args.update_old_actor_freq > 1:  # otherwise it equals the actor between steps
        modules["old_actor"] = run.old_actor
    return modules, {"actor_optimizer": run.actor_optimizer, "critic_optimizer": run.critic_optimizer}


def save(folder, step, run, keep):
    """Write ``folder/checkpoints/step_<n>/`` whole, then delete all but the newest ``keep``."""
    root = Path(folder) / "checkpoints"
    final, temporary = root / f"step_{step}", root / f".step_{step}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    modules, optimizers = _parts(run)
    for name, module in modules.items():
        save_model(module, str(temporary / f"{name}.safetensors"))
    for name, optimizer in optimizers.items():
        torch.save(optimizer.state_dict(), temporary / f"{name}.pt")
    state = {"step": step, "bad_steps": run.bad_steps, "processes": run.world.size}
    (temporary / "state.json").write_text(json.dumps(state), encoding="utf-8")
    for path in [*temporary.iterdir(), temporary]:
        _sync(path)
    for path in list_checkpoints(folder):
        if step_of(path) >= step:  # of a branch that a resumed run has left
            shutil.rmtree(path)
    os.replace(temporary, final)
    _sync(root)
    for path in list_checkpoints(folder)[:-keep]:
        shutil.rmtree(path)


def step_of(path):
    """The step of a checkpoint folder, None for a folder of another name."""
    match = re.fullmatch(r"step_(\d+)", Path(path).name)
    return int(match[1]) if match else None


def list_checkpoints(folder):
    """The checkpoints of a run folder, oldest first."""
    found = [p for p in (Path(folder) / "checkpoints").glob("step_*") if (p / "state.json").is_file()]
    return sorted((p for p in found if step_of(p) is not None), key=step_of)


def resume(path, run):
    """Fill a run from a checkpoint folder -> the number of steps done. InputError if it is damaged or of a
    run with other flags."""
    path = Path(path)
    check_same_run(path.parents[1], run)
    modules, optimizers = _parts(run)
    try:
        for name, module in modules.items():
            load_model(module, str(path / f"{name}.safetensors"), strict=True)
        for name, optimizer in optimizers.items():
            optimizer.load_state_dict(torch.load(path / f"{name}.pt", weights_only=True, map_location="cpu"))
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        run.bad_steps, step = state["bad_steps"], state["step"]
    except LOAD_ERRORS as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(f"--resume {path}: cannot be loaded ({reason}); name an older one") from None
    if "old_actor" not in modules:
        run.old_actor.load_state_dict(run.actor.state_dict())
    return step


def _config(run):
    """What ``config.json`` holds: every flag, and what else shapes the result."""
    sizes = {"processes": run.world.size, "total_steps": run.total_steps}
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    return {**vars(run.args), **sizes, "versions": {**versions, "transformers": transformers_version}}


def start_run(folder, run, resumed):
    """Create the run folder and write its ``config.json``."""
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not resumed:
            (folder / "config.json").write_text(json.dumps(_config(run), indent=2), encoding="utf-8")
    except OSError as error:
        raise InputError(f"--out_dir {run.args.out_dir}: cannot be written ({error.strerror})") from None


def check_same_run(folder, run):
    """InputError where something that shapes the result differs from the run to resume, both values named.

    Batch sizes are per process: what counts is their product with the number of processes.
    """
    path = Path(folder) / "config.json"
    try:
        old = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise InputError(f"--resume: {path} cannot be read ({error}); is this a run folder?") from None
    new = _config(run)
    for config in (old, new):
        for name in ("batch_size", "mini_batch_size"):
            config[name] *= config["processes"]
    for name in new.keys() - HARMLESS - {"processes", "versions"}:
        if old.get(name) != new[name]:
            over = " over all processes" if name.endswith("batch_size") else ""
            why = " (other prompts?)" if name == "total_steps" else ""
            raise InputError(
                f"--resume: --{name} was {old.get(name)!r} and is now {new[name]!r}{over}{why}; set it back"
            )


def find_run(out_dir, run_name, resume):
    """Flags -> (run folder, checkpoint to resume from or None). Creates nothing.

    Without ``--run_name`` a new run is run_<n>, n the first number free. ``--resume auto`` takes the newest
    checkpoint of that run (without a name: of the newest run), or starts anew where there is none.
    """
    out = Path(out_dir)
    if resume and resume != "auto":
        path = Path(resume).resolve()
        if not (path / "state.json").is_file():
            checkpoints = list_checkpoints(path)
            if not checkpoints:
                raise InputError(f"--resume {resume}: no checkpoint there; name a step_<n> or a run folder")
            path = checkpoints[-1]
        return path.parents[1], path
    numbered = {int(m[1]): p for p in out.glob("run_*") if (m := re.fullmatch(r"run_(\d+)", p.name))}
    runs = [out / run_name] if run_name else [numbered[n] for n in sorted(numbered)[-1:]]
    if resume == "auto":
        for run in runs:
            if checkpoints := list_checkpoints(run):
                return run, checkpoints[-1]
    if run_name and (out / run_name / "config.json").exists() and resume != "auto":
        raise InputError(
            f"--run_name {run_name}: {out / run_name} already holds a run; add --resume auto or rename"
        )
    return out / (run_name or f"run_{max(numbered, default=0) + 1}"), None
