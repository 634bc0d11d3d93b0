"""PPO's evaluation on held-out prompts: sampled and greedy, with the same sampling noise every time.

The prompts are those of ``--eval_data_path``; without it there is no evaluation. It runs before training
(step 0), after every ``--eval_interval`` batches and after the last one (``train`` in train_ppo.py).

Accuracy is measured against the answers in the records and is never a reward. If the score rises while the
accuracy falls, the policy exploits the reward (reward hacking). For records without answers there is the
judge (rewards/judge.py), which is never a reward either. best.py keeps the weights of the best evaluation.
"""

import math

from progress_bar import phase
from trainer.generation.sampling_noise import noise_keys
from trainer.rewards.rules import is_correct
from trainer.runs.metrics import Metrics
from trainer.runs.samples import SHOWN, answer_rows, rows_of_evaluation

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
    """Evaluate on all prompts, shared between the processes -> ({"eval/<name>": mean}, {file: rows to keep}).

    Names of greedy results end in "_greedy". The answers to the first prompts are kept (runs/samples.py), for
    report.html. roll_out(list of Prompt, temperature) -> (rollout, response texts, {part of the score: [B]}).
    If it raises InputError in one process, all processes raise it.
    """
    metrics, shown = Metrics(), {}
    mine = share_of(range(len(prompts)), world)
    answered = has_answers(prompts)
    batches = [mine[start : start + BATCH] for start in range(0, len(mine), BATCH)]
    with world.all_or_none(), phase("evaluation", 2 * len(mine), "responses") as bar:
        for places in batches:
            batch = [prompts[i] for i in places]  # no more at a time: their records can be large
            for kind, sampled_at in (("", temperature), ("_greedy", 0.0)):
                rollout, texts, parts = roll_out(batch, sampled_at)
                for place, prompt, row in zip(places, batch, answer_rows(texts, rollout, parts), strict=True):
                    if place < SHOWN:
                        shown.setdefault(place, {"prompt": prompt})[kind] = row
                pairs = [(t, p.answer) for t, p in zip(texts, batch, strict=True) if p.answer is not None]
                if answered:
                    right = sum(is_correct(text, answer, reasoning) for text, answer in pairs)
                    metrics.add(f"eval/accuracy{kind}", right, len(pairs))
                if reasoning:
                    metrics.add(f"eval/format_rate{kind}", (parts["format"] > 0).sum(), len(batch))
                for name, x in parts.items():
                    metrics.add(f"eval/{name}{kind}", x.sum(), len(batch))
                if "judge" in parts and not kind:
                    metrics.add("eval/judge_std", parts["judge"].double().square().sum(), len(batch))
                metrics.add(f"eval/length{kind}", rollout.response_len.sum(), len(batch))
                metrics.add(f"eval/finished{kind}", rollout.finished.sum(), len(batch))
                bar.done += len(batch)
    means = metrics.means(world)
    if "eval/judge_std" in means:  # so far the mean square
        variance = means["eval/judge_std"] - means["eval/judge"] ** 2
        means["eval/judge_std"] = math.sqrt(variance) if variance > 0 else 0.0
    return means, rows_of_evaluation(shown, world)


def evaluate_actor(run, metrics, rows):
    """Metrics and rows of a step -> these, and with them what ``evaluate`` finds of the actor on the held-out
    prompts; nothing is added without ``--eval_data_path``."""
    if run.held_out is None:
        return metrics, rows

    def roll_out(prompts, temperature):
        keys = noise_keys(run.args.seed, EVAL_STEP, [p.index for p in prompts])
        sampled = run.respond(run.actor, prompts, keys, temperature)
        rewards = (run.reward, run.judge)
        score, judged = (x.combine(run.raw_scores(x, prompts, *sampled)) for x in rewards)
        return *sampled, score | judged

    found, shown = evaluate(roll_out, run.held_out, run.args.temperature, run.args.reasoning, run.world)
    return metrics | found, rows | shown
