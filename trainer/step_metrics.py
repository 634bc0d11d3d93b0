"""What a PPO step logs: numbers of its rollout, of its responses, of its optimizer steps, of the whole step.

Every metric is explained in docs/metrics.md. The sums are exact over processes (runs/metrics.py). Nothing is
trained with these numbers. Those of the losses, such as policy/approx_kl and policy/clip_fraction, are named
in losses.py; grad_norm and learning_rate in ``take_step`` in train_ppo.py.
"""

import math
from argparse import Namespace
from collections.abc import Mapping
from itertools import chain

import torch
from torch import Tensor

from dataset.formats import plain_messages
from model.critic import CriticModel
from trainer.advantages import Sum, centred, mean_std, moments
from trainer.compute.batch import Batch
from trainer.compute.batching import in_fp64
from trainer.losses import kl_estimators, masked_sum
from trainer.options.filter_groups import rows_of_equal_groups
from trainer.rewards.combine import Reward
from trainer.rewards.rules import repetition
from trainer.runs.displays import Row, Rows
from trainer.runs.distributed import World
from trainer.runs.metrics import Metrics, Number


def batch_metrics(
    args: Namespace, batch: Batch, critic: CriticModel | None, kl_coef: float, world: World
) -> Metrics:
    """What a batch of new responses shows before it is learned from: the KL to the reference, how far the
    sampler's log-probs are from the scorer's, and, with a critic, the values beside the returns."""
    metrics = Metrics()
    mask = batch.action_mask
    of_tokens: dict[str, Tensor] = {}  # [B, R]
    # Of logged answers the reference is the old actor.
    if batch.ref_logprobs is not None and not args.offline_data_path:
        k1, _, k3 = kl_estimators(batch.old_logprobs, batch.ref_logprobs)
        of_tokens |= {"kl/k1": k1, "kl/k3": k3}
        metrics.add("kl/sequence", masked_sum(k1, mask), mask.any(1).sum())
    if batch.old_logprobs is not batch.sampler_logprobs:  # else they were not computed twice
        of_tokens["rollout/sampler_gap"] = (batch.sampler_logprobs - batch.old_logprobs).abs()
        of_tokens["rollout/importance_weight"] = batch.importance_weights
        size = effective_sample_size(batch.old_logprobs, batch.sampler_logprobs, mask, world.sum)
        metrics.add("rollout/importance_ess", size)
    if critic:
        of_tokens |= {"value/mean": batch.values, "value/return": batch.mc_returns}
        explained = explained_variance(batch.mc_returns, batch.values, mask, world.sum)
        metrics.add("value/explained_variance", explained)
        metrics.add("value/scale", critic.scale)
    sums = {name: masked_sum(x, mask) for name, x in of_tokens.items()}
    metrics.add_all(sums, mask.sum())
    metrics.add("policy/advantage_std", batch.advantage_std)
    if args.kl_target:
        metrics.add("kl/coef", kl_coef)
    return metrics


def effective_sample_size(
    old_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor, sum_over_processes: Sum
) -> float:
    """(sum w)^2 / (n sum w^2) of w = pi_old / pi_sampler, without a cap, over the n response tokens of the
    whole batch: 1 where sampler and scorer agree, 1/n where a single token has nearly all the weight. NaN
    where a w is too large for fp64."""
    total = sum_over_processes(moments(in_fp64(old_logprobs - sampler_logprobs).exp(), mask))
    return (total[0].square() / (total[1] * total[2])).item()


def explained_variance(returns: Tensor, values: Tensor, mask: Tensor, sum_over_processes: Sum) -> float:
    """1 - Var(returns - values) / Var(returns) over the response tokens of the whole batch; NaN where all
    returns are equal. returns: discounted sums of rewards; GAE's with lambda below 1 contain the values
    themselves: with them even noise would seem to explain something."""
    _, error_std = mean_std(sum_over_processes(moments(returns - values, mask)))
    _, return_std = mean_std(sum_over_processes(moments(returns, mask)))
    return 1 - (error_std / return_std) ** 2 if return_std else math.nan


def step_metrics(
    args: Namespace,
    rollout: Batch,
    reward: Reward,
    metrics: Metrics,
    seconds: Mapping[str, float],
    world: World,
) -> dict[str, float]:
    """All that a step logs -> {name: mean over all processes}.

    rollout: of the step; metrics: what estimating and updating have measured; seconds: of the step's phases.
    """
    responses = rollout.sampled()
    for name, x in rollout.parts.items():
        add_scores(metrics, f"reward/{name}", x)
    sums: dict[str, Number] = {}
    if reward.models:
        sums["reward/at_limit"] = reward.at_limit(rollout.raw).sum()
    if args.filter_groups:
        sums["rollout/sampled_again"] = rollout.sampled_again
    if args.num_generations > 1:
        sums["rollout/equal_groups"] = len(rows_of_equal_groups(rollout.parts["score"], args.num_generations))
    sums["rollout/length"] = rollout.lengths.sum()
    sums["rollout/finished"] = rollout.finished.sum()
    sums["rollout/repetition"] = torch.tensor([repetition(ids) for ids in responses]).sum()
    metrics.add_all(sums, len(responses))
    add_turns(metrics, "rollout/{}", rollout)
    metrics.add_all(metrics_over_processes(responses, rollout.parts["score"], world))
    if reward.functions:
        for logged in world.gather(rollout.raw.logged):
            for name, values in logged.items():
                metrics.add(f"function/{name}", sum(values), len(values))
    means = metrics.means(world)
    means |= {f"perf/{name}_seconds": x for name, x in seconds.items()}
    means["perf/samples_per_second"] = args.batch_size * world.size / sum(seconds.values())
    return means


