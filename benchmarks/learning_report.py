"""Tables and pictures of docs/learning.md from the runs in benchmarks/results/learning.json.

``python benchmarks/learning.py --table`` calls ``write``: it replaces what stands between the two marks of
each table in docs/learning.md, and draws docs/learning_<task>.png.
"""

import re
import statistics
from collections import Counter

from common import ROOT, table
from learning_tasks import AT_DEFAULTS, TASKS

PAGE = ROOT / "docs" / "learning.md"
PLAIN_RLOO = "RLOO, 4 answers"
WITHOUT_CRITIC = {  # {variant: its flags}, on task (b)
    PLAIN_RLOO: "`--num_generations 4`",
    "RLOO, half the rate": "`--num_generations 4 --learning_rate 2.5e-4`",
    "RLOO, twice the rate": "`--num_generations 4 --learning_rate 1e-3`",
    "RLOO, 2 answers": "`--num_generations 2`",
    "RLOO, 2 answers, half the rate": "`--num_generations 2 --learning_rate 2.5e-4`",
    "RLOO, 8 answers": "`--num_generations 8`",
    "RLOO, twice the KL's weight": "`--num_generations 4 --kl_coef 0.04`",
    "RLOO, half the rate, batches of 64": "`--num_generations 4 --learning_rate 2.5e-4 --batch_size 64`",
    "RLOO, half the rate, 2 PPO epochs": "`--num_generations 4 --learning_rate 2.5e-4 --ppo_epochs 2`",
    "RLOO, half the rate, 2 PPO epochs, replay": (
        "`--num_generations 4 --learning_rate 2.5e-4 --ppo_epochs 2 --replay_batches 1`"
    ),
    "group, 4 answers": "`--num_generations 4`",
    "RLOO, half the rate, groups filtered": "`--num_generations 4 --learning_rate 2.5e-4 --filter_groups 2`",
}
OPTIONS = {  # {variant: (its flags, the variant that it is compared with)}, on task (b)
    "KL target 0.5": ("`--kl_target 0.5`", ""),
    "KL target 0.5, from 0.2": ("`--kl_target 0.5 --kl_coef 0.2`", ""),
    "KL target 0.5, shorter horizon": ("`--kl_target 0.5 --kl_coef 0.2 --kl_horizon 256`", ""),
    "entropy 0.01": ("`--entropy_coef 0.01`", ""),
    "entropy 0.05": ("`--entropy_coef 0.05`", ""),
    "entropy top 0.2": ("`--entropy_top 0.2`", ""),
    "demonstrations": ("`--ptx_data_path dataset/demo/sft.jsonl`", ""),
    "average 0.9": ("`--ema_beta 0.9`: the actor", ""),
    "RLOO, half the rate, groups filtered": (
        "`--filter_groups 2`, with RLOO at half the rate",
        "RLOO, half the rate",
    ),
}
ON_ALL_TASKS = {PLAIN_RLOO, "group, 4 answers"}
NOT_BUILT = {"critic warm-up auto"}  # tried with code that was not kept
ELSEWHERE = NOT_BUILT | (WITHOUT_CRITIC.keys() | OPTIONS.keys()) - ON_ALL_TASKS  # not among the decisions
BESIDE_TRL = [task for task, this in TASKS.items() if this["rates"]["trl"]]
NAMES = {"trl": "TRL", "ours": "here"}
PEERS = (("GRPO, `group`", "grpo", "our_group"), ("RLOO", "rloo", "our_rloo"))
COLOURS = {"trl": "tab:orange", "ours": "tab:blue"}
WORDS = {"closed": "share of the gap", "accuracy": "held-out accuracy", "objective": "score - kl_coef KL"}


def figure(run, place=-1):
    """What the task is judged by, at one point of the curve; the "objective" is score - kl_coef KL."""
    task, curve = TASKS[run["task"]], run["curve"]
    if task["figure"] != "objective":
        return curve[task["figure"]][place]
    return curve["score"][place] - task["flags"]["kl_coef"] * curve["kl"][place]


def pick(runs, task, who, variant="", samples=None, wanted_rates=None):
    """The runs of one kind with these rates, or with those that have the most seeds, by seed."""
    samples = samples or samples_of(task, who)
    wanted = task, who, variant, samples
    found = [r for r in runs if (r["task"], r["who"], r["variant"], r["samples"]) == wanted]
    rates = [r["rates"] for r in found]
    most = max(rates, key=rates.count) if rates else None
    most = most if wanted_rates is None else list(wanted_rates)
    return [r for r in found if r["rates"] == most]


