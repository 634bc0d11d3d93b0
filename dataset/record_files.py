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
TABLE = ".parquet"
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+(:.+)?")
SUFFIXES = (".jsonl", ".json", ".txt", ".gz", TABLE)
BLANK = b"\xef\xbb\xbf \t\r\n"  # before the first record: Windows begins files with three bytes


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
def located(records, i: int):
    """Puts file and line of record ``i`` before the message of an InputError in this block."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{records.where(i)}: {error}") from error


class LineRecords:
    """The records of a text file. Blank lines are skipped. The file stays open as long as they exist."""

    _file = None

    def __init__(self, path: str):
        self.path = path
        self.is_text = path.removesuffix(".gz").endswith(".txt")
        self._open()
        self._starts = line_starts(self._file, path)

    def _open(self):
        """Open the file of lines: the file itself, or a temporary one made of it."""
        self._file = _as_plain_file(self.path)
        self.what = ":"
        if not self.is_text and _is_list(self._file):
            self.what = ": record "  # our lines are not lines of the file
            with self._file as whole:
                self._file = _as_lines(whole, self.path)
        self._version = _version(self._file)

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
        self._open()
        if self._file.name == self.path:  # else it is a temporary file of its own
            self._version = state["_version"]

    def __len__(self):
        return len(self._starts) - 1

    def __getitem__(self, i):
        start = self._starts[i]
        end = self._starts[i + 1]
        line = _read(self._file, start, end - start).split(b"\n", 1)[0]
        try:
            return {"text": _decode(line).strip()} if self.is_text else parse_object(line)
        except InputError as error:
            if _version(self._file) != self._version:
                raise InputError("the file has changed while it was read; leave it as it is") from error
            raise

    def where(self, i: int) -> str:
        """Where record ``i`` is, for error messages."""
        self._file.seek(0)
        lines = 1
        left = self._starts[i]
        while block := self._file.read(min(left, 1 << 20)):  # b"" too where the file has become shorter
            lines += block.count(b"\n")
            left -= len(block)
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
            if os.path.isdir(path):  # that the library has saved
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
    starts = array("Q")
    place = 0
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


def _as_plain_file(path):
    """The opened file, if it can be read at any place; else a temporary copy of what is in it: of a pipe's
    content, of what a gzip file holds. The system deletes it with the process."""
    try:
        file = open(path, "rb")  # noqa: SIM115
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); check the path") from error
    except ValueError as error:  # a NUL, or half a surrogate pair
        raise InputError(f"{path!r} is not a path ({error}); check it") from error
    packed = path.endswith(".gz")
    if file.seekable() and not packed:
        return file
    with file, _temporary(path) as plain:
        if not packed and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise InputError(f"{path}: several processes cannot read one pipe; write it to a file first")
        try:
            shutil.copyfileobj(gzip.GzipFile(fileobj=file) if packed else file, plain, 1 << 20)
        except (gzip.BadGzipFile, zlib.error, EOFError) as error:
            raise InputError(f"{path}: is not a complete gzip file ({error}); download it again") from error
    return plain


def _is_list(file):
    """Whether the file's first byte that is not blank begins a JSON list."""
    file.seek(0)
    first = next((line for line in file if line.strip(BLANK)), b"")
    return first.lstrip(BLANK).startswith(b"[")


def _as_lines(file, path):
    """A JSON list as a temporary file with one element per line."""
    file.seek(0)
    with as_input_error(path):
        elements = parse_json(file.read())
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


# ---------------------------------------------------------------- lines to objects


def parse_object(raw: bytes) -> dict:
    """The bytes of one line -> its JSON object. InputError if it is not UTF-8, JSON or an object."""
    record = parse_json(raw)
    if not isinstance(record, dict):
        raise InputError("not a JSON object; write {...} on every line")
    return record


def _decode(raw):
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"not UTF-8 ({error}); save the file as UTF-8") from error


def parse_json(raw: bytes):
    """Bytes of JSON text -> the value. Raises InputError."""
    text = _decode(raw)
    try:
        value = json.loads(text)
        if "\\ud" in text.lower():  # JSON can escape half a surrogate pair, which no text can be encoded with
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise InputError("has half a surrogate pair (like \\ud800); remove it") from error
    except json.JSONDecodeError as error:
        raise InputError(f"not JSON ({error}); one object a line is needed") from error
    except ValueError as error:  # Python's limit for the digits of a number
        raise InputError("has a number of thousands of digits; put it in quotes") from error
    except RecursionError as error:
        raise InputError("has lists or objects nested too deeply; one object a line") from error
    return value