def add_scores(metrics: Metrics, name: str, scores: Tensor) -> None:
    """Add numbers of responses to a metric, without those that are NaN: where nothing was said."""
    given = scores[~scores.isnan()]
    metrics.add(name, given.sum(), len(given))


def add_turns(metrics: Metrics, pattern: str, batch: Batch) -> None:
    """Add what is counted of responses in several turns, if they have them, and of calls where there are
    tools. pattern: of the metrics' names, {} stands for what is counted."""
    dialogues = batch.dialogues
    if not dialogues:
        return
    sums: dict[str, Number] = {
        "turns": sum(dialogue.turns for dialogue in dialogues),
        "observation_tokens": sum(dialogue.observation_tokens for dialogue in dialogues),
        "no_room": sum(dialogue.no_room for dialogue in dialogues),
        "hung": sum(dialogue.hung for dialogue in dialogues),
    }
    if batch.turn_rewards is None and any(prompt.tools for prompt in batch.prompts):
        sums["calls"] = calls = sum(dialogue.calls for dialogue in dialogues)
        failed = sum(dialogue.failed_calls for dialogue in dialogues)
        metrics.add(pattern.format("failed_calls"), failed, calls)  # NaN where nothing was called
    metrics.add_all({pattern.format(name): total for name, total in sums.items()}, len(dialogues))


def metrics_over_processes(responses: list[list[int]], scores: Tensor, world: World) -> dict[str, Number]:
    """{name: value} of the whole batch, the same in all processes: they all call it.

    responses: this process' B lists of sampled ids; scores [B]: theirs. "rollout/distinct": responses of
    which no two are equal, token by token, divided by all; "reward/score_std": population standard deviation
    of the scores; "rollout/score_length_corr": Pearson's correlation of score and length in tokens, 0 where
    one does not vary; "reward/unscored", only if there are any: the share whose score is NaN.
    """
    own = [(hash(tuple(ids)), x, len(ids)) for ids, x in zip(responses, scores.tolist(), strict=True)]
    texts, scores_of_all, lengths = zip(*chain.from_iterable(world.gather(own)), strict=True)
    numbers = torch.tensor([scores_of_all, lengths], dtype=torch.float64)  # each process has those of all
    scored = ~numbers[0].isnan()
    score, length = (centred(x, scored, torch.clone)[0][scored] for x in numbers)
    values: dict[str, Number] = {}
    if len(score) < len(texts):
        values["reward/unscored"] = 1 - len(score) / len(texts)
    return values | {
        "rollout/distinct": len(set(texts)) / len(texts),
        "reward/score_std": score.square().mean().sqrt().item() if len(score) else 0.0,
        "rollout/score_length_corr": torch.cosine_similarity(score, length, dim=0).item(),  # 0 if one is 0
    }


# ------------------------------------------------------------------------------------------ what is kept


def rows_of_step(batch: Batch, world: World) -> Rows:
    """What is kept of a step's responses, of all processes, which must all call it: the first one and those
    that stand out."""
    rows = [row for theirs in world.gather(answer_rows(batch)) for row in theirs]
    scored = [row for row in rows if "score" in row["parts"]]
    by_score = sorted(scored, key=lambda row: row["parts"]["score"])
    longest = max(rows, key=lambda row: row["length"])
    kept = {"first": rows[0]}
    if scored:
        kept |= {"best": by_score[-1], "worst": by_score[0]}
    kept["longest"] = longest
    return {"samples.jsonl": [{**row, "kind": kind} for kind, row in kept.items()]}


def answer_rows(batch: Batch) -> list[Row]:
    """A row of each response: prompt, text, the parts of its score that say something of it, its length in
    sampled tokens, did it end. Of several turns the text is the last one's, "messages" has all, and "cut_by"
    says what has cut a response."""
    numbers = {name: x.tolist() for name, x in batch.parts.items()}
    lengths = batch.lengths.tolist()
    finished = batch.finished.tolist()
    turns: list[Row] = [{"messages": plain_messages(dialogue.messages)} for dialogue in batch.dialogues]
    for row, dialogue, ended in zip(turns, batch.dialogues, finished, strict=bool(turns)):
        if not ended:
            row["cut_by"] = "--max_gen_len"
        if dialogue.no_room:
            row["cut_by"] = "an observation that does not fit"
        if dialogue.hung:
            row["cut_by"] = "--reward_timeout"
    return [
        {
            "prompt": prompt.prompt,
            "response": batch.texts[i],
            "parts": {name: round(x[i], 4) for name, x in numbers.items() if not math.isnan(x[i])},
            "length": lengths[i],
            "finished": finished[i],
            **(turns[i] if turns else {}),
        }
        for i, prompt in enumerate(batch.prompts)
    ]
