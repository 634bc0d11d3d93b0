"""What a PPO step logs: numbers of its rollout, of its responses, of its optimizer steps, of the whole step.

Every metric is explained in docs/metrics.md. The sums are exact over processes (runs/metrics.py). Nothing is
trained with these numbers.
"""

import torch

from trainer import ppo
from trainer.options.filter_groups import rows_of_equal_groups

LEAST_SPREAD = 1e-6  # times the mean: a smaller standard deviation is rounding


def note_rollout(run, new, metrics):
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


def note_step(run, name, step, metrics):
    """Add an optimizer step (``Step``) of a learner to ``metrics``."""
    group = "value" if name == "critic" else "policy"
    metrics.add("policy/skipped_steps", not step.finite, 1)
    if step.finite:
        metrics.add(f"{group}/grad_norm", step.norm, 1)
    rate = run.learners[name].optimizer.param_groups[0]["lr"]
    metrics.add(f"{group}/learning_rate", rate, 1)


def step_metrics(run, batch, metrics):
    """All that a step logs -> {name: mean over all processes}.

    batch: ``Batch`` (collect.py); metrics: what scoring and updating have measured (``Metrics``).
    """
    args = run.args
    rollout = batch.rollout
    responses = rollout.responses()
    count = len(responses)
    metrics.add_all({f"reward/{name}": x.sum() for name, x in batch.scores.items()}, count)
    if run.reward.models:
        metrics.add("reward/at_limit", run.reward.at_limit(batch.raw).sum(), count)
    if args.filter_groups:
        metrics.add("rollout/sampled_again", batch.again, count)
    if args.num_generations > 1:
        equal = len(rows_of_equal_groups(batch.scores["score"], args.num_generations))
        metrics.add("rollout/equal_groups", equal, count)
    metrics.add("rollout/length", rollout.response_len.sum(), count)
    metrics.add("rollout/finished", rollout.finished.sum(), count)
    metrics.add("rollout/repetition", torch.tensor([repetition(ids) for ids in responses]).sum(), count)
    metrics.add_all(batch_metrics(responses, batch.scores["score"], run.world), 1)
    means = metrics.means(run.world)
    means |= {f"perf/{name}_seconds": x for name, x in batch.seconds.items()}
    means |= run.reward.metrics(batch.raw)
    means["perf/samples_per_second"] = args.batch_size * run.world.size / sum(batch.seconds.values())
    return means


def repetition(ids):
    """The share of a response's trigrams of tokens, EOS included, that occurred before in the same response;
    0 where it has fewer than four tokens."""
    trigrams = list(zip(ids, ids[1:], ids[2:], strict=False))
    return (len(trigrams) - len(set(trigrams))) / max(len(trigrams), 1)


def batch_metrics(responses, scores, world):
    """{name: value} of the whole batch, the same in all processes, which must all call it.

    responses: this process' B lists of ids; scores [B]: theirs. "rollout/distinct": responses of which no two
    are equal, token by token, divided by all; "reward/score_std": population standard deviation of the
    scores; "rollout/score_length_corr": Pearson's correlation of score and length in tokens, 0 where one of
    them does not vary.
    """
    mine = [
        (hash(tuple(ids)), score, len(ids)) for ids, score in zip(responses, scores.tolist(), strict=True)
    ]
    hashes, scores, lengths = zip(*(row for rows in world.gather(mine) for row in rows), strict=True)
    scores = centred(scores)
    lengths = centred(lengths)
    size = (scores.square().sum() * lengths.square().sum()).sqrt().item()
    return {
        "rollout/distinct": len(set(hashes)) / len(hashes),
        "reward/score_std": scores.square().mean().sqrt().item(),
        "rollout/score_length_corr": (scores @ lengths).item() / size if size else 0.0,
    }


def centred(numbers):
    """Numbers less their mean, fp64 [N]; 0 everywhere where they differ by no more than rounding."""
    x = torch.tensor(numbers, dtype=torch.float64)
    mean = x.mean()
    x = x - mean
    return torch.zeros_like(x) if x.square().mean().sqrt() <= LEAST_SPREAD * mean.abs() else x
