"""What a run of any script is: ``PpoRun`` in run.py, ``SupervisedRun`` in supervised.py.

The loop, the checkpoints, the logs and the report know a run by this class only.
"""

import math
import shlex
import subprocess
import sys
from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Callable, Iterable, Sized
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from transformers import PreTrainedTokenizerBase

from dataset.lm_dataset import RecordDataset
from model.saving import SaveDtype
from trainer.compute.precision import LossScale
from trainer.compute.sharding import ShardGroup
from trainer.runs.displays import Display, StepLog
from trainer.runs.distributed import World
from trainer.runs.optimizer_step import Progress, TrainState

ROOT = Path(__file__).resolve().parents[2]
Say = Callable[[str], object]  # prints a line


class SavedAttributes:
    """A ``Stateful`` (torch's protocol): its state is the attributes that ``saved`` names."""

    saved: tuple[str, ...]

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.saved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update({name: state[name] for name in self.saved if name in state})


class Run(ABC):
    """Flags, models, data and progress of a run, and what is saved of them."""

    script: str  # the name of its file
    display: Display  # how it is shown
    args: Namespace  # the completed ``Flags``
    world: World
    dtype: torch.dtype  # of mixed precision
    tokenizer: PreTrainedTokenizerBase
    data: Any  # what it learns from: a ``Dataset`` with a length
    held_out: RecordDataset[Any] | None  # of an evaluation
    held_out_pairs: Sized | None = None  # of offline PPO
    eval_reward_hash: str = ""  # of --eval_reward_fn and --eval_reward_model; "" without
    train_states: dict[str, TrainState]
    # {name: what a checkpoint has besides weights and optimizer state} (checkpoints.py). ``load_state_dict``
    # gets {} where the checkpoint has none; it may raise KeyError.
    states: dict[str, Stateful]
    loss_scale: LossScale
    progress: Progress
    total_steps: int  # batches
    responses_per_record: int = 1
    shard_group: ShardGroup | None = None  # with --shard 1

    folder: Path
    result_path: Path
    outputs: list[Path]  # files and folders that the result replaces
    saved_step: int = 0  # after which the weights of the newest checkpoint and of the result are
    save_dtype: SaveDtype
    start_seconds: float = 0.0  # from the beginning of the process until all is loaded and checked
    evaluation_seconds: float = 0.0  # of all evaluations

    @property
    def modules(self) -> dict[str, nn.Module]:
        """{file name: what a checkpoint has the weights of}: the models that train, and the old actor where
        it is a model of its own (``PpoRun.modules``)."""
        return {name: train_state.model for name, train_state in self.train_states.items()}

    @property
    def batch_records(self) -> int:
        """The records of a batch, over all processes."""
        return self.args.batch_size * self.world.size // self.responses_per_record

    def count_steps(self) -> int:
        """The number of batches of the whole run."""
        steps = math.ceil(self.args.epochs * len(self.data) / self.batch_records)
        return min(steps, self.args.max_steps or steps)

    @abstractmethod
    def about(self) -> str:
        """Lines that say what the run is made of."""

    @abstractmethod
    def fingerprints(self) -> dict[str, str]:
        """{flag: a hash of what it names}, which ``--resume`` compares."""

    @abstractmethod
    def text_fingerprints(self) -> dict[str, str]:
        """Those of ``fingerprints`` that need no model."""

    @abstractmethod
    def evaluate(self) -> StepLog:
        """Evaluate the model -> (metrics, {file: rows to keep}); nothing without held-out data."""

    def facts(self) -> dict[str, Any]:
        """{name: value}: what health.py and the report read of a run's start."""
        return {
            "held_out": len(self.held_out_pairs or self.held_out or ()),
            # A hash of what evaluations depend on, and the first step evaluated so (``write_config``)
            "evaluated_by": f"{self.held_out.fingerprint} {self.eval_reward_hash}" if self.held_out else "",
            "evaluated_since": 0,
        }

    def begin(self, say: Say, keep_choice: Callable[[str, float], object]) -> None:
        """Choose what the flags leave open and the models decide, before the first evaluation.
        keep_choice(flag, value): writes it into config.json."""

    def restore_best(self, say: Say) -> None:
        """After a checkpoint was loaded: take over the best evaluation so far (options/best.py)."""

    def keep_best(self, metrics: dict[str, float], say: Say) -> None:
        """After a step was logged: keep its weights if its evaluation is the best so far."""

    def best_note(self) -> str:
        """Where the weights of the best evaluation are, "" without."""
        return ""

    @abstractmethod
    def save_result(self, say: Say) -> None:
        """Write the files that users load. All processes call it, and the main one writes."""

    def command(self, script: str, *words: str | Path) -> str:
        """``<this python> <script> <words>`` as one line that can be pasted into a shell in any directory,
        with --trust_remote_code where this run has it.

        script: its path in the repository; words: flags and values.
        """
        own_code = ["--trust_remote_code"] if self.args.trust_remote_code else []
        return quoted([sys.executable, ROOT / script, *words, *own_code])

    @abstractmethod
    def results(self) -> str:
        """Lines that say where the result is."""


def repeats_note(taker: str, taken: int, found: int) -> str:
    """A line where something, such as a batch, takes more records than are found, else ''."""
    return (taken > found) * (
        f"note     {taker} takes {taken} records of {found}: some are in it several times"
    )


# ------------------------------------------------------------------------------------ command lines to copy


def full_path(name: str) -> str:
    """The whole path of a file or folder that is there; anything else, such as a hub name, as it is."""
    return str(Path(name).resolve()) if Path(name).exists() else name


def quoted(words: Iterable[str | Path]) -> str:
    """Words -> one line that this system's shell reads as these words."""
    texts = [str(word) for word in words]
    return subprocess.list2cmdline(texts) if sys.platform == "win32" else shlex.join(texts)
