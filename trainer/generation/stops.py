"""What ends a response while it is decoded (EOS, stop strings, length): ``Endings``, made from the flags.

- An EOS, any id of ``Endings.eos``: of the tokenizer, the model, ``--stop_token_ids`` and special tokens
given to ``--stop``; ``finished`` is True. It is a token of the response.
- ``--stop``: the first token whose text completes a stop string (``StopStrings``); ``finished`` is True.
- Its length: a response of ``max_gen_len`` tokens is cut, and ``finished`` is False. It is trained on like
any other, unless --mask_truncated leaves it out of the policy loss.
- Not before ``--min_gen_len`` tokens (``Forbidden``): a stop string that an earlier token completes does not
count.

All of it is looked at on the device, in every step (``Engine._sample_and_store``), so no host waits for it.
"""

from argparse import Namespace
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from errors import InputError
from model.loading import TAGS, eos_ids
from trainer.compute.batch import Batch
from trainer.compute.batching import Layout

HALF = "\ufffd"  # what an incomplete character decodes to
BYTES = {character: byte for byte, character in bytes_to_unicode().items()}  # in tokens such as GPT-2's


class Forbidden(NamedTuple):
    """What a response may not have: the ids of ``textless``, and ``end_ids`` among its first min_gen_len - 1
    tokens. There their logits are -inf, as after a logits processor of transformers.

    The sampler and every scorer (actor, old actor, reference) do the same, so the policy that is sampled is
    the one that is scored. Its other tokens share the probability, in entropy and KL too.
    """

    min_gen_len: int
    end_ids: tuple[int, ...]
    textless: tuple[tuple[int, int], ...] = ()  # of ``without_text``

    def __bool__(self) -> bool:
        """Whether there are such tokens. A response has at least one token."""
        return self.min_gen_len > 1 or bool(self.textless)

    def forbid_(self, logits: Tensor, places: Tensor) -> None:
        """Make logits [n, V] -inf, in place. places [n]: the number of the predicted token in its response,
        from 0 on. A GPU is not waited for."""
        for first, behind in self.textless:
            logits[:, first:behind].fill_(-torch.inf)
        early = places < self.min_gen_len - 1
        for i in self.end_ids if self.min_gen_len > 1 else ():
            if 0 <= i < logits.shape[1]:  # a generation config may name ids that no model has
                logits[:, i].masked_fill_(early, -torch.inf)

    def of(self, layout: Layout) -> Callable[[Tensor, slice], None]:
        """What ``token_logprobs`` is to do with the logits of a ``Layout.of_responses``: a function of
        (logits [n, V], the slice of the wanted tokens that they predict). Rows behind the last wanted token
        are padding and stay as they are."""
        places = layout.response % layout.shape[1]

        def forbid_(logits, chunk):
            mine = places[chunk]
            self.forbid_(logits[: len(mine)], mine)

        return forbid_


def without_text(
    tokenizer: PreTrainedTokenizerBase, rows: int, ends: Iterable[int]
) -> tuple[tuple[int, int], ...]:
    """The ids below ``rows``, those of a model, that are no token of the tokenizer's, as runs (first, behind
    the last). Their text would be empty, and no reward could see them. ends: ids that end a response; these
    need no text."""
    known = {*tokenizer.get_vocab().values(), *tokenizer.added_tokens_decoder, *ends}
    borders = [-1, *sorted(i for i in known if i < rows), rows]
    return tuple((i + 1, following) for i, following in pairwise(borders) if i + 1 < following)


class StopStrings:
    """texts: those that end a response. An automaton over the bytes of the text finds them (Aho and Corasick
    1975), however tokens cut them; its state is the longest beginning of one with which the text so far ends.

    ``table`` [states, ids + 1]: the state after a token, plus the number of states where the token completes
    a stop string. The last column is for ids that the tokenizer does not have: they change no state.
    """

    def __init__(self, texts: list[str], tokenizer: PreTrainedTokenizerBase) -> None:
        self.texts = texts
        self.tokenizer = tokenizer
        stops = tuple(text.encode() for text in texts)
        starts = sorted({stop[:end] for stop in stops for end in range(len(stop))})
        states = {text: place for place, text in enumerate(starts)}
        count = len(states)  # the first of them is b""
        after = torch.zeros(2 * count, 256, dtype=torch.int64)  # the table of single bytes
        for begun, state in states.items():
            for byte in range(256):
                text = begun + bytes([byte])
                longest = next(text[start:] for start in range(len(text) + 1) if text[start:] in states)
                after[state, byte] = states[longest] + count * text.endswith(stops)
        after[count:] = after[:count] % count + count  # completed stays so
        words = dict(enumerate(self._vocabulary()))
        self.table = torch.arange(count)[:, None].repeat(1, len(words))
        for place in range(max(map(len, words.values()))):  # byte by byte, from every state
            words = {i: word for i, word in words.items() if len(word) > place}
            ids = torch.tensor(list(words))
            self.table[:, ids] = after[self.table[:, ids], torch.tensor([w[place] for w in words.values()])]

    def _vocabulary(self):
        """-> by id the bytes that each token adds to a text, and none for an id more."""
        ids = self.tokenizer.get_vocab()
        found = [b""] * (max(ids.values()) + 2)
        before = self.tokenizer("a", add_special_tokens=False)["input_ids"][-1:]
        skipped = role_ids(self.tokenizer)
        length = len(decode(self.tokenizer, before))
        for token, i in ids.items():
            text = decode(self.tokenizer, [*before, i], skipped)[length:]
            if HALF not in text:
                found[i] = text.encode()
            elif token.startswith("<0x"):  # a single byte, as in Llama 2's tokenizer
                found[i] = bytes.fromhex(token[3:5])
            else:
                found[i] = bytes(BYTES.get(character, 0) for character in token)
        return found

    def cut(self, ids: list[int]) -> str:
        """The tokens of a response that has ended -> its text: up to where the stop string begins that the
        last token completes, else without the last token, which is an EOS."""
        whole = decode(self.tokenizer, ids)
        before = decode(self.tokenizer, ids[:-1])
        seen = len(before.rstrip(HALF))
        starts = [whole.find(stop, max(0, seen - len(stop) + 1)) for stop in self.texts]
        found = [start for start in starts if start >= 0]
        return whole[: min(found)] if found else before


