"""Record files: reads any record of a file by its number, and keeps no text in memory.

    .jsonl             one JSON object per line
    .json              a list of objects
    .txt               one text per line: {"text": the line}
    any of these .gz   unpacked into a temporary file first
    .parquet, a folder written by save_to_disk, a hub name (user/name or user/name:split)
                       read with the library ``datasets``, which is only needed for these

Of a file of lines, memory holds only the positions where its lines begin, eight bytes per line. A record is
read from the disk when it is asked for.
"""

import contextlib
import gzip
import json
import os
import re
import shutil
import tempfile
import zlib
from array import array

from errors import InputError
from model.loading import as_input_error, quiet
from progress_bar import phase

DATASETS = "datasets>=4"  # the versions that this code was tested with
TABLE = (".parquet",)
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+(:.+)?")
SUFFIXES = (".jsonl", ".json", ".txt", ".gz", *TABLE)


def open_records(path):
    """A file, folder or hub name -> records: ``len(records)``, ``records[i]`` (a dict), ``records.where(i)``
    ("file:line"). Raises InputError if there is no such file, or if it is unreadable or empty. A record is
    checked when it is read: ``with located(records, i)`` puts file and line before the error message.
    """
    path = str(path)
    hub = HUB_NAME.fullmatch(path) and not path.endswith(SUFFIXES) and not os.path.lexists(path)
    saved = any(os.path.isfile(os.path.join(path, f"dataset_{name}.json")) for name in ("info", "dict"))
    table = hub or saved or path.endswith(TABLE)
    records = TableRecords(path) if table else LineRecords(path)
    if not len(records):
        raise InputError(f"{path}: the file has no records; give it one JSON object a line")
    return records


@contextlib.contextmanager
def located(records, i):
    """Puts file and line of record ``i`` before the message of an InputError in this block."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{records.where(i)}: {error}") from error


class LineRecords:
    """The records of a text file. Blank lines are skipped. The file stays open as long as they exist."""

    _file = None

    def __init__(self, path):
        self.path, self.what = path, ":"
        name = path.removesuffix(".gz")
        self.parse = _text_line if name.endswith(".txt") else parse_line
        self._file = self._open()
        self._version, self._starts = _version(self._file), line_starts(self._file, path)

    def _open(self):
        """-> the open file of lines: the file itself, or a temporary one made of it."""
        file = _unpacked(self.path) if self.path.endswith(".gz") else _seekable(self.path)
        if self.parse is parse_line and _first_byte(file) == b"[":
            self.what = ": record "  # our lines are not lines of the file
            with file:
                return _as_lines(file, self.path)
        return file

    def __del__(self):
        if self._file:  # else it could not be opened
            self._file.close()

    def __getstate__(self):
        """For a worker process that is not forked: it opens the file again."""
        if not os.path.isfile(self.path):
            raise InputError(
                f"{self.path}: several processes cannot read one pipe; --num_workers 0, or write a file first"
            )
        return {**vars(self), "_file": None}

    def __setstate__(self, state):
        vars(self).update(state)
        self._file = self._open()
        if self._file.name != self.path:  # a temporary file of its own
            self._version = _version(self._file)

    def __len__(self):
        return len(self._starts) - 1

    def __getitem__(self, i):
        start, end = self._starts[i], self._starts[i + 1]
        try:
            return self.parse(_read(self._file, start, end - start).split(b"\n", 1)[0])
        except InputError as error:
            if _version(self._file) != self._version:
                raise InputError("the file has changed while it was read; leave it as it is") from error
            raise

    def where(self, i):
        lines, left = 1, self._starts[i]
        self._file.seek(0)
        while left:
            block = self._file.read(min(left, 1 << 20))
            if not block:  # the file has become shorter
                break
            lines, left = lines + block.count(b"\n"), left - len(block)
        return f"{self.path}{self.what}{lines}"


class TableRecords:
    """The records of a table that the library ``datasets`` reads, memory-mapped from its cache."""

    def __init__(self, path):
        try:
            import datasets
        except ImportError:
            raise InputError(f"{path}: reading it needs a library: pip install '{DATASETS}'") from None
        self.path = path
        with quiet(), as_input_error(f"{path}: the library datasets cannot read it"):
            if os.path.isdir(path):
                table = datasets.load_from_disk(path)
            elif path.endswith(TABLE):
                table = datasets.load_dataset("parquet", data_files=path, split="train")
            else:
                name, _, split = path.partition(":")
                table = datasets.load_dataset(name, split=split or "train")
        if isinstance(table, datasets.DatasetDict):
            raise InputError(f"{path}: holds the splits {', '.join(table)}; name the folder of one")
        self._table = table

    def __len__(self):
        return len(self._table)

    def __getitem__(self, i):
        # If only some records have a key, the others have None in that column.
        return {name: value for name, value in self._table[i].items() if value is not None}

    def where(self, i):
        return f"{self.path}: record {i + 1}"


# ---------------------------------------------------------------- files to lines


def line_starts(file, name):
    """The byte positions at which the non-blank lines of a binary file begin, then the end of the file."""
    starts, place = array("Q"), 0
    file.seek(0)
    size = os.fstat(file.fileno()).st_size
    with phase(f"lines of {name}", size, "B") as bar:
        for line in file:
            if not line.isspace():
                starts.append(place)
                if not len(starts) % 100_000:
                    bar.done = place
            place += len(line)
    starts.append(place)
    return starts


def _read(file, start, size):
    if hasattr(os, "pread"):  # it uses no file position: forked processes that share the file may all read
        return os.pread(file.fileno(), size, start)
    file.seek(start)
    return file.read(size)


def _version(file):
    state = os.fstat(file.fileno())
    return state.st_size, state.st_mtime_ns


def _opened(path):
    try:
        return open(path, "rb")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); check the path") from error
    except ValueError as error:  # a NUL, or half a surrogate pair
        raise InputError(f"{path!r} is not a path ({error}); check it") from error


def _seekable(path):
    """The opened file; for a pipe, a temporary copy of its content."""
    file = _opened(path)
    if file.seekable():
        return file
    with file:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise InputError(f"{path}: several processes cannot read one pipe; write it to a file first")
        with _temporary(path) as copy:
            shutil.copyfileobj(file, copy, 1 << 20)
    return copy


def _unpacked(path):
    """A gzip file's content as a temporary file. The system deletes it with the process."""
    with _opened(path) as packed, _temporary(path) as plain:
        try:
            with gzip.open(packed) as unpacker:
                shutil.copyfileobj(unpacker, plain, 1 << 20)
        except (gzip.BadGzipFile, zlib.error, EOFError) as error:
            raise InputError(f"{path}: is not a complete gzip file ({error}); download it again") from error
    return plain


