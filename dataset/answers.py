"""Answers: the part of a response that is its answer (after </think>, in <answer>), whether it is correct,
which answers are equal, and which of them a response can equal. docs/metrics.md has a table of what is equal.

Numbers are compared exactly, as fractions. Formulas are compared where the library math-verify is installed,
in a process of its own (this file as a script): a sampled 9^{9^9} is computed without an end, and nothing but
the end of the process stops that.
"""

import faulthandler
import json
import re
import subprocess
import sys
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from importlib.util import find_spec
from unicodedata import normalize

Answer = str | list[str]  # each of a list is right
Numbers = set[Fraction]  # what a number may mean: {50, 1/2} for 50%; none for what is no number

SECONDS = 5  # for one comparison of formulas
WORDS, LONGEST = 5, 40  # of an answer that a response can equal; characters, because Chinese has no spaces

PART = r"(?:\{\s*(-?[\d.]+)\s*\}|(\d))"  # of a fraction in LaTeX
# How numbers are written -> how they are written plainly, to be replaced in this order.
REWRITES: dict[str, str | Callable[[re.Match], str]] = {
    r"\\[!()\[\]]|\\(?:left|right|displaystyle)(?![a-z])|\\?[$€£¥]": "",
    r"\{,\}": ",",
    r"\\(?:text|math|mbox)[a-z]*\{([^{}]*)\}": r"\1",
    "[\u2010-\u2013\u2212\ufe63\uff0d]": "-",
    "’": "'",
    "\\\\[,;: ]|[\u00a0\u2007\u202f]": "\u2009",  # spaces that part thousands; a plain one does not
    "(?<![\\d.,'_])[1-9]\\d{0,2}([,'_\u2009])\\d{3}(?:\\1\\d{3})*(?![,'_]?\\d)": (
        lambda number: number[0].replace(number[1], "")
    ),
    r"\s?(?:\\?%|％|per ?cent\b)": "%",
    r"\^\{?\\circ\}?": "°",
    r"(?<=[A-Za-z])\^\{?-?\d+\}?": "",  # of a unit, as in cm^2
    r"(?<=\d)\s*(?=\\[a-z]*frac|[¼-¾⅐-⅞])": " ",  # 1½ is 1 1/2
    rf"\\[a-z]*frac\s*{PART}\s*{PART}": r"\1\2/\3\4",
    "[¼-¾⅐-⅞]": lambda one: normalize("NFKC", one[0]),
    "[⁄∕／]": "/",
}

# In plain text. A number is whole, or it is none: digits with another point, comma, colon, slash or power
# beside them (1.234,5 or 10:30 or 2^3) are no number, nor are those in the braces of LaTeX. The minus of 10-3
# is no sign.
DIGITS = r"(?:\d+(?:\.\d+)?|(?<![\w.])\.\d+)(?:[eE][+-]?\d{1,3})?"
NUMBER = rf"((?<![\w.)\]}}%°])[-+])?(?:(\d+) +(?=\d+/\d))?({DIGITS})(?: ?/ ?(-?{DIGITS}))?(%?)"
BEFORE = r"(?<![\d/^])(?<!\d[.,':])(?<![/^{]-)(?<![\w}^]\{)"
COMPLETE = rf"{BEFORE}{NUMBER}(?![\d^²³¹⁰⁴-⁹]|[.,':/]+-?\d| ?/ ?\d)"
FIRST = rf"\A{COMPLETE}"
LAST = rf"{COMPLETE}\D*\Z"
ALONE = rf"\A{COMPLETE}\.?\Z"
# In a box it comes after "=", with no more than words beside it, such as a unit. 3x is none.
EQUATION = r"(?:(?:(?!\bor\b|\band\b)[^,;])*(?:=|≈|\\approx))?+"
IN_A_BOX = rf"\A{EQUATION}[^\d\\{{}}^+*/|<>-]*?(?<![A-Za-z_])(?<![A-Za-z]\()"
IN_A_BOX += rf"{COMPLETE}(?![A-Za-z]\b)[^\d\\{{}}^+*|<>!]*\Z"
BLOCK = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
FORMULA = r"[\d\\^*+=/]"  # in a formula there is one of these, in words there is none
IN_BRACES = r"[^{}]*"
for _ in range(4):  # braces in braces
    IN_BRACES = rf"(?:\\.|[^{{}}\\]|\{{{IN_BRACES}\}})*"
ANSWERED = re.compile(
    rf"####([^\n]*)|\\(?:boxed|fbox)\s*\{{({IN_BRACES})\}}|<answer>(.*?)</answer>", re.DOTALL
)


def plain(text: str) -> str:
    """The text with its numbers written plainly: no LaTeX, signs of currencies or separators of thousands."""
    for _ in range(2):  # one in another, such as a fraction in \text{…}
        for spelling, plainly in REWRITES.items():
            text = re.sub(spelling, plainly, text)
    return text.strip()


