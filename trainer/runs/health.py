"""The health of a run: its metrics -> findings, each with symptom, numbers, causes, remedy and source.

    python -m trainer.runs.health out/run_1

says what is unusual in a run folder, also one of an older version. Exit code 0; 1 where a finding is "wrong";
2 if the folder cannot be read. A run says each finding when it begins, once, and its summary.md has all of
them; --strict_health 1 ends a run on one that is "wrong". docs/health.md explains each.

What is looked for are the rows of health.toml, with the functions of health_rules.py; what they look at is in
health_past.py.
"""

import json
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from errors import InputError, run_script
from trainer.runs.health_past import Past
from trainer.runs.health_rules import LOOK, MOVE, RULES, WRONG, Rule, remedy_of

SCRIPT = "train_ppo.py"  # stages 1 and 2 have none of the metrics


@dataclass(frozen=True)
class Finding:
    """Something that is unusual in a run (level "look") or cannot be right ("wrong").

    step: since when; numbers: what shows it; causes: the likely ones, the likeliest first; remedy: flags with
    values to try, or words; source: where the limit comes from.
    """

    name: str
    level: str
    step: int
    symptom: str
    numbers: str
    causes: tuple[str, ...]
    remedy: str
    source: str


def finding_of(rule: Rule, seen: dict, past: Past) -> Finding:
    """A row and what it has seen in this run -> the finding."""
    newest = past.latest[-1] if past.latest else {}
    values = {**past.facts, **past.args, **newest, **seen}
    return Finding(
        name=rule.name,
        level=WRONG if seen.get("wrong") else LOOK,
        step=seen.get("since", past.step),
        symptom=rule.symptom.format_map(values),
        numbers=", ".join(filled(rule.numbers, values)),
        causes=tuple(filled(rule.causes, values)),
        remedy=remedy_of(filled(rule.remedy, values), past),
        source=rule.source,
    )


def filled(texts: Iterable[str], values: dict) -> list[str]:
    """The texts with their values; one with a value that is not known is left out."""
    found = []
    for text in texts:
        with suppress(KeyError, TypeError, ValueError):
            found.append(text.format_map(values))
    return found


class Health:
    """The findings of a run, step by step.

    args: config.json as a dict, or {}. What it costs at a step does not grow with the number of steps.
    """

    def __init__(self, args: dict, records: Iterable[dict] = ()):
        """records: the lines so far of a run that is resumed, or that has ended."""
        self._given = {}  # {name: its ``Finding``, the first one, or the first one that is "wrong"}
        self._said = {}  # {name: the level that ``add`` has returned}
        self._past = Past(args)
        logged = args.get("offline_data_path")
        self._rules = [rule for rule in RULES if rule.offline or not logged]
        if args.get("script", SCRIPT) != SCRIPT:
            self._rules = []
        self._look()  # at flags and data: nothing else is known yet
        for record in records:
            self.add(record)

    def add(self, record: dict) -> list[Finding]:
        """Take in a line of metrics.jsonl -> the findings that begin with it, or become "wrong" with it."""
        self._past.add(record)
        self._look()
        begun = [f for f in self.sorted if self._said.get(f.name) != f.level]
        self._said |= {f.name: f.level for f in begun}
        return begun

    def _look(self):
        """Keep what the rules find."""
        for rule in self._rules:
            known = self._given.get(rule.name)
            if known and known.level == WRONG:
                continue
            seen = rule.seen(self._past)
            if seen and not known:
                self._given[rule.name] = finding_of(rule, seen, self._past)
            elif seen and seen.get("wrong"):
                self._given[rule.name] = finding_of(rule, {**seen, "since": known.step}, self._past)

    @property
    def sorted(self) -> list[Finding]:
        """All findings: those of before the first step, which may be the cause of others, then the wrong
        ones, then by step, then in the order of the rules. A flag has one value in all remedies: that of the
        first of them."""
        values = {}

        def agreed(move):
            return f"--{move[1]} {values.setdefault(move[1], move[3])}"

        found = [self._given[rule.name] for rule in RULES if rule.name in self._given]
        found.sort(key=lambda f: (f.step > 0, f.level != WRONG, f.step))
        return [replace(f, remedy=MOVE.sub(agreed, f.remedy)) for f in found]


def findings(records: list[dict], args: dict) -> list[Finding]:
    """Lines of metrics.jsonl and config.json ({}: not known) -> its findings, sorted as ``Health`` has
    them."""
    return Health(args, records).sorted


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
    records, args = read_run(Path(argv[0]))
    if args.get("script", SCRIPT) != SCRIPT:
        print(f"{argv[0]}: a run of {args['script']}; only runs of {SCRIPT} are checked")
        return 0
    found = findings(records, args)
    print(f"{argv[0]}: step {records[-1]['step'] if records else 0}\n\n{as_markdown(found)}")
    return int(any(f.level == WRONG for f in found))


def read_run(folder: Path) -> tuple[list[dict], dict]:
    """A run folder -> lines of metrics.jsonl, config.json. An incomplete last line, of a run that was killed,
    is left out."""
    try:
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").split("\n")
        records = [json.loads(line) for line in lines[:-1]]  # then comes nothing, or half a line
        return records, json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"{folder}: cannot be read as a run folder ({error}); name one such as out/run_1"
        ) from None


if __name__ == "__main__":
    run_script(lambda: sys.exit(main()))
