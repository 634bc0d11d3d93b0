"""What ends a response: stop strings, however tokens cut them, and --min_gen_len; the scorers do the same."""

import json
import random
from functools import cache
from itertools import product

import pytest
import torch
from recorded_graphs import sample_as_on_a_gpu, without_kernels
from tiny import refused, tiny_llama, word_tokenizer
from tiny_tokenizers import TOKENIZERS, byte_level, ids_of
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from trainer import train_ppo
from trainer.compute.batch import Batch
from trainer.compute.batching import Layout
from trainer.generation.engine import Sampler
from trainer.generation.sampling import noise_keys, uniform
from trainer.generation.stops import (
    Forbidden,
    StopStrings,
    decode,
    load_endings,
    response_texts,
    without_text,
)

CASES = [
    ["ab"],
    ["\n\n"],
    ["你"],
    ["b\na", "a你b"],
    ["ab ab", "ba ", "b", "cc"],
    [" a b a"],
    ["a你b", "bb\n"],
]


def bytes_of(tokenizer, ids):
    """The bytes that each of the tokens adds to a text, as the tokenizers of these tests write them."""
    names = tokenizer.convert_ids_to_tokens(ids)
    decoder = str(tokenizer.backend_tokenizer.decoder)
    if "ByteLevel" in decoder:
        alphabet = {name: byte for byte, name in bytes_to_unicode().items()}
        return [b"" if name == "</s>" else bytes(alphabet[c] for c in name) for name in names]
    if "Fallback" in decoder:
        single = [name.startswith("<0x") for name in names]
        texts = [name.replace("▁", " ").replace("</s>", "").replace("<unk>", "") for name in names]
        pairs = zip(single, texts, strict=True)
        return [bytes([int(text[3:5], 16)]) if one else text.encode() for one, text in pairs]
    return [b"" if name == "</s>" else f" {name}".encode() for name in names]


def end_by_hand(strings, tokenizer, ids, least=0):
    """The least number of tokens whose text has a stop string that ends in the last one."""
    stops = [string.encode() for string in strings]
    pieces = bytes_of(tokenizer, ids)
    for count in range(max(1, least), len(ids) + 1):
        text, before = b"".join(pieces[:count]), len(b"".join(pieces[: count - 1]))
        if any(text[:end].endswith(stop) for stop in stops for end in range(before + 1, len(text) + 1)):
            return count
    return None


def end_of(wanted, ids, least=0):
    """What a sampler makes of the table, a token at a time."""
    states = len(wanted.table)
    state = 0
    for count, i in enumerate(ids, 1):
        found = wanted.table[state, i].item()
        state = found % states
        if found >= states and count >= least:
            return count
    return None


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_table_finds_what_searching_every_prefix_finds(kind):
    """Whatever pieces the tokens come in; a quarter of the responses has a least length too. A text is what
    the tokenizer decodes all its tokens to, up to the stop string, which is in it but for a space at the
    beginning, and for bytes among which there are halves of characters."""
    tokenizer, generator, found, cut = TOKENIZERS[kind](), random.Random(0), 0, 0
    for strings in CASES:
        wanted = StopStrings(strings, tokenizer)
        for number in range(60):
            ids = ids_of(tokenizer, generator, 24)
            least = generator.randint(2, 12) if number % 4 == 0 else 0
            end = end_by_hand(strings, tokenizer, ids, least)
            found += end is not None
            assert end_of(wanted, ids, least) == end, (strings, ids, least)
            text = decode(tokenizer, ids[:end])
            places = [text.find(stop) for stop in strings if stop in text]
            if end and not least and "\ufffd" not in text and places:
                assert wanted.cut(ids[:end]) == text[: min(places)]
                cut += 1
    assert found > 40
    assert cut > 20