def numbers(text: str, pattern: str) -> Numbers:
    """What the number means that a pattern with ``NUMBER`` finds in a text."""
    match = re.search(pattern, plain(text), re.DOTALL)
    if not match:
        return set()
    sign, whole, over, under, percent = match.groups()
    # Decimal reads numbers of any length.
    value, divisor, more = (Fraction(Decimal(part)) for part in (over, under or 1, whole or 0))
    if not divisor:
        return set()
    value = (value / divisor + more) * (-1 if sign == "-" else 1)
    return {value, value / 100} if percent else {value}


def final(text: str, pattern: str = LAST) -> tuple[str, Numbers]:
    """What a text gives, and its number: of the last ``\\boxed{…}``, ``<answer>…</answer>`` or #### with a
    number, without one of the whole text. pattern: ALONE if a number has to be all of the text, or boxed."""
    for mark in reversed([*ANSWERED.finditer(text)]):
        solution, box, block = mark.groups("")
        if box.strip():
            return final(box, IN_A_BOX)
        if pattern == LAST and block.strip():
            return final(block)
        if pattern == LAST and (solved := numbers(solution, FIRST)):
            return solution, solved
    return text, numbers(text, pattern)


def gives(text: str, answer: str, only: bool) -> bool:
    """Whether a text gives an answer. only: a number has to be all of the text, or of a box in it."""
    given, given_number = final(text, ALONE if only else LAST)
    right, right_number = final(answer, ALONE)
    if right_number and given_number:
        if len(right_number) == len(given_number):
            return right_number == given_number
        return bool(right_number & given_number)
    if plain(given) == plain(right):
        return True
    if not re.search(FORMULA, right) or not compares_formulas():
        return False
    return formulas_equal(f"${right}$", f"${given}$" if only else text)


def without_solution(answer: str) -> str:
    """The number of an answer that ends with "#### 72", as GSM8K's do; any other answer as it is."""
    mark = re.search(rf"####\s*({NUMBER})\s*\Z", plain(answer))
    return mark[1] if mark else answer


def alternatives(answer: Answer) -> list[str]:
    """The texts of an answer."""
    return [answer] if isinstance(answer, str) else answer


def comparable(answer: Answer) -> bool:
    """Whether a response can be expected to equal this answer: a number, or a few words on one line. A longer
    text is a demonstration, which no sampled text equals."""
    for text in alternatives(answer):
        last, number = final(text.strip(), ALONE)
        if number or ("\n" not in last and len(last) <= LONGEST and len(last.split()) <= WORDS):
            return True
    return False


# ---------------------------------------------------------------- the answer in a response


def after_thinking(response: str, beginning: str = "") -> str:
    """What a model that thinks says: the text behind the last ``</think>``, without the spaces around it.
    Without that tag it is the whole response; but if the beginning of the answer, in the prompt, has opened a
    thought, it is nothing: the thought has not ended."""
    _, tag, spoken = (beginning + response).rpartition("</think>")
    if tag:
        return spoken.strip()
    return "" if "<think>" in beginning else spoken


def answer_text(response: str) -> str | None:
    """The text of the first answer block without surrounding spaces, or None if there is no block."""
    match = BLOCK.search(response)
    return match[1].strip() if match else None


def is_correct(response: str, answer: Answer, reasoning: bool, beginning: str = "") -> bool:
    """Whether the response gives this answer, or one of a list. Evaluation asks (accuracy), and exact_answer.

    With ``--reasoning 1`` the answer block has to be the answer. Else what follows the thought has to be it,
    or to give it as its final number or in a box (``gives``). beginning: of the answer, in the prompt.
    """
    given = answer_text(beginning + response) if reasoning else after_thinking(response, beginning)
    return given is not None and any(gives(given, right, reasoning) for right in alternatives(answer))


# ---------------------------------------------------------------- formulas


def compares_formulas() -> bool:
    """Is math-verify installed?"""
    return find_spec("math_verify") is not None


def is_formula(answer: Answer) -> bool:
    """Is there LaTeX in the answer that is more than a number?"""
    return any("\\" in plain(text) for text in alternatives(answer))


_idle: list[subprocess.Popen[str]] = []  # processes that compare, to be used again


def formulas_equal(right: str, given: str) -> bool:
    """Whether math-verify finds the right answer in the given one; False if that takes ``SECONDS``."""
    if _idle:
        comparer = _idle.pop()
    else:
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        command = [sys.executable, __file__, str(SECONDS)]
        comparer = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=null, text=True)
    print(json.dumps([right, given]), file=comparer.stdin, flush=True)
    assert comparer.stdout
    reply = comparer.stdout.readline()
    if reply:
        _idle.append(comparer)
    else:
        comparer.wait()  # it has ended itself
    return reply == "True\n"


def compare_formulas() -> None:
    """Answer each line of the input, [right, given], with True or False; end the process at one that takes
    too long. The library's own time limits cannot stop a long multiplication."""
    from math_verify import parse, verify

    for line in sys.stdin:
        faulthandler.dump_traceback_later(int(sys.argv[1]), exit=True)
        right, given = (parse(text, parsing_timeout=None) for text in json.loads(line))
        print(verify(right, given, timeout_seconds=None), flush=True)
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    compare_formulas()
