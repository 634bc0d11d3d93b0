"""Datasets and the order of their records: prompts for PPO, demonstrations, pairs, ratings, logged answers.

Prompts and other records that are too long are dropped here, and never cut. Too long is more than
``max_length`` tokens (``--max_seq_len``); for PPO that counts the prompt alone, chat template included. Files
of up to READ_WHOLE records are read whole at the start. Of more records, ``SAMPLE`` are read then; if one
turns out too long later, the next one that fits takes its place. A wrong record, when it is read, is
an ``InputError`` with file and line. No text is kept. Nothing is ever left-padded.
"""

import hashlib
import json
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable
from copy import copy
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from dataset.answers import Answer, comparable, is_formula
from dataset.chat_template import (
    Ids,
    Marked,
    Thinking,
    conversation_ids,
    encode,
    is_read,
    learned_pieces,
    prompt_text,
    special_tokens,
    unmark,
    unrendered,
)
from dataset.formats import (
    BY_FORM,
    THOUGHT_FIELDS,
    AnyPrompt,
    Exchange,
    Keys,
    Record,
    Tools,
    add_system,
    begun,
    is_pair,
    named,
    replaces_turn,
    to_demonstration,
    to_messages,
    to_pair,
    to_prompt,
    to_rated,
    tool_name,
    tools_of,
    without_calls,
)
from dataset.record_files import located, open_records
from errors import InputError
from progress_bar import phase

READ_WHOLE = 100_000  # files of up to this many records are read whole at the start: 10 to 20 seconds
SAMPLE = 1_000  # records of a larger file that are read at the start, evenly spaced
NAMES = 5  # of tools that a line at the start shows
LISTED = re.compile(r"<tools>\s*(\[\s*)?\{")  # a list of tools in the text of a system turn (Hermes)
RENDERED = re.compile(r"\s*(<\|\w+\|>|<start_of_turn>|\[INST\])")  # how texts of chat templates begin
CHOSEN, REJECTED = 1.0, -1.0  # the scores of a pair's answers in offline PPO (HALOs, arXiv:2402.01306)

Labelled = tuple[*tuple[Ids, ...], float]  # token ids of one or two conversations, and a number
Item = TypeVar("Item")


