"""Steps of train_ppo.py, whole or in part, with a run and records that a test has made."""

from functools import partial

from benchmarks.one_step import take_step  # noqa: F401  (for tests, which import it from here)
from trainer import advantages, train_ppo
from trainer.runs.metrics import Seconds
from trainer.runs.optimizer_step import GradientSource


def collected(run, step, records):
    """Records -> a batch of responses with their scores."""
    return train_ppo.score(run, step, train_ppo.sample(run, step, records), Seconds())


def filled(run, step, batch):
    """A batch with scores -> the batch that is learned from, with all its fields."""
    args, models, world = run.args, run.models, run.world
    batch = train_ppo.evaluate_tokens(
        args, step, batch, models, run.options, world, run.progress.token_budget
    )
    for option in run.options:
        option.before_estimate(step, batch)
    train_ppo.reward_tokens(args, batch, run.kl.coef)
    has_signal = advantages.scores_differ(batch, world.sum)
    if models.critic:
        run.value_scale.fit(batch, has_signal, world.sum)
    train_ppo.estimate(args, batch, has_signal, run.advantage_scale, world)
    return batch


def update(run, step, batch, metrics):
    train_ppo.update(run.args, step, batch, run.models, run.updater, metrics, run.kl.coef, run.options)


def add_gradients(run, name, minibatch, tokens, number=0):
    """The gradients of one model's loss of a minibatch -> what the losses have measured. tokens: its own."""
    args, models = run.args, run.models
    whole = train_ppo.Minibatch(minibatch, tokens, args.mini_batch_size * run.world.size, number)
    loss = {
        "critic": partial(train_ppo.critic_loss, args, models, whole),
        "actor": partial(train_ppo.actor_loss, args, models, run.kl.coef, whole),
    }
    scorer = models.value_scorer if name == "critic" else models.actor_scorer
    beginnings = scorer.beginnings(minibatch.layout)
    sources = [GradientSource(minibatch.layout.lengths, loss[name], beginnings)]
    if name == "actor":
        sources += filter(None, (option.further_loss(number) for option in run.options))
    return run.updater.gradients(sources, args.accumulation_steps)
