"""Which responses and distributions of a PPO run are kept, as rows of JSONL files in the run folder.

    samples.jsonl        of each step the first two responses, and those that stand out (``KINDS``)
    histograms.jsonl     of each step the scores, lengths and KLs of all its responses, counted in bins
    eval_samples.jsonl   of each evaluation the answers to the first held-out prompts, always the same ones

They hold what report.html shows. What stands out and what is counted is taken from all processes; the first
two responses are those of the main process.
"""

import numpy as np
import torch

KINDS = {  # what stands out in a step -> how it is ordered, the largest is kept
    "best": lambda row: row["parts"]["score"],
    "worst": lambda row: -row["parts"]["score"],
    "longest": lambda row: row["length"],
    "limit": lambda row: row["limit"],
}
FIRST = 2  # responses of a step that are kept whatever they are
SHOWN = 8  # held-out prompts whose answers are kept
BINS = 20  # of a histogram, at most
AT_LIMIT = 2.999  # a reward model's part is clipped to ±3 times its weight


def rows_of_step(run, batch, rollout):
    """What is kept of a step -> {file: rows}. All processes must call it.

    batch: ``Batch`` (trainer/batch.py); rollout: the filled one, whose last rows are those of the batch.
    """
    count = len(batch.prompts)
    kl = torch.where(rollout.mask, rollout.old_logprobs - rollout.ref_logprobs, 0.0).sum(1)[-count:].tolist()
    answers = answer_rows(batch.texts, batch.rollout, batch.scores)
    rows = [
        {"prompt": prompt.prompt, **answer, "kl": round(x, 4), "limit": furthest(run.reward.models, answer)}
        for prompt, answer, x in zip(batch.prompts, answers, kl, strict=True)
    ]
    numbers = {
        "score": [row["parts"]["score"] for row in rows],
        "length": [row["length"] for row in rows],
        "kl": kl,
    }
    everyone = run.world.gather(
        (rows[:FIRST], {kind: max(rows, key=by) for kind, by in KINDS.items()}, numbers)
    )
    kept = [{**row, "kind": "first"} for row in everyone[0][0]]
    for kind, by in KINDS.items():
        row = max((theirs[kind] for _, theirs, _ in everyone), key=by)
        if kind != "limit" or row["limit"] >= AT_LIMIT:
            kept.append({**row, "kind": kind})
    counted = {
        name: histogram([x for _, _, theirs in everyone for x in theirs[name]], whole=name == "length")
        for name in numbers
    }
    for row in kept:
        del row["limit"]
        if run.args.offline_data_path:  # nothing was sampled: what is here is no KL
            row["kl"] = None
    if run.args.offline_data_path:
        counted["kl"] = None
    return {"samples.jsonl": kept, "histograms.jsonl": [counted]}


def answer_rows(texts, rollout, parts):
    """Responses -> a dict of each: its text, the parts of its score, its length in tokens, did it end.

    texts: B texts; rollout: theirs; parts: {part of the score: [B]}.
    """
    numbers = {name: x.tolist() for name, x in parts.items()}
    return [
        {
            "response": text,
            "parts": {name: round(x[i], 4) for name, x in numbers.items()},
            "length": length,
            "finished": finished,
        }
        for i, (text, length, finished) in enumerate(
            zip(texts, rollout.response_len.tolist(), rollout.finished.tolist(), strict=True)
        )
    ]


def furthest(models, answer):
    """How far the reward models' parts of a response are from 0, the largest, in units of their weight.

    models: {part: (model, weight)}; answer: a row of ``answer_rows``. 0.0 without reward models.
    """
    weighed = [abs(answer["parts"][name] / weight) for name, (_, weight) in models.items() if weight]
    return max(weighed, default=0.0)


def histogram(values, whole=False):
    """Numbers -> {"low": …, "high": …, "counts": […]}: equal bins between the two; None without a finite one.

    whole: whether they are whole numbers, each of which then lies in the middle of a bin or of several.
    """
    finite = np.array([x for x in values if np.isfinite(x)])
    if not len(finite):
        return None
    low, high, bins = float(finite.min()), float(finite.max()), BINS
    if whole:
        width = int(high - low) // BINS + 1
        bins = int(high - low) // width + 1
        low, high = low - 0.5, low - 0.5 + bins * width
    if low == high:
        return {"low": low, "high": high, "counts": [len(finite)]}
    counts, _ = np.histogram(finite, bins, (low, high))
    return {"low": round(low, 6), "high": round(high, 6), "counts": counts.tolist()}


def rows_of_evaluation(shown, world):
    """The answers to the first held-out prompts -> {file: rows}, in the order of the prompts.

    shown: {number of a prompt: {"prompt": ``Prompt``, "" and "_greedy": rows of ``answer_rows``}}, those that
    this process has. All processes must call it.
    """
    mine = {
        place: {"place": place, "prompt": row["prompt"].prompt, "answer": row["prompt"].answer}
        | row[""]
        | {"greedy": row["_greedy"]}
        for place, row in shown.items()
    }
    rows = {place: row for theirs in world.gather(mine) for place, row in theirs.items()}
    return {"eval_samples.jsonl": [rows[place] for place in sorted(rows)]}


def prompt_text(prompt):
    """A prompt, text or messages -> one text; of messages what the last one says."""
    return prompt if isinstance(prompt, str) else prompt[-1]["content"]


def sample_text(step, row):
    """A row of samples.jsonl as text: a header with the parts of the score, then prompt and response."""
    parts = "  ".join(f"{name} {value:+.2f}" for name, value in row["parts"].items())
    body = "\n".join(
        "    " + line for line in f"{prompt_text(row['prompt'])}\n{row['response']}".splitlines()
    )
    return f"  sample at step {step}: {parts}\n{body}"
