"""Offline PPO: logged answers take the place of sampled ones (--offline_data_path).

    scores         those of the file: 1 and -1 for the two answers of a pair, or numbers of its own
    ratio          actor / reference. Nobody knows which policy wrote the answers; the reference counts as it
    KL             k2 of the logged tokens, in the loss: it is never negative, and 0 only where actor and
                   reference agree. The mean of k1 is the KL only over the actor's own samples
    all the rest   as ever: critic, GAE, whitening, clip

It is the offline PPO of HALOs (Ethayarajh et al. 2024, arXiv:2402.01306). Nothing is sampled in training, so
the policy never tries what is not in the file. And the ratio's denominator never moves: a token that has left
the range of the clip learns no further in that direction.

How far the policy is from the reference can only be measured on its own samples: an evaluation does
(``sequence_kl``). It also says how held-out pairs fare (``evaluate_pairs``).
"""

import time

import torch

from dataset.data_order import next_batch
from dataset.formats import Keys
from dataset.lm_dataset import LoggedPairs
from dataset.record_files import open_records
from model.loading import eos_ids
from trainer.collect import Batch
from trainer.compute.batching import pad_right
from trainer.compute.rollout_data import as_rollout
from trainer.compute.scoring import score_policy
from trainer.rewards.reward import RawScores
from trainer.runs.distributed import batches_of
from trainer.runs.metrics import Metrics

PAIRS = 128  # held-out pairs that are scored together


def load_logged(kind, path, args, tokenizer, actor):
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


def held_out_pairs(args, tokenizer, actor):
    """The ``LoggedPairs`` of --eval_data_path where offline PPO is to be evaluated on them, else None."""
    if not (args.offline_data_path and args.eval_data_path):
        return None
    first = open_records(args.eval_data_path)[0]
    if not {"chosen", "rejected"} <= first.keys():
        return None
    return load_logged(LoggedPairs, args.eval_data_path, args, tokenizer, actor)


def logged_rollout(answers, device):
    """Logged answers (list of ``LoggedAnswer``) -> ``Rollout`` with its first five fields. No sampler gave
    them log-probs: these are 0 until ``take_reference`` is called."""
    tokens, lengths = pad_right([answer.response_ids for answer in answers], device)
    logprobs = torch.zeros(tokens.shape, device=device)
    prompts = [answer.prompt_ids for answer in answers]
    return as_rollout(prompts, tokens, logprobs, lengths, torch.ones_like(lengths, dtype=torch.bool))


def collect_logged(run, batches):
    """Take the next logged answers and their scores -> ``Batch``.

    Raises InputError on all processes where one's file is wrong.
    """
    start = time.perf_counter()
    with run.world.all_or_none():
        answers = next_batch(batches)
        rollout = logged_rollout(answers, run.world.device)
    scores = {"score": torch.tensor([answer.score for answer in answers])}
    seconds = {"rollout": time.perf_counter() - start, "reward": 0.0}
    texts = [answer.response for answer in answers]
    return Batch(answers, rollout, texts, RawScores(), scores, seconds)


def take_reference(rollout):
    """The reference counts as the policy that wrote the answers: the ratio is actor / reference, and all
    importance weights are 1."""
    rollout.old_logprobs = rollout.sampler_logprobs = rollout.ref_logprobs


def actor_and_reference(run, rollout):
    """Log-probs [B, R] of a rollout's tokens, at --temperature, under the actor and under the reference."""
    for scorer in (run.learners["actor"].scorer, run.scorers["reference"]):
        with run.host.on_device(scorer.model):
            yield score_policy(rollout, scorer, run.args.temperature)[0]


def sequence_kl(run, rollout):
    """k1 of each response [B], log actor - log reference over its tokens. Its mean over the actor's own
    samples is the KL to the reference, in nats a response."""
    actor, reference = actor_and_reference(run, rollout)
    return torch.where(rollout.mask, actor - reference, 0.0).sum(1).cpu()


@torch.no_grad()
def evaluate_pairs(run):
    """What the actor thinks of the held-out pairs -> {"eval/…": mean over the pairs of all processes}.

    chosen_share      p(chosen) / (p(chosen) + p(rejected)), p of an answer being the geometric mean of the
                      probabilities of its tokens
    chosen_share_std  its standard deviation over the pairs
    chosen_share_change_std  that of what each pair's share has changed by since the start, when the actor was
                      the reference; by it a change of the mean is judged
    chosen_preferred  share of the pairs in which actor / reference is larger for the chosen answer than for
                      the rejected one; a half where they are equal, as before training
    """
    pairs = run.held_out_pairs
    metrics = Metrics()
    with run.world.all_or_none():
        for places in batches_of(len(pairs), PAIRS, run.world):
            found = pairs.__getitems__(places or [0])
            rollout = logged_rollout([answer for pair in found for answer in pair], run.world.device)
            actor, ref = actor_and_reference(run, rollout)
            if not places:  # only other processes have pairs left; sharded models need all processes
                continue
            moved = torch.where(rollout.mask, actor - ref, 0.0).sum(1)
            shares = chosen_shares(actor, rollout)
            for name, x in (("", shares), ("_change", shares - chosen_shares(ref, rollout))):
                metrics.add(f"eval/chosen_share{name}", x.sum(), len(found))
                metrics.add(f"eval/chosen_share{name}_mean_square", x.square().sum(), len(found))
            preferred = 0.5 + 0.5 * torch.sign(moved[::2] - moved[1::2])
            metrics.add("eval/chosen_preferred", preferred.sum(), len(found))
    means = metrics.means(run.world)
    del means["eval/chosen_share_change"]  # the difference of two evaluations says it
    return means


def chosen_shares(logprobs, rollout):
    """Log-probs [2 P, R] of pairs, chosen and rejected in turn -> p(chosen) / (p(chosen) + p(rejected)), fp64
    [P], p of an answer being the geometric mean of the probabilities of its tokens."""
    means = torch.where(rollout.mask, logprobs, 0.0).sum(1) / rollout.response_len
    return torch.sigmoid(means[::2] - means[1::2]).double()