def response_text(
    ids: list[int], ended: bool, tokenizer: PreTrainedTokenizerBase, stops: StopStrings | None
) -> str:
    """The text of a response (``decode``), without the EOS or the stop string that ended it, if one did.
    stops: the ``StopStrings`` that it was sampled with, or None."""
    if ended and stops:
        return stops.cut(ids)
    return decode(tokenizer, ids[:-1] if ended else ids)


def response_texts(
    batch: Batch, tokenizer: PreTrainedTokenizerBase, stops: StopStrings | None = None
) -> list[str]:
    """The responses as B texts (``response_text``)."""
    rows = zip(batch.responses(), batch.finished.tolist(), strict=True)
    return [response_text(ids, ended, tokenizer, stops) for ids, ended in rows]


def decode(tokenizer: PreTrainedTokenizerBase, ids: list[int], skipped: set[int] | None = None) -> str:
    """Token ids -> their text, without EOS, BOS, padding and others that have a role for the tokenizer. Other
    special tokens, such as an [ANS] of the user's, are what the policy says. skipped: ``role_ids``, for who
    decodes often."""
    skipped = role_ids(tokenizer) if skipped is None else skipped
    ids = [i for i in ids if i not in skipped]
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def role_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The ids of the special tokens that have a role for the tokenizer."""
    return {getattr(tokenizer, f"{role}_id") for role in tokenizer.SPECIAL_TOKENS_ATTRIBUTES}


# ---------------------------------------------------------------- from flags


class Endings(NamedTuple):
    """What ends a response, besides --max_gen_len."""

    eos: list[int]  # the token ids that do
    stops: StopStrings | None
    forbidden: Forbidden  # these ids where a response is still too short, and ids without a text


def load_endings(args: Namespace, tokenizer: PreTrainedTokenizerBase, policy: PreTrainedModel) -> Endings:
    """Flags -> ``Endings``. Raises InputError for an id that the tokenizer does not have, and as
    ``read_stops``."""
    known = set(tokenizer.get_vocab().values())
    for i in args.stop_token_ids:
        if i not in known:
            raise InputError(f"--stop_token_ids {i}: the tokenizer has no such id; correct it")
    texts, ids = read_stops(args.stop, tokenizer, args.reasoning)
    ends = sorted({*eos_ids(tokenizer, policy), *args.stop_token_ids, *ids})
    stops = StopStrings(texts, tokenizer) if texts else None
    textless = without_text(tokenizer, len(policy.get_output_embeddings().weight), ends)
    return Endings(ends, stops, Forbidden(args.min_gen_len, tuple(ends), textless))


def keep_endings(endings: Endings, policy: PreTrainedModel) -> None:
    """Put the endings of a run into the policy's generation config, which is saved beside its weights: with
    them chat.py and transformers' ``generate`` end an answer where training did."""
    config = policy.generation_config
    if len(endings.eos) > 1:  # a single one is that of the model or of the tokenizer
        config.eos_token_id = endings.eos
    config.stop_strings = endings.stops.texts if endings.stops else None


def read_stops(
    given: list[str], tokenizer: PreTrainedTokenizerBase, reasoning: int = 0
) -> tuple[list[str], set[int]]:
    """--stop as on the command line -> (stop strings, the ids of those that are special tokens). Raises
    InputError for a text that cannot be one, or that --reasoning needs."""
    texts = []
    ids = set()
    special = {str(token): i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    roles = role_ids(tokenizer)
    for written in given:
        text = written.replace("\\n", "\n").replace("\\t", "\t")
        if text in special:
            ids.add(special[text])
            continue
        if not text or HALF in text:
            raise InputError(
                f"--stop {written!r}: must be a text, without U+FFFD; correct it or leave it out"
            )
        if held := [token for token, i in special.items() if i in roles and token in text]:
            raise InputError(f"--stop {written!r}: texts have no special token as {held[0]}; name that alone")
        if reasoning and any(tag in text or text in tag for tag in TAGS):
            raise InputError(
                f"--stop {written!r}: the text ends before it, and --reasoning 1 rewards {' '.join(TAGS)}; "
                "choose another, or --reasoning 0"
            )
        texts.append(text)
    return texts, ids
