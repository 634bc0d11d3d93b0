"""The demo's tool and its reward: a calculator, and whether the last turn is the right number.

python trainer/train_ppo.py --tools dataset/demo/calculator.py:calculate --reward_fn dataset/demo/calculator.py:right …
"""

import operator

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def calculate(expression: str) -> str:
    """Calculate.

    Args:
        expression: Two whole numbers with + or - or * between them.
    """
    left, sign, right = expression.split()
    return str(OPERATORS[sign](int(left), int(right)))


def right(prompts: list, responses: list[str], answers: list[str]) -> list[float]:
    """1.0 for each response that is the answer, 0.0 for others."""
    return [float(response.strip() == answer) for response, answer in zip(responses, answers, strict=True)]
