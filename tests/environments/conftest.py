"""Fixtures of the tests of environments: the demo's tokenizer, and files of the user's."""

import pytest

from dataset.demo.make_data import build_tokenizer


@pytest.fixture(scope="session")
def chat():
    """A tokenizer like the demo's: a chat template, one token per digit."""
    return build_tokenizer(["user assistant system", "What is two plus three?", "2 + 3 = 5"])
