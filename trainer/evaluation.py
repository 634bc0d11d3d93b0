"""PPO's evaluation on held-out prompts: sampled and greedy, with the same sampling noise every time.

The prompts are those of ``--eval_data_path``; without it there is no evaluation. It runs before training
(step 0), after every ``--eval_interval`` batches and after the last one (``train`` in train_ppo.py).

Accuracy is measured against the answers in the records and is never a reward. If the score rises while the
accuracy falls, the policy exploits the reward (reward hacking). For records without answers there is the
judge (rewards/judge.py), which is never a reward either. best.py keeps the weights of the best evaluation.
"""

from trainer.generation.sampling_noise import noise_keys
from trainer.rewards.rules import is_correct
from trainer.runs.metrics import Metrics

BATCH = 256  # prompts sampled at a time
EVAL_STEP = -1  # evaluation's step in the sampling noise: no training step has this number


def share_of(items, world):
    """This process' share of a dataset's items, as a list."""
    if len(items) < world.size:  # too few to share: every process takes all, which gives the same means
        return [items[i] for i in range(len(items))]
    return [items[i] for i in range(world.rank, len(items), world.size)]


def has_answers(prompts):
    """Whether any of these records has an answer, so that there is an accuracy."""
    return any(prompts[i].answer is not None for i in range(len(prompts)))


def evaluate(roll_out, prompts, temperature, reasoning, world):
    """Evaluate on all prompts, shared between the processes -> {"eval/<name>": mean}.

    Names of greedy results end in "_greedy". roll_out(list of Prompt, temperature) -> (rollout, response
    texts, {part of the score: [B]}). If it raises InputError in one process, all processes raise it.
    """
    metrics = Metrics()
    mine = share_of(range(len(prompts)), world)
    answered = has_answers(prompts)
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


def evaluate_actor(run):
    """The actor on the held-out prompts: {"eval/…": mean}, nothing without ``--eval_data_path``."""
    if run.held_out is None:
        return {}

    def roll_out(prompts, temperature):
        keys = noise_keys(run.args.seed, EVAL_STEP, [p.index for p in prompts])
        sampled = run.respond(run.actor, prompts, keys, temperature)
        rewards = (run.reward, run.judge)
        score, judged = (x.combine(run.raw_scores(x, prompts, *sampled)) for x in rewards)
        return *sampled, score | judged

    return evaluate(roll_out, run.held_out, run.args.temperature, run.args.reasoning, run.world)
