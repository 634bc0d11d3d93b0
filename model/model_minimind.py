"""MiniMind 2 and 3 as transformers models: config, backbone, language model and classifier.

How a MiniMind ``.pth`` is recognised, and how its config is found: minimind_pth.py.

A dense MiniMind 3 is a Qwen3. A dense MiniMind 2 is a Llama, that is a Qwen3 without the norms on queries and
keys. So everything here is transformers' Qwen3, except

- the query and key norms, which MiniMind 2 does not have;
- the mixture-of-experts feed-forward: a softmax gate over four experts. Each token goes through two of them
  and one shared expert (MiniMind 2), or through one of them (MiniMind 3).

State-dict keys are those of MiniMind's own class, so each can load the other's ``.pth`` with ``strict=True``.
Importing this module registers the classes with transformers' ``Auto*`` classes under the ``model_type``
``"small_lm_minimind"``. The name is not ``"minimind"``, because folders that MiniMind's own scripts write
have that type with other field names. They would be read wrongly here, without any error.
"""

import math

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationMixin,
    Qwen3Config,
    Qwen3Model,
    Qwen3PreTrainedModel,
)
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP
from transformers.utils import can_return_tuple

from errors import InputError

# Defaults that differ between the two versions. Sizes that follow from hidden_size are in MiniMindConfig.
VERSIONS = {
    2: {
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "router_aux_loss_coef": 0.1,
    },
    3: {
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "num_experts_per_tok": 1,
        "n_shared_experts": 0,
        "router_aux_loss_coef": 5e-4,
    },
}


@strict
class MiniMindConfig(Qwen3Config):
    """The architecture of a MiniMind model. Give every argument by name.

    ``minimind_version`` is 2 (default: MiniMind of 2025, whose released sizes are hidden 512 x 8 layers and
    768 x 16) or 3 (2026). A field left at ``None`` takes that version's value.

    Raises ``InputError`` for an unknown version and for a ``hidden_size`` that the heads do not divide.
    """

    model_type = "small_lm_minimind"
    attribute_map = {"n_routed_experts": "num_experts", "aux_loss_alpha": "router_aux_loss_coef"}  # noqa: RUF012

    hidden_size: int = 512
    num_hidden_layers: int = 8
    use_moe: bool = False
    minimind_version: int = 2

    vocab_size: int = 6400
    num_attention_heads: int = 8
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    rms_norm_eps: float | None = None
    tie_word_embeddings: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2

    num_experts: int = 4
    num_experts_per_tok: int | None = None
    n_shared_experts: int | None = None
    router_aux_loss_coef: float | None = None

    def __post_init__(self, **kwargs):
        if self.minimind_version not in VERSIONS:
            raise InputError(f"minimind_version {self.minimind_version} is not known: use 2 or 3")
        for name, value in VERSIONS[self.minimind_version].items():
            if vars(self)[name] is None:
                setattr(self, name, value)
        if self.head_dim is None:
            if self.hidden_size % (2 * self.num_attention_heads):
                raise InputError(
                    f"hidden_size {self.hidden_size} does not split into {self.num_attention_heads} heads "
                    f"of even size: use a multiple of {2 * self.num_attention_heads}"
                )
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.intermediate_size is None:
            width = {2: int(8 * self.hidden_size / 3), 3: self.hidden_size * math.pi}[self.minimind_version]
            self.intermediate_size = 64 * math.ceil(width / 64)
        if self.rope_parameters is None:
            theta = kwargs.pop("rope_theta", 1e6)
            self.rope_parameters = {"rope_type": "default", "rope_theta": theta}
        super().__post_init__(**kwargs)


class Router(nn.Linear):
    """Hidden states [N, hidden] -> expert logits [N, num_experts]. A class of its own, because transformers
    records ``router_logits`` by class (``_can_record_outputs``)."""


