"""Record files: reads any record of a file by its number, and keeps no text in memory.

.jsonl             one JSON object per line
.json              a list of objects, or lines as above
.csv, .tsv         the first line names the columns; cells are text, empty ones are left out
each of them .gz
.parquet, a folder of data files, a hub name (user/name or user/name:split)
                   read with the library ``datasets``, which is only needed for these
"""

import contextlib
import csv
import gzip
import io
import json
import os
import re
import tempfile
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from textwrap import shorten
from typing import IO, Any

from dataset.formats import Record
from errors import InputError, as_input_error
from model.loading import quiet

TABLE = ".parquet"
HUB_NAME = re.compile(
    r"(?!.*\.(jsonl?|gz|parquet|csv|tsv)\Z)[\w-][\w.-]*/[\w.-]+(:.+)?"
)  # not that of a file
BLANK = b"\xef\xbb\xbf \t\r\n"  # before the first record: Windows begins files with three bytes


class LineRecords:
    """The records of a file of lines. Blank lines are skipped. Memory holds only the positions where lines
    begin, eight bytes a line. The file stays open as long as they exist. Lists of JSON, .csv and .gz are made
    into a temporary file of lines first."""

    left_out = ""

    def __init__(self, path: str) -> None:
        self.path = path
        with as_input_error(f"{path}: cannot be read"):
            file: IO[bytes] = open(path, "rb")  # noqa: SIM115
            file.seek(0)  # a pipe cannot do that
        if path.endswith(".gz"):
            file = _temporary(path, gzip.GzipFile(fileobj=file))
        if table := re.search(r"\.([ct])sv(\.gz)?\Z", path.lower()):
            file = _temporary(path, _rows(file, {"c": ",", "t": "\t"}[table[1]]))
        start = file.read(100).lstrip(BLANK)
        file.seek(0)
        if start.startswith(b"["):
            with as_input_error(path):
                elements = parse_json(file.read())
            file = _temporary(path, (json.dumps(element).encode() + b"\n" for element in elements))
        self._file = file
        self._starts = array("Q")  # of the lines that are not blank, and the end of the file
        place = 0
        for line in file:
            if not line.isspace():
                self._starts.append(place)
            place += len(line)
        self._starts.append(place)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, i: int) -> Record:
        start = self._starts[i]
        self._file.seek(start)
        record = parse_json(self._file.read(self._starts[i + 1] - start))
        if not isinstance(record, dict):
            raise InputError("not a JSON object; write {...} on every line")
        return record


class TableRecords:
    """The records of a table that the library ``datasets`` reads, memory-mapped from its cache. ``left_out``:
    the files of a folder that it does not read, as a text: it goes by their names and takes one kind."""

    left_out = ""

    def __init__(self, path: str) -> None:
        try:
            import datasets
        except ImportError:
            raise InputError(f"{path}: reading it needs a library: pip install 'datasets>=4'") from None
        self.path = path
        files = path if path.endswith(TABLE) else None
        name, _, split = path.partition(":")
        if os.path.lexists(path):  # its name may have a colon, as on Windows
            name = "parquet" if files else path
            split = ""
        said = f"{path}: the library datasets cannot read it"
        said += "; name one file of the folder" if os.path.isdir(path) else ""
        with quiet(), as_input_error(said):
            try:
                self._table = datasets.load_dataset(name, split=split or "train", data_files=files)
            except datasets.exceptions.DatasetGenerationError as error:  # that alone says nothing
                raise error.__cause__ or error from None
            if os.path.isdir(path):
                read = datasets.load_dataset_builder(path).config.data_files["train"]
                folder = Path(path).resolve()
                unread = {*folder.rglob("*.*")} - {*map(Path, read)}
                names = [file.relative_to(folder).as_posix() for file in sorted(unread) if file.is_file()]
                self.left_out = shorten(
                    ", ".join(name for name in names if not re.search(r"(^|/)\.|\.md$", name)), 200
                )

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, i: int) -> Record:
        # If only some records have a key, the others have None or NaN in that column.
        return {name: value for name, value in self._table[i].items() if value is not None and value == value}


Records = LineRecords | TableRecords


def open_records(path: str | Path) -> Records:
    """A file, folder or hub name -> records: ``len(records)``, ``records[i]`` (a dict). Raises InputError if
    there is no such file, or if it is unreadable or empty. A record is checked when it is read:
    ``with located(records, i)`` puts file and line before the error message.
    """
    path = str(path)
    there = os.path.lexists(path)
    is_table = path.endswith(TABLE) or os.path.isdir(path) if there else HUB_NAME.fullmatch(path)
    records = TableRecords(path) if is_table else LineRecords(path)
    if not len(records):
        raise InputError(f"{path}: the file has no records; give it one JSON object a line")
    return records


@contextlib.contextmanager
def located(records: Records, i: int) -> Iterator[None]:
    """Puts file and line (of a list or a table, the number) of record ``i`` before the message of an
    InputError in this block. Blank lines do not count."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{records.path}:{i + 1}: {error}") from error


def _rows(file: IO[bytes], delimiter: str) -> Iterator[bytes]:
    """A table of text -> its rows as lines of JSON. Raises InputError for a row of another length."""
    csv.field_size_limit(2**31 - 1)
    text = io.TextIOWrapper(file, "utf-8-sig", newline="")
    reader = csv.DictReader(text, delimiter=delimiter, strict=True)
    for row in reader:
        if None in row or None in row.values():
            line = reader.line_num  # the last line of the row
            raise InputError(
                f"line {line}: a row has more or fewer cells than columns are named: {row}"[:200]
            )
        yield json.dumps({name: cell for name, cell in row.items() if cell}).encode() + b"\n"


def _temporary(path: str, lines: Iterable[bytes]) -> IO[bytes]:
    """A temporary file with these lines of the file ``path``. The system deletes it with the process."""
    with as_input_error(f"{path}: cannot be unpacked into {tempfile.gettempdir()} (TMPDIR names another)"):
        file = tempfile.TemporaryFile()  # noqa: SIM115
        file.writelines(lines)
        file.seek(0)
    return file


def parse_json(raw: bytes) -> Any:
    """Bytes of JSON text -> the value. Raises InputError."""
    with as_input_error("not JSON in UTF-8; one object a line is needed, or a .csv, .tsv or .parquet file"):
        text = raw.decode("utf-8-sig")
        # NaN, which pandas writes for an empty cell, counts as null.
        value = json.loads(text, parse_constant=lambda name: None)
        if "\\ud" in text.lower():  # JSON can escape half a surrogate pair, which no text can be encoded with
            json.dumps(value, ensure_ascii=False).encode()
    return value
