"""summary.md: whether a run helped, in words and tables, for all three scripts.

A verdict, the findings (health.py), a table of the first and the last evaluation, a table of the training
steps, and which step the saved weights have. It is written when a run ends, also when it was stopped.

How the verdict tells a change from chance: s is how much the metric varies from one training step to the next
(``spread_of_steps``). A mean of k steps then has the standard error s / sqrt(k). An evaluation of n records
has s sqrt(b / n), b being the records of a step; of a share, or where no step has the metric, d / sqrt(n), d
being its standard deviation over the records (``spread_of_records``). Where an evaluation says how much the
records' changes since the start vary (``eval/…_change_std``: pairs of offline PPO), the difference is one of
equal records: its standard error is that number / sqrt(n). Twice the standard error of the difference is the
least difference that is called a rise or a fall. Evaluations share their sampling noise, so this is cautious
there.
"""

import math

from trainer.runs.displays import PARTS, RULES, compared_name, metric_names, only_critic
from trainer.runs.health import SCRIPT, as_markdown
from trainer.runs.health_past import spread_of_steps

SHARES = ("accuracy", "chosen_share", "chosen_preferred", "finished", "format_rate")  # each record: 0 to 1


def summarise(run, records, saved_step, findings=(), state="ended"):
    """The content of summary.md, Markdown.

    records: all lines of metrics.jsonl; saved_step: the step of the newest checkpoint, 0 if there is none;
    findings: what health.py has found in the records; state: see ``Report.write``.
    """
    if saved_step and run.result_path:
        saved = f"{run.result_path.name} has the weights after step {saved_step}"
    elif saved_step:
        saved = f"the newest checkpoint has the weights after step {saved_step}; no result is written yet"
    else:
        saved = "no weights are saved"
    words = [*in_words(run, records), *([f"The run was {state}."] if "--strict_health" in state else [])]
    parts = [
        "\n".join(f"- {line}" for line in words),
        as_markdown(findings) if run.script == SCRIPT else "",
        *tables(run, records),
        f"Files: {saved}{run.about_best()}. The curves are in curves.png, every step is in metrics.jsonl.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def in_words(run, records):
    """What came of a run -> sentences. records: all lines of metrics.jsonl."""
    size, held_out = run.args.batch_size * run.world.size, len(run.held_out_pairs or run.held_out or ())
    words = verdict(records, run.display, size, held_out, run.best_metric)
    return words + about_the_steps([r for r in records if r["step"]], run.total_steps)


def tables(run, records):
    """The two tables of a run, Markdown: evaluations, steps. records: all lines of metrics.jsonl."""
    evaluated = [r for r in records if any(name.startswith("eval/") for name in r)]
    return evaluation_table(evaluated), step_table([r for r in records if r["step"]], run.display)


def about_the_steps(steps, total):
    """Sentences on the number of steps, where there is something to say."""
    words, critic = [], sum(map(only_critic, steps))
    if steps and steps[-1]["step"] < total:
        words.append(f"The run stopped after step {steps[-1]['step']} of {total}.")
    if critic:
        words.append(f"Steps that trained only the critic (--critic_warmup_steps): {critic} of {len(steps)}.")
    return words


def verdict(records, display, batch_size, held_out, best_by=""):
    """Did the run help? -> sentences: the evaluations compared, or without two of them the training steps.

    batch_size: records of a step, over all processes; held_out: records of an evaluation; best_by: the metric
    that says which evaluation was the best, where it is not the one that is compared.
    """
    steps = [r for r in records if r["step"]]
    short = compared_name({name: 0 for r in records for name in r}, display.best)
    how = display, batch_size, held_out
    change = change_of(records, short, *how)
    if change is None and steps:
        return [f"Nothing was evaluated that says whether the run helped (eval/{short})."]
    if change is None:
        return ["No step was trained."]
    before, after, least, where = change
    sign = -1 if display.lower_is_better else 1
    name = short.replace("score_raw", "raw score")
    words = [compare(name, before, after, least, where, sign)]
    if after - before > least and (own := change_of([without_rules(r, short) for r in records], "own", *how)):
        words[0] = words[0].removesuffix(".") + by_rules(records, after - before, *own)
    found = values_of(records, f"eval/{short}")
    greedy = values_of(records, f"eval/{short}_greedy")
    if len(greedy) >= 2:
        words.append(compare(f"greedy {name}", greedy[0][1], greedy[-1][1], least, where, sign))
    words += best_evaluation(records, best_by or f"eval/{short}", sign)
    if not held_out:
        words.append("Nothing was held out; --eval_data_path tests on other data.")
    elif len(found) < 2:
        words.append("There are no two evaluations to compare yet.")
    if short != display.best:
        words.append("The raw score is compared, because --normalize_reward moves the scale of the score.")
    words += parts_of_the_change(records, steps)
    for name in ("accuracy", "judge") if display.best == "score" else ():
        found = values_of(records, f"eval/{name}")
        if len(found) >= 2:
            before, after = found[0][1], found[-1][1]
            words.append(f"The {name}, which is never rewarded: {before:.3f} before, {after:.3f} after.")
            if name == "accuracy" and before == after == 0:
                words[-1] = "No held-out answer was right, before or after (accuracy 0)."
    return words


def change_of(records, short, display, batch_size, held_out):
    """How a metric changed -> (before, after, the least difference that is no chance, where it was measured);
    None where no step and no two evaluations have it. short: its name without the group."""
    numbers = values_of([r for r in records if r["step"]], f"{display.group}/{short}")
    spread = spread_of_steps([x for _, x in numbers])
    found = values_of(records, f"eval/{short}")
    if len(found) >= 2:
        least = 2 * spread * math.sqrt(2 * batch_size / max(held_out, 1))
        if not numbers or short in SHARES:  # steps have none, or one of records that they have learned
            least = 2 * spread_of_records(records, short) * math.sqrt(2 / max(held_out, 1))
        if changes := values_of(records, f"eval/{short}_change_std"):
            least = 2 * changes[-1][1] / math.sqrt(max(held_out, 1))
        return found[0][1], found[-1][1], least, f"on {held_out} held-out {display.tested or display.unit}"
    if not numbers:
        return None
    count = share_of_steps(len(numbers))
    least = 2 * spread * math.sqrt(2 / count)
    where = f"in training ({of_steps('first', count)} and {of_steps('last', count)} of {len(numbers)})"
    return mean(numbers[:count]), mean(numbers[-count:]), least, where


def without_rules(record, score):
    """A record with "reward/own" and "eval/own": what of this score is not by ``RULES``, if any of it is."""
    own = {}
    for group in ("reward", "eval"):
        rules = [record[f"{group}/{rule}"] for rule in RULES if f"{group}/{rule}" in record]
        if rules and f"{group}/{score}" in record:
            own[f"{group}/own"] = record[f"{group}/{score}"] - sum(rules)
    return record | own


def spread_of_records(records, name):
    """The standard deviation over the records of an evaluation: eval/<name>_std, the larger one of the first
    and the last evaluation. Where it is not logged, the most that a share with this mean can have; NaN for
    what is no share."""
    logged = [x for _, x in values_of(records, f"eval/{name}_std")]
    if logged:
        return max(logged[0], logged[-1])
    if name.removesuffix("_greedy") not in SHARES:
        return math.nan
    means = [x for _, x in values_of(records, f"eval/{name}")]
    return math.sqrt(max(x * (1 - x) for x in (means[0], means[-1])))


def best_evaluation(records, name, sign):
    """A sentence on the best evaluation by this metric, where it was not the last one; else none."""
    found = values_of(records, name)
    best_step, best = max(found, key=lambda pair: sign * pair[1], default=(0, 0.0))
    if not found or best == found[-1][1]:
        return []
    last = f"the last one has {found[-1][1]:.3f}"
    return [f"The best evaluation by {name} was at step {best_step}: {best:.3f}; {last}."]


def by_rules(records, rise, before, after, least, _):
    """The end of the sentence on a score that rose by ``rise``: whether most of it is by ``RULES``. before,
    after, least: of the score without them, as ``change_of`` has them."""
    if after - before > min(least, rise / 2):
        return "."
    parts = [name.removeprefix("reward/") for name in metric_names(PARTS, records)]
    measured = {p: values_of(records, f"eval/{p}") or values_of(records, f"reward/{p}") for p in parts}
    rules = ", ".join(part for part, x in measured.items() if part in RULES and x[-1][1] > x[0][1])
    own = " and ".join(part for part in parts if part not in RULES)
    how = "fell" if before - after > least else "did not clearly rise"
    return f", but mostly by rules ({rules}): {own} {how}, from {before:.3f} to {after:.3f}."


def parts_of_the_change(records, steps):
    """Where a change of PPO's score comes from: a sentence with every part's change on held-out prompts."""
    changes = {}
    for part in (name.removeprefix("reward/") for name in metric_names(PARTS, steps)):
        found = values_of(records, f"eval/{part}")
        if len(found) >= 2:
            changes[part] = found[-1][1] - found[0][1]
    if len(changes) < 2:
        return []
    largest_first = sorted(changes, key=lambda part: -abs(changes[part]))
    return [
        "Change of each part: " + ", ".join(f"{part} {changes[part]:+.3f}" for part in largest_first) + "."
    ]


def compare(name, before, after, least, where, sign):
    """One sentence on two values of a metric. least: the least difference that counts, NaN if not known;
    sign: -1 if lower is better, else 1."""
    values = f"from {before:.3f} to {after:.3f} {where}"
    if math.isnan(least):
        return f"The {name} went {values}: too few steps, or no known spread, to tell this from chance."
    if not abs(after - before) > least:
        return f"The {name} did not clearly change: {values}; up to {least:.2g} can be chance."
    words = " Lower is better." if sign < 0 else ""
    if sign * (after - before) < 0:
        words += " The run made it worse."
    return f"The {name} {'rose' if after > before else 'fell'} {values}.{words}"


def evaluation_table(records):
    """A table of the first and the last of these records, which have evaluations; '' if there is only one.

    Metrics with a greedy twin (eval/<name>_greedy) get two more columns.
    """
    if len(records) < 2:
        return ""
    before, after = records[0], records[-1]
    greedy = any(name.endswith("_greedy") for name in after)
    title = "sampled before | after | greedy before | after" if greedy else "before | after"
    rows = [f"| held out | {title} |", "|---|" + "---|" * (4 if greedy else 2)]
    for name in after:
        if name.startswith("eval/") and not name.endswith("_greedy") and name in before:
            keys = [name, f"{name}_greedy"] if greedy else [name]
            cells = " | ".join(shown(r[key]) if key in r else "" for key in keys for r in (before, after))
            rows.append(f"| {name.removeprefix('eval/').replace('_', ' ')} | {cells} |")
    return "\n".join(rows)


def step_table(steps, display):
    """A table of the metrics that a display follows: the first and the last steps, and the best one."""
    if not steps:
        return ""
    count, rows = share_of_steps(len(steps)), []
    names = [(name, best) for pattern, best in display.followed for name in metric_names(pattern, steps)]
    raw = [n for n in dict.fromkeys(n for r in steps for n in r) if n.endswith("_raw") and "reward/" in n]
    for name, best in names + [(n, "highest" * (n == "reward/score_raw")) for n in raw]:
        numbers, best = values_of(steps, name), "" if f"{name}_raw" in raw else best  # its scale moves
        if not numbers:
            continue
        cells = [shown(mean(numbers[:count])), shown(mean(numbers[-count:])), ""]
        if best:
            step, value = (max if best == "highest" else min)(numbers, key=lambda pair: pair[1])
            cells[2] = f"{shown(value)} (step {step})"
        rows.append(f"| {name} | {' | '.join(cells)} |")
    title = f"| training | {of_steps('first', count)} | {of_steps('last', count)} | best step |"
    return "\n".join([title, "|---|---|---|---|", *rows])


def share_of_steps(count):
    """How many steps at the start and at the end are averaged: a tenth, at least one."""
    return max(1, count // 10)


def of_steps(which, count):
    """'first step', or 'first 4 steps'."""
    return f"{which} step" if count == 1 else f"{which} {count} steps"


def shown(x):
    """A number with three decimals, or if it is small with two digits."""
    return f"{x:.3f}" if not 0 < abs(x) < 0.01 else f"{x:.2g}"


def values_of(records, name):
    """[(step, value)] of a metric, where it was logged and is a number."""
    found = ((r["step"], r[name]) for r in records if name in r)
    return [(step, x) for step, x in found if math.isfinite(x)]


def mean(numbers):
    """The mean of the values of [(step, value)]."""
    return sum(x for _, x in numbers) / len(numbers)
