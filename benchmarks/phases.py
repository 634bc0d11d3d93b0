"""Time of each phase of a PPO step, how near it comes to the machine's matrix rate, and how its cost grows.

The base case: a 128x4 policy with critic and reward model of the same size, batch 64, one PPO epoch, prompts
of 16 to 48 tokens, responses of max_gen_len / 4 tokens on average. In each other case one thing is larger.
Operations are counted as in update.py, for real tokens only: two forwards of the actor's size and one of the
critic's for log-probs and values, one forward of each token for rollout and reward. Draws docs/phases.png.

On a GPU the cases are the shape of Qwen 2.5 0.5B and "512x8", 256 prompts each, in minibatches of 64; all
responses of "0.5B" have 239 tokens. Shares are of the matrix rate in the type that ``--dtype auto`` chooses.
"""

import tempfile
from functools import partial
from pathlib import Path

import torch
from common import VOCABULARY, copy_rate, matrix_rate, peak_memory, vocabulary_of
from end_to_end import Ours, write_inputs
from update import weights_per_token

PHASES = ("rollout", "reward", "score", "update")
BASE = {"size": "128x4", "batch": 64, "max_gen_len": 64, "vocabulary": VOCABULARY}
LARGER = [("base", {}), ("batch x 4", {"batch": 256}), ("length x 4", {"max_gen_len": 256})]
LARGER += [("vocabulary x 4", {"vocabulary": 4 * VOCABULARY}), ("512x8", {"size": "512x8"})]
STEPS = 2
GPU_CASES = [
    ("0.5B", {"size": "0.5B", "batch": 256, "max_gen_len": 239, "varying": False}),
    ("512x8", {"size": "512x8", "batch": 256, "max_gen_len": 256}),
]


def operations(ours):
    """{phase: operations of one step}, averaged over the measured steps."""
    model, metrics = ours.run.models.actor, ours.metrics[1:]
    weights = weights_per_token(model)
    head = model.config.hidden_size * model.config.vocab_size
    batch = ours.args.batch_size
    responses = batch * sum(m["rollout/length"] for m in metrics) / len(metrics)
    prompts = batch * sum(len(p.prompt_ids) for p in ours.prompts) / len(ours.prompts)
    body, logits = 2 * weights * (prompts + responses), 2 * head * responses
    return {
        "rollout": body + logits,
        "reward": body,
        "score": 3 * body + 2 * logits,
        "update": 3 * (2 * body + logits),
    }


def measure(name, changes, device):
    setting = BASE | changes
    batch, longest = setting["batch"], setting["max_gen_len"]
    mean = longest / 4 if setting.get("varying", True) else None
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        write_inputs(folder, setting["size"], mean, setting["vocabulary"], max(256, batch))
        more = {} if device == "cpu" else {"mini_batch_size": min(64, batch)}
        ours = Ours(folder, 1, batch, longest, device, **more)
    for _ in range(1 + STEPS):
        ours.step()
    rate = matrix_rate(torch.float32 if device == "cpu" else ours.run.dtype, device=device)
    needs, result = operations(ours), {"setting": name}
    for phase in PHASES:
        seconds = min(m[f"perf/{phase}_seconds"] for m in ours.metrics[1:])
        result[f"{phase} ms/sample"] = round(1e3 * seconds / batch, 2)
        result[f"{phase} of matrix rate"] = round(needs[phase] / seconds / rate, 2)
    length = sum(m["rollout/length"] for m in ours.metrics[1:]) / STEPS
    if device != "cpu":
        totals = [sum(m[f"perf/{phase}_seconds"] for phase in PHASES) for m in ours.metrics[1:]]
        result |= {"seconds a step": round(min(totals), 2), "peak GiB": round(peak_memory(device), 1)}
    return result | {"mean length": round(length, 1)}


def rates(device):
    """The machine's limits, measured: matrix products and copies."""
    return {
        "fp32 GFLOP/s": round(matrix_rate(torch.float32, device=device) / 1e9),
        "bf16 GFLOP/s": round(matrix_rate(torch.bfloat16, device=device) / 1e9),
        "copy GB/s": round(copy_rate(device) / 1e9),
    }


def draw(results, path):
    """Draw one bar per case: the share of each phase, labelled with milliseconds per sample."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 2.8), layout="constrained")
    names = [r["setting"] for r in results][::-1]
    left = [0.0] * len(names)
    for phase, colour in zip(PHASES, ("#4477aa", "#ee6677", "#ccbb44", "#228833"), strict=True):
        widths = [r[f"{phase} ms/sample"] for r in results][::-1]
        totals = [sum(r[f"{p} ms/sample"] for p in PHASES) for r in results][::-1]
        shares = [w / t for w, t in zip(widths, totals, strict=True)]
        axes.barh(names, shares, left=left, label=phase, color=colour)
        for y, (start, share, width) in enumerate(zip(left, shares, widths, strict=True)):
            if share > 0.06:
                axes.text(start + share / 2, y, f"{width:.1f}", ha="center", va="center", color="white")
        left = [a + b for a, b in zip(left, shares, strict=True)]
    axes.set_xlim(0, 1)
    axes.set_xlabel("share of a step; numbers are milliseconds a sample")
    axes.legend(ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    figure.savefig(path, dpi=120)


def cases(device):
    if device == "cpu":
        return [partial(measure, name, changes, device) for name, changes in LARGER]
    return [
        partial(measure, name, {"vocabulary": vocabulary_of(changes["size"]), **changes}, device)
        for name, changes in GPU_CASES
    ]


def rows(results):
    return results
