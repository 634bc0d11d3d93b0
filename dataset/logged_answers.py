"""Logged answers, for offline PPO: prompts with an answer that was given once, and its score.

    {"chosen", "rejected"}     two answers: the chosen one with the score 1, the rejected one with -1
    an answer with a "score"   one answer

The first record says which of the two a file holds. Forms of records: formats.py. Prompt and answer are
tokenised separately, and the answer ends with its EOS, as if the policy had written it.
"""

import math
from dataclasses import dataclass

from dataset.chat_template import learned_pieces
from dataset.formats import BY_FORM, to_pair, to_rated
from dataset.lm_dataset import Prompt, RecordDataset, is_file_of_rated
from dataset.record_files import open_records
from dataset.special_tokens import unmark
from dataset.turns import add_system
from errors import InputError

CHOSEN, REJECTED = 1.0, -1.0  # the scores of a pair's answers (HALOs, arXiv:2402.01306)


@dataclass(frozen=True)
class LoggedAnswer(Prompt):
    """A prompt with an answer to it. ``response_ids``: with the EOS; ``answer`` is None."""

    response: str
    response_ids: list
    score: float


class LoggedAnswers(RecordDataset):
    """Items: ``LoggedAnswer``. Those whose prompt has more than ``max_length`` tokens or whose answer has
    more than ``max_response`` are dropped. eos: the ids that end a response.

    ``pairs``: whether the file holds pairs. Then item 2 n is the chosen answer of record n, item 2 n + 1 the
    rejected one. Raises InputError as ``RecordDataset`` does.
    """

    limits = "--max_seq_len or --max_gen_len"

    def __init__(self, path, tokenizer, max_length, max_response, eos, system_prompt="", keys=BY_FORM):
        self.max_response = max_response
        self.eos = set(eos)
        records = open_records(path)
        self.pairs = not is_file_of_rated(records, keys)
        self.per_record = 2 if self.pairs else 1
        super().__init__(path, tokenizer, max_length, system_prompt, keys, records)

    def draft(self, i, record):
        if self.pairs:
            side = i % 2
            prompt, response = to_pair(record, self.keys)[side]
            score = (CHOSEN, REJECTED)[side]
        else:
            prompt, response, score = to_rated(record, self.keys)
        prompt = add_system(prompt, self.system_prompt)
        *context, (answer, _) = learned_pieces(self.tokenizer, prompt, response)
        before = "".join(text for text, _ in context)

        def item_of(prompt_ids, response_ids):
            return LoggedAnswer(
                index=i,
                prompt=prompt,
                answer=None,
                prompt_ids=prompt_ids,
                record=record,
                text=unmark(self.tokenizer, before),
                response=response,
                response_ids=self._ended(response_ids),
                score=score,
            )

        return [(before, True), (answer, False)], item_of

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


class LoggedPairs(LoggedAnswers):
    """Pairs, for an evaluation. Items (chosen, rejected), both ``LoggedAnswer``; a pair is dropped where one
    of the two is too long."""

    def count(self):
        return len(self.records)

    def make(self, indices):
        sides = super().make([2 * number + side for number in indices for side in (0, 1)])
        return list(zip(sides[::2], sides[1::2], strict=True))

    def length(self, item):
        return max(map(super().length, item))
