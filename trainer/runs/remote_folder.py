"""``--out_dir s3://bucket/folder``: a run on a machine whose disk is lost with it.

The run works in a folder of this machine (``mirror_of`` in flags.py), as always. What changes there is copied
to the address: at the start, with each checkpoint, with the log once a minute, and at the end. A resumed run
first fetches its folder, so it can go on in an empty machine. The address is opened by fsspec: s3:// needs
the package s3fs, gs:// gcsfs, abfs:// adlfs.

- A checkpoint's SHA256SUMS is sent last and removed first. Without it a checkpoint there does not count.
- Object stores have no locks. Each process that takes up a run writes its name there (WRITER), and looks for
  it before it sends anything: a process that finds another's name ends. So the last one to come goes on.
- If nothing can be sent, the run ends in one line. It is whole in the folder of this machine, and a resumed
  run there goes on from it.
"""

import json
import os
import re
import shutil
import time
from pathlib import Path

from atomic_files import lock, one_at_a_time, writing
from errors import InputError, first_line
from trainer.runs.checkpoints import SUMS, damage, list_checkpoints, step_of

WRITER = ".writer"
LOG_SECONDS = 60.0  # between two copies of the log
PAUSES = (2.0, None)  # seconds before the next attempt; s3fs itself has tried several times in each
PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}


