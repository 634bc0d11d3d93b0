"""What a PPO step logs: numbers of its rollout, of its optimizer steps, and of the whole step.

Every metric is explained in docs/metrics.md. The sums are exact over processes (runs/metrics.py).
"""

from trainer import ppo
from trainer.filter_groups import rows_of_equal_groups
from trainer.response_stats import batch_metrics, repetition


def note_rollout(run, new, returns, metrics):
    """Add what the ``newest_rows`` of a filled rollout show to ``metrics``: KL, the sampler's gap, the values
    beside the Monte-Carlo returns [B, R]."""
    offline = bool(run.args.offline_data_path)  # then only the critic is measured: nothing was sampled
    for name, (total, count) in ppo.rollout_metrics(new, returns).items():
        if name.startswith("value/") or not offline:
            metrics.add(name, total, count)
    if run.critic:
        explained = ppo.explained_variance(returns, new.values, new.mask, run.world.sum)
        metrics.add("value/explained_variance", explained, 1)
        metrics.add("value/scale", run.critic.scale, 1)
    logprobs = new.old_logprobs, new.sampler_logprobs
    if not offline:
        size = ppo.effective_sample_size(*logprobs, new.mask, run.world.sum)
        metrics.add("rollout/importance_ess", size, 1)
    metrics.add("policy/advantage_std", new.advantage_std, 1)
    metrics.add_all(run.kl.metrics(), 1)


def note_step(run, name, step, metrics):
    """Add an optimizer step (``Step``) of a learner to ``metrics``."""
    group = {"critic": "value", "actor": "policy"}[name]
    metrics.add("policy/skipped_steps", not step.finite, 1)
    if step.finite:
        metrics.add(f"{group}/grad_norm", step.norm, 1)
    rate = run.learners[name].optimizer.param_groups[0]["lr"]
    metrics.add(f"{group}/learning_rate", rate, 1)


def step_metrics(run, batch, metrics, clock):
    """All that a step logs -> {name: mean over all processes}.

    batch: ``Batch`` (batch.py); metrics: what scoring and updating have measured (``Metrics``);
    clock: the times before scoring, before updating, and after it.
    """
    args, rollout, count = run.args, batch.rollout, len(batch.prompts)
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
    metrics.add("rollout/repetition", repetition(rollout).sum(), count)
    metrics.add_all(batch_metrics(rollout, batch.scores["score"], run.world), 1)
    means = metrics.means(run.world)
    seconds = {**batch.seconds, "score": clock[1] - clock[0], "update": clock[2] - clock[1]}
    means |= {f"perf/{name}_seconds": x for name, x in seconds.items()}
    means |= run.reward.metrics(batch.raw)
    means["perf/samples_per_second"] = args.batch_size * run.world.size / sum(seconds.values())
    return means
