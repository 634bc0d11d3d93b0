"""Offline PPO: logged answers take the place of sampled ones (``--offline_data_path``).

The scores are those of the file. Nobody knows which policy wrote the answers: the reference is taken for it,
so the ratio is actor / reference. All the rest is as ever. It is the offline PPO of HALOs (Ethayarajh et al.
2024, arXiv:2402.01306). docs/ppo.md, "Offline PPO".
"""

from argparse import Namespace
from collections.abc import Sequence
from typing import TypeVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dataset.formats import Keys, is_pair, named
from dataset.lm_dataset import LoggedAnswer, LoggedAnswers, LoggedPairs
from dataset.record_files import open_records
from model.loading import eos_ids
from trainer.compute.batch import Batch, new_batch
from trainer.compute.batching import pad_right, send

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
        Keys.of(args),
        max_response=args.max_gen_len,
        eos=eos_ids(tokenizer, actor),
    )


def held_out_pairs(
    args: Namespace, tokenizer: PreTrainedTokenizerBase, actor: PreTrainedModel
) -> LoggedPairs | None:
    """The ``LoggedPairs`` of --eval_data_path where offline PPO is to be evaluated on them, else None."""
    path = args.eval_data_path
    if args.offline_data_path and path and is_pair(named(open_records(path)[0], Keys.of(args))):
        return load_logged(LoggedPairs, path, args, tokenizer, actor)
    return None


def logged_batch(answers: Sequence[LoggedAnswer], device: torch.device) -> Batch:
    """Logged answers and their scores -> ``Batch``. No sampler gave them log-probs: these are 0 until
    ``evaluate_tokens`` takes the reference's."""
    tokens, lengths = pad_right([answer.response_ids for answer in answers], device)
    logprobs = torch.zeros(tokens.shape, device=device)
    prompts = [answer.prompt_ids for answer in answers]
    batch = new_batch(prompts, tokens, logprobs, lengths, torch.ones_like(lengths, dtype=torch.bool))
    batch.prompts = list(answers)
    batch.texts = [answer.response for answer in answers]
    scores = torch.tensor([answer.score for answer in answers])
    batch.parts = {"score": scores}
    batch.scores = send(scores, device)
    return batch
