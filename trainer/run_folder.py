"""A run's folder: which one it is, that it is ours alone, and that a resumed run is still the same run."""

import hashlib
import json
import os
import platform
import re
import secrets
import shlex
import sys
from pathlib import Path

import torch
from transformers import __version__ as transformers_version

from errors import InputError
from files import lock, write_whole, writing
from trainer import kernels
from trainer.checkpoints import SUMS, damage, list_checkpoints, newest_intact, step_of
from trainer.distributed import bit_sum

# Flags of any script that may differ when a run is resumed. They change what one sees or where it runs, not
# the result; or they name files, whose content is compared instead (``run.fingerprints()``).
HARMLESS = {
    "out_dir", "run_name", "resume", "device", "ddp", "num_workers", "log_interval", "save_interval",
    "keep_checkpoints", "use_wandb", "wandb_project", "eval_interval", "eval_data_path", "accumulation_steps",
    "gradient_checkpointing", "reward_timeout", "model", "tokenizer", "reward_model", "data_path",
    "hf_dir", "reference", "reward_fn", "reward_url", "trust_remote_code", "hidden_size", "num_hidden_layers",
    "use_moe", "script", "processes", "threads", "swanlab_id", "resume_command",
}  # fmt: skip


class RunFolder:
    """The folder of a run, locked until ``close`` or the end of the process. Only the main process has one.

    Without ``--run_name`` a new run is <kind>_<n>, n the first number free. ``--resume auto`` goes on with
    the run of that name (without a name: the newest run), or begins it where there is none; ``--resume PATH``
    names a run folder or one of its checkpoints. Raises InputError, having changed nothing, for a folder that
    holds a run and is not to be resumed, that is in use, or whose checkpoints are all damaged.

    ``path``; ``checkpoint`` to resume from or None; ``notes``: lines that the user should see.
    """

    def __init__(self, out_dir, run_name, resume, kind="run"):
        self.checkpoint, self.notes, self.kind = None, [], kind
        if resume and resume != "auto":
            self.path, step = _named(resume)
        else:
            newest, step = max(_numbered(out_dir, kind), default=0), None
            number = newest if resume and newest else newest + 1
            self.path = Path(out_dir) / (run_name or f"{kind}_{number}")
        self._lock = self._claim(out_dir, new=not run_name and not resume)
        if resume:
            self._find_checkpoint(step)
        elif any((self.path / name).exists() for name in ("config.json", "metrics.jsonl", "checkpoints")):
            raise InputError(f"--run_name {run_name}: {self.path} holds a run; add --resume auto or rename")

    def _claim(self, out_dir, new):
        """Create the folder and lock it. A ``new`` one is the next where another process was faster."""
        with writing(f"--out_dir {out_dir}"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            while new:
                try:
                    self.path.mkdir()
                    break
                except FileExistsError:
                    number = max(_numbered(out_dir, self.kind)) + 1
                    self.path = Path(out_dir) / f"{self.kind}_{number}"
            self.path.mkdir(exist_ok=True)
            try:
                return lock(self.path / ".lock")
            except BlockingIOError:
                holder = (self.path / ".lock").read_text(encoding="utf-8")
                raise InputError(
                    f"{self.path} is in use by {holder}; stop that or name another run"
                ) from None

    def _find_checkpoint(self, step):
        """The checkpoint to resume from: of the step that was named, or the newest that is not damaged."""
        if step is None:
            self.checkpoint, self.notes = newest_intact(self.path)
            return
        self.checkpoint = self.path / "checkpoints" / f"step_{step}"
        if problem := damage(self.checkpoint):
            raise InputError(
                f"--resume: {self.checkpoint} is damaged ({problem}); name the run folder instead"
            )

    def begin(self, run, argv):
        """Write ``config.json``, after comparing with what is there: InputError if it was another run's,
        notes on what has changed harmlessly. ``argv``: the command line."""
        config, held = configuration(run), (self.checkpoint or self.path) / "config.json"
        config["resume_command"] = resume_command(argv, self.path, run.script)
        config["swanlab_id"] = secrets.token_hex(8)
        if held.exists():  # without a checkpoint: of a run that was killed before its first one
            old = _read_json(held)
            self.notes += check_same_run(old, config, HARMLESS - run.judged_by_name)
            config["swanlab_id"] = old["swanlab_id"]
        path = self.path / "config.json"
        with writing(path):
            write_whole(path, json.dumps(config, indent=2))
        self.config = config

    def close(self):
        self._lock.close()


def _numbered(out, kind):
    """The numbers of the folders <kind>_<n>."""
    found = Path(out).glob(f"{kind}_*")
    return [int(m[1]) for path in found if (m := re.fullmatch(rf"{kind}_(\d+)", path.name, re.ASCII))]


def _named(resume):
    """``--resume PATH`` -> (the run folder, the step of the checkpoint that it names or None)."""
    path = Path(resume).resolve()
    run = path.parent.parent
    if path in list_checkpoints(run):
        return run, step_of(path)
    killed_early = (path / "config.json").is_file() and not (path / SUMS).exists()  # nor a lone checkpoint
    if list_checkpoints(path) or killed_early:
        return path, None
    raise InputError(f"--resume {resume}: no checkpoint there; name a run folder or its checkpoints/step_<n>")


def _read_json(path):
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"--resume: {path} cannot be read ({error}); start another run") from None


