"""The schedule of learning rates: linear warm-up, then a cosine from the peak down to a tenth of it.

The learning rate is a pure function of the optimizer step's number, so there is no scheduler to save. A run
knows at its start how many optimizer steps it will take:

- PPO: batches x PPO epochs x minibatches of a batch (``build_run`` in train_ppo.py; ``count_steps`` in
  inputs.py counts the batches). The critic's schedule spans all of them. The actor's begins after the first
  ``--critic_warmup_steps`` batches, which train only the critic, and spans the rest. No warm-up.
- Stages 1 and 2: one optimizer step a batch; warm-up in the first ``--warmup_ratio`` of them (supervised.py).

Steps that are left out (an early stop by --target_kl, a loss that is not finite) are counted all the same.
``Learner.learning_rate`` in optimizer_step.py calls ``cosine_lr`` with these numbers.
"""

import math


def cosine_lr(peak, step, total, warmup=0):
    """The learning rate of optimizer step ``step`` in [0, total) -> float.

    It rises linearly during the first ``warmup`` steps, is ``peak`` at step ``warmup``, and falls as a cosine
    to peak / 10 at the last step (Loshchilov and Hutter 2017, arXiv:1608.03983, eq. 5).
    """
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    progress = min((step - warmup) / max(total - warmup - 1, 1), 1.0)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))
