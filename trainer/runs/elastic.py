"""Runs that ``torchrun`` starts again by itself, with as many processes as are left.

torchrun has one agent on each machine (node): the parent of the processes there. When a process ends with an
error, or a machine is lost or comes, the agents start all processes again, as many as there are now. These
must go on with the run that their job began, though the command line may say nothing of --resume:

1. The main process notes in the run folder (JOB) which agents started its processes. A process of a job that
   is started again has one of these agents. So no other run is taken for it, neither an earlier one nor one
   of a job with the same name.
2. The sizes of a batch are given per process. Started again with another number of processes, each takes a
   larger or smaller part, and the whole batch is as before (``fit_sizes``).

Without torchrun, or with programs that set the same environment, none of this happens.
"""

import json
import os
import platform
from itertools import pairwise
from pathlib import Path

import psutil
import torch.distributed as dist

from atomic_files import write_whole, writing
from errors import InputError, SaidElsewhere

JOB = "torchrun.json"  # in a run folder: which agents started its processes, and why it must not go on
SIZES = ("batch_size", "mini_batch_size")  # per process


def agent():
    """The name of the torchrun agent that started this process, which no other agent ever has; '' without."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return ""
    parent = psutil.Process(os.getppid())
    return f"{platform.node()}/{parent.pid}/{parent.create_time():.2f}"


def torchrun_flag(name):
    """What the command line of this process' agent, or its environment, says of one of torchrun's flags."""
    words = psutil.Process(os.getppid()).cmdline() if agent() else []
    for word, following in pairwise([*words, ""]):
        flag, _, value = word.partition("=")
        if flag.startswith("--") and flag[2:].replace("-", "_") == name:
            return value or following
    return os.environ.get(f"PET_{name.upper()}", "")


def check_launcher():
    """InputError if torchrun may start the processes of several machines again, but in such a way that they
    might not find each other.

    All attempts of a job have the same store, in an agent, where those of the last attempt have left what is
    no longer true (``store_of_attempt``). Agents know the number of their own restarts only, and these
    differ after some faults. With the variable of the message each attempt has a new store.
    """
    nodes, restarts = torchrun_flag("nnodes"), torchrun_flag("max_restarts")
    again = ":" in nodes or (nodes not in ("", "1") and restarts not in ("", "0"))
    if again and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        kind = InputError if os.environ["RANK"] == "0" else SaidElsewhere
        raise kind(
            f"torchrun --nnodes {nodes}: start it with --rdzv_backend c10d and the environment variable "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on every machine, or restarted processes may not find "
            "each other (docs/scale.md)"
        )


def store_of_attempt(store):
    """torchrun's store -> the part of it that only the processes of this attempt use."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return store  # a new one
    return dist.PrefixStore(f"attempt_{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)


def find_job(out_dir, kind, run_name, agents):
    """-> the run folder that these agents' job began in ``out_dir``, None if there is none.

    kind, run_name: as of ``RunFolder``. Raises InputError with the exit code of before if --strict_health has
    ended this run: it must not go on by itself.
    """
    places = sorted(Path(out_dir).glob(f"*/{JOB}"), key=lambda path: path.stat().st_mtime)
    for path in reversed(places):
        try:
            job = json.loads(path.read_text(encoding="utf-8"))
            ours = job["kind"] == kind and not set(agents).isdisjoint(job["agents"])
            ended, code = job["ended"], job["code"]
        except (OSError, ValueError, KeyError, TypeError):  # a file of someone else
            continue
        if not ours or path.parent.name != (run_name or path.parent.name):
            continue
        if ended:
            error = InputError(f"not started again: {ended}")
            error.code = code
            raise error
        return path.parent
    return None


def note_job(folder, kind, agents, ended="", code=0):
    """Write down in a run folder who runs it; if it must not be started again: why, and the exit code."""
    if any(agents):
        with writing(folder / JOB):
            job = {"kind": kind, "agents": sorted(set(agents)), "ended": ended, "code": code}
            write_whole(folder / JOB, json.dumps(job))


def note_end(folder, error):
    """Write down in a run folder that torchrun must not start its run again: ``error`` has ended it."""
    if (folder / JOB).is_file():
        job = json.loads((folder / JOB).read_text(encoding="utf-8"))
        note_job(folder, job["kind"], job["agents"], str(error), error.code)


def fit_sizes(args, processes, config):
    """Change the sizes per process so that the whole batch stays what it was -> a note, '' if they stay.

    config: the content of the run's config.json. Raises InputError if the batch cannot be shared by so many
    processes. If the number of processes has not changed, flags that have changed are resume.py's affair.
    """
    before = config.get("processes", processes)
    if before == processes:
        return ""
    whole = {name: config[name] * before for name in SIZES if name in config}
    answers = getattr(args, "num_generations", 1)

    def fits(count):
        shares = [size / count for size in whole.values()]
        return all(share.is_integer() for share in shares) and shares[0] % answers == 0

    if not fits(processes):
        counts = [str(count) for count in range(1, min(whole.values()) + 1) if fits(count)]
        parts = " in minibatches of ".join(map(str, whole.values()))
        raise InputError(
            f"--batch_size: {processes} processes cannot share the batch of {parts}; "
            f"{', '.join(counts)} can: change torchrun's --nnodes or --nproc_per_node"
        )
    for name, size in whole.items():
        setattr(args, name, size // processes)
    said = " and ".join(f"--{name} {size // processes}" for name, size in whole.items())
    return f"note: {processes} in place of {before} processes: {said} for each, the whole batch as before"


def check_shared(out_dir, folder, agents):
    """InputError unless this process sees the run folder, which the main process has made. Called where
    processes are on several machines: torchrun may choose another main process when it starts them again."""
    if len(set(agents)) > 1 and not Path(folder).is_dir():
        raise InputError(
            f"--out_dir {out_dir}: {platform.node()} does not see {folder}; name a folder on a disk that all "
            "machines share, or s3://bucket/folder"
        )
