"""The tool of the demo and its reward: a calculator, and whether a response is the right number."""

import operator

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def calculate(expression: str) -> int:
    """Calculate.

    Args:
        expression: Two whole numbers with + or - or * between them, and spaces beside it.
    """
    left, sign, right = expression.split()
    return OPERATORS[sign](int(left), int(right))


def is_right(prompts: list[str], responses: list[str], answers: list[str]) -> list[float]:
    """1 for each response whose last turn is the answer and nothing else, 0 for the others."""
    return [float(response == answer) for response, answer in zip(responses, answers, strict=True)]