def samples_of(task, who):
    """The usual number of samples of a trainer's runs."""
    this = TASKS[task]
    return this.get("ablate", this["samples"]) if who in AT_DEFAULTS else this["samples"]


def best_rates(runs, task, who):
    """The rates with the best end of the first seed, among the runs of the usual number of samples."""
    wanted = task, who, 0, "", samples_of(task, who)
    tried = [r for r in runs if (r["task"], r["who"], r["seed"], r["variant"], r["samples"]) == wanted]
    return max(tried, key=figure)["rates"]


def middle(values, digits=3):
    """Numbers -> "median (least to most)"."""
    texts = [f"{f(values):.{digits}f}" for f in (statistics.median, min, max)]
    return texts[0] if len(values) == 1 else f"{texts[0]} ({texts[1]} to {texts[2]})"


def learned(run):
    """The curve of what is to be learned: the figure of (a) and (b), the score of (c) and (d)."""
    name = TASKS[run["task"]]["figure"]
    return run["curve"]["score" if name == "objective" else name]


def samples_until(run, goal):
    """The first measured number of samples at which ``learned`` is at least ``goal``, None if none is."""
    pairs = zip(run["curve"]["samples"], learned(run), strict=True)
    return next((samples for samples, value in pairs if value >= goal), None)


def until(runs, goal):
    """The median of ``samples_until`` as text; a run that never got there counts as the largest."""
    found = [samples_until(run, goal) for run in runs]
    number = statistics.median(x if x is not None else float("inf") for x in found)
    return "not reached" if number == float("inf") else f"{number:,.0f}"


def kinds(runs, task):
    """(who, variant, samples, rates) of the rows of a task: TRL's with their variants, then ours without,
    at the rates with the best mean end. Rates that were only tried, with one seed, have no row."""
    found = Counter(
        (r["who"], r["variant"], r["samples"], tuple(r["rates"])) for r in runs if r["task"] == task
    )
    most = {kind[:3]: max(n for k, n in found.items() if k[:3] == kind[:3]) for kind in found}
    shown = sorted(kind for kind, n in found.items() if n > 1 or most[kind[:3]] == 1)
    best = {}
    for kind in (k for k in shown if k[:2] == ("ours", "")):
        end = statistics.mean(figure(r) for r in pick(runs, task, *kind))
        best[kind[2]] = max(best.get(kind[2], (end, kind)), (end, kind))
    return [k for k in shown if k[0] == "trl"] + [kind for _, kind in best.values()]


def main_table(runs):
    """A row for each task and trainer: the end of the runs, and how many samples reach TRL's usual end. Task
    (e) has no peer: ``long_table``."""
    rows = []
    for task in BESIDE_TRL:
        this = TASKS[task]
        peer = pick(runs, task, "trl")
        goal = statistics.median(learned(r)[-1] for r in peer) if peer else float("inf")
        for who, variant, samples, rates in kinds(runs, task):
            found = pick(runs, task, who, variant, samples, rates)
            row = {
                "task": f"({task}) {this['title']}",
                "trainer": ", ".join(filter(None, (NAMES[who], variant))),
                "rates": ", ".join(f"{x:g}" for x in found[0]["rates"]),
                "samples": f"{samples:,}",
                "runs": len(found),
                "figure": middle([figure(r) for r in found]),
                "score": middle([r["curve"]["score"][-1] for r in found], 2),
                "KL a response": middle([r["curve"]["kl"][-1] for r in found], 2),
                "samples to TRL's end": until(found, goal),
                "CPU seconds": f"{statistics.median(r['curve']['seconds'][-1] for r in found):.0f}",
            }
            rows.append(row)
    return table(rows)


