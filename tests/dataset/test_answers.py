"""What a text gives as its answer, and what is equal: the table of docs/metrics.md, what stands beside
numbers, and formulas by a library of math-verify's interface."""

import os
import re
import sys
import time
from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny import ROOT

from dataset.answers import ALONE, Numbers, alternatives, comparable, final, gives, is_formula

PAGE = (
    (ROOT / "docs/metrics.md")
    .read_text(encoding="utf-8")
    .partition("### How answers")[2]
    .partition("\n## ")[0]
)
ROWS = re.findall(r"^\| `([^`]+)` \| (.+) \| (.+) \|$", PAGE, re.MULTILINE)


def texts(cell):
    return re.findall("`([^`]+)`", cell)


def test_the_table_of_the_page_is_true():
    assert len(ROWS) > 7
    for answer, equal, others in ROWS:
        for text in [answer, *texts(equal)]:
            assert gives(text, answer, False), (text, answer)
            if r"\sqrt" not in text:  # no number: all of the text is compared
                assert gives(f"5, 9 and 1; so {text}.", answer, False), (text, answer)
        for text in texts(others):
            assert not gives(text, answer, False), (text, answer)
            assert not gives(f"{answer} or {text}", answer, False), (text, answer)


WAYS = [  # how a response may say a number
    *(
        "{}",
        "It is {}.",
        "so {}, I think",
        "**{}**",
        "${}$",
        r"\({}\)",
        "x={}",
        "<<1+1={}>>{}",
        "({})",
        '"{}"',
    ),
    *(r"\boxed{{{}}} or 7", r"\boxed{{x = \text{{{} cm}}}} 7", r"7 \fbox {{\mathbf{{{}}}}} 7", "#### {}\n7"),
    r"\boxed{{7}} then \boxed{{\boxed{{{}}}}}, \boxed{{}}, \boxed{{ <answer></answer>",
    "7 <answer>\nit is {}\n</answer> 7",
]
MINUS = ["-", "−", "–", "﹣", "-", "‐", "‑"]
SEPARATORS = [",", "{,}", r"\,", "'", "’", "_", "\u00a0", "\u2009", "\u202f", r"\ ", r",\!", ""]


@given(
    st.integers(-(10**12), 10**12),
    st.sampled_from(["", ".0", ".5", ".25", ".007"]),
    st.sampled_from(WAYS),
    st.sampled_from(MINUS),
    st.sampled_from(SEPARATORS),
    st.booleans(),
)
def test_a_number_is_found_however_it_is_written(number, decimals, way, minus, separator, percent):
    digits = f"{abs(number):,}".replace(",", separator) + decimals
    value = Fraction(f"{number}{decimals}") if number else Fraction(f"0{decimals}")
    text = way.format(*[(minus if number < 0 else "") + digits + "%" * percent] * 2)
    wanted = {value, value / 100} if percent else {value}
    assert final(text)[1] == wanted, text


@given(
    st.integers(-99, 99),
    st.integers(1, 99),
    st.sampled_from(
        [r"\frac{{{}}}{{{}}}", r"\dfrac{{{}}}{{{}}}", r"\tfrac {{{}}} {{{}}}", "{}/{}", "{} / {}", "{}⁄{}"]
    ),
    st.sampled_from(WAYS),
)
def test_fractions_are_exact(over, under, form, way):
    text = way.format(*[("-" if over < 0 else "") + form.format(abs(over), under)] * 2)
    assert final(text)[1] == {Fraction(over, under)}, text


@given(st.integers(0, 999), st.sampled_from([",", "'", ":", "^", "^{", "²"]), st.integers(0, 99))
def test_digits_with_more_beside_them_are_no_number(number, beside, more):
    """And no number before them takes their place."""
    assert not final(f"5 or {number}{beside}{'' if beside == '²' else more + 1000}")[1]
    for text in (
        f"{number}.{more}.1",
        f"{number},{more}.5",
        f"x/{number}",
        f"{number}/{more}/2",
        f"{number}/0",
    ):
        assert not final(f"5 or {text}")[1], text


