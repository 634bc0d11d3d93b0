"""AdamW whose two moments are kept in bf16: half of their memory (``--moments_dtype bfloat16``).

A moment in bf16 has 8 significant bits: the numbers next to it are 0.4 to 0.8 % away. With beta2 = 0.999
the second moment falls by 0.1 % a step at most. Rounded to the nearest number, it would stand still for ever.
So it is rounded at random: up or down, with the probabilities that make the mean exact. The first moment
changes by a tenth a step and is rounded to the nearest. Weights and arithmetic are fp32.

The random bits depend on the seed, the number of the step and of the parameter, and on nothing else. So a
resumed run is the same bit for bit, and several processes stay equal. All chunks of a parameter use the same
bits, because drawing them costs more than the rest. The mean stays exact: each step draws new ones.

Why no library: bitsandbytes' 8-bit AdamW needs a GPU. torchao's needs torch.compile, and keeps its state in
classes that safetensors does not save.
"""

import zlib

import torch
from torch.optim import AdamW, Optimizer

from model.weights import is_sharded, local_part

# Numbers that are computed at a time, so that no fp32 copy of a whole moment exists
CHUNK = {"cpu": 1 << 16, "cuda": 1 << 24}


def make_optimizer(parameters, learning_rate, moments_dtype, seed, **options):
    """The optimizer of every script: torch's AdamW, or with moments_dtype "bfloat16" ``AdamWInHalf``.
    options: ``weight_decay`` and ``betas``."""
    if moments_dtype == "bfloat16":
        return AdamWInHalf(parameters, learning_rate, seed, **options)
    return AdamW(parameters, learning_rate, fused=True, **options)


class AdamWInHalf(Optimizer):
    """torch's AdamW (decoupled weight decay) with ``exp_avg`` and ``exp_avg_sq`` in bf16.

    state of a parameter: these two, and ``step``, a tensor on the CPU, so that reading it waits for no GPU.
    """

    def __init__(self, parameters, lr, seed, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        self.seed = seed
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        for group in self.param_groups:
            for p in group["params"]:
                if not is_sharded(p):
                    p.data = p.data.contiguous()  # they are read and written as one row

    @torch.no_grad()
    def step(self):
        """One step with the present gradients. A parameter without a gradient is left alone."""
        number = 0  # of the parameter
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._step_of(p, group, number)
                number += 1

    def _step_of(self, p, group, number):
        state = self.state[p]
        if not state:
            state |= zero_moments(self, p)
        state["step"] += 1
        step = int(state["step"])
        (beta1, beta2) = group["betas"]
        size = CHUNK[p.device.type]
        correction1 = 1 - beta1**step
        correction2 = 1 - beta2**step
        random = torch.Generator(p.device).manual_seed(zlib.crc32(f"{self.seed} {step} {number}".encode()))
        tensors = map(local_part, (p, p.grad, state["exp_avg"], state["exp_avg_sq"]))
        flat = [x.reshape(-1) for x in tensors]
        bits = torch.empty(min(size, len(flat[0])), dtype=torch.int32, device=p.device)
        bits.random_(0, 1 << 16, generator=random)
        for weight, grad, first, second in zip(*(x.split(size) for x in flat), strict=True):
            m = first.float().lerp_(grad, 1 - beta1)
            v = second.float().mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            first.copy_(m)
            weight.mul_(1 - group["lr"] * group["weight_decay"])
            root = v.sqrt().mul_(correction2**-0.5).add_(group["eps"])
            weight.addcdiv_(m, root, value=-group["lr"] / correction1)
            second.copy_(rounded_at_random(v, bits[: len(v)]))


def zero_moments(optimizer, p):
    """What an optimizer of ``make_optimizer`` keeps of a parameter before its first step."""
    half = isinstance(optimizer, AdamWInHalf)
    step = torch.zeros((), device="cpu" if half else p.device)
    kind = torch.bfloat16 if half else torch.float32
    return {"step": step} | {name: torch.zeros_like(p, dtype=kind) for name in ("exp_avg", "exp_avg_sq")}


def rounded_at_random(x, bits):
    """fp32 [n], overwritten -> the same numbers as bf16 can hold them, rounded up or down at random: the
    nearer is the likelier. A number that bf16 holds stays as it is. bits [n]: random, 0 to 65535."""
    # bf16 is the upper half of fp32's bits. Where lower half and random bits carry over, it is rounded up.
    return x.view(torch.int32).add_(bits).bitwise_and_(-(1 << 16)).view(torch.float32)
