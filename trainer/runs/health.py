"""The health of a run: its metrics -> findings, each with symptom, numbers, causes, remedy and source.

    python -m trainer.runs.health out/run_1

says what is unusual in a run folder, also one of an older version. Exit code 0; 1 where a finding is "wrong";
2 if the folder cannot be read. A run says each finding when it begins, once, and its summary.md has all of
them; --strict_health 1 ends a run on one that is "wrong". docs/health.md explains each.

A check is a pure function, ``Past`` (health_past.py) -> ``Finding`` or None; its name is the finding's. For
another one, add a function to ``ROWS`` of the file that it belongs to:

health_start.py       flags, data, templates: what is known when a run begins
health_policy.py      KL, ratio, size of the steps, entropy, sampler
health_critic.py      critic and advantages
health_responses.py   ends, length, repetition of the responses
health_reward.py      scores and rewards
"""

import sys
from dataclasses import replace

from errors import InputError, run_script
from trainer.runs import health_critic, health_policy, health_responses, health_reward, health_start
from trainer.runs.health_past import LOOK, WRONG, Past, counted
from trainer.runs.health_read import read_run

# Of findings since the same step the first in this order is said first: the critic suffers from all others.
ROWS = (*health_policy.ROWS, *health_responses.ROWS, *health_reward.ROWS, *health_critic.ROWS)
SCRIPT = "train_ppo.py"  # stages 1 and 2 have none of the metrics


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
                new.append(self.given[name])
        return new

    @property
    def sorted(self):
        """All findings: the wrong ones first, then by step, then in the order of the checks."""
        order = [row.__name__ for row in (*health_start.ROWS, *ROWS)]
        return sorted(self.given.values(), key=lambda f: (f.level != WRONG, f.step, order.index(f.name)))


def findings(records, args):
    """Lines of metrics.jsonl (list of dicts) and config.json (dict; {}: not known) -> list of ``Finding``:
    the wrong ones first, then by step."""
    return Health(args, records).sorted


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
    records, args = read_run(argv[0])
    if args.get("script", SCRIPT) != SCRIPT:
        print(f"{argv[0]}: a run of {args['script']}; only runs of {SCRIPT} are checked")
        return 0
    if not records:
        print(f"{argv[0]}: no step was logged yet")
        return 0
    found = findings(records, args)
    steps = max(r["step"] for r in records)
    print(f"{argv[0]}: {counted(steps, 'step')}\n\n{as_markdown(found)}")
    return int(any(f.level == WRONG for f in found))


if __name__ == "__main__":
    run_script(lambda: sys.exit(main()))
