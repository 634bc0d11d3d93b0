"""Before a run is built: which run this is, if torchrun has started it again or its folder is at an address.

``take_up`` is called once, when the processes have found each other and nothing is loaded yet, because the
sizes of a batch may depend on it. elastic.py knows torchrun, remote_folder.py addresses.
"""

import json
import os
import platform
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from errors import InputError
from trainer.runs.checkpoints import SUMS
from trainer.runs.elastic import JOB, SIZES, agent, check_shared, find_job, fit_sizes
from trainer.runs.remote_folder import RemoteFolder
from trainer.runs.run_folder import choose

LOCK_PATIENCE = 60.0  # seconds in which processes of before may still be ending


@dataclass
class Job:
    """How this run was started: ``agents``, torchrun's, by rank ('' without); ``remote``, where its folder is
    copied to (None: nowhere; all processes have one); ``notes``, lines to show to the user."""

    agents: list = field(default_factory=lambda: [""])
    remote: RemoteFolder | None = None
    notes: list = field(default_factory=list)

    @property
    def patience(self):
        """Seconds to wait for the lock of the run folder: torchrun may have just ended its last process."""
        return LOCK_PATIENCE if any(self.agents) else 0.0

    def _beside_main(self, rank):
        """Whether this process has the agent of the main process, and so its machine."""
        return bool(self.agents[rank]) and self.agents[rank] == self.agents[0]

    def checkpoint_here(self, out_dir, folder, checkpoint, world):
        """The main process' run folder and checkpoint -> the checkpoint as this process sees it.

        Raises InputError if it does not see the folder, or if it cannot be fetched. All processes call it.
        """
        path, found, sums = world.gather(
            folder and (folder.path, checkpoint, checkpoint and (checkpoint / SUMS).read_bytes())
        )[0]
        with world.all_or_none():
            if self.remote is None:
                check_shared(out_dir, path, self.agents)
            elif found and not world.is_main and not self._beside_main(world.rank):
                found = self.remote.copy_of("/".join(found.parts[-3:]), sums)
        return found


def take_up(args, world, kind):
    """-> the ``Job`` of this process. Sets --resume if torchrun has started the processes again, fits
    --batch_size and --mini_batch_size to their number, and fetches the run folder from an address.

    kind: as of ``RunFolder``. All processes call it. Raises InputError in all of them.
    """
    job, config = Job(agents=world.gather(agent())), {}
    with world.all_or_none():
        check_shards(args, job.agents)
        if args.out_url:
            holder = f"process {os.getpid()} on {platform.node()} ({secrets.token_hex(4)})"
            job.remote = RemoteFolder(args.out_url, args.out_dir, args.keep_checkpoints, holder)
        if world.is_main:
            config = _find_run(args, kind, job)
    args.resume, config = world.gather((args.resume, config))[0]
    with world.all_or_none():
        note = fit_sizes(args, world.size, config) if any(job.agents) else ""
    job.notes += [note] if note else []
    return job


def check_shards(args, agents):
    """InputError if the processes of several machines would each write their part of a checkpoint, but have
    no disk in common."""
    machines = {name.split("/")[0] for name in agents}
    if args.out_url and len(machines) > 1 and getattr(args, "shard", 0):
        raise InputError(
            f"--out_dir {args.out_url}: with --shard 1 the {len(machines)} machines write a checkpoint "
            "together; name a folder on a disk that all of them share"
        )


def _find_run(args, kind, job):
    """In the main process: set --resume, fetch the run -> the content of its config.json, {} if there is no
    run to be resumed."""
    if job.remote:
        job.remote.look()
        if any(job.agents):
            job.remote.fetch_small(JOB)
    if any(job.agents) and (begun := find_job(args.out_dir, kind, args.run_name, job.agents)):
        args.resume = str(begun)
    if not args.resume:
        if job.remote and args.run_name:  # RunFolder refuses a folder that holds a run
            job.remote.fetch_small("config.json", args.run_name)
        return {}
    path, step = choose(args.out_dir, args.run_name, args.resume, kind, strict=False)
    if job.remote:
        job.remote.fetch(path.name, step)
    try:
        config = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
        counts = [config[name] for name in ("processes", *SIZES) if name in config]
        return config if all(type(count) is int for count in counts) else {}
    except (OSError, ValueError, TypeError):
        return {}  # resume.py says what is wrong
