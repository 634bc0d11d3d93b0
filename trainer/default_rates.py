"""The default of --learning_rate and --critic_learning_rate: the peak that suits the model's size, which
``choose_rates`` in inputs.py takes where none is given. The schedule around it: ``Learner`` in base.py."""

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


def suited_rate(kind: str, parameters: int, lora: bool = False) -> float:
    """The peak learning rate for a model of so many ``parameters``, of two digits.

    kind: "actor", "critic", "sft" or "reward"; lora: only adapters beside these parameters train.
    """
    sizes, rates = np.log(SUITED[kind]).T
    rate = math.exp(np.interp(math.log(parameters), sizes, rates))
    return float(f"{rate * (LORA_FACTOR if lora else 1):.1e}")
