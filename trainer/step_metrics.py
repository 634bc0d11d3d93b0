"""What a PPO step logs: numbers of its rollout, of its responses, of its optimizer steps, of the whole step.

Every metric is explained in docs/metrics.md. The sums are exact over processes (runs/metrics.py). Nothing is
trained with these numbers.
"""

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from trainer import ppo
from trainer.collect import Batch
from trainer.compute.rollout_data import Rollout
from trainer.options.filter_groups import rows_of_equal_groups
from trainer.run import PpoRun
from trainer.runs.distributed import World
from trainer.runs.metrics import Metrics, Number
from trainer.runs.optimizer_step import Step

LEAST_SPREAD = 1e-6  # times the mean: a smaller standard deviation is rounding


def note_rollout(run: PpoRun, new: Rollout, metrics: Metrics) -> None:
    """Add what the ``newest_rows`` of a filled rollout show to ``metrics``: KL, the sampler's gap, the values
    beside the outcomes."""
    offline = bool(run.args.offline_data_path)  # then only the critic is measured: nothing was sampled
    for name, (total, count) in ppo.rollout_metrics(new).items():
        if name.startswith("value/") or not offline:
            metrics.add(name, total, count)
    if run.critic:
        explained = ppo.explained_variance(new.outcomes, new.values, new.mask, run.world.sum)
        metrics.add("value/explained_variance", explained, 1)
        metrics.add("value/scale", run.critic.scale, 1)
    if not offline:
        size = ppo.effective_sample_size(new.old_logprobs, new.sampler_logprobs, new.mask, run.world.sum)
        metrics.add("rollout/importance_ess", size, 1)
    metrics.add("policy/advantage_std", new.advantage_std, 1)
    metrics.add_all(run.kl.metrics(), 1)


def note_step(run: PpoRun, name: str, step: Step, metrics: Metrics) -> None:
    """Add an optimizer step (``Step``) of a learner to ``metrics``."""
    group = "value" if name == "critic" else "policy"
    metrics.add("policy/skipped_steps", not step.finite, 1)
    if step.finite:
        metrics.add(f"{group}/grad_norm", step.norm, 1)
    rate = run.learners[name].optimizer.param_groups[0]["lr"]
    metrics.add(f"{group}/learning_rate", rate, 1)


def step_metrics(run: PpoRun, batch: Batch, metrics: Metrics) -> dict[str, float]:
    """All that a step logs -> {name: mean over all processes}.

    metrics: what scoring and updating have measured.
    """
    args = run.args
    rollout = batch.rollout
    responses = rollout.responses()
    sums: dict[str, Number] = {f"reward/{name}": x.sum() for name, x in batch.scores.items()}
    if run.reward.models:
        sums["reward/at_limit"] = run.reward.at_limit(batch.raw).sum()
    if args.filter_groups:
        sums["rollout/sampled_again"] = batch.again
    if args.num_generations > 1:
        equal = rows_of_equal_groups(batch.scores["score"], args.num_generations)
        sums["rollout/equal_groups"] = len(equal)
    sums["rollout/length"] = rollout.response_len.sum()
    sums["rollout/finished"] = rollout.finished.sum()
    sums["rollout/repetition"] = torch.tensor([repetition(ids) for ids in responses]).sum()
    metrics.add_all(sums, len(responses))
    metrics.add_all(batch_metrics(responses, batch.scores["score"], run.world), 1)
    means = metrics.means(run.world)
    means |= {f"perf/{name}_seconds": x for name, x in batch.seconds.items()}
    means["perf/samples_per_second"] = args.batch_size * run.world.size / sum(batch.seconds.values())
    return means


def repetition(ids: Sequence[int]) -> float:
    """The share of a response's trigrams of tokens, EOS included, that occurred before in the same response;
    0 where it has fewer than four tokens."""
    trigrams = list(zip(ids, ids[1:], ids[2:], strict=False))
    return (len(trigrams) - len(set(trigrams))) / max(len(trigrams), 1)


def batch_metrics(responses: list[list[int]], scores: Tensor, world: World) -> dict[str, Number]:
    """{name: value} of the whole batch, the same in all processes, which must all call it.

    responses: this process' B lists of ids; scores [B]: theirs. "rollout/distinct": responses of which no two
    are equal, token by token, divided by all; "reward/score_std": population standard deviation of the
    scores; "rollout/score_length_corr": Pearson's correlation of score and length in tokens, 0 where one of
    them does not vary.
    """
    mine = [(hash(tuple(ids)), x, len(ids)) for ids, x in zip(responses, scores.tolist(), strict=True)]
    rows = list(chain.from_iterable(world.gather(mine)))
    score = centred([x for _, x, _ in rows])
    length = centred([count for _, _, count in rows])
    size = (score.square().sum() * length.square().sum()).sqrt().item()
    return {
        "rollout/distinct": len({text for text, _, _ in rows}) / len(rows),
        "reward/score_std": score.square().mean().sqrt().item(),
        "rollout/score_length_corr": (score @ length).item() / size if size else 0.0,
    }


def centred(numbers: Sequence[float]) -> Tensor:
    """Numbers less their mean, fp64 [N]; 0 everywhere where they differ by no more than rounding."""
    x = torch.tensor(numbers, dtype=torch.float64)
    mean = x.mean()
    x = x - mean
    return torch.zeros_like(x) if x.square().mean().sqrt() <= LEAST_SPREAD * mean.abs() else x
