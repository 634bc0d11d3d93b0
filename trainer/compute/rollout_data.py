"""The rollout: all data of one batch, in one dataclass whose fields are filled from top to bottom.

A sequence is a prompt, then its response, from position 0 on, padded on the right. Nothing is ever padded on
the left. So padding comes after every token that matters, and a causal model needs no attention mask in
training. The responses are samples of the old actor (``collect`` in train_ppo.py), drawn by
generation/engine.py from a copy of its weights (generation/sampler_copy.py).

[B, R] fields are in response coordinates: B sequences, R response columns. Column t belongs to response token
t. Its state, which is what policy and critic have read when that token is chosen, is at sequence position
prompt_len + t - 1.
"""

from dataclasses import dataclass, fields, replace

import torch


def length_mask(lengths, width):
    """lengths [B] -> bool [B, width], True where column < length."""
    return torch.arange(width, device=lengths.device) < lengths[:, None]


@dataclass
class Rollout:
    """B sequences of one process. The sampler fills the first five fields, the training step the others."""

    tokens: torch.Tensor  # [B, T] int64, prompt + response, right-padded
    prompt_len: torch.Tensor  # [B] int64
    response_len: torch.Tensor  # [B] int64, at least 1; includes the EOS, if one was sampled
    finished: torch.Tensor  # [B] bool; True: ended by an EOS, False: cut at max_gen_len
    sampler_logprobs: torch.Tensor  # [B, R] the sampler's own, only for rollout/sampler_gap
    old_logprobs: torch.Tensor | None = None  # [B, R]
    ref_logprobs: torch.Tensor | None = None  # [B, R]
    values: torch.Tensor | None = None  # [B, R]
    rewards: torch.Tensor | None = None  # [B, R]
    advantages: torch.Tensor | None = None  # [B, R]
    returns: torch.Tensor | None = None  # [B, R]
    advantage_std: float = 1.0  # what whitening divided the advantages by, in units of the reward

    @property
    def mask(self):
        """[B, R] bool, True on response tokens. From lengths, never from ``== pad``: pad may equal EOS."""
        return length_mask(self.response_len, self.sampler_logprobs.shape[1])

    @property
    def lengths(self):
        """[B] number of tokens of prompt plus response."""
        return self.prompt_len + self.response_len

    @property
    def sequences(self):
        """(tokens, prompt_len, response_len): the inputs of a scorer."""
        return self.tokens, self.prompt_len, self.response_len

    def rows(self, index):
        """-> a rollout of these rows only (list of int), cut to the longest of them."""
        index = torch.as_tensor(index, device=self.tokens.device)
        width, longest = int(self.response_len[index].max()), int(self.lengths[index].max())
        picked = {f.name: getattr(self, f.name) for f in fields(self)}
        picked = {name: x[index] for name, x in picked.items() if isinstance(x, torch.Tensor)}
        for name, x in picked.items():
            if x.dim() == 2:
                picked[name] = x[:, : longest if name == "tokens" else width]
        return replace(self, **picked)

    def responses(self):
        """The sampled token ids of every row, as lists; the EOS, if any, is included."""
        rows = zip(self.tokens.tolist(), self.prompt_len.tolist(), self.lengths.tolist(), strict=True)
        return [tokens[start:end] for tokens, start, end in rows]
