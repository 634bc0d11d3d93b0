"""The health of a run: its metrics -> findings, each with symptom, numbers, causes, remedy and source.

    python -m trainer.runs.health out/run_1

says what is unusual in a run folder, also one of an older version; for a folder of runs, in its newest one.
Exit code 0; 1 where a finding is "wrong"; 2 if the folder cannot be read. A run says each finding when it
begins, once, and its summary.md has all of them; --strict_health 1 ends a run on one that is "wrong".
docs/health.md explains each.

A check is a pure function, ``Past`` (health_past.py) -> ``Finding`` or None; its name is the finding's. For
another one, add a function to ``ROWS`` of the file that it belongs to:

health_start.py       flags, data, templates: what is known when a run begins
health_policy.py      KL, ratio, size of the steps, entropy, sampler
health_critic.py      critic and advantages
health_responses.py   ends, length, repetition of the responses
health_reward.py      scores and rewards
"""

import re
import sys
from dataclasses import replace
from pathlib import Path

from errors import InputError, run_script
from trainer.runs import health_critic, health_policy, health_responses, health_reward, health_start
from trainer.runs.health_past import LOOK, WRONG, Past, counted
from trainer.runs.health_read import is_number, read_run

# Of findings since the same step the first in this order is said first: the critic suffers from all others.
ROWS = (*health_policy.ROWS, *health_responses.ROWS, *health_reward.ROWS, *health_critic.ROWS)
SCRIPT = "train_ppo.py"  # stages 1 and 2 have none of the metrics
# What a remedy does with a flag: "--lam 1", "--learning_rate at a third", "a smaller --max_gen_len".
MOVE = re.compile(
    r"--(\w+) (-?[\d.]+(?:e[-+]?\d+)?|at a third|three times as high)|a (smaller|larger) --(\w+)"
)
LESS = ("at a third", "smaller")


class Health:
    """The findings of a run, step by step. ``given``: {name: ``Finding``}, the first of each level.

    args: config.json as a dict, or {}. What it costs at a step does not grow with the number of steps.
    """

    def __init__(self, args, records=()):
        """records: the lines so far of a run that is resumed, or that has ended."""
        self.given, self._past, self._begun = {}, Past(args), False
        for record in records:
            self.add(record)

    def add(self, record):
        """Take in a line of metrics.jsonl -> the findings that begin with it, or become "wrong" with it."""
        rows = ROWS if record["step"] else ()
        if rows and self._past.flag("offline_data_path"):  # scores, lengths and ratio are not the policy's
            rows = (*health_critic.ROWS, health_reward.held_out_falls)
        if not self._begun and self._past.flag("script", SCRIPT) == SCRIPT:
            rows = (*health_start.ROWS, *rows)
        self._begun, new = True, []
        self._past.add(record)
        for row in rows:
            name = row.__name__
            known = self.given.get(name)
            if known and known.level == WRONG:
                continue
            found = row(self._past)
            if found and not (known and found.level == LOOK):
                since = min(known.step, found.step) if known else found.step
                self.given[name] = replace(found, name=name, step=since)
                new.append(name)
        if not new:
            return []
        met = {cause for f in self.given.values() if f.level == WRONG for cause in f.causes}
        for name, f in self.given.items():
            if f.level == LOOK and met.intersection(f.blamed):
                self.given[name] = replace(
                    f, level=WRONG, symptom=f"{f.symptom}, and the run breaks: change it first"
                )
                new.append(name)
        return [f for f in self.sorted if f.name in new]

    @property
    def sorted(self):
        """All findings: the wrong ones first, then by step, then in the order of the checks. Their remedies
        move no flag both ways."""
        order = [row.__name__ for row in (*health_start.ROWS, *ROWS)]
        found = sorted(self.given.values(), key=lambda f: (f.level != WRONG, f.step, order.index(f.name)))
        return one_way(found, self._past.args)


def findings(records, args):
    """Lines of metrics.jsonl (list of dicts) and config.json (dict; {}: not known) -> list of ``Finding``:
    the wrong ones first, then by step."""
    return Health(args, records).sorted


def one_way(found: list, args: dict) -> list:
    """Findings, the most important one first -> the same. Where a remedy would raise a flag that an earlier
    one lowers, or the other way round, it names the earlier finding instead."""
    first, kept = {}, []  # {flag: (does its first remedy raise it?, that finding's name)}
    for finding in found:
        remedy = finding.remedy
        for move in MOVE.finditer(finding.remedy):
            name, up = move[1] or move[4], raises(move, args)
            if up is None:
                continue
            raised, before = first.setdefault(name, (up, finding.name))
            if up != raised:
                remedy = remedy.replace(move[0], f"(--{name}: do first what {before} says)")
        kept.append(replace(finding, remedy=remedy))
    return kept


def raises(move: re.Match, args: dict) -> bool | None:
    """Does this ``MOVE`` raise its flag? None: it has that value already, or its value is not known."""
    if not move[2] or not move[2][-1].isdigit():
        return (move[2] or move[3]) not in LESS
    now = args.get(move[1])
    return None if not is_number(now) or float(move[2]) == now else float(move[2]) > now


def one_line(finding):
    """A finding as one line, for the terminal."""
    return (
        f"{finding.level}, since step {finding.step}: {finding.symptom}. {finding.numbers}. "
        f"Try: {finding.remedy} (docs/health.md, {finding.name})"
    )


def as_markdown(found):
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


def main(argv=None):
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


if __name__ == "__main__":
    run_script(lambda: sys.exit(main()))