@settings(deadline=None)
@given(st.text(alphabet="\\{}boxed#<answer>/123.,-=%$^ \nfrac½", max_size=60), st.booleans())
@example("1" * 5000, False)
@example(r"\boxed{" * 2000, False)
@example(r"\boxed{" + "a=b" * 3000 + "}", False)
@example("<answer>" * 300, True)
def test_any_text_is_read_at_once_and_gives_itself(text, whole):
    started = time.process_time()
    said, found = final(text)
    assert isinstance(said, str) and (found == set() or len(found) <= 2)
    assert gives(text, text, whole)
    assert time.process_time() - started < 2


def test_what_is_no_number_is_compared_as_text():
    for text in (
        "Paris",
        r"\boxed{Paris}",
        r"so \boxed{\text{ Paris }}, or 5",
        "<answer>\nParis\n</answer>",
        " Paris ",
    ):
        assert gives(text, "Paris", False)
        assert gives(text, r"\boxed{\text{Paris}}", False)
    assert not gives("It is Paris", "Paris", False) and not gives(r"\boxed{Lyon} Paris", "Paris", False)
    assert gives("72", "so it is\n\\boxed{72}, which is 6 * 12", False)  # a solution with a box
    assert comparable("so it is\n\\boxed{72}, which is 6 * 12") and not comparable("so it is\n72")
    assert comparable(["a\nb", "72"]) and not comparable(["a\nb"]) and not comparable([])
    assert [is_formula(answer) for answer in (r"\pi", ["1", r"\pi"], r"\frac12", r"\text{a}", "x")] == [
        1,
        1,
        0,
        0,
        0,
    ]
    assert alternatives("a") == alternatives(["a"]) == ["a"]


def test_with_a_block_the_number_is_all_of_it():
    for text, right in (
        ("72", 1),
        (" 72. ", 1),
        ("$72$", 1),
        (r"\boxed{72}", 1),
        ("so 72", 0),
        ("72 eggs", 0),
    ):
        assert gives(text, "72", True) is bool(right)
    numbers: Numbers = {Fraction(72)}
    assert final("72", ALONE)[1] == numbers


LIBRARY = """
import re, sympy

def parse(text, parsing_timeout):
    assert parsing_timeout is None
    found = re.findall(r"[$](.*?)[$]|boxed{(.*)}", text)
    texts = [(one or other).replace("^", "**").replace("\\\\", "") for one, other in found]
    return [sympy.sympify(text.translate({123: "(", 125: ")"})) for text in texts]

def verify(right, said, timeout_seconds):
    return any(sympy.simplify(one - other) == 0 for one in right for other in said)
"""


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A library of math-verify's interface, by sympy, which reads a little LaTeX."""
    (tmp_path / "math_verify.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    monkeypatch.setattr("dataset.answers._idle", [])
    monkeypatch.setattr("dataset.answers.SECONDS", 2)


FORMULAS = [  # (text, answer, whole, whether it is given)
    (r"\boxed{2*\sqrt{2}}", r"\sqrt{8}", False, True),
    ("so $2*sqrt(2)$", r"\sqrt{8}", False, True),
    ("(x+1)^2", "x^2+2*x+1", True, True),
    ("(x+1)^3", "x^2+2*x+1", True, False),
    (r"\boxed{2^3}", "8", False, True),
    (r"\boxed{2^3}", "9", False, False),
    (r"\boxed{)}", "9", False, False),  # it fails, and the next one starts anew
    (r"\boxed{sqrt(4)}", "2", False, True),
    ("Rome", "Paris", False, False),  # words are not asked about
    (r"\boxed{2}", "3", False, False),
]


def test_formulas_are_compared_where_the_library_is(library):
    for text, answer, whole, right in FORMULAS:
        assert gives(text, answer, whole) is right, (text, answer)


def test_without_the_library_formulas_are_texts():
    for text, answer, whole, _ in FORMULAS:
        assert not gives(text, answer, whole)
    assert gives(r"\boxed{\sqrt{8}}", r"$\sqrt{8}$", False)


def test_a_comparison_without_an_end_is_ended(library):
    started = time.monotonic()
    assert not gives(r"\boxed{9^9^9^9}", "8", False)
    assert time.monotonic() - started < 60
    assert gives(r"\boxed{2^3}", "8", False)
