"""Offline PPO: logged answers take the place of sampled ones (``--offline_data_path``).

The scores are those of the file. Nobody knows which policy wrote the answers: the reference counts as it, so
the ratio is actor / reference. All the rest is as ever. It is the offline PPO of HALOs (Ethayarajh et al.
2024, arXiv:2402.01306). docs/ppo.md, "Offline PPO".
"""

from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dataset.data_order import next_batch
from dataset.formats import Keys
from dataset.lm_dataset import LoggedAnswer, LoggedAnswers, LoggedPairs
from dataset.record_files import open_records
from model.loading import eos_ids
from trainer.collect import Batch, Seconds
from trainer.compute.batching import pad_right
from trainer.compute.memory import HostMemory
from trainer.compute.rollout_data import Rollout, as_rollout
from trainer.compute.scoring import score_policy
from trainer.rewards.combine import RawScores
from trainer.runs.distributed import World, batches_of
from trainer.runs.metrics import Metrics

PAIRS = 128  # held-out pairs that are scored together
Logged = TypeVar("Logged", LoggedAnswers, LoggedPairs)


def load_logged(
    kind: type[Logged], path: str, args: Namespace, tokenizer: PreTrainedTokenizerBase, actor: PreTrainedModel
) -> Logged:
    """``LoggedAnswers`` or ``LoggedPairs`` (kind) of a file, as long as the flags allow."""
    return kind(
        path,
        tokenizer,
        args.max_seq_len,
        args.system_prompt,
        Keys(args.prompt_key, args.answer_key),
        max_response=args.max_gen_len,
        eos=eos_ids(tokenizer, actor),
    )


def held_out_pairs(
    args: Namespace, tokenizer: PreTrainedTokenizerBase, actor: PreTrainedModel
) -> LoggedPairs | None:
    """The ``LoggedPairs`` of --eval_data_path where offline PPO is to be evaluated on them, else None."""
    if not (args.offline_data_path and args.eval_data_path):
        return None
    first = open_records(args.eval_data_path)[0]
    if not {"chosen", "rejected"} <= first.keys():
        return None
    return load_logged(LoggedPairs, args.eval_data_path, args, tokenizer, actor)


def logged_rollout(answers: list[LoggedAnswer], device: torch.device) -> Rollout:
    """Logged answers (list of ``LoggedAnswer``) -> ``Rollout`` with its first five fields. No sampler gave
    them log-probs: these are 0 until ``take_reference`` is called."""
    tokens, lengths = pad_right([answer.response_ids for answer in answers], device)
    logprobs = torch.zeros(tokens.shape, device=device)
    prompts = [answer.prompt_ids for answer in answers]
    return as_rollout(prompts, tokens, logprobs, lengths, torch.ones_like(lengths, dtype=torch.bool))


def collect_logged(world: World, batches: Iterator[list]) -> Batch:
    """Take the next logged answers and their scores -> ``Batch``. Raises InputError on all processes where
    one's file is wrong."""
    seconds = Seconds(reward=0.0)  # so that perf/reward_seconds is logged
    with seconds.of("rollout"), world.all_or_none():
        answers = next_batch(batches)
        rollout = logged_rollout(answers, world.device)
    scores = {"score": torch.tensor([answer.score for answer in answers])}
    texts = [answer.response for answer in answers]
    return Batch(answers, rollout, texts, RawScores(), scores, seconds)


def take_reference(rollout: Rollout) -> None:
    """The reference counts as the policy that wrote the answers: the ratio is actor / reference, and all
    importance weights are 1."""
    rollout.old_logprobs = rollout.sampler_logprobs = rollout.ref_logprobs


def actor_and_reference(
    rollout: Rollout, scorers: Mapping[str, Any], host: HostMemory, temperature: float
) -> Iterator[Tensor]:
    """Log-probs [B, R] of a rollout's tokens under the actor and under the reference. scorers: of a run."""
    for name in ("actor", "reference"):
        with host.on_device(scorers[name].model):
            yield score_policy(rollout, scorers[name], temperature)[0]


def sequence_kl(rollout: Rollout, scorers: Mapping[str, Any], host: HostMemory, temperature: float) -> Tensor:
    """k1 of each response [B], log actor - log reference over its tokens. Its mean over the actor's own
    samples is the KL to the reference, in nats a response."""
    actor, reference = actor_and_reference(rollout, scorers, host, temperature)
    return torch.where(rollout.mask, actor - reference, 0.0).sum(1).cpu()


@torch.no_grad()
def evaluate_pairs(
    pairs: LoggedPairs, scorers: Mapping[str, Any], host: HostMemory, temperature: float, world: World
) -> dict[str, float]:
    """What the actor thinks of the held-out pairs -> {"eval/…": mean over the pairs of all processes}:
    chosen_share, p(chosen) / (p(chosen) + p(rejected)) with its standard deviation and that of its change
    since the start; chosen_preferred, the share of the pairs in which actor / reference is larger for the
    chosen answer. docs/metrics.md."""
    metrics = Metrics()
    with world.all_or_none():
        for places in batches_of(len(pairs), PAIRS, world):
            found = [pairs[place] for place in places or [0]]
            rollout = logged_rollout([answer for pair in found for answer in pair], world.device)
            actor, ref = actor_and_reference(rollout, scorers, host, temperature)
            if not places:  # only other processes have pairs left; sharded models need all processes
                continue
            moved = torch.where(rollout.mask, actor - ref, 0.0).sum(1)
            shares = chosen_shares(actor, rollout)
            for name, x in (("", shares), ("_change", shares - chosen_shares(ref, rollout))):
                metrics.add(f"eval/chosen_share{name}", x.sum(), len(found))
                metrics.add(f"eval/chosen_share{name}_mean_square", x.square().sum(), len(found))
            preferred = 0.5 + 0.5 * torch.sign(moved[::2] - moved[1::2])
            metrics.add("eval/chosen_preferred", preferred.sum(), len(found))
    means = metrics.means(world)
    del means["eval/chosen_share_change"]  # the difference of two evaluations says it
    return means


def chosen_shares(logprobs: Tensor, rollout: Rollout) -> Tensor:
    """Log-probs [2 P, R] of pairs, chosen and rejected in turn -> p(chosen) / (p(chosen) + p(rejected)), fp64
    [P], p of an answer being the geometric mean of the probabilities of its tokens."""
    means = torch.where(rollout.mask, logprobs, 0.0).sum(1) / rollout.response_len
    return torch.sigmoid(means[::2] - means[1::2]).double()
