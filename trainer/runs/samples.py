"""Which responses and distributions of a PPO run are kept, as rows of JSONL files in the run folder.

    samples.jsonl        of each step the first two responses, and those that stand out (``KINDS``)
    histograms.jsonl     of each step the scores, lengths and KLs of all its responses, counted in bins
    eval_samples.jsonl   of each evaluation the answers to the first held-out prompts, always the same ones

They hold what report.html shows, of all processes.
"""

from functools import partial

import numpy as np
import torch

KINDS = {  # what stands out in a step -> by what: the row with the largest is kept
    "best": lambda row: row["parts"]["score"],
    "worst": lambda row: -row["parts"]["score"],
    "longest": lambda row: row["length"],
}
FIRST = 2  # responses of a step that are kept whatever they are
SHOWN = 8  # held-out prompts whose answers are kept
BINS = 20  # of a histogram, at most
AT_LIMIT = 2.999  # a reward model's part is clipped to ±3 times its weight


def rows_of_step(run, batch, rollout) -> dict[str, list[dict]]:
    """What is kept of a step -> {file: rows}. All processes must call it.

    batch: ``Batch`` (trainer/collect.py); rollout: the filled one, whose last rows are those of the batch.
    """
    answers = answer_rows(batch.texts, batch.rollout, batch.scores)
    moved = torch.where(rollout.mask, rollout.old_logprobs - rollout.ref_logprobs, 0.0)
    kl = moved.sum(1)[-len(answers) :].tolist()
    offline = bool(run.args.offline_data_path)  # nothing was sampled: what is here is no KL
    mine = [
        {"prompt": prompt.prompt, **answer, "kl": x}
        for prompt, answer, x in zip(batch.prompts, answers, kl, strict=True)
    ]
    rows = [row for theirs in run.world.gather(mine) for row in theirs]
    kept = [("first", row) for row in rows[:FIRST]]
    kept += [(kind, max(rows, key=by)) for kind, by in KINDS.items()]
    limit = max(rows, key=partial(furthest, run.reward.models))
    if furthest(run.reward.models, limit) >= AT_LIMIT:
        kept.append(("limit", limit))
    counted = {
        "score": histogram([row["parts"]["score"] for row in rows]),
        "length": histogram([row["length"] for row in rows], whole=True),
        "kl": None if offline else histogram([row["kl"] for row in rows]),
    }
    samples = [{**row, "kl": None if offline else round(row["kl"], 4), "kind": kind} for kind, row in kept]
    return {"samples.jsonl": samples, "histograms.jsonl": [counted]}


def answer_rows(texts: list[str], rollout, parts: dict[str, torch.Tensor]) -> list[dict]:
    """Responses -> a dict of each: its text, the parts of its score, its length in tokens, did it end.

    texts: B texts; rollout: theirs; parts: {part of the score: [B]}.
    """
    lengths = rollout.response_len.tolist()
    finished = rollout.finished.tolist()
    numbers = {name: x.tolist() for name, x in parts.items()}
    return [
        {
            "response": text,
            "parts": {name: round(x[i], 4) for name, x in numbers.items()},
            "length": lengths[i],
            "finished": finished[i],
        }
        for i, text in enumerate(texts)
    ]


def furthest(models: dict, row: dict) -> float:
    """How far the reward models' parts of a response are from 0, the largest, in units of their weight.

    models: {part: (model, weight)}; row: of ``answer_rows``. 0.0 without reward models.
    """
    weighed = [abs(row["parts"][name] / weight) for name, (_, weight) in models.items() if weight]
    return max(weighed, default=0.0)


def histogram(values: list[float], whole: bool = False) -> dict | None:
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


def rows_of_evaluation(shown: dict[int, dict], world) -> dict[str, list[dict]]:
    """The answers to the first held-out prompts -> {file: rows}, in the order of the prompts.

    shown: {number of a prompt: row}, those that this process has. All processes must call it.
    """
    rows = {place: row for theirs in world.gather(shown) for place, row in theirs.items()}
    return {"eval_samples.jsonl": [rows[place] for place in sorted(rows)]}


def prompt_text(prompt: str | list[dict]) -> str:
    """A prompt, text or messages -> one text; of messages what the last one says."""
    return prompt if isinstance(prompt, str) else prompt[-1]["content"]


def sample_text(step: int, row: dict) -> str:
    """A row of samples.jsonl as text: a header with the parts of the score, then prompt and response."""
    parts = "  ".join(f"{name} {value:+.2f}" for name, value in row["parts"].items())
    body = "\n".join(
        "    " + line for line in f"{prompt_text(row['prompt'])}\n{row['response']}".splitlines()
    )
    return f"  sample at step {step}: {parts}\n{body}"