class RemoteFolder:
    """The folder at ``url``, of which ``local`` is the copy on this machine. keep: --keep_checkpoints.

    Its methods raise InputError, in one line that names --out_dir, if the address cannot be used.
    """

    def __init__(self, url, local, keep, holder):
        self.url, self.local, self.keep, self.holder = url, Path(local), keep, holder
        self.fs, self.root = _open(url)
        self.sent = {}  # {path: (size, time of change)} of what is there and here
        self.failed, self.last, self._owned = False, time.monotonic(), set()
        with writing(f"--out_dir {url}: {local}"):
            self.local.mkdir(parents=True, exist_ok=True)

    # ------------------------------------------------------------------------------------- there -> here

    def look(self):
        """Make the folders of all runs here, empty, so that a new run gets a free number. The best and the
        average of an earlier run get empty files here: what a new run removes here is removed there too."""
        for name in self._names(""):
            top, _, rest = name.partition("/")
            if rest == WRITER:
                (self.local / top).mkdir(exist_ok=True)
            elif re.fullmatch(r"ppo_actor_.*_(best|ema)(\.pth)?", top) and not (self.local / name).exists():
                (self.local / name).parent.mkdir(parents=True, exist_ok=True)
                (self.local / name).touch()
        self.sent = {path: _state(path) for path in self._results()}

    def fetch_small(self, name, run=""):
        """Fetch the file of this name in every run folder, or in the one that is named."""
        for path in self._names(run):
            path = f"{run}/{path}" if run else path
            if path.count("/") == 1 and path.endswith(f"/{name}"):
                (self.local / path).parent.mkdir(exist_ok=True)
                self._get(path)

    def fetch(self, run, step=None):
        """Fetch a run folder, with its newest undamaged checkpoint or that of ``step``, unless what is here
        is as new. run: its name."""
        names, here = self._names(run), self.local / run
        if not names or self._is_as_new(run, names, step):
            return
        here.mkdir(exist_ok=True)
        try:
            unlock = lock(here / ".lock")
        except BlockingIOError:  # RunFolder says who uses it
            return
        for path in here.iterdir():
            if not path.name.startswith(".lock"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        for name in names:
            if not name.startswith("checkpoints/") and name != WRITER:
                self._get(f"{run}/{name}")
        for number in reversed(_complete(names)):
            if step in (None, number):
                target = self.fetch_checkpoint(f"{run}/checkpoints/step_{number}")
                if not damage(target):
                    break
        unlock()

    def _is_as_new(self, run, names, step):
        """Whether the run folder here has all that the one there has: the machine is the same, or the network
        failed when it was ahead."""
        there, here = _complete(names), self.local / run
        mine = [step_of(path) for path in list_checkpoints(here) if not damage(path)]
        newest = max(mine, default=0)
        if not mine or step not in (None, *mine) or newest < max(there, default=0):
            return False
        if newest in there:
            sums = f"checkpoints/step_{newest}/{SUMS}"
            return (here / sums).read_bytes() == self._read(f"{run}/{sums}")
        return _run_id((here / "config.json").read_bytes()) == _run_id(self._read(f"{run}/config.json"))

    def fetch_checkpoint(self, name):
        """Fetch a checkpoint, whole or not at all -> its folder here. name: ``run_1/checkpoints/step_5``."""
        target = self.local / name
        part = target.with_name(f".{target.name}.tmp")  # ``tidy`` removes what a killed process leaves
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        for file in self._names(name):
            (part / file).parent.mkdir(parents=True, exist_ok=True)
            self._run(self.fs.get_file, f"{self.root}/{name}/{file}", str(part / file))
        shutil.rmtree(target, ignore_errors=True)
        os.replace(part, target)
        self.sent |= {path: _state(path) for path in _files(target)}
        return target

    def copy_of(self, name, sums):
        """On a machine without the main process: the folder of a checkpoint, fetched if it is not here.

        sums: the content of its SHA256SUMS. All processes of the machine may call it."""
        target = self.local / name
        with one_at_a_time(self.local):
            if not (target / SUMS).is_file() or (target / SUMS).read_bytes() != sums or damage(target):
                self.fetch_checkpoint(name)
        return target

    # ------------------------------------------------------------------------------------- here -> there

    def is_due(self):
        """Whether the log was sent long ago."""
        return time.monotonic() - self.last > LOG_SECONDS

    def send(self, run):
        """Send what has changed in a run folder and in the results beside it. run: the folder's name."""
        if self.failed:
            return
        self._own(run)
        here = self.local / run
        if not here.exists():  # nothing was learned, so it was removed
            self._remove(f"{run}/{name}" for name in self._names(run))
            return
        files = [path for path in _files(here) if "checkpoints" not in path.relative_to(here).parts]
        self._send(files)
        for checkpoint in list_checkpoints(here):
            self._send_checkpoint(checkpoint)
        self._forget_checkpoints(run)
        results = self._results()
        self._send(path for path in results if path.suffix != ".pth")
        self._send(path for path in results if path.suffix == ".pth")  # last, as here
        gone = [path for path in self.sent if not path.exists()]
        self._remove(self._name(path) for path in gone if "checkpoints" not in path.parts)
        for path in gone:
            del self.sent[path]
        self.last = time.monotonic()

    def _own(self, run):
        """Write this process' name into a run folder, once; later InputError if it is not there any more."""
        if run not in self._owned:
            self._run(self.fs.pipe_file, f"{self.root}/{run}/{WRITER}", self.holder.encode())
            self._owned.add(run)
            return
        try:
            holder = self._read(f"{run}/{WRITER}").decode()
        except InputError:
            if self._run(self.fs.exists, f"{self.root}/{run}/{WRITER}"):
                raise
            holder = "nobody (it was removed)"
        if holder != self.holder:
            self.failed = True
            raise InputError(
                f"--out_dir {self.url}: {run} there belongs to {holder} now, so this process ends; "
                "it has replaced nothing there since then"
            )

    def _send(self, paths):
        """Send those of the files that have changed, several at a time."""
        states = {path: _state(path) for path in paths if path.exists()}
        changed = [path for path, state in states.items() if self.sent.get(path) != state]
        if changed:
            places = [f"{self.root}/{self._name(path)}" for path in changed]
            self._run(self.fs.put, [str(path) for path in changed], places)
            self.sent |= {path: states[path] for path in changed}

    def _send_checkpoint(self, folder):
        files = sorted(_files(folder), key=lambda path: path.name == SUMS)
        if all(self.sent.get(path) == _state(path) for path in files):
            return
        self._remove(f"{self._name(folder)}/{name}" for name in self._names(self._name(folder)))
        for path in files:
            self.sent.pop(path, None)
        self._send(files[:-1])
        self._send(files[-1:])

    def _forget_checkpoints(self, run):
        """Remove the checkpoints there that are later than those here, and all but the newest ``keep``."""
        names, here = self._names(f"{run}/checkpoints"), list_checkpoints(self.local / run)
        newest = step_of(here[-1]) if here else 0
        found = {step for name in names if (step := step_of(name.split("/")[0])) is not None}
        kept = {step_of(path) for path in here} | set(sorted(n for n in found if n <= newest)[-self.keep :])
        gone = [name for name in names if step_of(name.split("/")[0]) not in kept]
        self._remove(f"{run}/checkpoints/{name}" for name in sorted(gone, key=lambda n: not n.endswith(SUMS)))

    # ------------------------------------------------------------------------------------------- helpers

    def _results(self):
        """The files here that are results: in no run folder and not hidden."""
        runs = ("metrics.jsonl", ".lock", "torchrun.json")
        found = []
        for path in sorted(self.local.iterdir()):
            if path.name.startswith(".") or (path.is_dir() and any((path / name).exists() for name in runs)):
                continue
            found += _files(path) if path.is_dir() else [path]
        return found

    def _name(self, path):
        return path.relative_to(self.local).as_posix()

    def _names(self, below):
        """The files there in the folder ``below``, by their names in it."""
        place = f"{self.root}/{below}".rstrip("/")
        found = [name for name in self._run(self.fs.find, place) if name.startswith(f"{place}/")]
        names = [name.removeprefix(f"{place}/") for name in found]
        return sorted(name for name in names if ".." not in name.split("/"))  # nothing outside of ``local``

    def _read(self, name):
        return self._run(self.fs.cat_file, f"{self.root}/{name}")

    def _get(self, name):
        path = self.local / name
        path.parent.mkdir(parents=True, exist_ok=True)
        self._run(self.fs.get_file, f"{self.root}/{name}", str(path))
        self.sent[path] = _state(path)

    def _remove(self, names):
        for name in names:
            self._run(self.fs.rm_file, f"{self.root}/{name}")

    def _run(self, operation, *words):
        """Call fsspec, twice if it fails. Raises InputError: each kind of store has errors of its own."""
        for pause in PAUSES:
            try:
                return operation(*words)
            except FileNotFoundError as error:  # asking again does not help
                failed = error
                break
            except Exception as error:
                failed = error
                if pause:
                    time.sleep(pause)
        self.failed = True
        remedy = "check the address, the network and the credentials"
        if self._owned:
            remedy = f"all of this run is in {self.local}: when it works again, add --resume auto"
        reason = f"{type(failed).__name__}: {first_line(failed)[:160]}"
        raise InputError(f"--out_dir {self.url}: does not work ({reason}); {remedy}") from None


def _open(url):
    """-> (fsspec's file system for an address, the path in it). Raises InputError if a package is missing."""
    scheme = url.split("://")[0]
    try:
        import fsspec

        return fsspec.core.url_to_fs(url.rstrip("/"), use_listings_cache=False, skip_instance_cache=True)
    except ImportError as error:
        package = (
            "fsspec" if error.name == "fsspec" else PACKAGES.get(scheme, f"fsspec's package for {scheme}")
        )
        raise InputError(f"--out_dir {url}: needs {package}; pip install {package}") from None
    except Exception as error:  # an unknown kind of address, or settings that are wrong
        raise InputError(f"--out_dir {url}: cannot be opened ({first_line(error)[:160]})") from None


def _files(folder):
    """All files of a folder but hidden ones and those in hidden folders."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return [path for path in paths if not any(x.startswith(".") for x in path.relative_to(folder).parts)]


def _state(path):
    """What changes with a file: its size and time."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _complete(names):
    """The steps of the checkpoints that are complete, in order. names: the files of a run folder."""
    found = (name.split("/") for name in names if name.endswith(f"/{SUMS}"))
    steps = {step_of(parts[1]) for parts in found if len(parts) == 3 and parts[0] == "checkpoints"}
    return sorted(steps - {None})


def _run_id(text):
    """The run_id in the content of a config.json, None if there is none."""
    try:
        return json.loads(text).get("run_id")
    except (ValueError, AttributeError):
        return None
