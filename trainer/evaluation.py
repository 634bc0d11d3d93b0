"""Held-out evaluation: the same prompts with the same noise every time, sampled and greedy.

Accuracy is measured against the records' answers and never rewarded: accuracy going down while the score goes
up is what reward hacking looks like.
"""

from trainer.rewards import is_correct
from trainer.tracking import Metrics

BATCH = 256


def share_of(items, world):
    """This process' items of a dataset, as a list."""
    if len(items) < world.size:  # too few to share: all take all, and means are the same
        return [items[i] for i in range(len(items))]
    return [items[i] for i in range(world.rank, len(items), world.size)]


def evaluate(roll_out, prompts, temperature, reasoning, world):
    """Evaluate on all prompts, shared out over the processes -> {"eval/…": mean}, greedy ones "…_greedy".

    roll_out(batch of Prompt, temperature) -> (rollout, texts, score parts).
    """
    metrics = Metrics()
    mine = share_of(prompts, world)
    answered = any(prompts[i].answer is not None for i in range(len(prompts)))
    batches = [mine[start : start + BATCH] for start in range(0, len(mine), BATCH)]
    with world.all_or_none():
        for batch, kind, heat in [
            (b, *way) for b in batches for way in (("", temperature), ("_greedy", 0.0))
        ]:
            rollout, texts, parts = roll_out(batch, heat)
            pairs = [(t, p.answer) for t, p in zip(texts, batch, strict=True) if p.answer is not None]
            if answered:
                right = sum(is_correct(text, answer, reasoning) for text, answer in pairs)
                metrics.add(f"eval/accuracy{kind}", right, len(pairs))
            if reasoning:
                metrics.add(f"eval/format_rate{kind}", (parts["format"] > 0).sum(), len(batch))
            for name, x in parts.items():
                metrics.add(f"eval/{name}{kind}", x.sum(), len(batch))
            metrics.add(f"eval/length{kind}", rollout.response_len.sum(), len(batch))
            metrics.add(f"eval/finished{kind}", rollout.finished.sum(), len(batch))
    return metrics.means(world)
