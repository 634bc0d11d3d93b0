"""Log-probs and values of sequences: the training forward, used with and without gradients.

Sequences go through a model packed, without padding; logits are computed only where a response token is
predicted, and never for a whole batch at a time (``logprobs.py``).
"""

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from errors import InputError
from model.checks import is_moe
from trainer.logprobs import token_logprobs
from trainer.memory import each_micro_batch
from trainer.packing import pack_sequences, packed_states, take_rows
from trainer.ppo import length_mask, load_balance_loss
from trainer.precision import autocast
from trainer.record import tokens_per_pass


def scatter(flat, mask):
    """[N] values of the tokens under mask -> [B, R] with zeros elsewhere. Keeps gradients."""
    return torch.zeros(mask.shape, dtype=flat.dtype, device=flat.device).masked_scatter(mask, flat)


def prepare(model, gradient_checkpointing):
    """Make a model's forward ready for training: packed rows where it can, and less memory where asked.

    Gradient checkpointing keeps only what enters a layer for the backward pass, and computes the rest again.
    transformers does so in training mode alone. Only the layers themselves are put into it, what is inside
    them stays in eval mode: the training forward remains the scoring forward.
    """
    pack_sequences(model)
    if not gradient_checkpointing:
        return
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise InputError(
            f"--gradient_checkpointing: {type(model).__name__} does not support it; leave the flag out"
        )
    # transformers renamed it in the course of version 5
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True


def response_states(backbone, tokens, prompt_len, response_len, **extra):
    """Right-padded tokens [B, T] -> (states [N, H] at which the N response tokens are predicted, row by row,
    their ids [N], mask [B, R], the backbone's output)."""
    mask = length_mask(response_len, int(response_len.max()))
    row, column = mask.nonzero(as_tuple=True)
    position = prompt_len[row] + column
    lengths = prompt_len + response_len
    start = lengths.cumsum(0) - lengths  # of each row among the packed tokens
    output = packed_states(backbone, tokens, lengths, **extra)
    states = take_rows(output.last_hidden_state, start[row] + position - 1)
    return states, tokens[row, position], mask, output


class PolicyScorer(nn.Module):
    """A causal LM as a scorer of given responses. ``dtype``: of autocast; log-probs are fp32 in any case."""

    def __init__(self, model, dtype=torch.float32):
        super().__init__()
        self.model, self.dtype = model, dtype
        self.balance_coef = model.config.router_aux_loss_coef if is_moe(model) else 0.0

    def forward(self, tokens, prompt_len, response_len, temperature):
        """tokens [B, T] -> logprobs [B, R], entropy [B, R] (no gradient), weighted balance loss (sum)."""
        extra = {"output_router_logits": True} if self.balance_coef else {}
        balance = torch.zeros((), device=tokens.device)
        with autocast(tokens.device, self.dtype):
            states, targets, mask, output = response_states(
                self.model.base_model, tokens, prompt_len, response_len, **extra
            )
            head = self.model.get_output_embeddings()
            logprobs, entropy = token_logprobs(head, states, targets, temperature)
            if self.balance_coef:
                lengths, top_k = prompt_len + response_len, self.model.config.num_experts_per_tok
                balance = self.balance_coef * load_balance_loss(output.router_logits, lengths, top_k)
        return scatter(logprobs, mask), scatter(entropy, mask), balance


class ValueScorer(nn.Module):
    """The critic, read at the states of the response tokens."""

    def __init__(self, critic, dtype=torch.float32):
        super().__init__()
        self.critic, self.dtype = critic, dtype

    def forward(self, tokens, prompt_len, response_len):
        """tokens [B, T] -> values [B, R] fp32, 0 on padding."""
        with autocast(tokens.device, self.dtype):
            states, _, mask, _ = response_states(self.critic.backbone, tokens, prompt_len, response_len)
            return scatter(self.critic.read(states), mask)


@torch.no_grad()
def score_all(rollout, score):
    """Apply ``score(rows of the rollout) -> [b, r]`` micro-batch by micro-batch -> [B, R], in row order."""
    result = torch.zeros_like(rollout.sampler_logprobs)

    def fill(index):
        part = score(rollout.rows(index))
        result[index, : part.shape[1]] = part

    each_micro_batch(rollout.lengths.tolist(), tokens_per_pass(result.device), fill)
    return result
