"""The record of one batch, filled from left to right, and the ways to cut it.

A sequence is prompt then response from position 0, padded on the right; nothing is ever left-padded, so a
causal model needs no attention mask in training: padding comes after every token that matters.
"""

from dataclasses import dataclass, fields, replace

import torch

from dataset.lm_dataset import right_pad
from trainer.ppo import length_mask


@dataclass
class Rollout:
    """B sequences of one process. [B, R] fields are in response coordinates (see ``trainer/ppo.py``)."""

    tokens: torch.Tensor  # [B, T] int64, prompt + response, right-padded
    prompt_len: torch.Tensor  # [B] int64
    response_len: torch.Tensor  # [B] int64, at least 1; counts the EOS, when one was sampled
    finished: torch.Tensor  # [B] bool; ended by EOS, False = cut at max_gen_len
    sampler_logprobs: torch.Tensor  # [B, R] the sampler's own, only to log how far it is from the scorer
    old_logprobs: torch.Tensor | None = None  # [B, R]
    ref_logprobs: torch.Tensor | None = None  # [B, R]
    values: torch.Tensor | None = None  # [B, R]
    rewards: torch.Tensor | None = None  # [B, R]
    advantages: torch.Tensor | None = None  # [B, R]
    returns: torch.Tensor | None = None  # [B, R]

    @property
    def mask(self):
        """[B, R] bool, from the lengths: never from ``== pad``, because pad may equal EOS."""
        return length_mask(self.response_len, self.sampler_logprobs.shape[1])

    @property
    def lengths(self):
        """[B] tokens of prompt + response."""
        return self.prompt_len + self.response_len

    @property
    def sequences(self):
        """(tokens, prompt_len, response_len): what a scorer reads."""
        return self.tokens, self.prompt_len, self.response_len

    def rows(self, index):
        """The same record for some rows (list of int), with the padding that is no longer needed cut off."""
        index = torch.as_tensor(index, device=self.tokens.device)
        width, longest = int(self.response_len[index].max()), int(self.lengths[index].max())
        picked = {f.name: getattr(self, f.name) for f in fields(self)}
        picked = {name: x[index] for name, x in picked.items() if x is not None}
        for name, x in picked.items():
            if x.dim() == 2:
                picked[name] = x[:, : longest if name == "tokens" else width]
        return replace(self, **picked)

    def responses(self):
        """The sampled token ids of every row, as lists, the EOS (if any) included."""
        rows = zip(self.tokens.tolist(), self.prompt_len.tolist(), self.lengths.tolist(), strict=True)
        return [tokens[start:end] for tokens, start, end in rows]


def tokens_per_pass(device):
    """Tokens of one forward at the most: a CPU wants activations in its cache, a GPU wants enough to do."""
    return 1 << 11 if device.type == "cpu" else 1 << 13


def pass_size(count, longest, tokens):
    """What a forward over so many rows is counted as: its tokens, or half of them with the padding that
    models need whose rows cannot be packed, whichever is more."""
    return max(tokens, -(-count * longest // 2))


def micro_batches(lengths, token_budget):
    """Row numbers cut into micro-batches of a ``pass_size`` of at most ``token_budget`` (one row at least).

    Rows are sorted by length first, longest first, so that little of a micro-batch is padding and running out
    of memory happens at once or never. lengths: list of B ints -> list of lists, each row in exactly one.
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    batches, tokens = [], 0
    for row in order:
        tokens += lengths[row]
        if batches and pass_size(len(batches[-1]) + 1, lengths[batches[-1][0]], tokens) <= token_budget:
            batches[-1].append(row)
        else:
            batches.append([row])
            tokens = lengths[row]
    return batches


def pad_right(sequences, device="cpu"):
    """Lists of ids -> (tokens [B, T] int64 padded with 0, lengths [B] int64). What pads never matters."""
    lengths, tokens = torch.tensor([len(s) for s in sequences]), right_pad(sequences)
    if torch.device(device).type == "cuda":  # from pinned memory, a copy need not wait for the GPU
        return tuple(x.pin_memory().to(device, non_blocking=True) for x in (tokens, lengths))
    return tokens.to(device), lengths.to(device)
