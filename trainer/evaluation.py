"""PPO's evaluation on held-out prompts: sampled and greedy, with the same sampling noise every time.

The prompts are those of ``--eval_data_path``; without it there is no evaluation. It runs before training
(step 0), after every ``--eval_interval`` batches and after the last one (``train`` in train_ppo.py).

Accuracy is measured against the answers in the records and is never a reward. If the score rises while the
accuracy falls, the policy exploits the reward (reward hacking). ``evaluate_actor`` in train_ppo.py calls it.
"""

from trainer.rewards.rules import is_correct
from trainer.runs.metrics import Metrics

BATCH = 256  # prompts sampled at a time
EVAL_STEP = -1  # evaluation's step in the sampling noise: no training step has this number


def share_of(items, world):
    """This process' share of a dataset's items, as a list."""
    if len(items) < world.size:  # too few to share: every process takes all, which gives the same means
        return [items[i] for i in range(len(items))]
    return [items[i] for i in range(world.rank, len(items), world.size)]


def evaluate(roll_out, prompts, temperature, reasoning, world):
    """Evaluate on all prompts, shared between the processes -> {"eval/<name>": mean}.

    Names of greedy results end in "_greedy". roll_out(list of Prompt, temperature) -> (rollout, response
    texts, {part of the score: [B]}). If it raises InputError in one process, all processes raise it.
    """
    metrics = Metrics()
    mine = share_of(range(len(prompts)), world)
    answered = any(prompts[i].answer is not None for i in range(len(prompts)))
    batches = [mine[start : start + BATCH] for start in range(0, len(mine), BATCH)]
    with world.all_or_none():
        for places in batches:
            batch = [prompts[i] for i in places]  # no more at a time: their records can be large
            for kind, sampled_at in (("", temperature), ("_greedy", 0.0)):
                rollout, texts, parts = roll_out(batch, sampled_at)
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
