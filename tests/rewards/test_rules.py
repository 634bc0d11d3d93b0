"""The rules about a response by hand: MiniMind's format, thinking, repetition, length; GSM8K's answers."""

import inspect

import pytest
from tiny import ROOT

from dataset import answers
from dataset.formats import TurnText
from trainer.rewards import rules

GOOD = "<think>\n1 + 1\n</think>\n<answer>\n2\n</answer>"
FORMS = [  # (response, reward of the format, of the marks)
    (GOOD, 0.5, 1.0),
    (GOOD.replace("</think>\n", "</think>\n\n"), 0.5, 1.0),  # one blank line between the blocks is allowed
    (GOOD.replace("</think>\n", "</think>\n\n\n"), 0.0, 1.0),  # two are not
    (GOOD + "\n", 0.0, 1.0),
    ("Well: " + GOOD, 0.0, 1.0),
    (GOOD.replace("\n", ""), 0.0, 1.0),
    (GOOD.replace("</think>", ""), 0.0, 0.75),
    (GOOD.replace("<answer>", "<answer><answer>"), 0.0, 0.75),
    (GOOD + GOOD.partition("</think>\n")[2], 0.0, 0.5),  # two answer blocks
    ("2", 0.0, 0.0),
    ("", 0.0, 0.0),
]
NUMBERS = [  # (response, answer, is it right?)
    ("There are 6*12 = <<6*12=72>>72 eggs.\n#### 72", "72", 1),  # as GSM8K's own solutions end
    ("12 + 60 = 72", "72", 1),
    ("<think>\n\\boxed{71}?\n</think>\n\nIt is 72.", "72", 1),  # a thought is no answer
    ("72 is the answer to 6 times 12", "72", 0),  # the last number counts
    ("#### 72\nThat took 3 steps", "72", 1),  # but not after a mark
    ("#### 72 eggs, not 73", "72", 1),
    ("#### Step 1\nThe answer is 72", "72", 1),  # a heading is no mark
    (r"so \boxed{72}, which is 6 * 12", "72", 1),
    (r"\boxed{x = 72}", "72", 1),
    (r"first \boxed{70}, then \boxed{72}", "72", 1),
    ("<think>\n70\n</think>\n<answer>\n72\n</answer> 5", "72", 1),
    ("<answer>\nnone\n</answer> 72", "72", 0),
    ("72.00", "72", 1),
    ("72.5", "72", 0),
    ("It costs $1,250,000.", "1250000", 1),
    (r"\$5", "5", 1),
    ("$.50", "0.5", 1),
    ("one of 1,24", "24", 0),  # a decimal comma, or two numbers: none
    ("10-2", "2", 1),  # no sign
    ("it is -2", "-2", 1),
    ("it is -$2", "-2", 1),
    ("it is $-2", "-2", 1),
    ("it is 2", "-2", 0),
    ("", "0", 0),
    ("no idea", "72", 0),
    ("72", "72", 1),  # verl's ground truth
]
BEGUN = {"role": "assistant", "content": TurnText("<think>", is_begun=True)}
DAPO = {1: 0.0, 16_384: 0.0, 16_385: 1 / 4096, 18_432: 0.5, 20_480: 1.0}  # its own numbers
RULES = [  # (rule, its arguments, what it gives)
    *((rules.format_reward, (text,), form) for text, form, _ in FORMS),
    *((rules.mark_reward, (text,), marks) for text, _, marks in FORMS),
    # The prompt has the beginning of the answer, with an open thought or without.
    *(
        (answers.after_thinking, (text, "So\n<think>"), said)
        for text, said in (("a</think>\n5", "5"), ("5", ""))
    ),
    (answers.after_thinking, ("5", "So: "), "So: 5"),
    (answers.after_thinking, ("5", "<think>a</think>It is "), "It is 5"),
    (answers.is_correct, ("2, or 7", "27", False, "It is 2"), False),
    (answers.is_correct, ("7", "27", False, "It is 2"), True),
    (answers.is_correct, ("27", "27", False, "<think>"), False),
    (answers.is_correct, ("\n27</answer>", "27", True, "<answer>"), True),
    (rules.exact_answer, ([[BEGUN]] * 2, ["27", "a</think>27"], ["27"] * 2), [0.0, 1.0]),
    (rules.thinking_reward, ("p <think>", "b" * 15 + "</think>5", 1.0, "So <think>" + "a" * 15), 1.25),
    (rules.thinking_reward, ("p <think>", "b" * 15 + "</think>5", 1.0, "So <think>"), -0.25),
    (rules.thinking_reward, ("p", "b" * 30 + "</think>5", 1.0, "<think>a</think>It"), 0.0),
    (answers.answer_text, (GOOD,), "2"),
    (answers.answer_text, ("<answer>a</answer><answer>b</answer>",), "a"),
    (answers.answer_text, ("<answer>2",), None),
    (answers.is_correct, (GOOD, " 2 ", True), True),
    (answers.is_correct, ("2", "2", True), False),
    (answers.is_correct, (" 2", "2", False), True),
    *((rules.repetition_penalty, (text, 0.5), 0.0) for text in ("a b c d e", "", "a b")),
    (rules.repetition_penalty, ("a b c a b c", 0.5), 0.25),  # 1 of 4 trigrams is a repetition
    (rules.repetition_penalty, ("A, a, a, a, a, a", 0.5), 0.5),  # 7 of 9: more than half
    (rules.repetition_penalty, ("x " * 100, 0.3), 0.3),
    *((rules.length_reward, ("\n" + "x" * n + " ", 0.5), -0.5) for n in (0, 19, 801)),  # spaces do not count
    *((rules.length_reward, ("\n" + "x" * n + " ", 0.5), 0.5) for n in (20, 800)),
    *((rules.overlong_penalty, (length, 20_480, 4096, 1.0), penalty) for length, penalty in DAPO.items()),
    (rules.overlong_penalty, (3, 4, 2, 0.5), 0.25),
    (rules.overlong_penalty, (1, 4, 4, 1.0), 0.25),  # every token costs
    *((rules.exact_answer, (["q"], [text], [answer]), [right]) for text, answer, right in NUMBERS),
    (rules.exact_answer, (["q", "q"], ["5", "5"], [None, "5"]), [None, 1.0]),
]


@pytest.mark.parametrize(("rule", "arguments", "wanted"), RULES)
def test_rules(rule, arguments, wanted):
    assert rule(*arguments) == pytest.approx(wanted)


def test_the_page_shows_the_function_as_it_is():
    page = (ROOT / "docs/rewards.md").read_text(encoding="utf-8")
    assert inspect.getsource(rules.exact_answer) in page
    assert "--reward_fn trainer/rewards/rules.py:exact_answer" in page
