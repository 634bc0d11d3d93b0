"""The tool of real_model_tools.py (``--tools``), and its reward, as a user writes them."""

import re


def calculate(expression: str) -> str:
    """
    Add or subtract two whole numbers.

    Args:
        expression: The sum, as "12 + 7".
    """
    found = re.fullmatch(r"\s*(-?\d{1,9})\s*([+-])\s*(-?\d{1,9})\s*", expression)
    if not found:
        raise ValueError('the expression must be as "12 + 7"')
    first, sign, second = found.groups()
    return str(int(first) + int(second) if sign == "+" else int(first) - int(second))


def right(prompts: list, responses: list[str], answers: list[str]) -> list[float]:
    """1 where the last number of the last turn is the answer, else 0."""
    numbers = [re.findall(r"-?\d+", text.replace(",", "")) for text in responses]
    return [float(found[-1:] == [answer]) for found, answer in zip(numbers, answers, strict=True)]
