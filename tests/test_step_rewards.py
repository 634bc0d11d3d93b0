"""Rewards of steps inside a response: the token that completes a character gets them."""

import random

import pytest
import torch
from tiny import request_of, word_tokenizer
from tiny_tokenizers import TOKENIZERS, ids_of

from trainer import advantages as adv
from trainer.advantages import step_rewards, token_places
from trainer.compute.batch import Batch, RawScores
from trainer.generation.stops import HALF, response_texts
from trainer.rewards.combine import Reward

WORDS = list("abcdefgh")


def rollout_of(responses, finished):
    width = 2 + max(map(len, responses))
    rows = [[9] * (1 + i % 2) + ids for i, ids in enumerate(responses)]
    tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    prompt_len = torch.tensor([1 + i % 2 for i in range(len(rows))])
    lengths = torch.tensor([len(ids) for ids in responses])
    logprobs = torch.zeros(len(rows), int(lengths.max()))
    return Batch(tokens, prompt_len, lengths, torch.tensor(finished), logprobs)


def test_where_characters_land_by_hand():
    tokenizer = word_tokenizer(["ab", "c", "你好"])
    ids = [2, 4, 3, 0]  # ab 你好 c </s>
    text = "ab 你好 c"
    assert token_places(range(len(text)), text, ids, tokenizer) == [0, 0, 1, 1, 1, 2, 2]
    assert token_places([len(text)], text, ids, tokenizer) == [3]
    assert token_places([0, 2], "ab 你", ids, tokenizer) == [0, 1]  # the text before a stop string
    tokenizer = TOKENIZERS["byte level"]()
    for names, places in ((["aä", "½łb"], [0, 1, 1]), (["a", "ä", "½", "ł", "b"], [0, 3, 4])):
        ids = [tokenizer.get_vocab()[name] for name in names]
        assert tokenizer.decode(ids) == "a你b"
        assert token_places(range(3), "a你b", ids, tokenizer) == places
    tokenizer = TOKENIZERS["byte fallback"]()
    names = ["ab", *(f"<0x{byte:02X}>" for byte in "漢字".encode()), "a"]
    ids = [tokenizer.get_vocab()[name] for name in names]
    assert tokenizer.decode(ids[:5]) == "ab" + 4 * HALF  # the first character is gone again
    assert token_places(range(5), "ab漢字a", ids, tokenizer) == [0, 0, 3, 6, 7]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_each_character_lands_on_the_first_token_after_which_it_is_there(kind):
    """Beside a search from the start, for texts of whole characters. With single bytes a character may be
    gone again while the next one is incomplete."""
    tokenizer, generator, several = TOKENIZERS[kind](), random.Random(0), 0
    gone = 0
    for _ in range(160):
        ids = ids_of(tokenizer, generator, 12)
        texts = [tokenizer.decode(ids[:count], skip_special_tokens=True) for count in range(13)]
        if HALF in texts[-1]:
            continue
        places = token_places(range(len(texts[-1])), texts[-1], ids, tokenizer)
        for offset, place in enumerate(places):
            here = texts[-1][: offset + 1]
            there = [text.startswith(here) for text in texts]
            assert place + 1 == there.index(True)
            several += HALF in texts[place]
            gone += not all(there[place + 1 :])
    assert several > 10 or kind == "words"
    assert gone > 10 or kind != "byte fallback"


def test_from_what_a_function_returns_to_rewards_of_tokens():
    """Pairs, a plain number and no pairs; two steps may share a token."""
    tokenizer = word_tokenizer(WORDS)
    rollout = rollout_of([[2, 3, 2, 0], [4, 5], [2, 2, 2]], [True, False, False])
    texts = response_texts(rollout, tokenizer)
    assert texts == ["a b a", "c d", "a a a"]
    given = [[(0, 1.0), (2, 0.25), (1, 0.5), (5, 1.5), (None, 0.5)], 3, []]
    reward = Reward(functions={"function": (lambda *_: given, 1.0)}, reasoning=False, missing_eos_penalty=0.5)
    raw = reward.score_parts(request_of(["p"] * 3, texts, finished=rollout.finished.tolist()))
    scores = reward.combine(raw)
    assert scores["function"].tolist() == [3.75, 3.0, 0.0]
    assert scores["score"].tolist() == [3.75, 2.5, -0.5]
    rollout.texts, rollout.raw = texts, raw
    steps = step_rewards(rollout, tokenizer)
    assert steps.tolist() == [[1.0, 0.75, 0.0, 2.0], [0.0] * 4, [0.0] * 4]
    rewards = adv.token_rewards(scores["score"], rollout.response_len, rollout.action_mask, steps=steps)
    assert rewards.tolist() == [[1.0, 0.75, 0.0, 2.0], [0.0, 2.5, 0.0, 0.0], [0.0, 0.0, -0.5, 0.0]]
    rollout.raw = RawScores()
    assert step_rewards(rollout, tokenizer) is None  # no reward function
