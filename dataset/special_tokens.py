"""Special tokens that a text spells out stay text, so that no text can end a turn.

A prompt may contain the characters ``<|im_end|>``, and a policy may write them. If they became the special
token, a response could end its turn, write the next one itself and so mislead a reward model. Therefore
``mark_special`` replaces each of them by a mark, then a chat template writes its own special tokens around
the text, and ``encode_marked`` encodes the marks as ordinary characters. Other text is not changed.
"""

import re
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from model.loading import as_input_error

MARK = "\ufdd0"  # begins a mark; Unicode reserves this code point for use inside programs
FIRST, LAST = 0xF0000, 0xFFFFD  # a mark's second code point: FIRST for MARK itself, then the names
MARKS = re.compile(f"({MARK}[{chr(FIRST)}-{chr(LAST)}])")


class Spellings(NamedTuple):
    """How a tokenizer's special tokens are written, and the ids that no text of a user may become."""

    names: list  # longest first: one may be the start of another
    pattern: re.Pattern  # matches any of the names
    ids: frozenset


@lru_cache(maxsize=8)  # called for every text, and some tokenizers have thousands of added tokens
def spellings(tokenizer):
    """The ``Spellings`` of a tokenizer."""
    added = tokenizer.added_tokens_decoder
    names = {*tokenizer.all_special_tokens, *(str(token) for token in added.values() if token.special)}
    names = sorted(names - {""}, key=lambda name: (-len(name), name))
    ids = {*tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)}
    # Unknown characters become the unknown token, so its id is allowed, unless it is BOS, EOS or pad as well.
    ends = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
    ids -= {tokenizer.unk_token_id} - ends
    return Spellings(names, re.compile("|".join(map(re.escape, names)) or "(?!)"), frozenset(ids))


def mark_special(tokenizer, text):
    """``text`` with a mark in place of each special token that it spells, before or after normalisation."""
    special = spellings(tokenizer)

    def marked(text):
        text = text.replace(MARK, MARK + chr(FIRST))
        return special.pattern.sub(lambda name: MARK + chr(FIRST + 1 + special.names.index(name[0])), text)

    normalizer = tokenizer.backend_tokenizer.normalizer if tokenizer.is_fast else None
    if normalizer is not None:
        with as_input_error(f"the tokenizer {tokenizer.name_or_path} cannot normalise a text"):
            # For example, full-width letters may become those of a special token.
            if special.pattern.search(normalizer.normalize_str(marked(text))):
                text = normalizer.normalize_str(text)
    return marked(text)


def unmark(tokenizer, text):
    """The text as it was before ``mark_special``."""
    strings = [MARK, *spellings(tokenizer).names]
    return MARKS.sub(lambda mark: strings[ord(mark[0][1]) - FIRST], text)


def encode_marked(tokenizer, text, add_special_tokens):
    """The token ids of a text with marks: the marks become text, special tokens outside them stay special.

    The text is split only at special tokens, so words and prefix spaces get the same ids as in any text.
    """
    ids = []
    pieces = re.split(f"((?:{spellings(tokenizer).pattern.pattern})+)", text)
    for is_marked, some in groupby(filter(None, pieces), lambda piece: MARK in piece):
        piece = "".join(some)
        ids += _as_text(tokenizer, piece) if is_marked else _ids(tokenizer, piece)
    if add_special_tokens:  # for example a BOS: what the tokenizer puts around any text
        whole = tokenizer("a", return_special_tokens_mask=True, verbose=False)
        around = whole["special_tokens_mask"]
        text_ends = len(around) - around[::-1].index(0)
        ids = whole["input_ids"][: around.index(0)] + ids + whole["input_ids"][text_ends:]
    return ids


def _as_text(tokenizer, text):
    """The ids of a text between two special tokens; none of them is special.

    If the vocabulary is words, it may have the special token as a word. Then its characters are encoded one
    by one.
    """
    special = spellings(tokenizer).ids
    ids = _ids(tokenizer, unmark(tokenizer, text), split_special_tokens=True)
    if special.isdisjoint(ids):
        return ids
    ids = []
    for part in filter(None, MARKS.split(text)):
        if MARK in part:
            rows = _ids(tokenizer, list(unmark(tokenizer, part)), split_special_tokens=True)
            ids += [i for row in rows for i in row if i not in special]
        else:
            ids += _ids(tokenizer, unmark(tokenizer, part))
    return ids


def _ids(tokenizer, text, **options):
    return tokenizer(text, verbose=False, **{"add_special_tokens": False, **options})["input_ids"]
