"""Which responses and distributions of a PPO run are kept, as rows of JSONL files in the run folder.

    samples.jsonl        of each step the first two responses, and those that stand out (``KINDS``)
    deciles.jsonl        of each step the deciles of the scores, lengths and KLs of all its responses
    eval_samples.jsonl   of each evaluation the answers to the first held-out prompts, always the same ones

They hold what report.html shows, of all processes.
"""

import math
import textwrap

import numpy as np
import torch

KINDS = {  # what stands out in a step -> by what: the row with the largest is kept
    "best": lambda row: row["parts"]["score"],
    "worst": lambda row: -row["parts"]["score"],
    "longest": lambda row: row["length"],
}
FIRST = 2  # responses of a step that are kept whatever they are
SHOWN = 8  # held-out prompts whose answers are kept
DECILES = np.linspace(0, 1, 11)  # the least, the median and the largest among them


def rows_of_step(run, batch, rollout) -> dict[str, list[dict]]:
    """What is kept of a step -> {file: rows}. All processes must call it.

    batch: ``Batch`` (trainer/collect.py); rollout: the filled one, whose last rows are those of the batch.
    """
    answers = answer_rows(batch.texts, batch.rollout, batch.scores)
    moved = torch.where(rollout.mask, rollout.old_logprobs - rollout.ref_logprobs, 0.0)
    kls = moved.sum(1)[-len(answers) :].tolist()
    mine = [
        {"prompt": prompt.prompt, **answer, "kl": round(kl, 4)}
        for prompt, answer, kl in zip(batch.prompts, answers, kls, strict=True)
    ]
    rows = [row for theirs in run.world.gather(mine) for row in theirs]
    values = {
        "score": [row["parts"]["score"] for row in rows],
        "length": [row["length"] for row in rows],
        "kl": [row["kl"] for row in rows],
    }
    if run.args.offline_data_path:  # nothing was sampled: what is here is no KL
        del values["kl"]
        rows = [{**row, "kl": None} for row in rows]
    kept = [{**row, "kind": "first"} for row in rows[:FIRST]]
    kept += [{**max(rows, key=by), "kind": kind} for kind, by in KINDS.items()]
    finite = {name: [x for x in numbers if math.isfinite(x)] for name, numbers in values.items()}
    deciles = {name: np.quantile(x, DECILES).round(4).tolist() for name, x in finite.items() if x}
    return {"samples.jsonl": kept, "deciles.jsonl": [deciles]}


def answer_rows(texts: list[str], rollout, parts: dict[str, torch.Tensor]) -> list[dict]:
    """Responses -> a dict of each: its text, the parts of its score, its length in tokens, did it end.

    texts: B texts; rollout: theirs; parts: {part of the score: [B]}.
    """
    numbers = {name: x.tolist() for name, x in parts.items()}
    rows = zip(texts, rollout.response_len.tolist(), rollout.finished.tolist(), strict=True)
    return [
        {
            "response": text,
            "parts": {name: round(x[i], 4) for name, x in numbers.items()},
            "length": length,
            "finished": finished,
        }
        for i, (text, length, finished) in enumerate(rows)
    ]


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
    body = textwrap.indent(f"{prompt_text(row['prompt'])}\n{row['response']}", "    ")
    return f"  sample at step {step}: {parts}\n{body}"
