"""PPO's evaluation on held-out prompts: sampled and greedy, with the same sampling noise every time.

The prompts are those of ``--eval_data_path``; without it there is no evaluation. It runs before training
(step 0), after every ``--eval_interval`` batches and after the last one (loop.py).

Accuracy is measured against the answers in the records and is never a reward. If the score rises while the
accuracy falls, the policy exploits the reward (reward hacking). There is none where most answers are too long
to be compared (``comparable`` in dataset/answers.py). For records without answers there is the judge
(rewards/reward.py), which is never a reward either. best.py keeps the weights of the best evaluation.
"""

import math

import torch

from dataset.answers import comparable
from progress_bar import phase
from trainer.generation.sampling import noise_keys
from trainer.options.offline import evaluate_pairs, sequence_kl
from trainer.rewards.rules import is_correct
from trainer.runs.distributed import batches_of
from trainer.runs.metrics import Metrics
from trainer.runs.samples import SHOWN, answer_rows, rows_of_evaluation

BATCH = 256  # responses sampled at a time
EVAL_STEP = -1  # evaluation's step in the sampling noise: no training step has this number


def pass_rate(right, k):
    """The chance that one of ``k`` answers to a prompt is right: 1 - C(n - c, k) / C(n, k) (Chen et al. 2021,
    arXiv:2107.03374, eq. 1). right: n bools, c of them True; k <= n."""
    wrong = len(right) - sum(right)
    return 1 - math.comb(wrong, k) / math.comb(len(right), k)


def evaluate(roll_out, prompts, temperature, reasoning, world, answers=1):
    """Evaluate on all prompts, shared between the processes -> ({"eval/<name>": mean}, {file: rows to keep}).

    Names of greedy results end in "_greedy". The answers to the first prompts are kept (runs/samples.py), for
    report.html. answers: to each prompt, where it is sampled; then "eval/pass@k" with k = 2, 4, … up to that
    number is the chance that one of k answers is right.
    roll_out(list of Prompt, temperature, answers to each) -> (rollout, response texts, {part of the score:
    [B]}), the answers to a prompt one after the other. It raises InputError in all processes or in none.
    """
    metrics = Metrics()
    shown = {}
    batches = batches_of(len(prompts), max(1, BATCH // answers), world)
    with phase("evaluation", (answers + 1) * sum(map(len, batches)), "responses") as bar:
        for places in batches:
            with world.all_or_none():
                batch = [prompts[i] for i in places or [0]]  # no more at a time: their records can be large
            for kind, sampled_at, count in (("", temperature, answers), ("_greedy", 0.0, 1)):
                rollout, texts, parts = roll_out(batch, sampled_at, count)
                if not places:  # only other processes have prompts left; sharded models need all processes
                    continue
                rows = answer_rows(texts, rollout, parts)[::count]  # the first answer to each
                for place, prompt, row in zip(places, batch, rows, strict=True):
                    if place < SHOWN:
                        known = {"place": place, "prompt": prompt.prompt, "answer": prompt.answer}
                        shown.setdefault(place, known).update({"greedy": row} if kind else row)
                if prompts.has_accuracy:
                    groups = [texts[i : i + count] for i in range(0, len(texts), count)]
                    right = [
                        [is_correct(text, prompt.answer, reasoning) for text in group]
                        for prompt, group in zip(batch, groups, strict=True)
                        if prompt.answer is not None and comparable(prompt.answer)
                    ]
                    metrics.add(f"eval/accuracy{kind}", sum(map(sum, right)), count * len(right))
                    for k in (2**i for i in range(1, count.bit_length())):
                        metrics.add(f"eval/pass@{k}", sum(pass_rate(group, k) for group in right), len(right))
                measured = {}
                if reasoning and "format" in parts:
                    measured["format_rate"] = parts["format"] > 0
                measured |= parts
                if "judge" in parts and not kind:
                    measured["judge_mean_square"] = parts["judge"].double().square()
                measured |= {"length": rollout.response_len, "finished": rollout.finished}
                metrics.add_all({f"eval/{name}{kind}": x.sum() for name, x in measured.items()}, len(texts))
                bar.done += len(texts)
    return metrics.means(world), rows_of_evaluation(shown, world)


def evaluate_actor(run, metrics, rows):
    """Metrics and rows of a step -> these, and with them what ``evaluate`` finds of the actor on the held-out
    prompts; nothing is added without ``--eval_data_path``. With ``--ema_beta`` the same of the averaged actor
    (ema.py), as "ema/<name>", once there is an average."""
    if run.held_out is None:
        return metrics, rows
    args = run.args
    world = run.world

    def roll_out(prompts, temperature, answers):
        prompts = [prompt for prompt in prompts for _ in range(answers)]
        samples = torch.arange(len(prompts)) % answers
        keys = noise_keys(args.seed, EVAL_STEP, [p.index for p in prompts], samples)
        with world.all_or_none():  # sharded models need all processes: one that has failed ends all
            rollout, texts = run.collector.respond(prompts, keys, temperature)
        parts = {}
        for reward in (run.reward, run.judge):
            with world.all_or_none():
                parts |= reward.combine(run.collector.raw_scores(reward, prompts, rollout, texts))
        if args.offline_data_path and temperature:
            with world.all_or_none():
                parts["kl"] = sequence_kl(rollout, run.scorers, run.host, args.temperature)
        return rollout, texts, parts

    def evaluated():
        with run.collector.sampling_from(run.actor):
            return evaluate(
                roll_out, run.held_out, args.temperature, args.reasoning, world, args.num_generations
            )

    found, shown = evaluated()
    if run.ema.batches:
        with run.ema.in_place():
            averaged, _ = evaluated()
        found |= {name.replace("eval/", "ema/"): x for name, x in averaged.items()}
    if run.held_out_pairs:
        found |= evaluate_pairs(run.held_out_pairs, run.scorers, run.host, args.temperature, world)
    return metrics | found, rows | shown
