"""Data files of every kind; large ones are read record by record, without their text in memory."""

import gzip
import json
import os
import shutil
import sys
import tracemalloc
from argparse import Namespace
from unittest.mock import Mock

import pytest
from tiny import refused, word_tokenizer, write_jsonl

from dataset import lm_dataset
from dataset.lm_dataset import RLAIFDataset, global_batch
from dataset.record_files import open_records
from trainer.inputs import describe_texts

NO_FLAGS = Namespace(system_prompt="", chat_template_kwargs=None, num_workers=0)
RECORDS = [{"prompt": "hi"}, {"prompt": "über", "answer": "5"}, {"prompt": "a\nb"}]
LINES = b"".join(json.dumps(record).encode() + b"\n" for record in RECORDS)


def read(path):
    records = open_records(path)
    return [records[i] for i in range(len(records))]


FILES = [
    ("a.jsonl", LINES.rstrip()),  # no newline at the end
    ("a.jsonl", b"\n \n" + LINES.replace(b"\n", b"\n\n\t\n")),
    ("a.jsonl", b"\xef\xbb\xbf" + LINES.replace(b"\n", b"\r\n")),  # as Windows writes them
    ("a.json", LINES),
    ("a.json", b"\xef\xbb\xbf\n" + json.dumps(RECORDS, indent=2, ensure_ascii=False).encode()),
    ("a.jsonl.gz", gzip.compress(LINES, mtime=0)),
    ("a.json.gz", gzip.compress(json.dumps(RECORDS).encode(), mtime=0)),
    ("no suffix", LINES),
    ("a.jsonl", LINES.replace(b'"hi"', b'"hi", "answer": NaN')),  # an empty cell of pandas
]


