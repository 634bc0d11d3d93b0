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


def states_at(backbone, tokens, lengths, row, position, **extra):
    """Right-padded tokens [B, T], and N different places in them behind the first column -> (states [N, H] at
    which the tokens there are predicted, those tokens' ids [N], the backbone's output)."""
    start = lengths.cumsum(0) - lengths  # of each row among the packed tokens
    output = packed_states(backbone, tokens, lengths, **extra)
    states = take_rows(output.last_hidden_state, start[row] + position - 1)
    return states, tokens[row, position], output


def response_places(prompt_len, response_len):
    """Where the N response tokens of B sequences are, row by row -> (row [N], position [N], mask [B, R])."""
    mask = length_mask(response_len, int(response_len.max()))
    row, column = mask.nonzero(as_tuple=True)
    return row, prompt_len[row] + column, mask


class Balance:
    """The load-balancing loss of a mixture of experts, times the weight in its config; 0 of other models.

    ``extra``: what the backbone is to be asked for; then call it with the backbone's output and lengths [B].
    """

    def __init__(self, model):
        self.config = model.config
        self.weight = model.config.router_aux_loss_coef if is_moe(model) else 0.0
        self.extra = {"output_router_logits": True} if self.weight else {}

    def __call__(self, output, lengths):
        if not self.weight:
            return torch.zeros((), device=lengths.device)
        top_k = self.config.num_experts_per_tok
        return self.weight * load_balance_loss(output.router_logits, lengths, top_k)


class PolicyScorer(nn.Module):
    """A causal LM as a scorer of given responses. ``dtype``: of autocast; log-probs are fp32 in any case."""

    def __init__(self, model, dtype=torch.float32):
        super().__init__()
        self.model, self.dtype = model, dtype
        self.balance = Balance(model)

    def forward(self, tokens, prompt_len, response_len, temperature):
        """tokens [B, T] -> logprobs [B, R], entropy [B, R] (no gradient), weighted balance loss (sum)."""
        row, position, mask = response_places(prompt_len, response_len)
        logprobs, entropy, balance = self.at(tokens, prompt_len + response_len, row, position, temperature)
        return scatter(logprobs, mask), scatter(entropy, mask), balance

    def at(self, tokens, lengths, row, position, temperature=1.0):
        """The same of the tokens at N places in tokens [B, T] -> logprobs [N], entropy [N], balance loss."""
        with autocast(tokens.device, self.dtype):
            states, targets, output = states_at(
                self.model.base_model, tokens, lengths, row, position, **self.balance.extra
            )
            head = self.model.get_output_embeddings()
            logprobs, entropy = token_logprobs(head, states, targets, temperature)
            return logprobs, entropy, self.balance(output, lengths)


class ValueScorer(nn.Module):
    """The critic, read at the states of the response tokens."""

    def __init__(self, critic, dtype=torch.float32):
        super().__init__()
        self.critic, self.dtype = critic, dtype

    def forward(self, tokens, prompt_len, response_len):
        """tokens [B, T] -> values [B, R] fp32, 0 on padding."""
        with autocast(tokens.device, self.dtype):
            row, position, mask = response_places(prompt_len, response_len)
            states, *_ = states_at(self.critic.backbone, tokens, prompt_len + response_len, row, position)
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
