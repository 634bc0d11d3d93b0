"""Answers that can be compared: the number that a text gives, and which answers a response can equal."""

import re
from decimal import Decimal

NUMBER = r"(?:(?<![\w.)])-)?(?:\d+(?:\.\d+)?|(?<![\w.])\.\d+)"  # the minus of "10-3" is no sign
SKIPPED = re.compile(r"(?<=\d),(?=\d{3}(?!\d))|\\?\$")  # the comma of 1,000 and the sign of $5
MARKED = re.compile(rf"####\s*{NUMBER}|\\boxed\{{[^{{}}]*|<answer>.*?</answer>", re.DOTALL)
AT_THE_END = re.compile(rf"####\s*({NUMBER})\s*\Z")
WORDS, LONGEST = 5, 40  # of an answer that a response can equal; characters, because Chinese has no spaces


def final_number(text: str) -> Decimal | None:
    """The number after the last ####, or the last one in the last \\boxed{…} or <answer>…</answer>, or of the
    whole text if it has none of these; None if there is no number."""
    text = SKIPPED.sub("", text)
    marked = MARKED.findall(text) or [text]
    numbers = re.findall(NUMBER, marked[-1])
    return Decimal(numbers[-1]) if numbers else None


def without_solution(answer: str) -> str:
    """The number of an answer that ends with "#### 72", as GSM8K's do; any other answer as it is."""
    mark = AT_THE_END.search(SKIPPED.sub("", answer))
    return mark[1] if mark else answer


def as_number(answer: str) -> Decimal | None:
    """The number that an answer is; None for any other text."""
    text = SKIPPED.sub("", answer.strip())
    return Decimal(text) if re.fullmatch(NUMBER, text) else None


def comparable(answer: str) -> bool:
    """Whether a response can be expected to equal this answer: a number, or a few words on one line. A longer
    text is a demonstration, which no sampled text equals."""
    text = answer.strip()
    short = "\n" not in text and len(text) <= LONGEST and len(text.split()) <= WORDS
    return short or as_number(text) is not None