def test_by_hand():
    tokenizer = byte_level()
    ids = tokenizer.get_vocab()
    wanted = StopStrings(["\n\n"], tokenizer)
    assert wanted.table.shape == (2, len(ids) + 1)
    assert wanted.table[:, -1].tolist() == [0, 1]  # an id that the tokenizer does not have
    assert wanted.table[:, ids["Ċ"]].tolist() == [1, 3]  # the second completes it, and may begin another
    tokens = [ids[name] for name in ("a", "bĊ", "Ċa", "b", "Ċ", "Ċ")]
    assert (end_of(wanted, tokens[:2]), end_of(wanted, tokens)) == (None, 3)
    assert wanted.cut(tokens[:3]) == "ab"
    assert end_of(wanted, tokens, least=4) == 6
    assert wanted.cut(tokens) == "ab\n\nab"
    assert wanted.cut([ids["a"], ids["</s>"]]) == "a"
    assert wanted.cut([ids["a"], ids["ĊĊ"], ids["</s>"]]) == "a\n\n"  # ignored, and then an EOS


def test_a_special_token_that_has_no_role_is_what_the_policy_says():
    tokenizer = byte_level()
    tokenizer.add_special_tokens({"bos_token": "<s>", "pad_token": "<pad>"})
    tokenizer.add_tokens(["[ANS]", "<|eot|>"], special_tokens=True)
    ids = tokenizer.get_vocab()
    row = [ids[name] for name in ("a", "<s>", "[ANS]", "<pad>", "b", "<|eot|>")]
    assert decode(tokenizer, row) == "a[ANS]b<|eot|>"
    assert StopStrings(["\n\n"], tokenizer).cut(row) == "a[ANS]b"  # <|eot|> is an EOS of the model
    logprobs = torch.zeros(1, 6)
    rollout = Batch(
        torch.tensor([[2, *row]]), torch.tensor([1]), torch.tensor([6]), torch.tensor([True]), logprobs
    )
    assert response_texts(rollout, tokenizer) == ["a[ANS]b"]
    wanted = StopStrings(["S]b"], tokenizer)
    assert end_of(wanted, row) == 5
    assert wanted.cut(row[:5]) == "a[AN"


PROMPTS = [[2 + i % 5] * (1 + i % 6) for i in range(16)]
KEYS = noise_keys(7, 3, range(16))
WORDS = list("abcdefghij")
ENDS = [0, 7]


@pytest.fixture(scope="module")
def model():
    return tiny_llama(12, layers=2, spread=3.0)


@pytest.fixture(scope="module")
def wanted():
    return StopStrings(["c d", "b", "g g"], word_tokenizer(WORDS))


@cache
@torch.no_grad()
def by_hand(model, least, stops, never):
    """Token by token; ends get probability 0 where they are too early, never always -> [(ids, finished)]"""
    found = []
    for prompt, numbers in zip(PROMPTS, uniform(KEYS, 10), strict=True):
        ids, ended = [], False
        while not ended and len(ids) < 10:
            p = torch.softmax(model(torch.tensor([prompt + ids])).logits[0, -1].double(), -1)
            if len(ids) + 1 < least:
                p[ENDS] = 0
            for run in never:
                p[slice(*run)] = 0
            ids.append(int((p.cumsum(0) <= numbers[len(ids)] * p.sum()).sum()))
            ended = ids[-1] in ENDS or bool(stops and end_by_hand(stops.texts, stops.tokenizer, ids, least))
        found.append((ids, ended))
    return found


@pytest.mark.parametrize(("device", "slots"), [("CPU", 5), ("CPU without a compiler", 64), ("GPU", 7)])
def test_whatever_ends_a_response_nothing_else_changes(model, wanted, slots, device, monkeypatch):
    """A GPU makes several steps between two checks for finished sequences, which decode on. One sampler for
    all calls: what it has captured and left of others is not used."""
    if device != "CPU":
        without_kernels(monkeypatch)
    if device == "GPU":
        sample_as_on_a_gpu(monkeypatch)
    sampler, seen = Sampler(model, slots=slots), []
    some = ((3, 4), (8, 10))  # ids without a text
    kinds = ((0, wanted), (0, None), (5, None), (2, wanted), (6, wanted), (0, None, some), (6, wanted, some))
    for least, stops, *never in kinds:
        cases = by_hand(model, least, stops, *never or [()])
        for rows in (range(16), range(3, 9)):
            keys, prompts = KEYS[list(rows)], [PROMPTS[row] for row in rows]
            rollout = sampler.sample(prompts, keys, ENDS, 10, 1.0, least, stops, *never)
            assert rollout.responses() == [cases[row][0] for row in rows]
            assert rollout.finished.tolist() == [cases[row][1] for row in rows]
            assert rollout.sampler_logprobs.shape == rollout.action_mask.shape
            assert (rollout.sampler_logprobs * ~rollout.action_mask == 0).all()
            with torch.inference_mode():
                sampler.engine.begun.fill_(1)  # what the last ones have left
        seen.append((min(len(ids) for ids, _ in cases), sum(finished for _, finished in cases)))
    assert [shortest for shortest, _ in seen] == [1, 1, 5, 2, 6, 1, 6]
    assert seen[0][1] > seen[1][1] and all(0 < finished < 16 for _, finished in seen)
    assert bool(sampler.graphs.captured) == (device == "GPU")
    assert [bool(Forbidden(least, (0,))) for least in (0, 1, 2)] == [False, False, True]
    assert Forbidden(0, (0,), some)


