"""Datasets: prompts for PPO, demonstrations for stage 1, preference pairs or rated answers for stage 2.

Prompts and other records that are too long are dropped here, and never cut. Too long is more than
``max_length`` tokens (``--max_seq_len``); for PPO that counts the prompt alone, chat template included.

    up to READ_WHOLE records  ``RecordDataset.__init__`` reads all of them at the start, drops those that are
                              too long and counts them (``dropped``)
    more records              it reads ``SAMPLE`` of them at the start. If a record turns out too long later,
                              ``__getitems__`` takes the next one that fits in its place (``_next``)

A wrong record, when it is read, is an ``InputError`` with file and line. Items are made when they are asked
for; no text is kept. Nothing is ever left-padded. Record formats: formats.py. Files: record_files.py.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain

from torch.utils.data import Dataset

from dataset.answers import comparable
from dataset.chat_template import conversation_text, encode, learned_pieces, prompt_text
from dataset.formats import (
    BY_FORM,
    Keys,
    has_tools,
    is_rated,
    to_demonstration,
    to_pair,
    to_prompt,
    to_rated,
)
from dataset.record_files import located, open_records
from dataset.special_tokens import unmark
from dataset.turns import add_system
from errors import InputError
from progress_bar import phase

READ_WHOLE = 100_000  # files of up to this many records are read whole at the start: about ten seconds
SAMPLE = 1_000  # records of a larger file that are read at the start, evenly spaced
BLOCK = 256  # records that are tokenised together


class RecordDataset(Dataset, ABC):
    """The base of all datasets here: items by number, made from records. Subclasses add ``draft``.

    ``keys``: the keys of records that the user named (formats.py); ``dropped``: number of records found too
    long at the start; ``long_answers``: those of infinite length; ``longest``: upper limit of an item's
    tokens; ``fingerprint``: a hash of the items made at the start; ``columns``: the keys of the records read
    so far; ``note``: what was ignored, a line or "".
    ``limits``: the flags that say how long an item may be; ``per_record``: how many items a record makes.
    Raises InputError for a bad file, for a bad record among those read, or if all of those are too long.
    """

    limits = "--max_seq_len"
    per_record = 1

    def __init__(
        self, path, tokenizer, max_length: int, system_prompt: str = "", keys: Keys = BY_FORM, records=None
    ):
        self.path = str(path)
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.keys = keys
        self.system_prompt = system_prompt
        self.records = records or open_records(path)
        self.columns = {}
        self.with_tools = set()  # numbers of records
        n = self.count()
        self.whole = n <= READ_WHOLE
        places = range(n) if self.whole else [i * (n - 1) // (SAMPLE - 1) for i in range(SAMPLE)]
        digest = hashlib.sha256(f"{n}".encode())
        lengths = []
        with phase(f"tokens of {path}", len(places), "records") as bar:
            for first in range(0, len(places), BLOCK):
                for item in self.make(places[first : first + BLOCK]):
                    self.note_item(item)
                    digest.update(json.dumps(item, default=_hashed).encode())
                    lengths.append(self.length(item))
                bar.done = len(lengths)
        fitting = [i for i, length in zip(places, lengths, strict=True) if length <= max_length]
        if not fitting:
            raise self.too_long()
        self._kept = fitting if self.whole else range(n)
        self.edge = len(self._kept)
        self.dropped = len(lengths) - len(fitting)
        self.long_answers = lengths.count(float("inf"))
        self.longest = max_length
        if self.whole:
            self.longest = max(length for length in lengths if length <= max_length)
        self.fingerprint = digest.hexdigest()[:12]
        self.note = ""
        if self.with_tools:
            self.note = (
                f"{path}: tools are ignored: {len(self.with_tools)} of the records read have them; turns "
                "that call one or hold its result are left out"
            )

    @abstractmethod
    def draft(self, i: int, record: dict) -> tuple[list[tuple[str, bool]], Callable]:
        """Item ``i``, before its texts are tokens -> ([(text, does it open a sequence?), …], a function that
        makes the item of their token ids). ``record``: the record of the item. Raises InputError."""

    def count(self) -> int:
        """The number of items, those that are too long too."""
        return len(self.records) * self.per_record

    def note_item(self, item):
        """Called at the start with each item that is read."""

    @staticmethod
    def length(item) -> float:
        """The number of tokens of an item: of the longest sequence in it, if all but its last are such."""
        return max(map(len, item[:-1]))

    def make(self, indices):
        """Numbers of items -> the items, also those that are too long."""
        drafts = []
        for i in indices:
            with located(self.records, i // self.per_record):
                drafts.append(self.draft(i, self.read(i // self.per_record)))
        texts = list(chain.from_iterable(texts for texts, _ in drafts))
        openings = iter(encode(self.tokenizer, [text for text, opens in texts if opens]))
        others = iter(encode(self.tokenizer, [text for text, opens in texts if not opens], opening=False))
        items = []
        for i, (texts, item_of) in zip(indices, drafts, strict=True):
            ids = [next(openings if opens else others) for _, opens in texts]
            with located(self.records, i // self.per_record):
                items.append(item_of(*ids))
        return items

    def read(self, number: int) -> dict:
        """A record, whose keys and tools are noted."""
        record = self.records[number]
        self.columns |= dict.fromkeys(record)
        if has_tools(record):
            self.with_tools.add(number)
        return record

    def __len__(self):
        return len(self._kept)

    def __getitems__(self, places):
        """Several items, tokenised together. DataLoader calls this for a batch."""
        items = self.make([self._kept[place] for place in places])
        return [
            item if self.length(item) <= self.max_length else self._next(place)
            for place, item in zip(places, items, strict=True)
        ]

    def __getitem__(self, place):
        return self.__getitems__([place])[0]

    def hold_out(self, count: int):
        """Keep the last ``count`` items apart, for evaluation. A record that is too long is never replaced by
        one from the other side of this edge."""
        self.edge = len(self) - count

    def _next(self, place):
        """The next item after ``place`` that is short enough, round and round on its side of ``edge``."""
        first, last = (0, self.edge) if place < self.edge else (self.edge, len(self))
        for other in chain(range(place + 1, last), range(first, place)):
            (item,) = self.make([self._kept[other]])
            if self.length(item) <= self.max_length:
                return item
        raise self.too_long()

    def too_long(self) -> InputError:
        """-> the error where every record is too long."""
        return InputError(f"{self.path}: every record is longer than {self.limits} allows; raise it")

    def describe(self) -> str:
        """The number of items, and how many were too long, as a text."""
        if not self.whole:
            return f"{len(self)} (longer than {self.limits} and passed over: {self.dropped} of {SAMPLE} read)"
        dropped = f" ({self.dropped} longer than {self.limits} dropped)" if self.dropped else ""
        return f"{len(self)}{dropped}"


def _hashed(prompt):
    """What of a Prompt goes into the fingerprint: what is trained on, and not the rest of its record."""
    return {name: value for name, value in vars(prompt).items() if name not in ("record", "text")}


# ---------------------------------------------------------------------------------------------------------
# Prompts for PPO


@dataclass(frozen=True)
class Prompt:
    """One prompt. ``index``: the number of its record. ``answer``: for evaluation and reward functions; its
    text is never trained on. ``prompt_ids``: token ids up to the assistant's turn, ``text``: the same as
    text. ``record``: the record as the file has it, for reward functions."""

    index: int
    prompt: list | str  # messages or text: reward models apply their own templates
    answer: str | None
    prompt_ids: list
    record: dict = field(repr=False)
    text: str = field(repr=False)

    def __post_init__(self):
        if not self.prompt_ids:
            raise InputError("the prompt has no tokens; fill it in or delete the line")


class RLAIFDataset(RecordDataset):
    """Prompts for PPO. Items: ``Prompt``. Takes records of every format and uses their prompts only. Prompts
    of more than ``max_length`` tokens are dropped (see ``RecordDataset``). thinking: ``Thinking`` or None.

    ``answers``, ``comparable_answers``: of the records read at the start, those with an answer, and those
    with one that a response can equal (``comparable`` in answers.py).
    """

    answers = 0
    comparable_answers = 0

    def __init__(self, path, tokenizer, max_length, system_prompt="", keys=BY_FORM, thinking=None):
        self.thinking = thinking
        super().__init__(path, tokenizer, max_length, system_prompt, keys)

    @property
    def has_accuracy(self) -> bool:
        """Whether it says something how many responses equal the answers: can most of these be compared?"""
        return 0 < self.answers <= 2 * self.comparable_answers

    def note_item(self, item):
        if item.answer is not None:
            self.answers += 1
            self.comparable_answers += comparable(item.answer)

    def draft(self, i, record):
        prompt, answer = to_prompt(record, self.keys)
        prompt = add_system(prompt, self.system_prompt)
        switches = self.thinking.kwargs(i) if self.thinking else {}
        text = prompt_text(self.tokenizer, prompt, **switches)

        def item_of(ids):
            return Prompt(i, prompt, answer, ids, record, unmark(self.tokenizer, text))

        return [(text, True)], item_of

    @staticmethod
    def length(item):
        return len(item.prompt_ids)


# ---------------------------------------------------------------------------------------------------------
# Demonstrations (stage 1)


class SFTDataset(RecordDataset):
    """Demonstrations. Items (token ids, loss mask). The mask is 1 on what the assistant says, its end of turn
    included. In a record that is only a text, it is 1 on all but the first token.

    Prompt and answer are tokenised separately, as they are when the model generates, so no token covers the
    end of one and the start of the other.
    """

    def draft(self, i, record):
        prompt, answer = to_demonstration(record, self.keys)
        prompt = prompt and add_system(prompt, self.system_prompt)
        pieces = learned_pieces(self.tokenizer, prompt, answer)

        def item_of(*rows):
            ids = list(chain.from_iterable(rows))
            mask = []
            for place, (row, (_, is_said)) in enumerate(zip(rows, pieces, strict=True)):
                if is_said and place:
                    mask += up_to_eos(row, self.tokenizer.eos_token_id)
                else:  # a first piece that is said is a whole text, whose first token may be an EOS
                    mask += [int(is_said)] * len(row)
            mask[0] = 0  # nothing comes before the first token of a text
            return ids, mask

        return [(text, place == 0) for place, (text, _) in enumerate(pieces)], item_of


def up_to_eos(ids, eos_id):
    """The mask of one assistant piece: 1 up to its last EOS, 0 after it, where a template may write a newline
    that the model never has to."""
    said = len(ids) - ids[::-1].index(eos_id) if eos_id in ids else len(ids)
    return [1] * said + [0] * (len(ids) - said)


# ---------------------------------------------------------------------------------------------------------
# Preferences (stage 2)


class PreferenceDataset(RecordDataset):
    """Preference pairs. Items (chosen ids, rejected ids, margin). Each side has the token ids that the reward
    model reads in PPO (``conversation_ids``). margin is 0.0 if the record has none."""

    def draft(self, i, record):
        *sides, margin = to_pair(record, self.keys)
        return [self.text(*side) for side in sides], lambda chosen, rejected: (chosen, rejected, margin)

    def prompt(self, place):
        """The prompt of an item: text or messages."""
        record = self.read(self._kept[place])
        return add_system(to_prompt(record, self.keys)[0], self.system_prompt)

    def text(self, prompt, response):
        """What the reward model reads, as ``draft`` has it."""
        return conversation_text(self.tokenizer, add_system(prompt, self.system_prompt), response), True


class RatedDataset(PreferenceDataset):
    """Rated answers. Items (conversation ids, score)."""

    def draft(self, i, record):
        prompt, response, score = to_rated(record, self.keys)
        return [self.text(prompt, response)], lambda ids: (ids, score)


def is_file_of_rated(records, keys: Keys) -> bool:
    """Whether a file holds rated answers and not pairs: the first record decides."""
    with located(records, 0):
        return is_rated(records[0], keys)


def reward_dataset(path, tokenizer, max_length, system_prompt="", keys=BY_FORM):
    """The dataset of stage 2: ``RatedDataset`` or ``PreferenceDataset``, decided by the first record."""
    records = open_records(path)
    kind = RatedDataset if is_file_of_rated(records, keys) else PreferenceDataset
    return kind(path, tokenizer, max_length, system_prompt, keys, records)
