"""Log-probs and values of given responses: the forward of training, used with and without gradients.

The value of response token t is read at sequence position prompt_len + t - 1, before the model reads token t.
There ``ValueScorer`` takes the last hidden state of the critic's backbone, and the value head turns it into a
number (``CriticModel.read``, model/critic.py). The log-prob of token t comes from the policy's logits at the
same position (``PolicyScorer``).

Sequences go through a model packed: one behind the other in one row, without padding, each token with its
position in its own sequence. Only attention (attention.py) has to know where a sequence ends. A prompt with
several answers in a micro-batch goes through once for all of them (``Layout`` in batching.py), where the
model can do that (``pack_sequences``). Logits are computed only where a response token is predicted, and
never for a whole batch at a time (logprobs.py).
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from errors import as_input_error
from model.critic import CriticModel
from model.loading import embeddings, is_moe, quiet
from trainer.compute.attention import ATTENTION
from trainer.compute.batch import Batch
from trainer.compute.batching import Beginnings, Layout, pad_right, tokens_per_forward
from trainer.compute.fused_layers import fuse_layers
from trainer.compute.kernels import difference, few_layers
from trainer.compute.logprobs import token_logprobs
from trainer.compute.memory import each_micro_batch
from trainer.compute.precision import autocast, rows_to_add
from trainer.compute.sharding import ShardGroup, layers_of

# A model without its head. transformers calls ``base_model`` a Module, which has no config.
Backbone = Any
SHORT_WINDOW = 4  # tokens, fewer than the sequences of a check


@contextmanager
def short_windows(model: nn.Module) -> Iterator[None]:
    """In this block the sliding windows of a model of transformers have ``SHORT_WINDOW`` tokens, so that what
    is compared reaches them. Some classes have them in their own mask only, which packed rows go without."""
    places: list[Any] = [model.config, *model.modules()]
    windows = [(place, place.sliding_window) for place in places if getattr(place, "sliding_window", None)]
    try:
        for place, _ in windows:
            place.sliding_window = SHORT_WINDOW
        yield
    finally:
        for place, window in windows:
            place.sliding_window = window


@torch.no_grad()
def pack_sequences(backbone: Backbone) -> bool:
    """Let a backbone read packed rows, and fuse its layers (``fuse_layers``) -> whether it reads packed rows.

    Packed and padded states of its first layers (``few_layers``) are compared first. Where they differ, and
    where a model does not use the attention interface of transformers, the backbone stays as it was, and a
    warning says so. Then states are compared with those of rows whose equal beginnings are computed once
    (``shares_beginnings``).
    """
    config = backbone.config
    before = config._attn_implementation
    if before == ATTENTION:
        return True
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(embeddings(backbone), (4, 9), generator=generator).to(backbone.device)
    tokens[1:3, :5] = tokens[0, :5]
    lengths = [9, 8, 6, 9]
    whole = Layout(lengths, device=backbone.device)
    shared = Layout(lengths, device=backbone.device, beginnings=[(0, 5), (0, 5), (0, 5), (1, 0)])

    def states():
        return packed_states(backbone, tokens, whole)[0]

    def states_of_shared():
        return states()[whole.cu_seqlens[shared.row] + shared.position]

    def shared_states():
        return packed_states(backbone, tokens, shared)[0]

    def packed():
        with quiet():
            backbone.set_attn_implementation(ATTENTION)
        return states()

    with few_layers(backbone), short_windows(backbone):
        differ = difference(states, packed, backbone.device)
    if differ:
        backbone.set_attn_implementation(before)
    if config._attn_implementation != ATTENTION:  # some keep their own and raise no error
        warnings.warn(f"{type(backbone).__name__}: computed with padding, which is slower", stacklevel=2)
        return False
    fuse_layers(backbone, states)
    with few_layers(backbone), short_windows(backbone):
        differ = difference(states_of_shared, shared_states, backbone.device)
    # Experts are balanced over whole sequences.
    backbone.shares_beginnings = not differ and not is_moe(backbone)
    return True


def shares_beginnings(backbone: Backbone) -> bool:
    """Whether a backbone can compute equal beginnings of sequences once, as ``pack_sequences`` has found."""
    return getattr(backbone, "shares_beginnings", False)


def packed_states(backbone: Backbone, tokens: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Run a backbone on right-padded tokens [B, T] -> (the states [N, H] of the N tokens of the layout;
    the aux_loss: the load-balancing loss of a mixture of experts, times the weight in its config, a sum over
    sequences and layers, 0 for other models)."""
    experts = is_moe(backbone)
    extra = {"output_router_logits": True} if experts else {}
    row = layout.row
    position = layout.position
    if backbone.config._attn_implementation == ATTENTION:
        places: Any = slice(len(row))
        more = rows_to_add(len(row), backbone.get_input_embeddings().weight)  # 0 but on a CPU in bf16
        output = backbone(
            input_ids=F.pad(tokens[row, position], (0, more))[None],
            position_ids=F.pad(position, (0, more))[None],
            # Of four dimensions: transformers builds none of [N, N]. ``packing`` has the bounds instead.
            attention_mask=tokens.new_zeros(1, 1, 1, 1, dtype=torch.bool),
            packing=layout.filled if more else layout,
            use_cache=False,
            **extra,
        )
    else:
        places = row * tokens.shape[1] + position
        output = backbone(input_ids=tokens, use_cache=False, **extra)
    states = output.last_hidden_state.flatten(0, 1)[places]
    if not experts:
        return states, torch.zeros((), device=states.device)
    routers = [x[places] for x in output.router_logits]
    loss = load_balance_loss(routers, layout, backbone.config.num_experts_per_tok)
    return states, backbone.config.router_aux_loss_coef * loss


