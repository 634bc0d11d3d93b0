"""The health of a run: its metrics -> findings, each with symptom, numbers, causes, remedy and source.

    python -m trainer.runs.health out/run_1

says what is unusual in a run folder, also one of an older version; for a folder of runs, in its newest one.
Exit code 0; 1 where a finding is "wrong"; 2 if the folder cannot be read. A run says each finding when it
begins, once, and its summary.md has all of them; --strict_health 1 ends a run on one that is "wrong".
docs/health.md explains each.

What is looked for are the rows of health_rules.py; what they look at is in health_past.py.
"""

import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from errors import InputError, run_script
from trainer.runs.health_past import Past
from trainer.runs.health_rules import LOOK, RULES, WRONG, Rule, advice, counted

SCRIPT = "train_ppo.py"  # stages 1 and 2 have none of the metrics
# What a remedy does with a flag.
MOVE = re.compile(r"--(\w+) (-?[\d.]+(?:e[-+]?\d+)?)|a (smaller|larger) --(\w+)")


@dataclass(frozen=True)
class Finding:
    """Something that is unusual in a run (level "look") or cannot be right ("wrong").

    step: since when; numbers: what shows it; causes: the likely ones, the likeliest first; remedy: flags with
    values to try, or words; source: where the limit comes from; blamed: causes, in the words of the rules.
    Where a finding that is wrong has one of them, this one is wrong too.
    """

    name: str
    level: str
    step: int
    symptom: str
    numbers: str
    causes: tuple[str, ...]
    remedy: str
    source: str
    blamed: tuple[str, ...] = ()


def finding_of(rule: Rule, seen: dict, past: Past) -> Finding:
    """A row and the values that it has seen in this run -> the finding."""
    newest = past.latest[-1] if past.latest else {}
    values = defaultdict(str, {**past.facts, **past.args, **newest, **advice(past), **seen})

    def texts(field, separator):
        """The parts of a text of the row, or of the one that was seen instead, with their values."""
        parts = seen.get(field, getattr(rule, field)).split(separator)
        return list(filter(None, (filled(part, values) for part in parts)))

    return Finding(
        name=rule.name,
        level=WRONG if seen.get("wrong") else rule.level,
        step=seen.get("since", past.step),
        symptom=texts("symptom", "\n")[0],
        numbers=", ".join(texts("numbers", ", ")),
        causes=tuple(texts("causes", "; ")),
        remedy=texts("remedy", " | ")[0],
        source=rule.source,
        blamed=seen.get("blamed", ()),
    )


def filled(text: str, values: dict) -> str:
    """A text with its values; "" where it has a number that is not known. Where values are empty, what stands
    between them and the others goes too."""
    try:
        words = " ".join(text.format_map(values).split())
    except ValueError:  # "" is no number
        return ""
    return words.strip(" ,;").removeprefix("or ")


class Health:
    """The findings of a run, step by step. ``given``: {name: ``Finding``}, the first of each level.

    args: config.json as a dict, or {}. What it costs at a step does not grow with the number of steps.
    """

    def __init__(self, args: dict, records: Iterable[dict] = ()):
        """records: the lines so far of a run that is resumed, or that has ended."""
        self.given: dict[str, Finding] = {}
        self._past = Past(args)
        self._rules = RULES if args.get("script", SCRIPT) == SCRIPT else []
        self._new = self._look()  # at flags and data: nothing else is known yet
        if args.get("offline_data_path"):
            self._rules = [rule for rule in self._rules if rule.offline]
        for record in records:
            self.add(record)

    def add(self, record: dict) -> list[Finding]:
        """Take in a line of metrics.jsonl -> the findings that begin with it, or become "wrong" with it."""
        self._past.add(record)
        new = self._new | self._look()
        self._new = set()
        if not new:
            return []
        met = {cause for f in self.given.values() if f.level == WRONG for cause in f.causes}
        for name, f in self.given.items():
            if f.level == LOOK and met.intersection(f.blamed):
                symptom = f"{f.symptom}, and the run breaks: change it first"
                self.given[name] = replace(f, level=WRONG, symptom=symptom)
                new.add(name)
        return [f for f in self.sorted if f.name in new]

    def _look(self) -> set[str]:
        """Keep what the rules find -> the names of the findings that are new, or now "wrong"."""
        new = set()
        for rule in self._rules:
            known = self.given.get(rule.name)
            if known and known.level == WRONG:
                continue
            seen = rule.when(self._past)
            if not seen:
                continue
            seen = seen if isinstance(seen, dict) else {}
            if known and not seen.get("wrong"):
                continue
            found = finding_of(rule, seen, self._past)
            self.given[rule.name] = replace(found, step=min(known.step, found.step)) if known else found
            new.add(rule.name)
        return new

    @property
    def sorted(self) -> list[Finding]:
        """All findings: the wrong ones first, then by step, then in the order of the rules. Their remedies
        move no flag both ways."""
        found = [self.given[rule.name] for rule in RULES if rule.name in self.given]
        found.sort(key=lambda f: (f.level != WRONG, f.step))
        return one_way(found, self._past.args)