def long_table(runs):
    """Task (e): a row for each of the actor's rates and some steps of its run, the highest rate first."""
    rows, runs = [], [r for r in runs if r["task"] == "e"]
    for run in sorted(runs, key=lambda r: r["rates"], reverse=True):
        last = len(run["curve"]["samples"]) - 1
        for place in sorted({1, 2, last} & set(range(last + 1))):
            point = {name: values[place] for name, values in run["curve"].items()}
            point |= {"KL a response": abs(point["kl"]), "figure": figure(run, place)}
            row = {"actor's rate": f"{run['rates'][0]:g}", "step": point["samples"] // 16}
            shown = ("KL a response", "score", "figure", "gold", "spelling")
            rows.append(row | {name: f"{point[name]:.2f}" for name in shown})
    return table(rows)


def variants_table(runs):
    """A row for each changed decision, a column for each task: the end, and in brackets its difference to the
    mean of the same seeds and rates without the change, with the standard error of this difference. Runs of
    "our_gae" are at the program's defaults, and so is what they are compared with."""
    runs = [r for r in runs if r["who"] in ("ours", "our_gae")]
    names = [r["variant"] for r in runs if r["variant"] and r["variant"] not in ELSEWHERE]
    names, rows = list(dict.fromkeys(names)), []
    tasks = [task for task in TASKS if any(r["task"] == task and r["variant"] for r in runs)]
    for name in names:
        row = {"changed": name}
        for task in tasks:
            samples = TASKS[task].get("ablate")
            found = pick(runs, task, "ours", name, samples) or pick(runs, task, "our_gae", name, samples)
            same = pick(runs, task, found[0]["who"], "", samples, found[0]["rates"]) if found else ()
            changed, plain = ({r["seed"]: figure(r) for r in group} for group in (found, same))
            row[f"({task})"] = difference([(changed[x], plain[x]) for x in changed.keys() & plain.keys()])
        if any(list(row.values())[1:]):
            rows.append(row)
    return table(rows)


def mean_of(runs, name):
    """The mean end of one curve, as text."""
    return f"{statistics.mean(r['curve'][name][-1] for r in runs):.2f}"


def peers_table(runs):
    """A row for each task and estimator without a critic: TRL's runs, ours, and the difference of their mean
    ends with its standard error. Only in (a) are seeds pairs: each has a policy and rewards of its own."""
    rows = []
    for task in BESIDE_TRL:
        for name, peer, own in PEERS:
            found = {who: at_defaults(runs, task, who) for who in (peer, own)}
            if not all(found.values()):
                continue
            by_seed = {who: {r["seed"]: figure(r) for r in group} for who, group in found.items()}
            both = sorted(by_seed[peer].keys() & by_seed[own].keys())
            figures = {who: [x[seed] for seed in (both if task == "a" else x)] for who, x in by_seed.items()}
            row = {"task": f"({task})", "estimator": name}
            row["runs: TRL, here"] = ", ".join(str(len(x)) for x in figures.values())
            for who, title in ((peer, "TRL"), (own, "here")):
                row[title] = f"{middle(figures[who])} at {actor_rate(found[who][0]):g}"
            row["here less TRL"] = apart(figures[own], figures[peer], pairs=task == "a")
            row["KL: TRL, here"] = ", ".join(mean_of(group, "kl") for group in found.values())
            seconds = [statistics.median(r["curve"]["seconds"][-1] for r in x) for x in found.values()]
            row["CPU seconds: TRL, here"] = ", ".join(f"{x:.0f}" for x in seconds)
            rows.append(row)
    return table(rows)


def at_defaults(runs, task, who):
    """A trainer's runs at the rate that was best with the first seed."""
    if not any(r["seed"] == 0 for r in pick(runs, task, who)):
        return []
    return pick(runs, task, who, wanted_rates=best_rates(runs, task, who))


def actor_rate(run):
    return run["flags"].get("learning_rate", run["rates"][0])


def apart(left, right, pairs):
    """The difference of two means with its standard error, of ``pairs`` or of independent runs."""
    text = f"{statistics.mean(left) - statistics.mean(right):+.3f}"
    if min(len(left), len(right)) < 2:
        return text
    groups = (left, right)
    if pairs:
        groups = ([x - y for x, y in zip(left, right, strict=True)],)
    error = sum(statistics.variance(x) / len(x) for x in groups) ** 0.5
    return f"{text} ± {error:.3f}"


def beside(runs, name, other):
    """A variant of task (b) and the one that it is compared with -> [(its run, the other's)] of each seed."""
    rates = TASKS["b"]["ablate_rates"]
    changed, plain = ({r["seed"]: r for r in pick(runs, "b", "ours", x, None, rates)} for x in (name, other))
    return [(changed[seed], plain[seed]) for seed in sorted(changed.keys() & plain.keys())]


def ends(pairs):
    """Columns on pairs of runs: what the first ones end with, and how long they take beside the others."""
    changed = [run["curve"] for run, _ in pairs]
    sampled = [curve.get("sampled", curve["samples"])[-1] for curve in changed]
    seconds = [run["curve"]["seconds"][-1] / other["curve"]["seconds"][-1] for run, other in pairs]
    return {
        "runs": len(pairs),
        "accuracy": difference([(figure(run), figure(other)) for run, other in pairs]),
        "KL": f"{statistics.mean(curve['kl'][-1] for curve in changed):.2f}",
        "samples": f"{statistics.mean(sampled):,.0f}",
        "CPU time": f"{statistics.median(seconds):.2f}",
    }


def without_critic_table(runs):
    """A row for each setting that was tried without a critic, on task (b) with several seeds, beside PPO."""
    found = {name: beside(runs, name, "") for name in WITHOUT_CRITIC}
    tried = {name: pairs for name, pairs in found.items() if len(pairs) > 1}
    return table([{"": name, "flags": WITHOUT_CRITIC[name]} | ends(pairs) for name, pairs in tried.items()])


def options_table(runs):
    """A row for each option, on task (b), beside the run without it."""
    rows = []
    for name, (flags, other) in OPTIONS.items():
        if pairs := beside(runs, name, other):
            rows.append({"option": flags} | ends(pairs))
        if pairs and "ema_accuracy" in pairs[0][0]["curve"]:
            average = [(run["curve"]["ema_accuracy"][-1], figure(plain)) for run, plain in pairs]
            kl = statistics.mean(run["curve"]["ema_kl"][-1] for run, _ in pairs)
            changed = {"option": flags.replace("the actor", "the average"), "accuracy": difference(average)}
            rows.append(rows[-1] | changed | {"KL": f"{kl:.2f}"})
    return table(rows)


def difference(pairs):
    """[(changed, plain)] of the same seeds -> text: the mean end, and its difference ± standard error."""
    if not pairs:
        return ""
    apart = [changed - plain for changed, plain in pairs]
    mean = statistics.mean(changed for changed, _ in pairs)
    error = f" ± {statistics.stdev(apart) / len(apart) ** 0.5:.3f}" if len(apart) > 1 else ""
    return f"{mean:.3f} ({statistics.mean(apart):+.3f}{error})"


def draw(runs, task, path):
    """Figure and KL by samples, and the figure by seconds: thin lines are runs, thick ones their median."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = [("samples", WORDS[TASKS[task]["figure"]]), ("samples", "KL a response"), ("seconds", None)]
    shown, axes = pyplot.subplots(1, 3, figsize=(10.5, 3), layout="constrained")
    for who in ("trl", "ours"):
        found = pick(runs, task, who)
        for axis, (across, upward) in zip(axes, panels, strict=True):
            lines = []
            for run in found:
                x, places = run["curve"][across], range(len(run["curve"]["samples"]))
                y = run["curve"]["kl"] if upward == "KL a response" else [figure(run, i) for i in places]
                axis.plot(x, y, color=COLOURS[who], alpha=0.25, linewidth=0.8)
                lines.append((x, y))
            if lines:
                x, y = (
                    [statistics.median(v) for v in zip(*part, strict=True)]
                    for part in zip(*lines, strict=True)
                )
                axis.plot(x, y, color=COLOURS[who], linewidth=2, label=NAMES[who])
            axis.set_xlabel("CPU seconds" if across == "seconds" else across)
            axis.set_ylabel(upward or panels[0][1])
    axes[0].legend()
    shown.suptitle(f"({task}) {TASKS[task]['title']}", fontsize=10)
    shown.savefig(path, dpi=70)
    pyplot.close(shown)


TABLES = {
    "main": main_table,
    "long": long_table,
    "variants": variants_table,
    "beside TRL": peers_table,
    "without a critic": without_critic_table,
    "options": options_table,
}


def write(runs):
    """Replace the tables of docs/learning.md, each between its marks; draw the tasks that have runs."""
    text = PAGE.read_text(encoding="utf-8")
    for name, made in TABLES.items():
        marks = f"<!-- {name} -->", f"<!-- end of {name} -->"
        between = re.compile(f"{marks[0]}.*?{marks[1]}", re.DOTALL)
        text = between.sub(lambda _, m=marks, f=made: f"{m[0]}\n{f(runs)}\n{m[1]}", text)
    PAGE.write_text(text, encoding="utf-8")
    for task in BESIDE_TRL:
        if any(run["task"] == task for run in runs):
            draw(runs, task, PAGE.parent / f"learning_{task}.png")