class MoEFeedForward(nn.Module):
    """Each token goes through the ``num_experts_per_tok`` experts of highest gate probability, and through
    every shared expert. The weights of the chosen experts are made to add up to one."""

    def __init__(self, config):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.gate = Router(config.hidden_size, config.num_experts, bias=False)
        self.experts = nn.ModuleList(Qwen3MLP(config) for _ in range(config.num_experts))
        self.shared_experts = nn.ModuleList(Qwen3MLP(config) for _ in range(config.n_shared_experts))

    def forward(self, hidden):  # [B, T, hidden] -> the same
        tokens = hidden.reshape(-1, hidden.shape[-1])  # [N, hidden]
        probs = self.gate(tokens).softmax(dim=-1, dtype=torch.float32)  # [N, num_experts]
        weights, chosen = probs.topk(self.top_k, dim=-1)  # [N, top_k]
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)

        out = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            # An expert that no token chose runs on zero tokens. Its gradient is then zero and not missing:
            # data-parallel training needs that.
            row, slot = torch.where(chosen == index)
            visit = expert(tokens[row]) * weights[row, slot, None]
            out = out.index_add(0, row, visit.to(out.dtype))
        for expert in self.shared_experts:
            out = out + expert(tokens)
        return out.view_as(hidden)


class MiniMindPreTrainedModel(Qwen3PreTrainedModel):
    """Settings that transformers reads for every MiniMind model."""

    config: MiniMindConfig
    config_class = MiniMindConfig
    _can_compile_fullgraph = False  # the number of tokens of an expert depends on the data
    _can_record_outputs = {**Qwen3PreTrainedModel._can_record_outputs, "router_logits": Router}  # noqa: RUF012


class MiniMindModel(MiniMindPreTrainedModel, Qwen3Model):
    """The backbone: ``input_ids`` [B, T] -> ``last_hidden_state`` [B, T, hidden], final norm included.

    With ``output_router_logits=True`` the output has ``router_logits``: a tuple of one tensor
    [B * T, num_experts] per layer, with gradients; an empty tuple for a dense model.
    """

    def __init__(self, config):
        super().__init__(config)
        for layer in self.layers:
            if config.minimind_version == 2:
                layer.self_attn.q_norm = nn.Identity()
                layer.self_attn.k_norm = nn.Identity()
            if config.use_moe:
                layer.mlp = MoEFeedForward(config)
        self.post_init()


class MiniMindForCausalLM(MiniMindPreTrainedModel, GenerationMixin):
    """The language model: ``input_ids`` [B, T] -> ``logits`` [B, T, vocab_size].

    It is called like any causal language model of transformers. ``output_router_logits=True`` adds the
    backbone's ``router_logits``. ``loss`` is the cross-entropy alone. The trainer adds the experts' balance
    loss (trainer/compute/balance_loss.py), because it knows which tokens are padding.
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config):
        super().__init__(config)
        self.model = MiniMindModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        labels=None,
        use_cache=None,
        output_router_logits=False,
        logits_to_keep=0,
        **kwargs,
    ):
        backbone = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_router_logits=output_router_logits,
            **kwargs,
        )
        # logits_to_keep, as in transformers: how many last positions to keep, 0 for all, or their indices.
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(backbone.last_hidden_state[:, keep])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        return MoeCausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=backbone.past_key_values,
            hidden_states=backbone.hidden_states,
            attentions=backbone.attentions,
            router_logits=backbone.router_logits if output_router_logits else None,
        )


class MiniMindForSequenceClassification(GenericForSequenceClassification, MiniMindPreTrainedModel):
    """A MiniMind backbone with a linear ``score`` head, read at the last token: a reward model."""


AutoConfig.register(MiniMindConfig.model_type, MiniMindConfig)
AutoModel.register(MiniMindConfig, MiniMindModel)
AutoModelForCausalLM.register(MiniMindConfig, MiniMindForCausalLM)
AutoModelForSequenceClassification.register(MiniMindConfig, MiniMindForSequenceClassification)
