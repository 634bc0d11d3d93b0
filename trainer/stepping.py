"""One optimizer step, of any script: as many tokens at a time as fit into memory, and no step at all where
something is not finite."""

import math

from torch.nn.utils import clip_grad_norm_

from trainer.memory import halving
from trainer.record import pass_size

MAX_BAD_STEPS = 5  # non-finite optimizer steps in a row that end the run


def gradients_that_fit(run, backward, lengths, pieces=1):
    """``backward(token budget)`` -> its ``Metrics``, for sequences of these lengths: in ``pieces`` of about
    as many tokens, or of as few as have fitted so far; where memory runs out of half as many from then on."""
    total, longest = sum(lengths), max(lengths)
    wanted = pass_size(len(lengths), longest, total) if pieces == 1 else math.ceil(total / pieces)
    wanted = min(run.progress.token_budget, wanted)
    sums, fitted = halving(backward, wanted, longest, undo=lambda: forget_gradients(run))
    if fitted < wanted:
        run.progress.token_budget = fitted
    sums.add("perf/out_of_memory", fitted < wanted, 1)
    return sums


def forget_gradients(run):
    for optimizer in run.optimizers.values():
        optimizer.zero_grad()


def step_if_finite(run, loss, both):
    """Sum gradients over processes, clip each model's to --grad_clip, step: ``both`` are (model, optimizer,
    learning rate). A loss or gradient that is not finite makes it no step at all: no weight, momentum or
    decay moves; several in a row end the run. -> (was it a step?, the gradients' norms)."""
    progress = run.progress
    for model, _, _ in both:
        run.world.sum_gradients(model)
    norms = [clip_grad_norm_(model.parameters(), run.args.grad_clip).item() for model, _, _ in both]
    finite = math.isfinite(loss + sum(norms))
    for _, optimizer, lr in both:
        for group in optimizer.param_groups:
            group["lr"] = lr
        if finite:
            optimizer.step()
    forget_gradients(run)
    progress.bad_steps = 0 if finite else progress.bad_steps + 1
    progress.skipped_steps += not finite
    if progress.bad_steps >= MAX_BAD_STEPS:
        raise SystemExit(f"error: {MAX_BAD_STEPS} optimizer steps in a row were not finite; lower the rates")
    return finite, norms