def configuration(run):
    """What ``config.json`` holds: every flag, and what else shapes the result."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    versions["kernels"] = "compiled" if kernels.serve(run.world.device) else "torch's"
    return {
        **vars(run.args),
        "script": run.script,
        "processes": run.world.size,
        "total_steps": run.total_steps,
        "threads": torch.get_num_threads(),
        "versions": {**versions, "transformers": transformers_version},
        "fingerprints": run.fingerprints(),
    }


def short_hash(content):
    """Of whatever JSON can hold."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]


def weights_hash(module):
    return short_hash([(name, bit_sum(p)) for name, p in module.named_parameters()])


def check_same_run(old, new, harmless=HARMLESS):
    """-> notes on what differs and may. InputError, with both values, where that shapes the result.

    Batch sizes are per process: what counts is their product with the number of processes.
    """
    try:
        if old.get("script", "train_ppo.py") != new["script"]:
            raise InputError(f"--resume: this is a run of {old['script']}; name one of {new['script']}")
        sizes = [
            {
                name: config[name] * config["processes"]
                for name in ("batch_size", "mini_batch_size")
                if name in new
            }
            for config in (old, new)
        ]
        for name in [name for name in new if name not in harmless and not isinstance(new[name], dict)]:
            was, now = (
                own.get(name, config.get(name)) for own, config in zip(sizes, (old, new), strict=True)
            )
            if was != now:
                over = " over all processes" if name in sizes[0] else ""
                why = " (other data?)" if name == "total_steps" else ""
                raise InputError(f"--resume: --{name} was {was!r} and is now {now!r}{over}{why}; set it back")
        notes = []
        for name, now in new["fingerprints"].items():
            was = old["fingerprints"].get(name)
            if was != now and name == "reward_fn":  # it may be the very mistake that stopped the run
                notes.append(
                    f"note: the code of --reward_fn {new['reward_fn']} has changed since the run began"
                )
            elif was != now:
                raise InputError(
                    f"--resume: --{name} {new[name]} does not hold what the run began with (fingerprint {was}"
                    f", now {now}); name the original"
                )
        for name in ("versions", "threads", "processes"):
            if old[name] != new[name]:
                notes.append(
                    f"note: {name} were {old[name]} and are {new[name]}: results may differ by rounding"
                )
    except (KeyError, TypeError, AttributeError):
        raise InputError(
            "--resume: the run's config.json is not one of this program; start another run"
        ) from None
    return notes


def resume_command(argv, folder, script):
    """The command line that goes on with a run, for people to copy. ``argv``: the flags of this one."""
    kept, skip = [], False
    for word in argv:
        if not skip and word != "--resume" and not word.startswith("--resume="):
            kept.append(word)
        skip = word == "--resume"
    launcher = [sys.executable]
    if "WORLD_SIZE" in os.environ:
        local = os.environ["LOCAL_WORLD_SIZE"]
        nodes = int(os.environ["WORLD_SIZE"]) // int(local)
        launcher = ["torchrun", *(["--nnodes", str(nodes)] if nodes > 1 else []), "--nproc_per_node", local]
    path = Path(__file__).with_name(script)
    return shlex.join([*launcher, str(path), *kept, "--resume", str(folder)])
