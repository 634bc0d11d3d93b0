"""Atomic files and locks: files that are complete or absent, and locks that end with their process."""

import contextlib
import os
import platform
import weakref
from pathlib import Path

from errors import InputError

try:
    import fcntl
except ImportError:  # Windows, where filelock locks files
    import filelock

    fcntl = None


def sync(path):
    """Force the content of a file or folder to the disk (fsync)."""
    flags = os.O_RDONLY
    if not hasattr(os, "O_DIRECTORY"):  # Windows flushes no folder, and a file only if it is open for writing
        if os.path.isdir(path):
            return
        flags = os.O_RDWR
    handle = os.open(path, flags)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def move(source, target):
    """Rename ``source`` to ``target``, flushed to disk before and after, so a crash leaves one of the two."""
    sync(source)
    os.replace(source, target)
    sync(Path(target).parent)


def write_whole(path, data):
    """Write text or bytes to a file. After a crash it has either its old content or all of the new one."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_bytes(data.encode() if isinstance(data, str) else data)
        move(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def last_written(path: Path) -> int | None:
    """When a file was last written, in ns since 1970; None if it is not there."""
    return path.stat().st_mtime_ns if path.exists() else None


@contextlib.contextmanager
def writing(path):
    """Turn a failure to write in this block (full disk, no permission) into an ``InputError`` on ``path``."""
    try:
        yield
    except Exception as error:  # those of safetensors and tokenizers say "(os error N)"
        if not isinstance(error, OSError) and "(os error " not in str(error):
            raise
        reason = error.strerror if isinstance(error, OSError) else str(error).splitlines()[0]
        raise InputError(
            f"{path}: cannot be written ({reason}); make room or choose another place"
        ) from error


def lock(path):
    """Lock the file ``path`` -> a function that unlocks it. The lock also ends when the process ends or dies.

    The file's text names the process that holds the lock. Raises ``BlockingIOError`` if another process has
    locked it.
    """
    if fcntl is None:
        return _lock_with_filelock(path)
    file = open(path, "a+", encoding="utf-8")  # noqa: SIM115  (open for as long as the lock is held)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise
    except OSError:
        pass  # some clusters' file systems have no locks; then two processes can use the folder
    held = weakref.ref(file)
    os.register_at_fork(after_in_child=lambda: held() and held().close())  # or a forked worker would keep it
    file.truncate(0)
    file.write(_holder())
    file.flush()
    return file.close


def _lock_with_filelock(path):
    """``lock`` without fcntl. What is locked is a second file: Windows lets nobody read a locked one."""
    held = filelock.FileLock(f"{path}.held")
    try:
        held.acquire(blocking=False)
    except filelock.Timeout:
        raise BlockingIOError(f"{path} is locked") from None
    Path(path).write_text(_holder(), encoding="utf-8")
    return held.release


def _holder():
    return f"process {os.getpid()} on {platform.node()}"


@contextlib.contextmanager
def one_at_a_time(folder):
    """Only one process at a time is in this block for ``folder``, which must exist; the others wait."""
    if fcntl is None:
        with filelock.FileLock(folder.with_name(f".{folder.name}.lock")):
            yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # file systems without locks, as above
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
