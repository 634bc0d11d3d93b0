"""Rewards that are rules about a response: MiniMind's think / answer format, thinking, repetition and length;
how close it came to --max_gen_len.

Sources: MiniMind (github.com/jingyaogong/minimind), ``trainer/train_ppo.py`` of October 2025 for the format,
of August 2026 for thinking; DAPO, Yu et al. 2025 (arXiv:2503.14476), eq. 13, for the last one. ``Reward`` in
combine.py calls the rules. A rule of your own needs no change here: see ``--reward_fn`` (reward_function.py).
``exact_answer`` is an example of one: ``--reward_fn trainer/rewards/rules.py:exact_answer``.
"""

import re
from collections.abc import Sequence

from dataset.answers import Answer, is_correct
from dataset.formats import begun
from model.loading import TAGS

FORMAT = re.compile(r"<think>\n.*?\n</think>\n{1,2}<answer>\n.*?\n</answer>", re.DOTALL)
REPEATED = re.compile(r"\w+|[^\w\s]")  # words and punctuation marks, of which trigrams are made
LENGTHS = range(20, 801)  # characters of a response that is rewarded for its length
THOUGHTS = range(20, 301)  # the same of a thought


def format_reward(response: str) -> float:
    """0.5 for exactly one think block and one answer block, with one or two newlines between them, else 0."""
    return 0.5 if mark_reward(response) == 1.0 and FORMAT.fullmatch(response) else 0.0


def mark_reward(response: str) -> float:
    """0.25 for each of the four tags that occurs exactly once: partial credit on the way to the format."""
    return 0.25 * sum(response.count(tag) == 1 for tag in TAGS)


def from_thought(beginning: str) -> str:
    """The beginning of an answer from its ``<think>`` on; "" where there is none."""
    return "".join(beginning.partition("<think>")[1:])


def thinking_reward(prompt: str, response: str, size: float, beginning: str = "") -> float:
    """``size`` times MiniMind's points for a response with ``</think>``: 1 for a thought of 20 to 300
    characters, else -0.5; and 0.25 if there is one such tag, else -0.25. 0 for a response without the tag. 0
    also where the thought ends in the prompt: closed by the chat template or by the answer's beginning."""
    thought, tag, _ = (from_thought(beginning) + response).partition("</think>")
    if not tag or "</think>" in beginning or prompt.rstrip().endswith("</think>"):
        return 0.0
    thought = thought.strip().removeprefix("<think>").strip()  # the tag is in the prompt or here
    of_length = 1.0 if len(thought) in THOUGHTS else -0.5
    return size * (of_length + (0.25 if response.count("</think>") == 1 else -0.25))


def repetition_penalty(response: str, largest: float) -> float:
    """0 if all trigrams of the response differ, ``largest`` if half of them or more repeat an earlier one.

    In between it grows linearly with the share of repeated trigrams. MiniMind's ``largest`` is 0.5.
    """
    return largest * min(1.0, 2 * repetition(REPEATED.findall(response.lower())))


def repetition(items: Sequence[object]) -> float:
    """The share of the trigrams of these words or tokens that occurred before among them; 0 for fewer than
    four."""
    trigrams = list(zip(items, items[1:], items[2:], strict=False))
    return 1 - len(set(trigrams)) / len(trigrams) if trigrams else 0.0


def length_reward(response: str, size: float) -> float:
    """``size`` for a response of 20 to 800 characters, else minus ``size``. MiniMind's ``size`` is 0.5."""
    return size if len(response.strip()) in LENGTHS else -size


def overlong_penalty(length: int, longest: int, buffer: int, largest: float) -> float:
    """What a response of ``length`` tokens loses: 0 up to longest - buffer tokens, ``largest`` at ``longest``
    (--max_gen_len), and in between it grows in a straight line."""
    return largest * min(1.0, max(0.0, (length - (longest - buffer)) / buffer))


def exact_answer(prompts: list, responses: list[str], answers: list[Answer | None]) -> list[float | None]:
    """B responses and their answers -> 1.0 where the response gives the answer, else 0.0; None where the
    record has no answer."""
    return [
        None if answer is None else float(is_correct(response, answer, False, begun(prompt)))
        for prompt, response, answer in zip(prompts, responses, answers, strict=True)
    ]
