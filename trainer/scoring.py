"""Log-probs and values of sequences: the training forward, used with and without gradients.

The two modules here are what gets wrapped for several processes, so every forward that needs gradients goes
through the wrapper. Logits are computed only where a response token is predicted, and in chunks of tokens
that are recomputed in the backward pass: no [tokens, vocabulary] tensor of a whole batch ever exists.
"""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from model.checks import is_moe
from trainer.ppo import length_mask, load_balance_loss, token_logprobs
from trainer.record import micro_batches

LOGITS_PER_CHUNK = 1 << 24  # elements of one chunk's [tokens, vocabulary] logits: 64 MiB in fp32
TOKENS_PER_PASS = 1 << 14  # padded tokens of one forward at the most


def response_states(hidden, prompt_len, mask):
    """hidden [B, T, ...] -> [N, ...]: the states at which the N response tokens under mask are predicted."""
    row, column = mask.nonzero(as_tuple=True)
    return hidden[row, prompt_len[row] + column - 1]


def scatter(flat, mask):
    """[N] values of the tokens under mask -> [B, R] with zeros elsewhere. Keeps gradients."""
    return torch.zeros(mask.shape, dtype=flat.dtype, device=flat.device).masked_scatter(mask, flat)


def autocast_dtype(name, device):
    """``--dtype`` -> torch dtype; "auto": bf16 on GPUs that compute in it, else fp32."""
    if name == "auto":
        native = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        name = "bfloat16" if native else "float32"
    return getattr(torch, name)


def autocast(device, dtype):
    """Mixed precision for what runs inside: weights stay fp32. fp32 as ``dtype`` changes nothing."""
    return torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32)


class PolicyScorer(nn.Module):
    """A causal LM as a scorer of given responses. ``dtype``: of autocast; log-probs are fp32 in any case."""

    def __init__(self, model, dtype=torch.float32):
        super().__init__()
        self.model, self.dtype = model, dtype
        self.balance_coef = model.config.router_aux_loss_coef if is_moe(model) else 0.0

    def forward(self, tokens, prompt_len, response_len, temperature):
        """tokens [B, T] -> logprobs [B, R], entropy [B, R] (no gradient), weighted balance loss (sum)."""
        with autocast(tokens.device, self.dtype):
            return self._score(tokens, prompt_len, response_len, temperature)

    def _score(self, tokens, prompt_len, response_len, temperature):
        extra = {"output_router_logits": True} if self.balance_coef else {}
        output = self.model.base_model(input_ids=tokens, use_cache=False, **extra)
        mask = length_mask(response_len, int(response_len.max()))
        states = response_states(output.last_hidden_state, prompt_len, mask)  # [N, H]
        row, column = mask.nonzero(as_tuple=True)
        targets = tokens[row, prompt_len[row] + column]  # [N]
        logprobs, entropy = self._chunked_logprobs(states, targets, temperature)
        balance = torch.zeros((), device=tokens.device)
        if self.balance_coef:
            real = length_mask(prompt_len + response_len, tokens.shape[1])
            top_k = self.model.config.num_experts_per_tok
            balance = self.balance_coef * load_balance_loss(output.router_logits, real, top_k)
        return scatter(logprobs, mask), scatter(entropy, mask), balance

    def _chunked_logprobs(self, states, targets, temperature):
        """[N, H], [N] -> logprobs [N], entropy [N]; a chunk's logits live only while it is worked on."""
        head = self.model.get_output_embeddings()

        def score(chunk, chunk_targets):
            return token_logprobs(head(chunk), chunk_targets, temperature)

        size = max(1, LOGITS_PER_CHUNK // head.weight.shape[0])
        if len(states) <= size:
            return score(states, targets)
        parts = [
            checkpoint(score, chunk, chunk_targets, use_reentrant=False)
            for chunk, chunk_targets in zip(states.split(size), targets.split(size), strict=True)
        ]
        return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


class ValueScorer(nn.Module):
    """The critic, read at the states of the response tokens."""

    def __init__(self, critic, dtype=torch.float32):
        super().__init__()
        self.critic, self.dtype = critic, dtype

    def forward(self, tokens, prompt_len, response_len):
        """tokens [B, T] -> values [B, R] fp32, 0 on padding."""
        mask = length_mask(response_len, int(response_len.max()))
        with autocast(tokens.device, self.dtype):
            values = self.critic(tokens)
        return scatter(response_states(values.float(), prompt_len, mask), mask)


@torch.no_grad()
def score_all(rollout, score):
    """Apply ``score(rows of the rollout) -> [b, r]`` micro-batch by micro-batch -> [B, R], in row order."""
    result = torch.zeros_like(rollout.sampler_logprobs)
    for index in micro_batches(rollout.lengths.tolist(), TOKENS_PER_PASS):
        part = score(rollout.rows(index))
        result[index, : part.shape[1]] = part
    return result
