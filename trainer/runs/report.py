"""report.html: a whole run on one page, which needs no network and runs no script; and curves.png.

What came of it and what is wrong, the curves, the distributions, the same held-out prompts' answers at every
evaluation, responses that stand out, the configuration. The page is report.html.jinja2; this file has what it
shows. Texts of models and data are escaped by Jinja2, and the page forbids itself to load or to run anything.

It is written as the run goes, when ``SHARE`` times as long as the last writing took has gone by, and always
when the run ends or is stopped.
"""

import json
import re
import time
from contextlib import suppress
from difflib import SequenceMatcher
from pathlib import Path

from atomic_files import write_whole, writing
from errors import InputError, first_line
from trainer.runs.displays import DISTRIBUTIONS, Records
from trainer.runs.samples import prompt_text
from trainer.runs.summary import filled, in_words, tables

SHARE = 100  # so writing it takes at most 1 % of a run
DRAWN = 6  # panels of curves.png; report.html has all
# A word with the space before it; a Chinese character is a word.
WORDS = re.compile(r"\s*(?:[^\W\u2e80-\u9fff\uac00-\ud7af]+|\S)")


class Report:
    """The report of a run. Only the main process has one. say(line): prints a line."""

    def __init__(self, run, folder, say):
        self.run = run
        self.folder = folder
        self.say = say
        self._due = time.perf_counter() + SHARE  # as if writing it took a second

    def is_due(self) -> bool:
        """Whether writing it now keeps to its share of the run's time."""
        return time.perf_counter() >= self._due

    def write(self, findings: list, state: str) -> None:
        """Write report.html, and curves.png if the run has ended. findings: list of ``Finding``; state: see
        ``in_words``. Raises InputError if the disk cannot be written. If they cannot be made, a line says so:
        a fault in them must not end a run."""
        start = time.perf_counter()
        try:
            self._write(findings, state)
        except InputError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {first_line(error)}"
            self.say(f"note: report.html cannot be made ({reason}); report it on the project's issue page")
        end = time.perf_counter()
        self._due = end + SHARE * (end - start)

    def _write(self, findings, state):
        from trainer.runs.plots import draw_png, draw_svgs  # here, because matplotlib takes long to load

        run = self.run
        folder = self.folder.path
        records = read_metrics(folder)
        numbered = list(enumerate(findings, 1))
        page = filled(
            "report.html.jinja2",
            run=run,
            folder=self.folder,
            state=state,
            written=time.strftime("%Y-%m-%d %H:%M %Z"),
            words=in_words(run, records, state),
            findings=numbered,
            tables=tables(run, records),
            plots=draw_svgs(records, run.display.panels, numbered),
            fans=draw_svgs(read_rows(folder / "deciles.jsonl"), DISTRIBUTIONS, numbered),
            answers=read_rows(folder / "eval_samples.jsonl"),
            samples=read_rows(folder / "samples.jsonl"),
            prompt_text=prompt_text,
            changes=changes,
        )
        path = folder / "report.html"
        with writing(path):
            write_whole(path, page.encode(errors="replace"))  # JSON may hold half a character
        if state != "running":
            path = folder / "curves.png"
            with writing(path):
                draw_png(records, run.display.panels[:DRAWN], path)


def read_rows(path: Path) -> list[dict]:
    """The rows of a JSONL file of the run folder; none if there is no such file. Half a line, of a run that
    was killed, is left out."""
    rows = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with suppress(ValueError):
            rows.append(json.loads(line))
    return rows


def read_metrics(folder: Path) -> Records:
    """The run's metrics.jsonl, without the numbers that were not finite."""
    rows = read_rows(folder / "metrics.jsonl")
    return [{name: x for name, x in row.items() if x is not None} for row in rows]


def changes(after: str, before: str) -> list[tuple[str, bool]]:
    """Two texts -> the pieces of ``after``, each with whether it is new."""
    now = WORDS.findall(after)
    pieces = []
    for kind, _, _, start, end in SequenceMatcher(None, WORDS.findall(before), now).get_opcodes():
        pieces.append(("".join(now[start:end]), kind != "equal"))
    return pieces