@pytest.mark.parametrize(("name", "content"), FILES)
def test_files(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    found = [
        {key: value for key, value in record.items() if value is not None} for record in read(tmp_path / name)
    ]
    assert found == RECORDS


@pytest.mark.parametrize(("name", "comma"), [("a.csv", ","), ("a.tsv", "\t"), ("a.CSV.gz", ",")])
def test_tables_of_text(tmp_path, name, comma):
    """As Excel writes them; cells are text, and empty ones are left out."""
    rows = ["prompt,answer,score", "hi,007,", '"a\nb,""c""",None,1.50', ""]
    content = "\r\n".join(rows).replace(",", comma).encode("utf-8-sig")
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    cells = {"prompt": f'a\nb{comma}"c"', "answer": "None", "score": "1.50"}
    assert read(tmp_path / name) == [{"prompt": "hi", "answer": "007"}, cells]


def test_tables_and_hub_names(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    empty = {"answer": None, "score": float("nan")}
    table = datasets.Dataset.from_list([{**empty, **record} for record in RECORDS])
    table.to_parquet(tmp_path / "a.parquet")
    (tmp_path / "folder").mkdir()
    table.to_json(tmp_path / "folder" / "train.jsonl")
    for path in ("a.parquet", "folder"):
        assert read(tmp_path / path) == RECORDS  # empty fields are left out
    shutil.copytree(tmp_path / "folder", tmp_path / "more" / "data")
    for name in (".a.json", ".cache/b.json", "README.md", "LICENSE", "unit_test_b.jsonl", "data/c.csv"):
        (tmp_path / "more" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "more" / name).write_bytes(LINES)
    assert read(tmp_path / "more") == RECORDS
    monkeypatch.chdir(tmp_path)
    data = [RLAIFDataset(path, word_tokenizer(["hi"]), 10) for path in ("more", "more", "folder")]
    (note,) = describe_texts(NO_FLAGS, data)
    assert note.startswith("note     more: by name or kind ") and note.endswith(
        ": data/c.csv, unit_test_b.jsonl"
    )
    data = RLAIFDataset(tmp_path / "a.parquet", word_tokenizer(["hi"]), 10)
    assert [p.answer for p in data] == [None, "5", None]
    fields = {"style": "rule", "ground_truth": "72", "extra": None}  # as verl's files; None stays inside
    verl = {"prompt": [{"role": "user", "content": "hi"}], "reward_model": fields, "data_source": "x"}
    datasets.Dataset.from_list([verl]).to_parquet(tmp_path / "verl.parquet")
    (prompt,) = RLAIFDataset(tmp_path / "verl.parquet", word_tokenizer(["hi"]), 10)
    assert (prompt.prompt, prompt.answer, prompt.record) == (verl["prompt"], "72", verl)
    (tmp_path / "b.parquet").write_bytes(b"no table")
    refused(r"b\.parquet: the library datasets cannot read it.*magic bytes", open_records, "b.parquet")
    (tmp_path / "mixed").mkdir()
    write_jsonl(tmp_path / "mixed" / "a.jsonl", [{"prompt": {"x": 1}}])
    write_jsonl(tmp_path / "mixed" / "b.jsonl", [{"prompt": {"y": 1}}])
    refused(r"mixed: the library .*; name one file of the folder: TypeError: .*cast", open_records, "mixed")
    load_dataset = Mock(return_value=table)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for path, split in (("someone/prompts", "train"), ("someone/prompts:test[:10%]", "test[:10%]")):
        assert read(path) == RECORDS
        load_dataset.assert_called_with("someone/prompts", split=split, data_files=None)


BAD_FILES = [
    ("a.jsonl", LINES + b"[1]\n", r"a\.jsonl:4: not a JSON object"),
    ("a.jsonl", b"\n\n" + LINES + b"{", r"a\.jsonl:4: not JSON"),
    ("a.jsonl", LINES + b'{"prompt": "\xe9"}', r"a\.jsonl:4: not JSON in UTF-8"),
    ("a.xlsx", b"PK\x03\x04", r"a\.xlsx:1: not JSON .* or a \.csv, \.tsv or \.parquet file"),
    (
        "a.csv",
        b'prompt,answer\n"hi\nyou",6\nhi,there,5\n',
        r"a\.csv: .*line 4: a row has more or fewer cells than columns are named: .*there",
    ),
    ("a.csv", b"prompt,answer\nhi\n", "line 2: a row has more or fewer cells than columns"),
    ("a.csv", b"prompt\n\xff\xfe", r"a\.csv: .*UnicodeDecodeError"),
    ("a.csv", b"", "no records"),
    ("a.json", b'[{"prompt": "hi"}, 5]', r"a\.json:2: not a JSON object"),
    ("a.json", b'[{"prompt": "hi"}', r"a\.json: not JSON"),
    ("a.json", b"[]", "no records"),
    ("a.json", b"[" * 100_000, r"a\.json: not JSON in UTF-8; .*RecursionError"),
    ("a.jsonl.gz", LINES, r"a\.jsonl\.gz: cannot be unpacked .*BadGzipFile"),
    ("a.jsonl.gz", gzip.compress(LINES, mtime=0)[:-9], r"a\.jsonl\.gz: cannot be unpacked .*EOFError"),
    ("a.jsonl.gz", gzip.compress(LINES + b"{", mtime=0), r"a\.jsonl\.gz:4: not JSON"),
]


@pytest.mark.parametrize(("name", "content", "says"), BAD_FILES)
def test_bad_files(tmp_path, name, content, says):
    (tmp_path / name).write_bytes(content)
    refused(says, RLAIFDataset, tmp_path / name, word_tokenizer(["hi"]), 10)


def test_what_cannot_be_opened_or_unpacked_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("nowhere.jsonl", "no/where.gz", "a/b/c", "x" * 300, "a\0b", "\ud800"):
        refused("", open_records, name)
    end, start = os.pipe()
    os.write(start, LINES)
    os.close(start)
    refused(r"/dev/fd/\d+: cannot be read", open_records, f"/dev/fd/{end}")
    os.close(end)
    (tmp_path / "a.gz").write_bytes(gzip.compress(LINES))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    refused(r"a\.gz: cannot be unpacked into .*gone \(TMPDIR", open_records, tmp_path / "a.gz")
    monkeypatch.setitem(sys.modules, "datasets", None)
    refused(r"a\.parquet: cannot be read: .*No such file", open_records, "data/a.parquet")  # no hub name
    (tmp_path / "a.parquet").touch()
    refused(r"a\.parquet: .*pip install 'datasets", open_records, tmp_path / "a.parquet")


@pytest.fixture
def small_limits(monkeypatch):
    monkeypatch.setattr(lm_dataset, "READ_WHOLE", 30)
    monkeypatch.setattr(lm_dataset, "SAMPLE", 10)


def test_many_lines(tmp_path, small_limits):
    """In memory: offsets of lines (0.4 MB, twice that while collecting), an epoch's order (0.2 MB)."""
    line = b'{"prompt": "a b"%s}\n' % (b" " * 100)
    (tmp_path / "a.jsonl").write_bytes(line * 49_999 + b'{"prompt": "b a"}\n')
    tracemalloc.start()
    data = RLAIFDataset(tmp_path / "a.jsonl", word_tokenizer("ab"), 10)
    batches = [global_batch(len(data), 0, step, 64) for step in range(10)]
    texts = {data[i].prompt for batch in batches[:2] for i in batch}
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 5e5 < held < peak < 1.5e6 < 5e4 * len(line) / 2
    assert len(data) == 50_000 and texts == {"a b"}
    assert data[49_999].prompt == "b a" and data[49_999].index == 49_999
    assert max(i for batch in batches for i in batch) > 45_000  # shuffled over all of it


def lengths(tmp_path, is_long):
    """40 prompts of one token, or of four that are too long -> their ``RLAIFDataset``."""
    records = [{"prompt": "a b a b" if is_long(i) else "a"} for i in range(40)]
    return RLAIFDataset(write_jsonl(tmp_path / "a.jsonl", records), word_tokenizer("ab"), 2)


def test_what_is_too_long_is_passed_over(tmp_path, small_limits):
    data = lengths(tmp_path, lambda i: i % 3 == 0)
    assert len(data) == 40 and data.longest == 2
    limit = "--max_seq_len 2; --max_seq_len 4 keeps them"
    assert data.describe() == f"40 (4 of 10 read dropped, longer than {limit})"
    assert [data[i].index for i in (1, 2, 3, 4, 39)] == [1, 2, 4, 4, 1]  # after 39, the last, comes 0
    assert [data[i].index for i in (0, 5, 6)] == [1, 5, 7]
    assert {p.index for p in lengths(tmp_path, lambda i: i < 39)} == {39}
    refused("--max_seq_len", lengths, tmp_path, lambda i: True)
    data = lengths(tmp_path, lambda i: i in (29, 35, 39))
    held_out = data.split(30)  # never replaced by one from the other side
    assert [len(part) for part in (data, held_out)] == [30, 10]
    assert [data[i].index for i in (28, 29)] == [28, 0]
    assert [held_out[i].index for i in (0, 5, 9)] == [30, 36, 30]


def test_a_bad_line_behind_the_sample(tmp_path, small_limits):
    lines = ['{"prompt": "a"}' + " " * 10_000] * 40
    lines[7] = '{"prompt": 7}'
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    data = RLAIFDataset(tmp_path / "a.jsonl", word_tokenizer("a"), 5)
    assert data[6].prompt == "a"
    assert [data[i].index for i in (1, 2)] == [1, 2]
    refused(r"a\.jsonl:8: a conversation must be", data.__getitem__, 7)
    (tmp_path / "a.jsonl").write_bytes(b"")  # it changes while it is read
    refused(r"a\.jsonl:4: not JSON", data.make, 3)
