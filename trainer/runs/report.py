"""report.html: a whole run on one page, which needs no network and runs no script.

What came of it and what is wrong, the curves, the distributions, the same held-out prompts' answers at every
evaluation, responses that stand out, the configuration. The page is report.html.jinja2; this file has what it
shows. Texts of models and data are escaped by Jinja2, and the page forbids itself to load or to run anything.

It is written as the run goes, when ``SHARE`` times as long as the last writing took has gone by, and always
when the run ends or is stopped.
"""

import json
import re
import time
from datetime import datetime
from difflib import SequenceMatcher
from itertools import takewhile
from pathlib import Path

import numpy as np
from markupsafe import Markup, escape

from atomic_files import write_whole, writing
from errors import InputError, first_line
from trainer.runs.displays import Records
from trainer.runs.health import SCRIPT, Finding
from trainer.runs.plots import draw_report
from trainer.runs.samples import prompt_text
from trainer.runs.summary import TEMPLATES, filled, in_words, tables

SHARE = 100  # so writing it takes at most 1 % of a run
FIRST = 1.0  # seconds: what the first writing is assumed to take
MOST_EVALUATIONS = 12  # shown side by side
MOST_ROWS = 5  # responses of a kind
MOST_CHARACTERS = 2000  # of a text
# A flag, with a number behind it if there is one: no line of the page ends inside.
FLAG = re.compile(r"--[a-z]\w*(?: -?\d+(?:\.\d+)?(?:e[-+]?\d+)?(?![^\s,;.)]))?")
# A word with the space before it; a Chinese character is a word.
WORDS = re.compile(r"\s*(?:[^\W\u2e80-\u9fff\uac00-\ud7af]+|\S)")


class Report:
    """The report of a run. Only the main process has one. say(line): prints a line."""

    def __init__(self, run, folder, say):
        self.run = run
        self.folder = folder
        self.say = say
        self._seconds = FIRST
        self._written = time.perf_counter()

    def is_due(self) -> bool:
        """Whether writing it now keeps to its share of the run's time."""
        return time.perf_counter() - self._written >= SHARE * self._seconds

    def write(self, records: Records, findings: list, state: str) -> None:
        """Write report.html. records: all lines of metrics.jsonl; findings: list of ``Finding``; state:
        "running", "ended", "stopped" or "ended by --strict_health 1: NAME". Raises InputError if the disk
        cannot be written. If the page cannot be made, a line says so: a fault in it must not end a run."""
        start = time.perf_counter()
        path = self.folder.path / "report.html"
        try:
            page = self.page(records, list(enumerate(findings, 1)), state)
            with writing(path):
                write_whole(path, page.encode(errors="replace"))  # JSON may hold half a character
            self._seconds = time.perf_counter() - start
        except InputError:
            raise
        except ImportError:  # of matplotlib: ``RunLogger`` says so where it draws curves.png
            pass
        except Exception as error:
            reason = f"{type(error).__name__}: {first_line(error)}"
            self.say(f"note: report.html cannot be made ({reason}); report it on the project's issue page")
        self._written = time.perf_counter()

    def page(self, records: Records, findings: list[tuple[int, Finding]], state: str) -> str:
        """The page. findings: with their numbers; other arguments: see ``write``."""
        run = self.run
        path = self.folder.path
        curves, distributions = draw_report(
            records, findings, run.display.panels, read_rows(path / "histograms.jsonl")
        )
        return filled(
            "report.html.jinja2",
            name=path.name,
            run=run,
            config=self.folder.config,
            state=state,
            step=last_step(records),
            written=datetime.now().astimezone(),
            words=in_words(run, records),
            findings=findings,
            watched=run.script == SCRIPT,
            tables=tables(run, records),
            plots=curves,
            heat=distributions,
            answers=read_rows(path / "eval_samples.jsonl"),
            samples=read_rows(path / "samples.jsonl"),
        )


def read_rows(path: Path) -> list[dict]:
    """The rows of a JSONL file of the run folder; none if there is no such file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line]


def last_step(records: Records) -> int:
    """The step of the last of these records; 0 where metrics.jsonl was lost."""
    return records[-1]["step"] if records else 0


def plain(value: object) -> str:
    """A value of the configuration as text; what is text stays as it is."""
    if value is None:
        return "not set"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def unbroken(text: str) -> Markup:
    """A text, escaped, in which a flag and its value stay on one line."""
    return Markup(FLAG.sub(lambda found: f'<span class="flag">{found[0]}</span>', str(escape(text))))


def shortened(text: object) -> str:
    """A text with at most MOST_CHARACTERS; how many more there were is said."""
    text = plain(text)
    more = len(text) - MOST_CHARACTERS
    return text if more <= 0 else f"{text[:MOST_CHARACTERS]} … ({more} more characters)"


def evenly(items: list, most: int = MOST_EVALUATIONS) -> list:
    """At most so many of the items, the first and the last among them, evenly spaced."""
    places = np.linspace(0, len(items) - 1, min(most, len(items)))
    return [items[round(place)] for place in places]


def changes(after: str, before: str) -> dict:
    """Two texts -> {"pieces": [(piece of ``after``, is it new)], "new": how many words are new, "gone": how
    many gone}. Changes of white space alone are none."""
    now = WORDS.findall(after)
    words = [[word.strip() for word in WORDS.findall(text)] for text in (before, after)]
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*words, strict=False)))
    pieces = [("".join(now[:same]), False)]
    new = gone = 0
    # It ignores frequent words of long texts, and so it is quick for texts that repeat themselves too.
    for kind, a, b, c, d in SequenceMatcher(None, words[0][same:], words[1][same:]).get_opcodes():
        piece = "".join(now[same + c : same + d])
        if kind != "equal":
            new += d - c
            gone += b - a
        word = piece.lstrip()
        pieces += [(piece[: len(piece) - len(word)], False), (word, kind != "equal")]
    return {"pieces": [piece for piece in pieces if piece[0]], "new": new, "gone": gone}


def once(rows: list[dict]) -> list[dict]:
    """The first rows of samples.jsonl, at most MOST_ROWS, each prompt with the same response once."""
    found = {}
    for row in rows:
        found.setdefault((json.dumps(row["prompt"]), row["response"]), row)
    return list(found.values())[:MOST_ROWS]


TEMPLATES.filters |= {
    function.__name__: function
    for function in (shortened, prompt_text, plain, unbroken, evenly, changes, once)
}
