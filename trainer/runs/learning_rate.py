"""Learning rates: the peak that suits a model's size, and the schedule around it.

``suited_rate``: the peak where no flag gives one, by the number of trained parameters. ``cosine_lr``: linear
warm-up, then a cosine from the peak down to a tenth of it. ``constant_lr``: linear warm-up, then the peak.

The learning rate is a pure function of the optimizer step's number, so there is no scheduler to save. A run
knows at its start how many optimizer steps it will take (with ``--lr_schedule constant`` it need not: such a
run can be resumed with more steps):

- PPO: batches x PPO epochs x minibatches of a batch (``PpoRun`` in run.py; ``count_steps`` in
  inputs.py counts the batches). The critic's schedule spans all of them. The actor's begins after the first
  ``--critic_warmup_steps`` batches, which train only the critic, and spans the rest. Each rate rises in the
  first ``--lr_warmup_steps`` batches in which its model trains.
- Stages 1 and 2: one optimizer step a batch; warm-up in the first ``--warmup_ratio`` of them (supervised.py).

Steps that are left out (an early stop by --target_kl, a loss that is not finite) are counted all the same.
``Learner.learning_rate`` in optimizer_step.py calls the schedule with these numbers.
"""

import math

import numpy as np

# (trained parameters, peak learning rate). Between two points the line is straight in logarithms of both,
# beyond the ends it is level. Where the numbers come from: docs/ppo.md, "Learning rates".
SUITED = {
    "actor": ((1.3e6, 5e-4), (4.9e6, 2e-4), (2.25e7, 3e-5), (5e8, 1e-6), (8e9, 5e-7)),
    "critic": ((1.3e6, 5e-4), (4.9e6, 5e-4), (2.25e7, 2e-4), (5e8, 1e-5), (8e9, 9e-6)),
    "sft": ((1.3e6, 2e-3), (5e8, 2e-5), (8e9, 5e-6)),
    "reward": ((1.3e6, 1e-3), (5e8, 1e-5), (8e9, 5e-6)),
}
LORA_FACTOR = 4  # measured on the demo: 2 to 6 times the rate of all weights works, 10 times is too much


FAR_ABOVE = 10  # times the suited rate: such a rate is remarked on


def rate_note(flag, rate, suited):
    """A line for a given rate that is far above the one that suits the model's size, else None."""
    if rate <= FAR_ABOVE * suited:
        return None
    return (
        f"note     --{flag} {rate:g} is {rate / suited:.0f} times what suits this size of model ({suited:g})"
    )


def suited_rate(kind, parameters, lora=False):
    """The peak learning rate for a model of so many ``parameters``, of two digits.

    kind: "actor", "critic", "sft" or "reward"; lora: only adapters beside these parameters train.
    """
    sizes, rates = np.log(SUITED[kind]).T
    rate = math.exp(np.interp(math.log(max(parameters, 1)), sizes, rates))
    return float(f"{rate * (LORA_FACTOR if lora else 1):.1e}")


def cosine_lr(peak, step, total, warmup=0):
    """The learning rate of optimizer step ``step`` in [0, total) -> float.

    It rises linearly during the first ``warmup`` steps, is ``peak`` at step ``warmup``, and falls as a cosine
    to peak / 10 at the last step (Loshchilov and Hutter 2017, arXiv:1608.03983, eq. 5).
    """
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    progress = min((step - warmup) / max(total - warmup - 1, 1), 1.0)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def constant_lr(peak, step, total, warmup=0):
    """The learning rate of optimizer step ``step``: it rises linearly as in ``cosine_lr`` and then stays
    ``peak``, whatever ``total`` is."""
    return peak * min(1.0, (step + 1) / (warmup + 1))


SCHEDULES = {"cosine": cosine_lr, "constant": constant_lr}
