"""One optimizer step, for all training scripts: gradients, their sum, clipping, learning rates, AdamW.

``Updater.gradients`` computes the gradients of a minibatch in micro-batches that fit into memory.
``Updater.step`` then sums, clips and steps one model. If the loss or the gradient is NaN or infinite, the
step is left out. PPO's models step one after the other. ``Updater.after_minibatch`` looks at both steps of a
minibatch, ends a run in which such steps follow one another, and adapts the scale of fp16's losses
(compute/precision.py). ``AdamWInHalf`` is --moments_dtype bfloat16."""

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import AdamW, Optimizer
from torch.optim.optimizer import ParamsT

from model.weights import full_tensor, local_part, sharded_and_whole
from trainer.compute.batching import Beginnings, micro_batches, tokens_per_micro_batch, tokens_saved
from trainer.compute.memory import attempt, out_of_memory_error
from trainer.compute.precision import LossScale
from trainer.compute.sharding import ShardGroup
from trainer.runs.distributed import World
from trainer.runs.metrics import Loss, Metrics

MAX_BAD_STEPS = 5  # minibatches in a row with an optimizer step that was not finite, which end the run
# Numbers that AdamWInHalf computes at a time, so that no fp32 copy of a whole moment exists
CHUNK = {"cpu": 1 << 16, "cuda": 1 << 24, "mps": 1 << 24}


class GradientSource(NamedTuple):
    """What a loss is of."""

    lengths: list[int]  # of sequences, in tokens
    loss_of: Callable[[list[int]], Loss]  # rows -> (loss, ``Metrics``)
    beginnings: Beginnings = ()  # of the sequences, as far as they are computed once


class Step(NamedTuple):
    """What an optimizer step was made from: the loss, and the gradient's norm before clipping."""

    loss: float
    norm: float

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss + self.norm)


@dataclass
class Progress:
    """How far a run has come: what changes from batch to batch besides weights and optimizer state."""

    token_budget: int  # tokens of one micro-batch at most; halved when memory runs out
    step: int = 0  # batches done; it fixes the place in the data, the sampling noise and the learning rates
    bad_steps: int = 0  # minibatches in a row with a step left out, because a loss or gradient was not finite
    skipped_steps: int = 0  # all optimizer steps left out for this reason, of every model


