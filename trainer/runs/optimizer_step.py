"""One optimizer step, for all training scripts: gradients, their sum over processes, clipping, AdamW.

``gradients_that_fit`` computes the gradients of a minibatch in micro-batches that fit into memory.
``step_if_finite`` then sums, clips and steps one model. If its loss or gradient is NaN or infinite, the step
is left out. PPO's models step one after the other; ``note_steps`` looks at both steps of a minibatch, ends a
run that goes on with such steps, and adapts the scale of fp16's losses (compute/loss_scale.py).
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

from model.weights import sharded_and_whole
from trainer.compute.batching import micro_batches, pass_size
from trainer.compute.memory import attempt, out_of_memory_error
from trainer.runs.base import Run
from trainer.runs.distributed import sum_gradients
from trainer.runs.metrics import Metrics

MAX_BAD_STEPS = 5  # minibatches in a row with an optimizer step that was not finite, which end the run


# What a loss is of: the lengths of sequences in tokens, and ``loss_of(rows)`` -> (loss, ``Metrics``).
GradientSource = tuple[list[int], Callable[[list[int]], tuple[Tensor, Metrics]]]


def gradients_that_fit(run: Run, sources: list[GradientSource], pieces: int = 1) -> Metrics:
    """Compute a minibatch's gradients in micro-batches that fit into memory -> ``Metrics`` of the losses.

    pieces: the number of micro-batches of about equal size (--accumulation_steps). If memory runs out, all is
    computed again with half the tokens, which ``run.progress.token_budget`` keeps. Raises InputError where
    not even a single sequence fits.
    """
    lengths = [length for lengths, _ in sources for length in lengths]
    total = sum(lengths)
    longest = max(lengths)
    wanted = pass_size(len(lengths), longest, total) if pieces == 1 else math.ceil(total / pieces)
    wanted = min(run.progress.token_budget, wanted)
    if run.in_step:
        wanted, longest = run.in_step.most(wanted, longest)
    budget = wanted
    while not (done := attempt(backward, run, sources, budget))[0]:
        forget_gradients(run)
        if budget <= longest:  # no micro-batch had more tokens than the longest sequence
            raise out_of_memory_error(longest)
        budget //= 2
        run.progress.token_budget = budget
    sums = done[1]
    sums.add("perf/out_of_memory", budget < wanted, 1)
    if run.loss_scale.active:
        sums.add("perf/loss_scale", run.loss_scale.value, 1)
    return sums


def backward(run: Run, sources: list[GradientSource], token_budget: int) -> Metrics:
    """Add the gradients of every micro-batch of at most ``token_budget`` tokens -> the losses' metrics."""
    sums = Metrics()
    for lengths, loss_of in sources:

        def learn_from(rows: list[int], loss_of: Callable = loss_of) -> None:
            loss, metrics = loss_of(rows)
            run.loss_scale.scaled(loss).backward()
            sums.merge(metrics)

        if run.in_step:
            run.in_step.train(lengths, token_budget, learn_from)
        else:
            for rows in micro_batches(lengths, token_budget):
                learn_from(rows)
    return sums


def forget_gradients(run):
    """Discard the gradients of all models."""
    for optimizer in run.optimizers.values():
        optimizer.zero_grad()


class Step(NamedTuple):
    """What an optimizer step was made from: the loss, and the gradient's norm before clipping."""

    loss: float
    norm: float

    @property
    def finite(self):
        return math.isfinite(self.loss + self.norm)


def step_if_finite(run, learner, loss, number):
    """Optimizer step ``number`` of the run for one model: sum gradients over processes, clip their norm to
    --grad_clip, step, free the gradients -> ``Step``. If it is not ``finite``, the step is left out: weights,
    moments and weight decay do not move. ``note_steps`` has to be told of it."""
    sum_gradients(learner.model.parameters(), run.world)
    run.loss_scale.unscale(learner.model)
    step = Step(loss, clip_gradients(learner.model, run.args.grad_clip))
    for group in learner.optimizer.param_groups:
        group["lr"] = learner.learning_rate(number)
    if step.finite:
        learner.optimizer.step()
    learner.optimizer.zero_grad()
    return step


def clip_gradients(model, largest):
    """Clip the norm of all gradients of a model to ``largest``, in place -> the norm before, as a float."""
    parts = sharded_and_whole(p for p in model.parameters() if p.grad is not None)
    if not parts[0]:
        return clip_grad_norm_(parts[1], largest).item()
    norms = [get_total_norm([p.grad for p in part]) for part in parts if part]
    norms[0] = norms[0].full_tensor()  # over all processes
    norm = get_total_norm(norms)
    for part in parts:
        clip_grads_with_norm_(part, largest, norm)
    return norm.item()


def note_steps(run, steps):
    """Take note of a minibatch's ``Step`` of each model that had one, once: adapt the loss scale, which the
    models share, and count. ``MAX_BAD_STEPS`` minibatches in a row with a step that was not finite end the
    run (SystemExit). One does not count if the loss scale of fp16 was too large for it and could be lowered.
    """
    progress = run.progress
    scale = run.loss_scale
    steps = list(steps)
    bad = sum(not step.finite for step in steps)
    # The loss is computed without the scale: if it is not finite, a lower scale does not help.
    lowered = all(math.isfinite(step.loss) for step in steps) and scale.adapt(not bad)
    if not lowered:
        progress.bad_steps = progress.bad_steps + 1 if bad else 0
    progress.skipped_steps += bad
    if progress.bad_steps >= MAX_BAD_STEPS:
        remedy = "use --dtype float32, or lower" if scale.active else "lower"
        raise SystemExit(
            f"error: {MAX_BAD_STEPS} optimizer steps in a row were not finite; {remedy} the learning rates"
        )
