"""Log-probs and values of given responses: the forward of training, used with and without gradients.

Where the value of a token is read: the value of response token t is read at sequence position
prompt_len + t - 1, before the model reads token t. There ``ValueScorer`` takes the last hidden state of the
critic's backbone, and the value head turns it into a number (``CriticModel.read``, model/critic.py). The
log-prob of token t comes from the policy's logits at the same position (``PolicyScorer``).

Sequences go through a model packed, without padding (packing.py). Logits are computed only where a response
token is predicted, and never for a whole batch at a time (logprobs.py).
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from errors import InputError
from model.loading import is_moe
from trainer.compute.batching import pad_right, send, take_rows, tokens_per_pass
from trainer.compute.logprobs import token_logprobs
from trainer.compute.memory import each_micro_batch
from trainer.compute.packing import Layout, pack_sequences, packed_states
from trainer.compute.precision import autocast


def prepare_training(model, gradient_checkpointing):
    """Prepare a model's forward for training: packed rows if the model can, gradient checkpointing if asked.

    Gradient checkpointing keeps only the input of each layer for the backward pass, and computes the rest
    again. transformers does so in training mode only. So the layers themselves are set to training mode, and
    all modules inside them stay in eval mode: the training forward stays the same as the scoring forward.
    Raises InputError for a model without gradient checkpointing.
    """
    pack_sequences(model)
    if not gradient_checkpointing:
        return
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise InputError(
            f"--gradient_checkpointing: {type(model).__name__} does not support it; leave the flag out"
        )
    # transformers 5 renamed this method in one of its releases
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True


class BalanceLoss:
    """The load-balancing loss of a mixture of experts, times the weight in its config; 0 for other models.

    Call the backbone with the keyword arguments ``extra``, then this with the backbone's output and the
    ``Layout`` -> the loss, a sum over sequences and layers.
    """

    def __init__(self, model):
        self.config = model.config
        self.weight = model.config.router_aux_loss_coef if is_moe(model) else 0.0
        self.extra = {"output_router_logits": True} if self.weight else {}

    def __call__(self, output, layout):
        if not self.weight:
            return torch.zeros((), device=layout.length.device)
        top_k = self.config.num_experts_per_tok
        return self.weight * load_balance_loss(output.router_logits, layout, top_k)


def load_balance_loss(router_logits, layout, top_k):
    """Mixture-of-experts load balancing, per sequence (arXiv:2101.03961, eq. 4), summed over B and layers.

    router_logits: one [N, E] for each layer, of the N tokens of a ``Layout``.
    For one sequence and layer it is E * sum_e f_e P_e, where f_e is the share of the sequence's choices that
    went to expert e, and P_e is the mean gate probability of e; it is 1 when balanced. It is computed per
    sequence, so that the cut into micro-batches does not change it.
    """
    length = layout.length[:, None]
    total = torch.zeros((), device=length.device)
    for logits in router_logits:
        experts = logits.shape[-1]
        gate = logits.float().softmax(-1)
        chosen = torch.zeros_like(gate).scatter_(-1, gate.topk(top_k, dim=-1).indices, 1.0)
        per_sequence = gate.new_zeros(len(length), experts)
        share = per_sequence.index_add(0, layout.row, chosen) / (length * top_k)
        mean_gate = per_sequence.index_add(0, layout.row, gate) / length
        total = total + experts * (share * mean_gate).sum()
    return total


def states_at(backbone, tokens, layout, **extra):
    """The states that predict the M wanted tokens of a ``Layout`` in right-padded tokens [B, T] -> (states
    [M, H], the ids of those tokens [M], the backbone's output)."""
    output = packed_states(backbone, tokens, layout, **extra)
    states = take_rows(output.last_hidden_state, layout.predicted_by)
    return states, tokens[layout.wanted_row, layout.wanted_position], output


class PolicyScorer(nn.Module):
    """Computes the log-probs of given responses under a causal LM. dtype: of autocast; log-probs are fp32.
    early_ends: of ``--min_gen_len``, or None; learn_entropy: whether entropies have a gradient."""

    in_step = None  # ``InStep`` (sharding.py) where the model is sharded

    def __init__(self, model, dtype=torch.float32, early_ends=None, learn_entropy=False):
        super().__init__()
        self.model = model
        self.dtype = dtype
        self.early_ends = early_ends
        self.learn_entropy = learn_entropy
        self.balance = BalanceLoss(model)

    def forward(self, tokens, layout, temperature=1.0):
        """tokens [B, T], ``Layout.of_responses`` -> logprobs [B, R], entropy [B, R], balance loss (weighted
        sum). A ``Layout`` without shape, of demonstrations, gives both of its M wanted tokens: [M]."""
        forbid_ = None
        if self.early_ends and layout.shape:  # --min_gen_len is not for demonstrations
            forbid_ = self.early_ends.of(layout)
        with autocast(tokens.device, self.dtype):
            states, targets, output = states_at(self.model.base_model, tokens, layout, **self.balance.extra)
            head = self.model.get_output_embeddings()
            logprobs, entropy = token_logprobs(
                head, states, targets, temperature, forbid_, self.learn_entropy
            )
            balance = self.balance(output, layout)
        return layout.spread(logprobs), layout.spread(entropy), balance


class ValueScorer(nn.Module):
    """Computes the values of given responses: the critic, read one position before each response token."""

    in_step = None  # as of ``PolicyScorer``

    def __init__(self, critic, dtype=torch.float32):
        super().__init__()
        self.critic = critic
        self.dtype = dtype
        self.balance = BalanceLoss(critic.backbone)

    def forward(self, tokens, layout):
        """tokens [B, T], ``Layout.of_responses`` -> values [B, R] fp32, 0 on padding, balance loss (weighted
        sum)."""
        with autocast(tokens.device, self.dtype):
            states, _, output = states_at(self.critic.backbone, tokens, layout, **self.balance.extra)
            values = layout.spread(self.critic.read(states))
            return values, self.balance(output, layout)


@torch.no_grad()
def score_all(rollout, score, name="log-probs", scorer=None):
    """Call ``score(rows of the rollout) -> [b, r]`` for each micro-batch -> [B, R], in row order; of several
    numbers a token [n, b, r] -> [n, B, R]. name: of the progress bar; scorer: what ``score`` calls."""
    places = []
    parts = []
    width = rollout.sampler_logprobs.shape[1]

    def fill(index):
        part = score(rollout.rows(index))
        parts.append(F.pad(part, (0, width - part.shape[-1])))
        places.extend(index)

    device = rollout.tokens.device
    lengths = rollout.layout.lengths
    each_micro_batch(lengths, tokens_per_pass(device), fill, name, scorer, lambda: score(rollout.rows([0])))
    return torch.cat(parts, -2).index_select(-2, send(torch.tensor(places).argsort(), device))


def score_policy(rollout, scorer, temperature):
    """Log-probs [B, R] of the sampled tokens under a ``PolicyScorer``, and its entropies before them."""

    def score(rows):
        return torch.stack(scorer(*rows.sequences, temperature)[:2])

    return score_all(rollout, score, scorer=scorer).unbind()


def score_values(rollout, scorer):
    """Values [B, R] of the states before the sampled tokens, from a ``ValueScorer``."""
    return score_all(rollout, lambda rows: scorer(*rows.sequences)[0], "values", scorer)


def score_learned(items, scorer):
    """Demonstrations -> (log-probs of their N learned tokens [N], differentiable, balance loss), at
    temperature 1. items: of ``SFTDataset``, (token ids, mask); the first token is never learned: nothing
    predicts it."""
    tokens, _ = pad_right([ids for ids, _ in items], scorer.model.device)
    learned = np.flatnonzero(np.concatenate([[0, *mask[1:]] for _, mask in items]))
    logprobs, _, balance = scorer(tokens, Layout([len(ids) for ids, _ in items], learned, tokens.device))
    return logprobs, balance
