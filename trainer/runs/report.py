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
from functools import cache
from itertools import takewhile
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from atomic_files import write_whole, writing
from errors import first_line
from trainer.runs.health import SCRIPT
from trainer.runs.health_past import REPORT
from trainer.runs.report_plots import Drawing
from trainer.runs.samples import prompt_text
from trainer.runs.summary import in_words, tables

SHARE = 100  # so writing it takes at most 1 % of a run
FIRST = 1.0  # seconds: what the first writing is assumed to take
MOST_EVALUATIONS = 12  # shown side by side
MOST_ROWS = 5  # responses of a kind
MOST_CHARACTERS = 2000  # of a text
# A flag, with a number behind it if there is one: no line of the page ends inside.
FLAG = re.compile(r"--[a-z]\w*(?: -?\d+(?:\.\d+)?(?:e[-+]?\d+)?(?![^\s,;.)]))?")
WORDS = re.compile(r"([^\W\u2e80-\u9fff\uac00-\ud7af]+|\S)(\s*)")  # a Chinese character is a word
DISTRIBUTIONS = (  # name in histograms.jsonl, title, what to look for
    ("score", "scores", "The strong part should move up. Two bands: the responses are of two kinds."),
    ("length", "length (tokens)", "A band that moves to the top edge: responses grow until they are cut."),
    ("kl", "KL of a response (nats)", "Responses far above the line have left the reference."),
)
KINDS = {
    "best": "The best scores of all steps",
    "worst": "The worst scores",
    "limit": "Scored at the limit of a reward model",
    "longest": "The longest",
    "first": "The latest, whatever their score",
}


class Report:
    """The report of a run. Only the main process has one."""

    def __init__(self, run, folder):
        self.run, self.folder = run, folder
        self._seconds, self._written = FIRST, time.perf_counter()

    def is_due(self):
        """Whether writing it now keeps to its share of the run's time."""
        return time.perf_counter() - self._written >= SHARE * self._seconds

    def write(self, records, findings, state):
        """Write report.html. records: all lines of metrics.jsonl; findings: list of ``Finding``; state:
        "running", "ended", "stopped" or "ended by --strict_health 1: NAME". Raises InputError if the disk
        cannot be written. -> "", or a note if the page cannot be made: a fault in it must not end a run."""
        start = time.perf_counter()
        try:
            page = render(self.content(records, findings, state))
        except Exception as error:
            self._written = time.perf_counter()
            if isinstance(error, ImportError):  # ``RunLogger`` says so where it draws curves.png
                return ""
            return f"note: report.html cannot be made ({type(error).__name__}: {first_line(error)}); {REPORT}"
        with writing(path := self.folder.path / "report.html"):
            write_whole(path, page.encode(errors="replace"))  # JSON may hold half a character
        self._written = time.perf_counter()
        self._seconds = self._written - start
        return ""

    def content(self, records, findings, state):
        """What the page shows, by the names that report.html.jinja2 has for it. Arguments: see ``write``."""
        run, config, path = self.run, self.folder.config, self.folder.path
        numbered = list(enumerate(findings, 1))
        drawing = Drawing(records, numbered)
        plots = [drawing.curves(panel) for panel in (*run.display.panels, *run.display.details)]
        histograms = read_rows(path / "histograms.jsonl")
        heat = [
            drawing.distribution(title, look_for, histograms, name) for name, title, look_for in DISTRIBUTIONS
        ]
        return {
            "name": path.name,
            "script": run.script,
            "state": state,
            "step": last_step(records),
            "total_steps": run.total_steps,
            "written": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
            "words": in_words(run, records),
            "findings": numbered,
            "watched": run.script == SCRIPT,
            "tables": [cells(table) for table in tables(run, records)],
            "plots": [plot for plot in plots if plot],
            "heat": [plot for plot in heat if plot],
            "evaluations": evaluations(read_rows(path / "eval_samples.jsonl")),
            "samples": standing_out(read_rows(path / "samples.jsonl")),
            "command": config["command"],
            "resume_command": config["resume_command"],
            "flags": flag_rows(run.flags, config),
            "others": {
                name: x for name, x in config.items() if name not in run.flags and "command" not in name
            },
        }


def render(content):
    """What the page shows -> the page, as text."""
    return _template().render(content)


