"""What an option of PPO may do in a step. An option is an object with its state and some of these hooks:
ema.py, kl_target.py, ptx.py, replay.py. The other files of this folder have no hooks.

train_ppo.py calls the hooks of all options of a run, in the order of ``PpoRun.options`` (run.py). What a
checkpoint keeps of an option: ``state_dict`` and ``load_state_dict``, as of torch's ``Stateful``.
"""

from trainer.compute.batch import Batch
from trainer.runs.optimizer_step import GradientSource


class Option:
    """All hooks, each of which does nothing."""

    def add_replayed(self, batch: Batch) -> Batch:
        """The new batch, scored by the reference -> the batch to learn from: its rows come last."""
        return batch

    def before_estimate(self, step: int, batch: Batch) -> None:
        """The batch has log-probs and values, and nothing is learned from it yet. InputError in all processes
        where a record is wrong."""

    def further_loss(self, number: int) -> GradientSource | None:
        """What the actor learns from besides, in optimizer step ``number`` of the run."""
        return None

    def after_step(self, step: int, batch: Batch) -> None:
        """The step has been made; batch: the new one."""
