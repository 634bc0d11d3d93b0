"""Rewards of steps inside a response: from characters of its text to its tokens.

A reward function may give a score to a character (rewards/returned_scores.py). It lands on the token that
completes this character: the first one after which the tokens so far decode to a text that has it, and all
before it, as the whole response's text does. So tokens may cut a text in any way, and a character may be made
of several. ``ppo.token_rewards`` adds what the rest of the score is worth on the last token.
"""

from bisect import bisect_left
from functools import cache

import torch

from trainer.compute.batching import send


def step_rewards(steps, texts, rollout, tokenizer):
    """-> [B, R] fp32 on the rollout's device: the sum of the steps that end with each token; None without a
    reward function.

    steps: for each response a list of (character offset or None, score), or [] in all (``RawScores.steps``);
    texts: of the B responses, as the reward function got them; rollout: theirs.
    """
    if not steps:
        return None
    rewards = torch.zeros(rollout.sampler_logprobs.shape)
    for row, (pairs, text, ids) in enumerate(zip(steps, texts, rollout.responses(), strict=True)):
        if pairs:
            places = token_places([offset for offset, _ in pairs], text, ids, tokenizer)
            for place, (_, score) in zip(places, pairs, strict=True):
                rewards[row, place] += score
    return send(rewards, rollout.tokens.device)


def token_places(offsets, text, ids, tokenizer):
    """Character offsets in the text of a response -> the places of the tokens that complete them. None and
    the length of the text mean the last token, as does a character that no tokens but all decode to."""

    @cache
    def decoded(count):
        return tokenizer.decode(ids[:count], skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def place(offset):
        if offset is None or offset >= len(text):
            return len(ids) - 1
        wanted = text[: offset + 1]
        counts = range(1, len(ids))
        return bisect_left(counts, True, key=lambda count: decoded(count)[: offset + 1] == wanted)

    return [place(offset) for offset in offsets]