def prepare_training(model: Backbone, gradient_checkpointing: int) -> None:
    """Prepare a model's forward for training: packed rows if the model can, gradient checkpointing if asked.

    Gradient checkpointing keeps only the input of each layer for the backward pass. transformers does so in
    training mode only. So the layers themselves are set to training mode, and all modules inside them stay in
    eval mode: the training forward is the scoring forward. InputError for a model that does not support it.
    """
    pack_sequences(model)
    if not gradient_checkpointing:
        return
    # transformers 5 renamed this method in one of its releases
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    with as_input_error("--gradient_checkpointing: leave the flag out"):
        enable({"use_reentrant": False})
    for layer in layers_of(model):
        layer.training = True


def load_balance_loss(router_logits: Sequence[Tensor], layout: Layout, top_k: int) -> Tensor:
    """Mixture-of-experts load balancing, per sequence (arXiv:2101.03961, eq. 4), summed over B and layers.

    router_logits: one [N, E] for each layer. For one sequence and layer it is E * sum_e f_e P_e, where f_e is
    the share of the sequence's choices that went to expert e, and P_e is the mean gate probability of e; 1
    when balanced. Per sequence, so that the cut into micro-batches does not change it.
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


class Scorer(nn.Module):
    """A model that scores tokens, under autocast in ``dtype``."""

    name: str  # of what it finds, for the progress bar
    shard_group: ShardGroup | None = None  # where the model is sharded

    def __init__(self, model: Any, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.model = model
        self.dtype = dtype

    @property
    def backbone(self) -> Backbone:
        return self.model.base_model

    @property
    def shares_prompts(self) -> bool:
        """Whether equal prompts are to be computed once."""
        return shares_beginnings(self.backbone)

    def beginnings(self, layout: Layout) -> Beginnings:
        """What is computed once of sequences of a ``Layout.of_responses``: their prompts. A warning says
        where there are equal ones and the model cannot."""
        if self.shares_prompts:
            return list(zip(layout.prompt, layout.prompt_len, strict=True))
        if len(set(layout.prompt)) < len(layout.prompt):
            name = type(self.backbone).__name__
            warnings.warn(f"{name}: a prompt is computed once for each answer, which is slower", stacklevel=2)
        return ()


class PolicyScorer(Scorer):
    """Computes the log-probs of given responses under a causal LM, in fp32. forbidden: the tokens that
    responses may not contain, or None; learn_entropy: whether entropies have a gradient."""

    name = "log-probs"

    def __init__(
        self,
        model: PreTrainedModel,
        dtype: torch.dtype = torch.float32,
        forbidden: Any = None,  # ``Forbidden``, of a layer above, so not imported
        learn_entropy: bool = False,
    ) -> None:
        super().__init__(model, dtype)
        self.forbidden = forbidden
        self.learn_entropy = learn_entropy

    def forward(
        self, tokens: Tensor, layout: Layout, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """tokens [B, T], ``Layout.of_responses`` -> logprobs [B, R], entropy [B, R], aux_loss (of
        ``packed_states``). With a ``Layout`` without responses, of demonstrations, both are of its M wanted
        tokens: [M]."""
        forbid = None
        if self.forbidden and layout.shape[1]:  # demonstrations may have these tokens
            forbid = self.forbidden.of(layout)
        targets = tokens[layout.row, layout.position][layout.predicted]
        with autocast(tokens.device, self.dtype):
            states, aux_loss = packed_states(self.backbone, tokens, layout)
            states = states.index_select(0, layout.predicted_by)
            head = self.model.get_output_embeddings()
            logprobs, entropy = token_logprobs(head, states, targets, temperature, forbid, self.learn_entropy)
        return layout.scatter(logprobs), layout.scatter(entropy), aux_loss


class ValueScorer(Scorer):
    """Computes the values of given responses: the critic, read one position before each response token."""

    name = "values"
    model: CriticModel

    @property
    def backbone(self) -> Backbone:
        return self.model.backbone

    def forward(self, tokens: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """tokens [B, T], ``Layout.of_responses`` -> values [B, R] fp32, 0 on padding, aux_loss (of
        ``packed_states``)."""
        with autocast(tokens.device, self.dtype):
            states, aux_loss = packed_states(self.backbone, tokens, layout)
            values = self.model.read(states.index_select(0, layout.predicted_by))
            return layout.scatter(values), aux_loss


@torch.no_grad()
def score_all(batch: Batch, scorer: Scorer, token_budget: int = 0, **more: float) -> list[Tensor]:
    """Score all rows of a batch, micro-batch by micro-batch -> what the scorer finds of the sampled tokens,
    each [B, R]: a ``PolicyScorer`` log-probs and the entropies of the distributions that they were drawn
    from, a ``ValueScorer`` values. more: what it is called with besides; token_budget: of a micro-batch,
    where that is more than ``tokens_per_forward``."""
    found: dict[int, tuple[Tensor, ...]] = {}  # {row: its numbers, each [R]}
    width = batch.sampler_logprobs.shape[1]

    def fill(index):
        rows = index or [0]  # of a pass of a sharded model for which no rows are left
        part = batch.rows(rows, scorer.shares_prompts)
        *numbers, _ = scorer(part.tokens, part.layout, **more)
        padded = [F.pad(x, (0, width - x.shape[1])) for x in numbers]
        found.update(zip(rows, zip(*padded, strict=True), strict=True))

    budget = max(token_budget, tokens_per_forward(batch.tokens.device))
    beginnings = scorer.beginnings(batch.layout)
    each_micro_batch(batch.layout.lengths, budget, fill, scorer.name, scorer.shard_group, beginnings)
    in_order = [found[row] for row in range(len(found))]
    return [torch.stack(numbers) for numbers in zip(*in_order, strict=True)]


def score_learned(
    items: Sequence[tuple[Sequence[int], Sequence[int]]], scorer: PolicyScorer
) -> tuple[Tensor, Tensor]:
    """Demonstrations -> (log-probs of their N learned tokens [N], differentiable, aux_loss), at
    temperature 1. items: of ``SFTDataset``, (token ids, mask); the first token is never learned: nothing
    predicts it."""
    tokens, _ = pad_right([ids for ids, _ in items], scorer.model.device)
    states = np.flatnonzero(np.concatenate([[*mask[1:], 0] for _, mask in items]))  # each predicts the next
    logprobs, _, aux_loss = scorer(tokens, Layout([len(ids) for ids, _ in items], states, tokens.device))
    return logprobs, aux_loss
