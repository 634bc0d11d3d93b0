"""The results of sampling: as a ``Rollout``, each response directly behind its prompt, and as texts."""

import torch
import torch.nn.functional as F

from trainer.compute.batching import pad_right
from trainer.compute.rollout_data import Rollout, length_mask


def as_rollout(prompt_ids, tokens, logprobs, response_len, finished):
    """-> ``Rollout`` with its first five fields. A GPU is waited for once.

    prompt_ids: B lists of ids; tokens and logprobs [B, columns]: of the responses, column t is their token t,
    what lies behind a response is not used; response_len and finished [B].
    """
    device = tokens.device
    counts = response_len.tolist()  # here the host waits
    width = max(len(prompt) + count for prompt, count in zip(prompt_ids, counts, strict=True))
    real = length_mask(response_len, max(counts))  # [B, R]
    prompts, prompt_len = pad_right(prompt_ids, device)
    column = torch.arange(width, device=device) - prompt_len[:, None]  # of the response, [B, T]
    responses = tokens.gather(1, column.clamp(0, max(counts) - 1))
    inside = (column >= 0) & (column < response_len[:, None])
    sequences = torch.where(inside, responses, F.pad(prompts, (0, width - prompts.shape[1])))
    logprobs = torch.where(real, logprobs[:, : real.shape[1]], 0.0)
    lengths = [len(prompt) for prompt in prompt_ids], counts
    kept = response_len.clone(), finished.clone()  # the engine's own tensors change in its next call
    return Rollout(sequences, prompt_len, *kept, logprobs, host_lengths=lengths)


def response_texts(rollout, tokenizer, stops=None):
    """The responses as B texts, without the EOS or the stop string that ended them and without other special
    tokens. stops: the ``StopStrings`` that they were sampled with, or None."""
    ids, finished = rollout.responses(), rollout.finished.tolist()
    if stops:
        return [stops.cut(r) if ended else stops.decode(r) for r, ended in zip(ids, finished, strict=True)]
    ids = [r[:-1] if ended else r for r, ended in zip(ids, finished, strict=True)]
    return tokenizer.batch_decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
