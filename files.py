"""Files that appear whole or not at all, and locks that end with the process that holds them."""

import contextlib
import fcntl
import os
import weakref
from pathlib import Path

from errors import InputError


def sync(path):
    """Force a file's or folder's content to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def move(source, target):
    """Rename ``source`` to ``target``, flushed to disk before and after: a crash leaves one of them."""
    sync(source)
    os.replace(source, target)
    sync(Path(target).parent)


def write_whole(path, data):
    """Write text or bytes to a file that has either its old content or all of the new, whatever happens."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_bytes(data.encode() if isinstance(data, str) else data)
        move(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def writing(path):
    """A full disk or a closed folder, whichever library meets it in this block, is an ``InputError``."""
    try:
        yield
    except Exception as error:  # safetensors and tokenizers have exceptions of their own, which end in …
        if not isinstance(error, OSError) and "(os error " not in str(error):
            raise
        reason = error.strerror if isinstance(error, OSError) else str(error).splitlines()[0]
        raise InputError(
            f"{path}: cannot be written ({reason}); make room or choose another place"
        ) from error


def lock(path):
    """Hold the lock file ``path`` until the returned file is closed or the process ends, however it ends.

    The file says who holds it. Raises ``BlockingIOError`` where another process does.
    """
    file = open(path, "a+", encoding="utf-8")  # noqa: SIM115  (open for as long as the lock is held)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise
    except OSError:
        pass  # some file systems of clusters know no locks; then nobody is kept out
    held = weakref.ref(file)
    os.register_at_fork(after_in_child=lambda: held() and held().close())  # a worker that outlives us lets go
    file.truncate(0)
    file.write(f"process {os.getpid()} on {os.uname().nodename}")
    file.flush()
    return file


@contextlib.contextmanager
def one_at_a_time(folder):
    """Wait until no other process is in such a block for this folder, which has to be there."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # as above
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
