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
from array import array
from collections import Counter
from dataclasses import dataclass, field

from torch.utils.data import Dataset

from dataset.answers import comparable
from dataset.formats import is_rated, to_demonstration, to_pair, to_prompt, to_rated, tool_turns
from dataset.keys import BY_FORM
from dataset.prompt_template import check_system_prompt
from dataset.record_files import located, open_records
from dataset.special_tokens import mark_special, unmark
from dataset.tokenization import conversation_text, encode, for_tokenizer, prompt_text, render
from dataset.turns import add_system
from errors import InputError
from progress_bar import phase

READ_WHOLE = 100_000  # files of up to this many records are read whole at the start: about ten seconds
SAMPLE = 1_000  # records of a larger file that are read at the start, evenly spaced
BLOCK = 256  # records that are tokenised together


class RecordDataset(Dataset):
    """The base of all datasets here: items by number, made from records. Subclasses add ``make``, ``length``.

    ``keys``: the keys of records that the user named (keys.py); ``dropped``: number of records found too long
    at the start; ``long_answers``: those of infinite length; ``longest``: upper limit of an item's tokens;
    ``fingerprint``: a hash of the items made at the start; ``columns``: the keys of the records read so far;
    ``note``: what was ignored, a line or "".
    ``limits``: the flags that say how long an item may be. Raises InputError for a bad file, for a bad record
    among those read, or if all of those are too long.
    """

    limits = "--max_seq_len"

    def __init__(self, path, tokenizer, max_length, system_prompt="", keys=BY_FORM, records=None):
        self.path, self.tokenizer, self.max_length, self.keys = str(path), tokenizer, max_length, keys
        check_system_prompt(tokenizer, system_prompt)
        self.system_prompt, self.records = system_prompt, records or open_records(path)
        n = len(self.records)
        self.whole = n <= READ_WHOLE
        places = range(n) if self.whole else [i * (n - 1) // (SAMPLE - 1) for i in range(SAMPLE)]
        self.columns, self._tools = {}, Counter()
        digest, lengths = hashlib.sha256(f"{n}".encode()), []
        with phase(f"tokens of {path}", len(places), "records") as bar:
            for first in range(0, len(places), BLOCK):
                for item in self.make(places[first : first + BLOCK]):
                    self.note_item(item)
                    digest.update(json.dumps(item, default=_hashed).encode())
                    lengths.append(self.length(item))
                bar.done = len(lengths)
        fitting = [(i, length) for i, length in zip(places, lengths, strict=True) if length <= max_length]
        if not fitting:
            raise self.too_long()
        self._kept = array("L", [i for i, _ in fitting]) if self.whole else range(n)
        self.edge, self.dropped = len(self._kept), len(lengths) - len(fitting)
        self.long_answers = lengths.count(float("inf"))
        self.longest = max(length for _, length in fitting) if self.whole else max_length
        self.fingerprint = digest.hexdigest()[:12]
        self.note = ""
        if (count := self._tools)["records"]:
            self.note = (
                f"{path}: tools are ignored: {count['records']} of {count['read']} records have them; "
                f"{count['turns']} turns that call one or hold its result are left out"
            )

    def note_item(self, item):
        """Called at the start with each item that is read."""

    def make(self, indices):
        """Record numbers -> their items, also those that are too long."""
        raise NotImplementedError

    @staticmethod
    def length(item):
        """The number of tokens of an item."""
        raise NotImplementedError

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
        if not 0 <= place < len(self):
            raise IndexError(place)  # a for loop over the dataset ends with this
        return self.__getitems__([place])[0]

    def hold_out(self, count):
        """Keep the last ``count`` items apart, for evaluation. A record that is too long is never replaced by
        one from the other side of this edge."""
        self.edge = len(self) - count

    def _next(self, place):
        """The next item after ``place`` that is short enough, round and round on its side of ``edge``."""
        first, last = (0, self.edge) if place < self.edge else (self.edge, len(self))
        for i in range(place + 1, place + last - first):
            (item,) = self.make([self._kept[first + (i - first) % (last - first)]])
            if self.length(item) <= self.max_length:
                return item
        raise self.too_long()

    def too_long(self):
        """-> the error where every record is too long."""
        most = f"{self.max_length} tokens; raise --max_seq_len"
        return InputError(f"{self.path}: every record is longer than {most}")

    def describe(self):
        """The number of items, and how many were too long, as a text."""
        if not self.whole:
            return f"{len(self)} (longer than {self.limits} and passed over: {self.dropped} of {SAMPLE} read)"
        return f"{len(self)}" + (
            f" ({self.dropped} longer than {self.limits} dropped)" if self.dropped else ""
        )

    def read(self, indices, form):
        """Record numbers -> a list of what ``form(record, keys)``, as those of formats.py, makes of each."""
        rows = []
        for i in indices:
            with located(self.records, i):
                record = self.records[i]
                rows.append(form(record, self.keys))
                turns = tool_turns(record, self.keys)
            has_tools = bool(turns or record.get("tools"))
            self._tools.update(read=1, records=has_tools, turns=turns)
            self.columns |= dict.fromkeys(record)
        return rows


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


class RLAIFDataset(RecordDataset):
    """Prompts for PPO. Items: ``Prompt``. Takes records of every format and uses their prompts only. Prompts
    of more than ``max_length`` tokens are dropped (see ``RecordDataset``). thinking: ``Thinking`` or None.

    ``answers``, ``comparable_answers``: of the records read at the start, those with an answer, and those
    with one that a response can equal (``comparable`` in answers.py).
    """

    answers, comparable_answers = 0, 0

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

    def make(self, indices):
        rows = self.read(indices, self._row)
        texts = []
        for i, (_, prompt, _) in zip(indices, rows, strict=True):
            with located(self.records, i):
                switched = self.thinking.kwargs(i) if self.thinking else {}
                texts.append(prompt_text(self.tokenizer, prompt, **switched))
        items = []
        for i, row, text, ids in zip(indices, rows, texts, encode(self.tokenizer, texts), strict=True):
            record, prompt, answer = row
            with located(self.records, i):
                if not ids:
                    raise InputError("the prompt has no tokens; fill it in or delete the line")
            items.append(Prompt(i, prompt, answer, ids, record, unmark(self.tokenizer, text)))
        return items

    def _row(self, record, keys):
        """-> (record, prompt, answer)"""
        prompt, answer = to_prompt(record, keys)
        return record, add_system(prompt, self.system_prompt), answer

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

    def make(self, indices):
        conversations = self.read(indices, self._pieces)
        first = encode(self.tokenizer, [pieces[0][0] for pieces in conversations])
        later = [text for pieces in conversations for text, _ in pieces[1:]]
        later = iter(encode(self.tokenizer, later, opening=False))
        samples = []
        for ids, pieces in zip(first, conversations, strict=True):
            ids, mask = list(ids), [0] * len(ids)
            if pieces[0][1]:
                mask[1:] = [1] * (len(ids) - 1)
            for _, trained in pieces[1:]:
                piece = next(later)
                ids += piece
                mask += up_to_eos(piece, self.tokenizer.eos_token_id) if trained else [0] * len(piece)
            samples.append((ids, mask))
        return samples

    def _pieces(self, record, keys):
        """A record -> [(text, is it trained on?), …]"""
        tokenizer, (prompt, answer) = self.tokenizer, to_demonstration(record, keys)
        answer = mark_special(tokenizer, answer)
        if tokenizer.eos_token is None:
            raise InputError(f"the tokenizer {tokenizer.name_or_path} has no EOS token to end answers with")
        if prompt is None:  # a text, learned as it is
            return [(answer, True), (tokenizer.eos_token, True)]
        prompt = for_tokenizer(tokenizer, add_system(prompt, self.system_prompt))
        if isinstance(prompt, str):
            return [(prompt, False), (answer + tokenizer.eos_token, True)]
        messages = [*prompt, {"role": "assistant", "content": answer}]
        pieces, done, full = [], 0, render(tokenizer, messages)
        for k, message in enumerate(messages):
            if message["role"] != "assistant" or k == 0:
                continue
            before, after = (
                render(tokenizer, messages[:k], generate=True),
                render(tokenizer, messages[: k + 1]),
            )
            # Some templates rewrite earlier turns (Qwen3 removes old thoughts). Such a turn is context only.
            if full.startswith(after) and after.startswith(before) and len(before) > done:
                pieces += [(full[done : len(before)], False), (full[len(before) : len(after)], True)]
                done = len(after)
        if done < len(full):
            raise InputError("this chat template cannot be split into prompt and answer for training")
        return pieces

    @staticmethod
    def length(item):
        return len(item[0])


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

    def make(self, indices):
        rows = self.read(indices, self._row)
        ids = encode(self.tokenizer, [text for chosen, rejected, _ in rows for text in (chosen, rejected)])
        return list(zip(ids[::2], ids[1::2], [margin for _, _, margin in rows], strict=True))

    def _row(self, record, keys):
        *sides, margin = to_pair(record, keys)
        return *(self._text(*side) for side in sides), margin

    def prompt(self, place):
        """The prompt of an item: text or messages."""
        ((prompt, _),) = self.read([self._kept[place]], to_prompt)
        return add_system(prompt, self.system_prompt)

    def _text(self, prompt, response):
        return conversation_text(self.tokenizer, add_system(prompt, self.system_prompt), response)

    @staticmethod
    def length(item):
        return max(len(item[0]), len(item[1]))


class RatedDataset(PreferenceDataset):
    """Rated answers. Items (conversation ids, score)."""

    def make(self, indices):
        rows = self.read(indices, self._row)
        return list(
            zip(encode(self.tokenizer, [text for text, _ in rows]), [s for _, s in rows], strict=True)
        )

    def _row(self, record, keys):
        prompt, response, score = to_rated(record, keys)
        return self._text(prompt, response), score

    @staticmethod
    def length(item):
        return len(item[0])


def reward_dataset(path, tokenizer, max_length, system_prompt="", keys=BY_FORM):
    """The dataset of stage 2: ``RatedDataset`` or ``PreferenceDataset``, decided by the first record."""
    records = open_records(path)
    with located(records, 0):
        kind = RatedDataset if is_rated(records[0], keys) else PreferenceDataset
    return kind(path, tokenizer, max_length, system_prompt, keys, records)