def _as_lines(file, path):
    """A JSON list as a temporary file with one element per line."""
    file.seek(0)
    elements = parse_json(file.read(), path)
    with _temporary(path) as lines:
        for element in elements:
            lines.write(json.dumps(element).encode() + b"\n")
    return lines


@contextlib.contextmanager
def _temporary(path):
    """An unnamed file that stays open after this block. InputError, with its folder, if the disk is full."""
    try:
        with contextlib.ExitStack() as failed:
            file = failed.enter_context(tempfile.TemporaryFile())
            yield file
            file.flush()
            failed.pop_all()  # open for as long as its records are
    except OSError as error:
        place = tempfile.gettempdir()
        raise InputError(f"{path}: no room for it in {place} ({error.strerror}); set TMPDIR") from error


def _first_byte(file):
    """The first byte that is not blank; b"" if there is none."""
    file.seek(0)
    while block := file.read(1 << 12):
        if byte := block.removeprefix(b"\xef\xbb\xbf").lstrip()[:1]:
            return byte
    return b""


# ---------------------------------------------------------------- lines to objects


def parse_line(raw):
    """The bytes of one line -> its JSON object, a dict. InputError if it is not UTF-8, JSON or an object."""
    record = parse_json(raw)
    if not isinstance(record, dict):
        raise InputError("not a JSON object; write {...} on every line")
    return record


def _text_line(raw):
    return {"text": _decode(raw).strip()}


def _decode(raw):
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"not UTF-8 ({error}); save the file as UTF-8") from error


def parse_json(raw, where=""):
    """Bytes of JSON text -> the value. Raises InputError, with ``where`` first in its message."""
    where = where and f"{where}: "
    try:
        value = json.loads(_decode(raw))
        sound = b"\\ud" not in raw.lower() or _is_unicode(value)
    except json.JSONDecodeError as error:
        raise InputError(f"{where}not JSON ({error}); one object a line is needed") from error
    except InputError as error:
        raise InputError(f"{where}{error}") from error
    except ValueError as error:  # Python's limit for the digits of a number
        raise InputError(f"{where}has a number of thousands of digits; put it in quotes") from error
    except RecursionError as error:
        raise InputError(f"{where}has lists or objects nested too deeply; one object a line") from error
    if not sound:
        raise InputError(f"{where}has half a surrogate pair (like \\ud800); remove it")
    return value


def _is_unicode(value):
    """Can the texts in the value be encoded? Half a surrogate pair cannot, but JSON can escape it."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True