@dataclass(eq=False)
class RecordDataset(Generic[Item], ABC):
    """The base of all datasets here: items by number, made from records. Raises InputError for a bad file, a
    bad record among those read, or if all of these are too long. ``read``, ``dropped``: how many items were
    read at the start, and how many of these were too long; ``longest``: upper limit of an item's tokens;
    ``fingerprint``: a hash of the items made at the start; ``columns``: the keys of the records read."""

    path: str | Path
    tokenizer: PreTrainedTokenizerBase
    max_length: int
    system_prompt: str = ""
    keys: Keys = BY_FORM  # those that the user named
    _: KW_ONLY
    tools: Tools = ()  # of --tools or --env, which are run; shown where a record lists none

    limits = "--max_seq_len"  # the flags that say how long an item may be
    shows_tools = True  # to the model that reads the items
    by_answer = False  # whether each answer of a pair is an item, and not the pair

    def __post_init__(self) -> None:
        self.records = open_records(self.path)
        self.columns: dict[str, None] = {}
        self.noted: set[str] = set()  # what is to be said of the records that have been read
        self.unknown_tools: dict[str, None] = {}  # that records list, and ``tools`` does not
        with located(self.records, 0):
            first = named(self.records[0], self.keys)
        self.pairs = is_pair(first) or "score" not in first  # and not rated answers
        self.per_record = 2 if self.by_answer and self.pairs else 1  # items
        n = len(self.records) * self.per_record
        reads_all = n <= READ_WHOLE
        self._places = range(n) if reads_all else [i * (n - 1) // (SAMPLE - 1) for i in range(SAMPLE)]
        digest = hashlib.sha256(f"{n}".encode())
        fitting = {}  # {number of an item: its length}
        self.longest_read = 0  # tokens of the longest one read
        with phase(f"tokens of {self.path}", len(self._places), "records") as bar:
            for i in self._places:
                item = self.make(i)
                self.count_item(item)
                digest.update(json.dumps(item, default=_hashed).encode())
                length = self.length(item)
                self.longest_read = max(self.longest_read, length)
                if length <= self.max_length:
                    fitting[i] = length
                bar.update()
        if not fitting:
            raise self.too_long()
        self._kept = list(fitting) if reads_all else range(n)
        self.read = len(self._places)
        self.dropped = self.read - len(fitting)
        self.longest = max(fitting.values()) if reads_all else self.max_length
        self.fingerprint = digest.hexdigest()[:12]

    @abstractmethod
    def item(self, i: int, record: Record) -> Item:
        """Item ``i``, made of this record, which is as the file has it. Raises InputError."""

    def length(self, item: Item) -> int:
        """The number of tokens of an item: of the longest sequence in it, if all but its last are such."""
        assert isinstance(item, tuple)
        return max(map(len, item[:-1]))

    def count_item(self, item: Item) -> None:
        """Called at the start with each item that is read."""

    def make(self, i: int) -> Item:
        """Item ``i``, also one that is too long."""
        number = i // self.per_record
        with located(self.records, number):
            record = self.records[number]
            self.columns |= dict.fromkeys(record)
            return self.item(i, record)

    def fields(self, record: Record) -> Record:
        """A record as the functions of formats.py read it."""
        given = named(record, self.keys)
        read = unrendered(self.tokenizer, given)
        if read is not given:
            self.noted.add("texts that the chat template has written already are read as messages")
        if replaces_turn(read):
            self.noted.add(
                "the last turn of a conversation is left out where an answer is beside it; one that the "
                'answer continues belongs into "prompt"'
            )
        return read

    def exchanges(self, record: Record) -> tuple[list[Exchange], float]:
        """A record as ``fields`` gives it -> of a pair both prompts with their answers, and the margin; else
        one prompt with its rated answer, and the score. Raises InputError."""
        sides, number = to_pair(record) if self.pairs else to_rated(record)
        return [(add_system(prompt, self.system_prompt), answer) for prompt, answer in sides], number

    def tools_for(self, record: Record, prompt: AnyPrompt) -> Tools:
        """The tools that the chat template writes into a prompt: those that the record, as ``fields`` gives
        it, lists, else those of the flags; none where a system turn's text has the list already. What is to
        be said of the prompt is noted. Raises InputError."""
        listed = tools_of(record)
        turns = to_messages(prompt)
        is_written = any(turn["role"] == "system" and LISTED.search(turn["content"]) for turn in turns)
        if self.tools:
            known = {tool_name(tool) for tool in self.tools}
            self.unknown_tools |= {name: None for name in map(tool_name, listed) if name not in known}
            if listed or is_written:
                self.noted.add("records list tools: these are shown, and not those of --tools or --env")
        elif listed or any(turn["role"] == "tool" for turn in turns):
            shown = self.shows_tools and is_read(self.tokenizer, "tools")
            lists = "shown as the chat template writes them" if shown else "left out"
            self.noted.add(f"no tool is run; lists of tools are {lists}")
        if any(RENDERED.match(turn["content"]) for turn in turns):
            self.noted.add(
                "turns begin with marks of a chat template, such as <|im_start|> or [INST], which stay text; "
                "give messages in their place, or the template with --prompt_template"
            )
        return () if is_written else listed or self.tools

    def notes(self) -> list[str]:
        """What is to be said of the records that were read at the start."""
        notes = sorted(self.noted)
        if self.unknown_tools:
            names = ", ".join([*islice(self.unknown_tools, NAMES)])
            more = len(self.unknown_tools) - NAMES
            names += f" and {more} more" * (more > 0)
            notes.append(f"tools that records list and no flag has, so that calls get an error: {names}")
        if self.records.left_out:
            notes.append(f"by name or kind not of its split train and not read: {self.records.left_out}")
        return notes

    def ids(self, text: Marked, context: Marked = "") -> Ids:
        """The token ids of a text. context: as in ``encode``."""
        return encode(self.tokenizer, [text], context)[0]

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, place: int) -> Item:
        """The item at ``place``, or the next one that is short enough, round and round."""
        for other in chain([place], range(place + 1, len(self)), range(place)):
            item = self.make(self._kept[other])
            if self.length(item) <= self.max_length:
                return item
        raise self.too_long()

    def split(self, place: int) -> Self:
        """Take off the items from ``place`` on -> a dataset of these."""
        rest = copy(self)
        rest._kept = self._kept[place:]
        rest.dropped = 0  # those that were count once
        self._kept = self._kept[:place]
        return rest

    def too_long(self) -> InputError:
        """-> the error where every record is too long."""
        return InputError(f"{self.path}: every record is longer than {self.limits} allows; raise it")

    def field_hashes(self, fields: Iterable[str]) -> dict[str, str]:
        """{field: a hash of its values in the records that were read at the start, which are read again}."""
        digests = {field: hashlib.sha256() for field in fields}
        for i in self._places if digests else ():
            record = self.records[i // self.per_record]
            for field, digest in digests.items():
                digest.update(json.dumps([record.get(field)], default=str).encode())
        return {field: digest.hexdigest()[:12] for field, digest in digests.items()}

    def describe(self) -> str:
        """The number of items, how many were too long, and the limit that keeps these, as a text."""
        if not self.dropped:
            return f"{len(self)}"
        limit = self.limits
        if limit == RecordDataset.limits:
            limit += f" {self.max_length}; {limit} {self.longest_read} keeps them"
        return f"{len(self)} ({self.dropped} of {self.read} read dropped, longer than {limit})"


def _hashed(prompt: "Prompt") -> Record:
    """What of a Prompt goes into the fingerprint: what is trained on, and not the rest of its record."""
    return {name: value for name, value in vars(prompt).items() if name not in ("record", "text", "tools")}


# ---------------------------------------------------------------- prompts for PPO


@dataclass(frozen=True)
class Prompt:
    """One prompt. ``index``: the number of its record. ``answer``: for evaluation and reward functions; its
    text is never trained on. ``prompt_ids``: token ids up to the assistant's turn, ``text``: the same as
    text. ``record``: the record as the file has it, for reward functions. ``tools``: those that the chat
    template was given."""

    index: int
    prompt: AnyPrompt  # reward models apply their own templates
    answer: Answer | None
    prompt_ids: Ids
    record: Record
    text: str
    _: KW_ONLY
    tools: Tools = ()

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise InputError("the prompt has no tokens; fill it in or delete the line")


@dataclass(eq=False)
class RLAIFDataset(RecordDataset[Prompt]):
    """Prompts for PPO. Takes records of every format and uses their prompts; their answers only for
    evaluation and reward functions.

    Numbers of the records read at the start: ``with_answer``; ``comparable_answers``, those with one that a
    response can equal (``comparable`` in answers.py); ``formulas``, those of them with a formula.
    """

    thinking: Thinking | None = None
    with_answer = 0
    comparable_answers = 0
    formulas = 0

    @property
    def has_accuracy(self) -> bool:
        """Whether it says something how many responses equal the answers: can most of these be compared?"""
        return 0 < self.with_answer <= 2 * self.comparable_answers

    def count_item(self, item: Prompt) -> None:
        if item.answer is not None:
            self.with_answer += 1
            self.comparable_answers += comparable(item.answer)
            self.formulas += comparable(item.answer) and is_formula(item.answer)

    def item(self, i: int, record: Record) -> Prompt:
        fields = self.fields(record)
        prompt, answer = to_prompt(fields)
        if self.tools:
            prompt = without_calls(fields, prompt)
        prompt = add_system(prompt, self.system_prompt)
        tools = self.tools_for(fields, prompt)
        switches = self.thinking(i) if self.thinking else {}
        text = prompt_text(self.tokenizer, prompt, tools, **switches)
        return Prompt(
            index=i,
            prompt=prompt,
            answer=answer,
            prompt_ids=self.ids(text),
            record=record,
            text=unmark(text),
            tools=tools,
        )

    def length(self, item: Prompt) -> int:
        return len(item.prompt_ids)


# ---------------------------------------------------------------- demonstrations (stage 1)


class SFTDataset(RecordDataset[tuple[Ids, Ids]]):
    """Demonstrations. Items (token ids, loss mask). The mask is 1 on what the assistant says up to the token
    that ends its turn, but for turns with "weight": 0, and those that a template rewrites once others follow.
    In a record that is only a text, it is 1 on all but the first token.

    Prompt and answer are tokenised separately, as they are when the model generates, so no token covers the
    end of one and the start of the other.
    """

    ends: list[int] | None = None  # the ids that end a response of the policy; None: not yet known
    endless = False  # whether the template ends an answer with no token of its own
    rewritten = 0  # turns of the assistant that are context only, in the records read at the start

    def __post_init__(self) -> None:
        self.kinds: dict[frozenset[int], int] = {}  # {special tokens in what is learned: number of an item}
        super().__post_init__()

    def item(self, i: int, record: Record) -> tuple[Ids, Ids]:
        tokenizer = self.tokenizer
        fields = self.fields(record)
        for name in THOUGHT_FIELDS:
            if fields.get(name):
                self.noted.add(f'"{name}" beside an answer is not learned; <think>…</think> in the answer is')
        prompt, answer = to_demonstration(fields)
        prompt = prompt and add_system(prompt, self.system_prompt)
        pieces = learned_pieces(tokenizer, prompt, answer, self.tools_for(fields, prompt or ""))
        if prompt and tokenizer.chat_template and self.ends is None:
            roles = [turn["role"] for turn in to_messages(prompt)]
            spoken = roles.count("assistant") + (not begun(prompt))  # a beginning and its answer are one
            self.rewritten += spoken - len(pieces) // 2
        ids: Ids = []
        mask: Ids = []
        context = ""
        for number, (text, learned) in enumerate(pieces):
            row = self.ids(text, context)
            counted = 0
            if learned:
                special = frozenset(special_tokens(tokenizer)[1].intersection(row))
                self.kinds.setdefault(special, i)
                if not special and number == len(pieces) - 1:
                    row.append(tokenizer.eos_token_id)
                    self.endless = True
                if special and self.ends and set(row).isdisjoint(self.ends):
                    raise InputError(
                        "the chat template does not end answers with the tokenizer's EOS, "
                        f"{tokenizer.eos_token}: set eos_token in tokenizer_config.json to the token that "
                        "ends a turn, or give another --prompt_template"
                    )
                ends = self.ends or [tokenizer.eos_token_id]
                # A text may begin with the EOS. Behind the end templates write a newline or one more EOS.
                counted = next((n + 1 for n in range(1, len(row)) if row[n] in ends), len(row))
            mask += [1] * counted + [0] * (len(row) - counted)
            ids += row
            context += text
        if not any(mask):
            raise InputError('no answer to learn from: its "weight" is 0; delete the line')
        mask[0] = 0  # nothing comes before the first token of a text
        return ids, mask

    def end_at(self, ends: list[int]) -> None:
        """From now on answers end at these ids, as in PPO. Raises InputError if those of a record end at
        another token."""
        self.ends = ends
        for i in self.kinds.values():
            self.make(i)

    def notes(self) -> list[str]:
        notes = super().notes()
        if self.endless:
            eos = self.tokenizer.eos_token
            notes.append(f"the chat template ends no answer; {eos} is put behind the last one, and learned")
        if self.rewritten:
            notes.append(
                f"turns of the assistant that are context only: {self.rewritten}, as the chat template "
                "writes them in another way once more turns follow; a --prompt_template may not"
            )
        return notes


# ---------------------------------------------------------------- preferences (stage 2)


class PreferenceDataset(RecordDataset[Labelled]):
    """Pairs: items (chosen ids, rejected ids, margin), the margin 0.0 if the record has none; or rated
    answers: items (conversation ids, score). The token ids are those that the reward model reads in PPO."""

    shows_tools = False

    def item(self, i: int, record: Record) -> Labelled:
        record = self.fields(record)
        sides, number = self.exchanges(record)
        self.tools_for(record, sides[0][0])
        rows = conversation_ids(self.tokenizer, sides)
        if not all(rows):
            raise InputError("prompt and answer have no tokens; fill them in or delete the line")
        return *rows, number


# ---------------------------------------------------------------- logged answers (offline PPO)
#
# Prompts with an answer that was given once, and its score: that of a rated answer, or for a pair CHOSEN and
# REJECTED. Prompt and answer are tokenised separately, and the answer ends with its EOS, as if the policy had
# written it.


@dataclass(frozen=True)
class LoggedAnswer(Prompt):
    """A prompt with an answer to it. ``response_ids``: with the EOS; ``answer`` is None."""

    response: str
    response_ids: Ids
    score: float


@dataclass(eq=False, kw_only=True)
class LoggedRecords(RecordDataset[Item]):
    """Records whose prompt has more than ``max_length`` tokens or whose answer has more than ``max_response``
    are dropped. eos: the ids that end a response."""

    max_response: int
    eos: list[int]

    limits = "--max_seq_len or --max_gen_len"

    def answer(self, i: int, record: Record, side: int) -> LoggedAnswer:
        """Item ``i``, an answer of a record. side: of a pair, 0 for the chosen one, 1 for the other."""
        fields = self.fields(record)
        sides, score = self.exchanges(fields)
        if self.pairs:
            score = (CHOSEN, REJECTED)[side]
        prompt, response = sides[side]
        tools = self.tools_for(fields, prompt)
        *pieces, (reply, _) = learned_pieces(self.tokenizer, prompt, response, tools)
        context = "".join(text for text, _ in pieces)
        ids = self.ids(reply, context)
        ends = [place for place, token in enumerate(ids) if token in self.eos]
        if not ends:
            raise InputError(
                "the answer does not end with an EOS that the policy knows: set eos_token in "
                "tokenizer_config.json to the token that ends a turn, or give another --prompt_template"
            )
        return LoggedAnswer(
            index=i,
            prompt=prompt,
            answer=None,
            prompt_ids=self.ids(context),
            record=record,
            text=unmark(context),
            response=response,
            response_ids=ids[: ends[0] + 1],
            tools=tools,
            score=score,
        )

    def length(self, item: Item) -> int:
        """The tokens of the longest prompt, or more than any limit where an answer is too long."""
        answers: Any = item if isinstance(item, tuple) else [item]
        too_long = any(len(answer.response_ids) > self.max_response for answer in answers)
        return sys.maxsize if too_long else max(len(answer.prompt_ids) for answer in answers)


class LoggedAnswers(LoggedRecords[LoggedAnswer]):
    """Items: ``LoggedAnswer``. Of pairs, item 2 n is the chosen answer of record n, item 2 n + 1 the rejected
    one."""

    by_answer = True

    def item(self, i: int, record: Record) -> LoggedAnswer:
        return self.answer(i, record, i % self.per_record)


class LoggedPairs(LoggedRecords[tuple[LoggedAnswer, LoggedAnswer]]):
    """Pairs, for an evaluation. Items (chosen, rejected); dropped where one of the two is too long."""

    def item(self, i: int, record: Record) -> tuple[LoggedAnswer, LoggedAnswer]:
        return self.answer(i, record, 0), self.answer(i, record, 1)


# ---------------------------------------------------------------- the order of records
#
# It depends on the seed, the epoch and the size of the global batch only, not on the number of processes. So
# a resumed run goes on in the order of the run that was stopped.


def permutation(n: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of range(n) as an array; it depends on the arguments only.

    Ten million numbers take half a second and 40 MB. numpy has promised not to change RandomState's stream
    (NEP 19), so a run that is resumed with another numpy continues in the same order.
    """
    order = np.arange(n, dtype=np.uint32)
    np.random.RandomState([seed & 0xFFFFFFFF, seed >> 32, epoch]).shuffle(order)
    return order


# Of prompts and demonstrations; a batch may reach into the next epoch.
epoch_order = lru_cache(maxsize=4)(permutation)


def global_batch(n: int, seed: int, step: int, size: int) -> list[int]:
    """Dataset indices of global batch ``step``: ``size`` entries of the endless stream of epochs."""
    places = (divmod(position, n) for position in range(step * size, (step + 1) * size))
    return [int(epoch_order(n, seed, epoch)[i]) for epoch, i in places]


def local_positions(batch_size: int, rank: int, world: int, group_size: int) -> list[int]:
    """The positions in the global batch that this process holds, in the order of its local rows: every
    ``world``-th prompt, with all its responses (completions) one after the other.

    Position p is response p % group_size to prompt p // group_size of the global batch. ``batch_size``, in
    responses, is per process.
    """
    prompts = range(rank, batch_size // group_size * world, world)
    return [prompt * group_size + sample for prompt in prompts for sample in range(group_size)]
