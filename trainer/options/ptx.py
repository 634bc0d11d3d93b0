"""PTX: the loss of demonstrations, mixed into the actor's optimizer steps (--ptx_data_path, --ptx_coef).

    the actor's loss of a minibatch += ptx_coef * (sum over learned tokens of -log p(token) / their number)

It is InstructGPT's "PPO-ptx" (Ouyang et al. 2022, arXiv:2203.02155, eq. 2). Each optimizer step has
--mini_batch_size records of its own per process, which follow from the seed and the step's number alone.
"""

from argparse import Namespace

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dataset.formats import Tools
from dataset.lm_dataset import SFTDataset, global_batch
from model.loading import eos_ids, most_positions
from trainer.compute.batch import Batch
from trainer.compute.scoring import PolicyScorer, score_learned
from trainer.options.option import Option
from trainer.runs.distributed import World
from trainer.runs.metrics import Loss, Metrics
from trainer.runs.optimizer_step import GradientSource


class Demonstrations(SFTDataset):
    """The records of --ptx_data_path."""

    limits = "--max_seq_len + --max_gen_len or the model"


class Ptx(Option):
    """The demonstrations of a run, and those that the optimizer steps of a batch learn from.

    args: ptx_coef, seed, mini_batch_size; scorer: of the actor; per_batch: optimizer steps of a batch.
    """

    def __init__(
        self, data: Demonstrations, args: Namespace, scorer: PolicyScorer, per_batch: int, world: World
    ) -> None:
        self.data = data
        self.coef: float = args.ptx_coef
        self.seed: int = args.seed
        self.scorer = scorer
        self.per_batch = per_batch
        self.size: int = args.mini_batch_size * world.size  # sequences of a minibatch, over all processes
        self.world = world
        # Of the batch that was read last: {number of an optimizer step: [(token ids, mask), …]}, those of
        # this process; {number: learned tokens of all processes}.
        self.items: dict[int, list] = {}
        self.learned: dict[int, int] = {}

    def before_estimate(self, step: int, batch: Batch) -> None:
        """Read the demonstrations of all optimizer steps of a step. All processes must call it; all raise
        InputError where one meets a wrong record."""
        self.items = {}
        with self.world.all_or_none():
            for number in range(step * self.per_batch, (step + 1) * self.per_batch):
                places = global_batch(len(self.data), self.seed, number, self.size)
                self.items[number] = [self.data[place] for place in self.world.share_of(places)]
        counts = [sum(sum(mask[1:]) for _, mask in items) for items in self.items.values()]
        totals = self.world.sum(torch.tensor(counts, device=self.world.device)).clamp(min=1)
        self.learned = dict(zip(self.items, totals.tolist(), strict=True))

    def further_loss(self, number: int) -> GradientSource:
        """What optimizer step ``number`` of the actor learns from the demonstrations."""
        items = self.items[number]

        def loss_of(rows: list[int]) -> Loss:
            metrics = Metrics()
            logprobs, balance = score_learned([items[row] for row in rows], self.scorer)
            metrics.add("policy/ptx_loss", -logprobs.sum(), len(logprobs))
            loss = -logprobs.sum() / self.learned[number] + balance / self.size
            return self.coef * loss, metrics

        return GradientSource([len(ids) for ids, _ in items], loss_of)


def load_demonstrations(
    args: Namespace, tokenizer: PreTrainedTokenizerBase, actor: PreTrainedModel, tools: Tools = ()
) -> Demonstrations | None:
    """Flags -> the demonstrations, None without --ptx_data_path. Those longer than the model are dropped.
    tools: the schemas of those that are run. Raises InputError for a wrong file or record."""
    if not args.ptx_data_path:
        return None
    longest = min(args.max_seq_len + args.max_gen_len, most_positions(actor.config))
    data = Demonstrations(args.ptx_data_path, tokenizer, longest, args.system_prompt, tools=tools)
    data.end_at(eos_ids(tokenizer, actor))
    return data
