"""Logged answers, for offline PPO: prompts with an answer that was given once, and its score.

    {"chosen", "rejected"}     two answers: the chosen one with the score 1, the rejected one with -1
    an answer with a "score"   one answer

The first record says which of the two a file holds. Forms of records: formats.py. Prompt and answer are
tokenised separately, and the answer ends with its EOS, as if the policy had written it.
"""

import math
from dataclasses import dataclass

from dataset.formats import is_rated, to_pair, to_rated
from dataset.keys import BY_FORM
from dataset.lm_dataset import Prompt, RecordDataset
from dataset.record_files import located, open_records
from dataset.special_tokens import mark_special, unmark
from dataset.tokenization import encode, for_tokenizer, render
from dataset.turns import add_system
from errors import InputError

CHOSEN, REJECTED = 1.0, -1.0  # the scores of a pair's answers (HALOs, arXiv:2402.01306)


@dataclass(frozen=True)
class LoggedAnswer(Prompt):
    """A prompt with an answer to it. ``response_ids``: with the EOS; ``answer`` is None."""

    response: str
    response_ids: list
    score: float


class Sides:
    """The records of a file of pairs, each of them twice: 2 n for the chosen answer of record n, 2 n + 1 for
    the rejected one."""

    def __init__(self, records):
        self.records = records

    def __len__(self):
        return 2 * len(self.records)

    def __getitem__(self, i):
        return self.records[i // 2]

    def where(self, i):
        """Where the record is, for error messages."""
        return self.records.where(i // 2)


class LoggedAnswers(RecordDataset):
    """Items: ``LoggedAnswer``. Those whose prompt has more than ``max_length`` tokens or whose answer has
    more than ``max_response`` are dropped. eos: the ids that end a response.

    ``pairs``: whether the file holds pairs. Raises InputError as ``RecordDataset`` does.
    """

    limits = "--max_seq_len or --max_gen_len"

    def __init__(self, path, tokenizer, max_length, max_response, eos, system_prompt="", keys=BY_FORM):
        self.max_response, self.eos = max_response, set(eos)
        records = open_records(path)
        with located(records, 0):
            self.pairs = not is_rated(records[0], keys)
        records = self.arranged(records)
        super().__init__(path, tokenizer, max_length, system_prompt, keys, records)

    def arranged(self, records):
        """The records of the file as this dataset numbers them."""
        return Sides(records) if self.pairs else records

    def make(self, indices):
        if not self.pairs:
            return self.answers(indices, self.read(indices, _rated))
        numbers = dict.fromkeys(i // 2 for i in indices)  # a record is read once, not once for each side
        sides = dict(zip(numbers, self.read([2 * n for n in numbers], _sides), strict=True))
        return self.answers(indices, [sides[i // 2][i % 2] for i in indices])

    def answers(self, indices, rows):
        """Rows (record, prompt, response, score) of these record numbers -> list of ``LoggedAnswer``."""
        prompts = [add_system(prompt, self.system_prompt) for _, prompt, _, _ in rows]
        texts = []
        for i, prompt, (_, _, response, _) in zip(indices, prompts, rows, strict=True):
            with located(self.records, i):
                texts.append(self._texts(prompt, response))
        asked = encode(self.tokenizer, [prompt for prompt, _ in texts])
        said = encode(self.tokenizer, [response for _, response in texts], opening=False)
        items = []
        for i, prompt, (text, _), ids, answer, row in zip(
            indices, prompts, texts, asked, said, rows, strict=True
        ):
            with located(self.records, i):
                if not ids:
                    raise InputError("the prompt has no tokens; fill it in or delete the line")
                answer = self._ended(answer)
            record, _, response, score = row
            items.append(
                LoggedAnswer(
                    index=i,
                    prompt=prompt,
                    answer=None,
                    prompt_ids=ids,
                    record=record,
                    text=unmark(self.tokenizer, text),
                    response=response,
                    response_ids=answer,
                    score=score,
                )
            )
        return items

    def _texts(self, prompt, response):
        """-> (the prompt, the answer with what ends it), as texts for the tokenizer."""
        asked, response = for_tokenizer(self.tokenizer, prompt), mark_special(self.tokenizer, response)
        if isinstance(asked, str):
            return asked, response + (self.tokenizer.eos_token or "")
        before = render(self.tokenizer, asked, generate=True)
        after = render(self.tokenizer, [*asked, {"role": "assistant", "content": response}])
        if not after.startswith(before):
            raise InputError("this chat template cannot be split into prompt and answer for training")
        return before, after[len(before) :]

    def _ended(self, ids):
        """An answer's token ids up to the first that ends a response."""
        for place, token in enumerate(ids):
            if token in self.eos:
                return ids[: place + 1]
        raise InputError(
            "the answer does not end with an EOS that the policy knows: set eos_token in "
            "tokenizer_config.json to the token that ends a turn, or give another --prompt_template"
        )

    def length(self, item):
        """The tokens of the prompt; infinite where the answer is too long."""
        return len(item.prompt_ids) if len(item.response_ids) <= self.max_response else math.inf

    def too_long(self):
        return InputError(
            f"{self.path}: every record has a prompt of more than {self.max_length} tokens or an answer of "
            f"more than {self.max_response}; raise {self.limits}"
        )


class LoggedPairs(LoggedAnswers):
    """Pairs, for an evaluation. Items (chosen, rejected), both ``LoggedAnswer``; a pair is dropped where one
    of the two is too long."""

    def arranged(self, records):
        return records

    def make(self, indices):
        rows = [side for sides in self.read(indices, _sides) for side in sides]
        items = self.answers([i for i in indices for _ in range(2)], rows)
        return list(zip(items[::2], items[1::2], strict=True))

    def length(self, item):
        return max(map(super().length, item))


def _sides(record, keys):
    """A record -> its two answers as rows (record, prompt, response, score)"""
    *sides, _ = to_pair(record, keys)
    return [(record, *side, score) for side, score in zip(sides, (CHOSEN, REJECTED), strict=True)]


def _rated(record, keys):
    """A record -> a row (record, prompt, response, score)"""
    return record, *to_rated(record, keys)