def findings(records: list[dict], args: dict) -> list[Finding]:
    """Lines of metrics.jsonl and config.json ({}: not known) -> its findings: the wrong ones first, then by
    step."""
    return Health(args, records).sorted


def one_way(found: list[Finding], args: dict) -> list[Finding]:
    """Findings, the most important one first -> the same. Where a remedy would raise a flag that an earlier
    one lowers, or the other way round, it names the earlier finding instead."""
    first = {}  # {flag: (does its first remedy raise it?, that finding's name)}
    kept = []
    for finding in found:
        remedy = finding.remedy
        for move in MOVE.finditer(finding.remedy):
            name = move[1] or move[4]
            now = args.get(name)
            if move[2] and (not isinstance(now, int | float) or float(move[2]) == now):
                continue  # it is not known, or there already
            raises = float(move[2]) > now if move[2] else move[3] == "larger"
            raised, before = first.setdefault(name, (raises, finding.name))
            if raises != raised:
                remedy = remedy.replace(move[0], f"(--{name}: do first what {before} says)")
        kept.append(replace(finding, remedy=remedy))
    return kept


def one_line(finding: Finding) -> str:
    """A finding as one line, for the terminal."""
    return (
        f"{finding.level}, since step {finding.step}: {finding.symptom}. {finding.numbers}. "
        f"Try: {finding.remedy} (docs/health.md, {finding.name})"
    )


def as_markdown(found: list[Finding]) -> str:
    """Findings -> the section of summary.md; a sentence if there are none."""
    if not found:
        return "Health: nothing unusual was found."
    lines = ["Health (docs/health.md explains each finding):", ""]
    for f in found:
        lines += [
            f"- **{f.name}** ({f.level}, since step {f.step}): {f.symptom}.",
            f"  - numbers: {f.numbers}",
            f"  - likely causes: {'; '.join(f.causes)}",
            f"  - try: {f.remedy}",
            f"  - source: {f.source}",
        ]
    return "\n".join(lines)


def main(argv=None) -> int:
    """Print the findings of the run folder that is named -> the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if len(argv) != 1 or argv[0].startswith("-"):
        raise InputError("usage: python -m trainer.runs.health RUN_FOLDER, such as out/run_1")
    folder = newest_run(Path(argv[0]))
    records, args = read_run(folder)
    where = f"{folder}" if folder == Path(argv[0]) else f"{folder}, the newest run in {argv[0]}"
    if args.get("script", SCRIPT) != SCRIPT:
        print(f"{where}: a run of {args['script']}; only runs of {SCRIPT} are checked")
        return 0
    if not records:
        print(f"{where}: no step was logged yet")
        return 0
    found = findings(records, args)
    steps = max(r["step"] for r in records)
    print(f"{where}: {counted(steps, 'step')}\n\n{as_markdown(found)}")
    return int(any(f.level == WRONG for f in found))


def newest_run(folder: Path) -> Path:
    """A folder of runs -> the run that was logged last; any other folder -> itself."""
    logs = [] if (folder / "metrics.jsonl").exists() else folder.glob("*/metrics.jsonl")
    newest = max(logs, key=lambda path: path.stat().st_mtime, default=None)
    return newest.parent if newest else folder


def read_run(folder: Path) -> tuple[list[dict], dict]:
    """A run folder -> lines of metrics.jsonl, config.json.

    An incomplete last line, of a run that was killed, is left out. InputError names what cannot be read.
    """
    path = folder / "metrics.jsonl"
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{folder}: is no run folder ({reason}); name one such as out/run_1") from None
    records = []
    for number, line in enumerate(lines[:-1], 1):  # behind the last line end is nothing, or half a line
        try:
            records.append(json.loads(line))
        except ValueError as error:
            raise InputError(f"{path}, line {number}: is no line of metrics ({error}); restore it") from None
    return records, config


if __name__ == "__main__":
    run_script(lambda: sys.exit(main()))
