"""PPO's evaluation on held-out prompts.

The prompts are those of ``--eval_data_path``; without it there is no evaluation. They are answered sampled
and greedy, with the same sampling noise every time: before training (step 0), after every ``--eval_interval``
batches and after the last one (session.py). Accuracy is measured against the answers in the records. The
judge (rewards/combine.py) is never a reward, and neither is the accuracy, unless the reward gets the answers
too: if the score rises while they fall, the policy exploits the reward. docs/report.md has the files of
responses."""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass

import torch

from dataset.answers import comparable, is_correct
from dataset.lm_dataset import LoggedPairs, Prompt, RLAIFDataset
from progress_bar import phase
from trainer.compute.batch import Batch, RawScores
from trainer.compute.scoring import score_all
from trainer.generation.sampling import noise_keys
from trainer.inputs import EVAL_BATCH
from trainer.models import Models
from trainer.options.ema import Ema
from trainer.options.offline import logged_batch
from trainer.rewards.combine import Reward
from trainer.rewards.reward_function import Request
from trainer.rollout import RolloutEngine
from trainer.runs.displays import Row, StepLog
from trainer.runs.distributed import World
from trainer.runs.metrics import Metrics
from trainer.step_metrics import add_scores, add_turns, answer_rows

PAIRS = 128  # held-out pairs that are scored together
EVAL_STEP = -1  # evaluation's step in the sampling noise: no training step has this number
SHOWN = 8  # held-out prompts whose answers are kept


@dataclass
class Evaluation:
    """What an evaluation is made of. ``rewards``: of training and of evaluation; ``score_parts``: asks one
    of them about a batch."""

    args: Namespace
    world: World
    held_out: RLAIFDataset
    pairs: LoggedPairs | None  # of offline PPO
    models: Models
    engine: RolloutEngine
    rewards: tuple[Reward, ...]
    score_parts: Callable[[Reward, Batch], RawScores]
    ema: Ema

    def __call__(self) -> StepLog:
        """What the actor is like on the held-out prompts; with ``--ema_beta`` the same of the averaged actor
        (ema.py), as "ema/<name>", once there is an average."""
        found, shown = self.of_prompts()
        if self.ema.batches:
            with self.ema.in_place():
                averaged, _ = self.of_prompts()
            found |= {name.replace("eval/", "ema/"): x for name, x in averaged.items()}
        if self.pairs:
            found |= self.of_pairs(self.pairs)
        return found, shown

    def of_prompts(self) -> StepLog:
        """Evaluate on all prompts, shared between the processes -> ({"eval/<name>": mean}, rows to keep: the
        answers to the first prompts).

        Names of greedy results end in "_greedy". With ``--num_generations`` n, "eval/pass@n" is the share of
        the prompts of which one of the n sampled answers is right."""
        args = self.args
        held_out = self.held_out
        metrics = Metrics()
        mine: dict[int, Row] = {}
        batches = self.world.batches_of(len(held_out), max(1, EVAL_BATCH // (args.num_generations + 1)))
        total = (args.num_generations + 1) * sum(map(len, batches))
        with self.engine.weights_of(self.models.actor), phase("evaluation", total, "responses") as bar:
            for places in batches:
                with self.world.all_or_none():
                    prompts = [held_out[i] for i in places or [0]]  # no more at a time: records can be large
                for kind, batch in self.answer(prompts).items():
                    if not places:  # only others have prompts left; sharded models need all processes
                        continue
                    count = len(batch.prompts) // len(prompts)
                    answers = answer_rows(batch)[::count]  # the first one to each
                    for place, prompt, row in zip(places, prompts, answers, strict=True):
                        if place < SHOWN and kind:
                            mine[place]["greedy"] = row
                        elif place < SHOWN:
                            mine[place] = {"place": place, "answer": prompt.answer} | row
                    if held_out.has_accuracy:
                        request = Request(batch.prompts, batch.texts, dialogues=batch.dialogues)
                        rows = zip(batch.prompts, batch.texts, request.beginnings, strict=True)
                        right = [
                            is_correct(text, prompt.answer, args.reasoning, beginning)
                            for prompt, text, beginning in rows
                            if prompt.answer is not None and comparable(prompt.answer)
                        ]
                        metrics.add(f"eval/accuracy{kind}", sum(right), len(right))
                        if count > 1:
                            solved = [any(right[i : i + count]) for i in range(0, len(right), count)]
                            metrics.add(f"eval/pass@{count}", sum(solved), len(solved))
                    parts = batch.parts
                    measured = parts | {"length": batch.lengths, "finished": batch.finished}
                    if "format" in parts:
                        measured["format_rate"] = parts["format"] > 0
                    if "judge" in parts and not kind:
                        measured["judge_mean_square"] = parts["judge"].double().square()
                    for name, x in measured.items():
                        add_scores(metrics, f"eval/{name}{kind}", x)
                    add_turns(metrics, "eval/{}" + kind, batch)
                    bar.update(len(batch.prompts))
        shown = {place: row for theirs in self.world.gather(mine) for place, row in theirs.items()}
        return metrics.means(self.world), {"eval_samples.jsonl": [shown[place] for place in sorted(shown)]}

    def answer(self, prompts: list[Prompt]) -> dict[str, Batch]:
        """-> {"": ``--num_generations`` sampled answers to each prompt, "_greedy": one}, with the scores of
        reward and judge. All are sampled in one call, in which the answers to a prompt share its computation.

        Raises InputError in all processes or in none."""
        count = self.args.num_generations + 1  # the last one is greedy
        asked = [prompt for prompt in prompts for _ in range(count)]
        samples = torch.arange(len(asked)) % count
        keys = noise_keys(self.args.seed, EVAL_STEP, [p.index for p in asked], samples)
        greedy = (samples == count - 1).tolist()
        with self.world.all_or_none():  # sharded models need all processes: one that has failed ends all
            batch = self.engine.respond(asked, keys, self.args.temperature, greedy)
        found = {}
        for kind, wanted in (("", False), ("_greedy", True)):
            found[kind] = batch.rows([row for row, chosen in enumerate(greedy) if chosen is wanted])
            for reward in self.rewards:
                with self.world.all_or_none():
                    found[kind].parts |= reward.combine(self.score_parts(reward, found[kind]))
        for part in found.values():
            self.engine.end_turns(part)
        return found

    @torch.no_grad()
    def of_pairs(self, pairs: LoggedPairs) -> dict[str, float]:
        """-> {"eval/chosen_preferred": the share of the held-out pairs of offline PPO in which actor /
        reference is larger for the chosen answer than for the rejected one; equal counts a half}."""
        metrics = Metrics()
        models = self.models
        temperature = self.args.temperature
        assert models.reference_scorer  # logged answers are compared with it
        with self.world.all_or_none(), models.host.on_device(models.reference):
            for places in self.world.batches_of(len(pairs), PAIRS):
                found = [pairs[place] for place in places or [0]]
                batch = logged_batch([answer for pair in found for answer in pair], self.world.device)
                actor, _ = score_all(batch, models.actor_scorer, temperature=temperature)
                ref, _ = score_all(batch, models.reference_scorer, temperature=temperature)
                if places:  # else only other processes have pairs left; sharded models need all processes
                    moved = torch.where(batch.action_mask, actor - ref, 0.0).sum(1)
                    preferred = 0.5 + 0.5 * torch.sign(moved[::2] - moved[1::2])
                    metrics.add("eval/chosen_preferred", preferred.sum(), len(found))
        return metrics.means(self.world)
