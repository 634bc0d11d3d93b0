"""Record files: reads any record of a file by its number, and keeps no text in memory.

    .jsonl             one JSON object per line
    .json              a list of objects, or lines as above
    .txt               one text per line: {"text": the line}
    each of them .gz
    .parquet, a folder of data files, a hub name (user/name or user/name:split)
                       read with the library ``datasets``, which is only needed for these

Of a file of lines, memory holds only the positions where its lines begin, eight bytes per line. A record is
read from the disk when it is asked for. Lists and .gz are made into a temporary file of lines first.
"""

import contextlib
import gzip
import json
import os
import re
import tempfile
import zlib
from array import array
from collections.abc import Iterable
from typing import BinaryIO

from errors import InputError
from model.loading import as_input_error, quiet

DATASETS = "datasets>=4"  # the versions that this code was tested with
TABLE = ".parquet"
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+(:.+)?")
SUFFIXES = (".jsonl", ".json", ".txt", ".gz", TABLE)
BLANK = b"\xef\xbb\xbf \t\r\n"  # before the first record: Windows begins files with three bytes


def open_records(path: str):
    """A file, folder or hub name -> records: ``len(records)``, ``records[i]`` (a dict), ``records.where(i)``
    ("file:line"). Raises InputError if there is no such file, or if it is unreadable or empty. A record is
    checked when it is read: ``with located(records, i)`` puts file and line before the error message.
    """
    path = str(path)
    hub = HUB_NAME.fullmatch(path) and not path.endswith(SUFFIXES) and not os.path.lexists(path)
    is_table = hub or path.endswith(TABLE) or os.path.isdir(path)
    records = TableRecords(path) if is_table else LineRecords(path)
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
    """The records of a file of lines. Blank lines are skipped. The file stays open as long as they exist."""

    def __init__(self, path: str):
        self.path = path
        self.what = ":"
        self.is_text = path.removesuffix(".gz").endswith(".txt")
        try:
            file = open(path, "rb")  # noqa: SIM115
            file.seek(0)  # a pipe cannot do that
        except OSError as error:
            reason = error.strerror or error
            raise InputError(f"{path}: cannot be read ({reason}); check the path") from error
        except ValueError as error:  # a NUL, or half a surrogate pair
            raise InputError(f"{path!r} is not a path ({error}); check it") from error
        if path.endswith(".gz"):
            file = _temporary(path, gzip.GzipFile(fileobj=file))
        start = file.read(100).lstrip(BLANK)
        file.seek(0)
        if start.startswith(b"[") and not self.is_text:
            self.what = ": record "  # our lines are not lines of the file
            with as_input_error(path):
                elements = parse_json(file.read())
            file = _temporary(path, (json.dumps(element).encode() + b"\n" for element in elements))
        self._file = file
        self._starts = line_starts(file)

    def __len__(self):
        return len(self._starts) - 1

    def __getitem__(self, i):
        start = self._starts[i]
        size = self._starts[i + 1] - start
        if hasattr(os, "pread"):  # forked processes share the file, and its position
            lines = os.pread(self._file.fileno(), size, start)
        else:
            self._file.seek(start)
            lines = self._file.read(size)
        line = lines.split(b"\n", 1)[0]
        if self.is_text:
            with as_input_error("save the file as UTF-8"):
                return {"text": line.decode("utf-8-sig").strip()}
        record = parse_json(line)
        if not isinstance(record, dict):
            raise InputError("not a JSON object; write {...} on every line")
        return record

    def where(self, i: int) -> str:
        """Where record ``i`` is, for error messages."""
        self._file.seek(0)
        lines = 1
        while self._file.tell() < self._starts[i] and self._file.readline():  # the file may be shorter now
            lines += 1
        return f"{self.path}{self.what}{lines}"


class TableRecords:
    """The records of a table that the library ``datasets`` reads, memory-mapped from its cache."""

    def __init__(self, path):
        try:
            import datasets
        except ImportError:
            raise InputError(f"{path}: reading it needs a library: pip install '{DATASETS}'") from None
        self.path = path
        name, _, split = path.partition(":")
        files = {}
        if os.path.lexists(path):  # its name may have a colon, as on Windows
            name, split = path, ""
        if path.endswith(TABLE):
            name = "parquet"
            files = {"data_files": path}
        with quiet(), as_input_error(f"{path}: the library datasets cannot read it"):
            if os.path.isfile(os.path.join(path, "dataset_info.json")):  # written by save_to_disk
                self._table = datasets.load_from_disk(path)
            else:
                self._table = datasets.load_dataset(name, split=split or "train", **files)

    def __len__(self):
        return len(self._table)

    def __getitem__(self, i):
        # If only some records have a key, the others have None in that column.
        return {name: value for name, value in self._table[i].items() if value is not None}

    def where(self, i):
        return f"{self.path}: record {i + 1}"


def line_starts(file: BinaryIO) -> array:
    """The byte positions at which the non-blank lines of a file begin, then the end of the file."""
    starts = array("Q")
    place = 0
    file.seek(0)
    for line in file:
        if not line.isspace():
            starts.append(place)
        place += len(line)
    starts.append(place)
    return starts


def _temporary(path: str, lines: Iterable[bytes]) -> BinaryIO:
    """A temporary file with these lines of the file ``path``. The system deletes it with the process."""
    try:
        file = tempfile.TemporaryFile()  # noqa: SIM115
        file.writelines(lines)
        file.seek(0)
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise InputError(f"{path}: is not a complete gzip file ({error}); download it again") from error
    except OSError as error:
        place = tempfile.gettempdir()
        raise InputError(f"{path}: no room for it in {place} ({error.strerror}); set TMPDIR") from error
    return file


def parse_json(raw: bytes):
    """Bytes of JSON text -> the value. Raises InputError."""
    try:
        text = raw.decode("utf-8-sig")
        value = json.loads(text)
        if "\\ud" in text.lower():  # JSON can escape half a surrogate pair, which no text can be encoded with
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise InputError(f"not JSON in UTF-8 ({error}); one object a line is needed") from error
    return value