def test_ids_are_forbidden_in_the_first_tokens_of_each_response():
    """Of responses with 4, 1 and 3 tokens. Rows behind the last token are padding, and stay."""
    layout = Layout.of_responses([2, 1, 3], [4, 1, 3])
    forbid_ = Forbidden(3, (1,)).of(layout)
    for size in (3, 9, 20):
        logits = torch.zeros(9, 3)
        for start in range(0, 9, size):
            forbid_(logits[start : start + size], slice(start, start + size))
        early = [1, 1, 0, 0, 1, 1, 1, 0, 0]
        assert logits.isneginf().tolist() == [[False, bool(row), False] for row in early]


def test_ids_without_a_text_are_found_wherever_they_are():
    """Above the tokenizer's ids, and between its words and a token that was added behind a gap."""
    tokenizer = word_tokenizer(WORDS)  # 12 ids
    assert without_text(tokenizer, 12, [0]) == ()
    assert without_text(tokenizer, 20, [0]) == ((12, 20),)
    assert without_text(tokenizer, 20, [0, 14, 50]) == ((12, 14), (15, 20))  # an end needs no text
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["model"]["vocab"]["<|end|>"] = 17
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)))
    assert without_text(tokenizer, 20, [0]) == ((12, 17), (18, 20))
    tokenizer.add_tokens(["<|more|>"], special_tokens=True)  # a reserved token has a text: its name
    assert without_text(tokenizer, 20, [0]) == ((12, 13), (14, 17), (18, 20))


def test_in_half_precision_and_greedy_too(model):
    for dtype, temperature in product((torch.bfloat16, torch.float16), (0.0, 1.0)):
        rollout = Sampler(model, dtype).sample(PROMPTS, KEYS, ENDS, 8, temperature, 5)
        assert rollout.response_len.min() >= 5
        assert rollout.sampler_logprobs.isfinite().all()


def endings(*argv, tokenizer=None):
    tokenizer = tokenizer or word_tokenizer(WORDS)
    args = train_ppo.parse_args(["--reasoning", "0", *argv])
    return load_endings(args, tokenizer, tiny_llama(len(tokenizer)))


def test_flags_to_ends():
    tokenizer = word_tokenizer(WORDS)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
    found = endings("--stop", "a\\n", "<|end|>", "b\\tb", "--stop_token_ids", "3", tokenizer=tokenizer)
    assert found.stops.texts == ["a\n", "b\tb"]
    assert found.eos == [0, 3, tokenizer.convert_tokens_to_ids("<|end|>")]
    assert endings() == ([0], None, Forbidden(0, (0,)))
    assert not endings().forbidden
    assert endings("--min_gen_len", "3", "--stop_token_ids", "4").forbidden.end_ids == (0, 4)


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--stop", ""], "--stop '': must be a text"),
        (["--stop", "a\ufffd"], "must be a text, without U\\+FFFD"),
        (["--stop", "b", "a</s>"], "--stop 'a</s>': texts have no special token as </s>; name that alone"),
        (["--stop_token_ids", "3", "12"], "--stop_token_ids 12: the tokenizer has no such id"),
        (["--reasoning", "1", "--stop", "</answer>"], "--stop '</answer>': the text ends before it, and"),
    ],
)
def test_a_stop_that_cannot_be_one_is_a_line(argv, line):
    refused(line, endings, *argv)