@dataclass
class TrainState:
    """The train state of one model: the model, its optimizer and its schedule. PPO has the actor's and, with
    a critic, the critic's; stages 1 and 2 have one."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    peak: float  # the highest learning rate
    total_steps: int  # optimizer steps of the whole run
    per_batch: int = 1  # optimizer steps of a batch
    first_batch: int = 0  # the batch with which this model begins to train
    warmup_steps: int = 0  # optimizer steps in which the learning rate rises
    schedule: str = "cosine"  # or "constant"

    def learning_rate(self, number: int) -> float:
        """The learning rate in optimizer step ``number`` of the run, over the steps in which this model
        trains: it rises linearly in the warm-up, is then the peak, and falls as a cosine to a tenth at the
        last step (Loshchilov and Hutter 2017, arXiv:1608.03983, eq. 5), or is constant. A step that is left
        out counts too."""
        first = self.first_batch * self.per_batch  # of its optimizer steps in the run
        step = number - first
        warmup = self.warmup_steps
        if step < warmup:
            return self.peak * (step + 1) / (warmup + 1)
        if self.schedule == "constant":
            return self.peak
        falling = self.total_steps - first - warmup
        progress = (step - warmup) / max(falling - 1, 1)
        return self.peak * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


@dataclass
class Updater:
    """Makes the optimizer steps of a run's models. grad_clip: --grad_clip; shard_group: of --shard 1."""

    world: World
    train_states: dict[str, TrainState]
    loss_scale: LossScale
    progress: Progress
    grad_clip: float
    shard_group: ShardGroup | None = None

    def gradients(self, sources: list[GradientSource], pieces: int = 1) -> Metrics:
        """Compute a minibatch's gradients in micro-batches that fit into memory -> ``Metrics`` of the losses.

        pieces: the number of micro-batches of about equal size (--accumulation_steps). If memory runs out,
        all is computed again with half the tokens, which ``progress.token_budget`` keeps. Raises InputError
        where not even a single sequence fits.
        """
        lengths = [length for source in sources for length in source.lengths]
        saved = sum(tokens_saved(source.beginnings) for source in sources)
        longest = max(lengths)
        wanted = tokens_per_micro_batch(self.progress.token_budget, lengths, pieces, saved)
        budget = wanted
        while (sums := attempt(self.backward, sources, budget)[1]) is None:
            self.forget_gradients()
            if budget <= longest:  # no micro-batch had more tokens than the longest sequence
                raise out_of_memory_error(longest)
            budget //= 2
            self.progress.token_budget = budget
        sums.add("perf/out_of_memory", budget < wanted)
        if self.loss_scale.active:
            sums.add("perf/loss_scale", self.loss_scale.value)
        return sums

    def backward(self, sources: list[GradientSource], token_budget: int) -> Metrics:
        """Add the gradients of every micro-batch of at most ``token_budget`` tokens -> the losses'
        metrics."""
        sums = Metrics()

        def learn_from(loss_of: Callable, rows: list[int]) -> None:
            loss, metrics = loss_of(rows)
            (loss * self.loss_scale.value).backward()
            sums.merge(metrics)

        for lengths, loss_of, beginnings in sources:
            batches = micro_batches(lengths, token_budget, beginnings)
            if self.shard_group:  # all processes have equally many sequences, so no pass is without
                for rows in self.shard_group.equal_passes(batches):
                    self.shard_group.run(learn_from, loss_of, rows)
            else:
                for rows in batches:
                    learn_from(loss_of, rows)
        return sums

    def forget_gradients(self) -> None:
        """Discard the gradients of all models."""
        for train_state in self.train_states.values():
            train_state.optimizer.zero_grad()

    def step(self, name: str, loss: float, number: int) -> Step:
        """Optimizer step ``number`` of the run for one model: sum gradients over processes, clip their norm,
        step, free the gradients. If the ``Step`` is not ``finite``, weights, moments and weight decay do not
        move. ``after_minibatch`` has to be called with it."""
        train_state = self.train_states[name]
        self.world.sum_gradients(train_state.model.parameters())
        self.loss_scale.unscale(train_state.model)
        step = Step(loss, clip_gradients(train_state.model, self.grad_clip))
        for group in train_state.optimizer.param_groups:
            group["lr"] = train_state.learning_rate(number)
        if step.finite:
            train_state.optimizer.step()
        train_state.optimizer.zero_grad()
        return step

    def after_minibatch(self, steps: Sequence[Step]) -> None:
        """To be called once with a minibatch's ``Step`` of each model that had one: adapt the loss scale,
        which the models share, and count. ``MAX_BAD_STEPS`` minibatches in a row with a step that was not
        finite end the run (SystemExit). One does not count if the loss scale of fp16 was too large for it and
        could be lowered."""
        progress = self.progress
        bad = sum(not step.finite for step in steps)
        # The loss is computed without the scale: if it is not finite, a lower scale does not help.
        lowered = all(math.isfinite(step.loss) for step in steps) and self.loss_scale.adapt(not bad)
        if not lowered:
            progress.bad_steps = progress.bad_steps + 1 if bad else 0
        progress.skipped_steps += bad
        if progress.bad_steps >= MAX_BAD_STEPS:
            raise SystemExit(
                f"error: {MAX_BAD_STEPS} optimizer steps in a row were not finite; lower the learning rates, "
                "or use --dtype float32"
            )


def clip_gradients(model: nn.Module, largest: float) -> float:
    """Clip the norm of all gradients of a model to ``largest``, in place -> the norm before."""
    parts = [part for part in sharded_and_whole(model.parameters()) if part]  # one, without --shard
    norms = [get_total_norm([p.grad for p in part if p.grad is not None]) for part in parts]
    norm = full_tensor(norms[0])  # of a sharded part over all processes
    if len(norms) > 1:
        norm = get_total_norm([norm, norms[1]])
    for part in parts:
        clip_grads_with_norm_(part, largest, norm)
    return norm.item()


