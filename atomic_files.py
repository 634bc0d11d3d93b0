"""Atomic files and locks: files that are complete or absent, and locks that end with their process."""

import contextlib
import fcntl
import os
import weakref
from pathlib import Path

from errors import InputError


def sync(path):
    """Force the content of a file or folder to the disk (fsync)."""
    handle = os.open(path, os.O_RDONLY)
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
    """Lock the file ``path`` -> the open file. The lock ends when it is closed or the process ends or dies.

    The file's text names the process that holds the lock. Raises ``BlockingIOError`` if another process has
    locked it.
    """
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
    file.write(f"process {os.getpid()} on {os.uname().nodename}")
    file.flush()
    return file


@contextlib.contextmanager
def one_at_a_time(folder):
    """Only one process at a time is in this block for ``folder``, which must exist; the others wait."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # file systems without locks, as above
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
