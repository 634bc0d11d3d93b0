"""Atomic files: files that are complete or absent, and one process at a time."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from errors import InputError, first_line


def sync(path: Path) -> None:
    """Force the content of a file or folder to the disk (fsync)."""
    windows = not hasattr(os, "O_DIRECTORY")  # it flushes no folder, and a file only if open for writing
    if windows and path.is_dir():
        return
    handle = os.open(path, os.O_RDWR if windows else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def move(source: Path, target: Path) -> None:
    """Rename ``source`` to ``target``, flushed to disk before and after, so a crash leaves one of the two."""
    sync(source)
    os.replace(source, target)
    sync(target.parent)


def write_whole(path: Path, text: str) -> None:
    """Write a text to a file. After a crash it has either its old content or all of the new one. Half a
    character, which JSON may hold, becomes a question mark."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_bytes(text.encode(errors="replace"))
        move(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def check_unused(path: Path) -> None:
    """Raise InputError if there is something at ``path``, unless it is an empty folder."""
    if any(path.iterdir()) if path.is_dir() else path.exists():
        raise InputError(f"{path}: is there, and nothing is overwritten; name a new one or delete it")


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Turn a failure to write in this block (full disk, no permission) into an ``InputError`` on ``path``."""
    try:
        yield
    except Exception as error:  # those of safetensors and tokenizers say "(os error N)"
        if not isinstance(error, OSError) and "(os error " not in str(error):
            raise
        remedy = "make its folder" if isinstance(error, FileNotFoundError) else "make room"
        raise InputError(
            f"{path}: cannot be written ({first_line(error)}); {remedy} or choose another place"
        ) from error


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Only one process at a time is in this block for ``folder``; the others wait."""
    from filelock import FileLock  # not at the top: --help does not need it

    path = folder.with_name(f".{folder.name}.lock")
    with FileLock(path):
        try:
            yield
        finally:  # who waits for it sees that it is gone, and makes a new one
            with suppress(OSError):  # Windows deletes no open file; there filelock does
                path.unlink()