# --------------------------------------------------------------------------------------------------- AdamW


def make_optimizer(
    parameters: ParamsT,
    learning_rate: float,
    moments_dtype: str,
    seed: int,
    betas: tuple[float, float] = (0.9, 0.999),
) -> Optimizer:
    """The optimizer of every script: torch's AdamW, or with moments_dtype "bfloat16" ``AdamWInHalf``. Weights
    decay only in groups of ``parameters`` that say so."""
    if moments_dtype == "bfloat16":
        optimizer = AdamWInHalf(parameters, learning_rate, betas, weight_decay=0.0)
        optimizer.seed = seed
        return optimizer
    return AdamW(parameters, learning_rate, betas, weight_decay=0.0, fused=True)


class AdamWInHalf(AdamW):
    """torch's AdamW (decoupled weight decay) with ``exp_avg`` and ``exp_avg_sq`` in bf16; weights and
    arithmetic are fp32. Parameters are contiguous.

    The second moment falls by less than the spacing of bf16 (0.4 to 0.8 %): rounded to the nearest it would
    stand still, so it is rounded at random. The random bits depend on seed, step and parameter alone.
    """

    seed: int

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # there is no closure
        """One step with the present gradients. A parameter without a gradient is left alone."""
        trained = [(p, group) for group in self.param_groups for p in group["params"]]
        for number, (p, group) in enumerate(trained):
            if p.grad is None:
                continue
            state = optimizer_state(self, p)
            state["step"] += 1
            step = int(state["step"])
            rate = group["lr"]
            beta1, beta2 = group["betas"]
            tensors = (p, p.grad, state["exp_avg"], state["exp_avg_sq"])
            chunks = [local_part(x).view(-1).split(CHUNK[p.device.type]) for x in tensors]
            # All chunks use the same bits, because drawing them costs more than the rest.
            random = torch.Generator(p.device).manual_seed(
                zlib.crc32(f"{self.seed} {step} {number}".encode())
            )
            bits = torch.randint(
                1 << 16, chunks[0][0].shape, generator=random, dtype=torch.int32, device=p.device
            )
            for weight, g, first, second in zip(*chunks, strict=True):
                m = first.float().lerp_(g, 1 - beta1)
                v = second.float().mul_(beta2).addcmul_(g, g, value=1 - beta2)
                first.copy_(m)
                weight.mul_(1 - rate * group["weight_decay"])
                root = v.sqrt().mul_((1 - beta2**step) ** -0.5).add_(group["eps"])
                weight.addcdiv_(m, root, value=-rate / (1 - beta1**step))
                second.copy_(rounded_at_random(v, bits[: len(v)]))


def optimizer_state(optimizer: Optimizer, p: Tensor) -> dict[str, Tensor]:
    """The optimizer state of a parameter, for an optimizer of ``make_optimizer``: zeros before the first
    step. The step of ``AdamWInHalf`` is on the CPU, so that reading it waits for no GPU."""
    state: dict[str, Tensor] = optimizer.state[p]
    if not state:
        half = isinstance(optimizer, AdamWInHalf)
        state["step"] = torch.zeros((), device="cpu" if half else p.device)
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros_like(p, dtype=torch.bfloat16 if half else None)
    return state


def rounded_at_random(x: Tensor, bits: Tensor) -> Tensor:
    """fp32 [n], overwritten -> the same numbers as bf16 can hold them, rounded up or down at random: the
    nearer is the likelier. A number that bf16 holds stays as it is. bits [n]: random, 0 to 65535."""
    # bf16 is the upper half of fp32's bits. Where lower half and random bits carry over, it is rounded up.
    return x.view(torch.int32).add_(bits).bitwise_and_(-(1 << 16)).view(torch.float32)
