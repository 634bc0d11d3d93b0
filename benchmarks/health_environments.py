"""The environments and tools of the broken runs of health.py: each has the fault that its run should show."""

import re
import time


def calculate(left: int, right: int) -> int:
    """Add. The policy was taught to call it with one argument, "expression".

    Args:
        left: a number
        right: another
    """
    return left + right


class Answers:
    """A text game of one turn: the nearer the number is to the answer, the more it earns."""

    def reset(self, answer):
        self.answer = int(answer)

    def step(self, text):
        return "", self.reward_of(text), True

    def reward_of(self, text):
        numbers = re.findall(r"<answer>\s*(-?[0-9]{1,4})\s*</answer>", text)
        return 1 / (1 + abs(int(numbers[0]) - self.answer)) if numbers else 0.0


class Waits(Answers):
    """It takes three seconds for a quarter of the answers."""

    def step(self, text):
        time.sleep(3 * (self.answer % 4 == 0))
        return super().step(text)


class Explains(Answers):
    """It says much after the first of two turns."""

    explained = False

    def step(self, text):
        if self.explained:
            return super().step(text)
        self.explained = True
        return "What is " + "ten plus " * 36 + "one?", self.reward_of(text), False
