"""Fixtures of the tests of data: a tokenizer with and without a chat template, files of records."""

import copy
import json

import pytest

from dataset.demo.make_data import build_tokenizer


@pytest.fixture(scope="session")
def chat():
    """A tokenizer like the demo's: a chat template, one token per digit."""
    return build_tokenizer(["user assistant system", "What is two plus three?", "2 + 3 = 5"])


@pytest.fixture
def plain(chat):
    """The same without a chat template."""
    tokenizer = copy.deepcopy(chat)
    tokenizer.chat_template = None
    return tokenizer


@pytest.fixture
def jsonl(tmp_path):
    """Writes lines, records or text, into data.jsonl -> its path."""

    def write(*lines):
        path = tmp_path / "data.jsonl"
        path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines), "utf-8")
        return path

    return write