@cache
def _template():
    place = FileSystemLoader(Path(__file__).parent)
    how = {"autoescape": True, "undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    pages = Environment(loader=place, **how)
    filters = (shortened, prompt_text, plain, unbroken)
    pages.filters |= {function.__name__: function for function in filters}
    return pages.get_template("report.html.jinja2")


def read_rows(path):
    """A JSONL file of the run folder -> list of dicts; none if there is no such file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line]


def last_step(records):
    """The step of the last of these records; 0 where metrics.jsonl was lost."""
    return records[-1]["step"] if records else 0


def cells(table):
    """A table in Markdown -> its rows as lists of texts, the title first; none for ''."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return [row for n, row in enumerate(rows) if n != 1]  # without the line of dashes


def flag_rows(flags, config):
    """[(flag, value, default, whether they differ)] of a configuration. flags: {name: ``Flag``}."""
    return [
        (name, plain(config[name]), plain(flag.default), config[name] != flag.default)
        for name, flag in sorted(flags.items())
        if name in config
    ]


def plain(value):
    """A value of the configuration as text; what is text stays as it is."""
    if value is None:
        return "not set"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def unbroken(text):
    """A text, escaped, in which a flag and its value stay on one line."""
    return Markup(FLAG.sub(lambda found: f'<span class="flag">{found[0]}</span>', str(escape(text))))


def shortened(text):
    """A text with at most MOST_CHARACTERS; how many more there were is said."""
    text = text if isinstance(text, str) else plain(text)
    more = len(text) - MOST_CHARACTERS
    return text if more <= 0 else f"{text[:MOST_CHARACTERS]} … ({more} more characters)"


# ---------------------------------------------------------------------------- answers at every evaluation


def evaluations(rows):
    """Rows of eval_samples.jsonl -> {"steps": those shown, "all": how many there are, "prompts": [{"prompt",
    "answer", "kinds": [(name, cards)]}]}, a card for each shown evaluation, see ``card``."""
    steps = sorted({row["step"] for row in rows})
    chosen = evenly(steps, MOST_EVALUATIONS)
    found = {(row["place"], row["step"]): row for row in rows}
    prompts = []
    for place in sorted({row["place"] for row in rows}):
        mine = [found[place, step] for step in chosen if (place, step) in found]
        greedy = [{"step": row["step"], **row["greedy"]} for row in mine]
        kinds = [("greedy", cards(greedy)), ("sampled", cards(mine))]
        prompts.append({"prompt": mine[0]["prompt"], "answer": mine[0]["answer"], "kinds": kinds})
    return {"steps": chosen, "all": len(steps), "prompts": prompts}


def evenly(items, most):
    """At most so many of the items, the first and the last among them, evenly spaced."""
    if len(items) <= most:
        return items
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def cards(answers):
    """One prompt's answers, in the order of the evaluations -> what is shown of each: also pieces of its text
    with whether they are new, and how many words have come and gone since the one before."""
    shown, before = [], None
    for answer in answers:
        text = shortened(answer["response"])
        pieces, new, gone = changes(before, text)
        parts = {name: x for name, x in answer["parts"].items() if name != "score"}
        shown.append(
            {
                **answer,
                "score": answer["parts"].get("score"),
                "parts": parts,
                "pieces": pieces,
                "new": new,
                "gone": gone,
            }
        )
        shown[-1]["first"] = before is None
        before = text
    return shown


def changes(before, after):
    """Two texts -> ([(piece of ``after``, is it new)], how many words are new, how many gone).
    Without ``before`` nothing is new. Changes of white space alone are none."""
    if before is None or before == after:
        return [(after, False)], 0, 0
    old, now = (WORDS.findall(text) for text in (before, after))  # [(word, the space behind it)]
    same = sum(1 for _ in takewhile(lambda pair: pair[0][0] == pair[1][0], zip(old, now, strict=False)))
    start = after[: len(after) - len(after.lstrip())]
    pieces, new, gone = [(start + joined(now[:same]), False)], 0, 0
    words = [[word for word, _ in text[same:]] for text in (old, now)]
    # It ignores frequent words of long texts, and so it is quick for texts that repeat themselves too.
    for kind, a, b, c, d in SequenceMatcher(None, *words).get_opcodes():
        piece = joined(now[same + c : same + d])
        if kind == "equal":
            pieces.append((piece, False))
        else:
            new, gone, word = new + d - c, gone + b - a, piece.rstrip()
            pieces += [(word, True), (piece[len(word) :], False)]
    return [(piece, is_new) for piece, is_new in pieces if piece], new, gone


def joined(words):
    """[(word, the space behind it)] -> text."""
    return "".join(word + space for word, space in words)


# -------------------------------------------------------------------------------- responses of training


def standing_out(rows):
    """Rows of samples.jsonl -> [(title, rows)]: of each kind those that stand out most, each text once."""
    order = {
        "best": lambda row: -row["parts"]["score"],
        "worst": lambda row: row["parts"]["score"],
        "longest": lambda row: -row["length"],
        "limit": lambda row: -row["step"],
        "first": lambda row: -row["step"],
    }
    groups = []
    for kind, title in KINDS.items():
        chosen = {}
        for row in sorted((row for row in rows if row.get("kind") == kind), key=order[kind]):
            chosen.setdefault((json.dumps(row["prompt"]), row["response"]), row)
            if len(chosen) == MOST_ROWS:
                break
        if chosen:
            groups.append((title, list(chosen.values())))
    return groups
