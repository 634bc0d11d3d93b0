"""MiniMind 2 and 3: the models. loading.py recognises a ``.pth`` of theirs (``minimind_config_of``).

A dense MiniMind 3 is a Qwen3; a dense MiniMind 2 a Llama: a Qwen3 without norms on queries and keys. So
``plain_config`` makes these of them. With experts they are of the classes here, which are transformers' Qwen3
except the missing norms (MiniMind 2) and the mixture of experts. State-dict keys are those of MiniMind's own
class: each loads the other's ``.pth`` with ``strict=True``. Importing this module registers the classes with
the ``Auto*`` classes as ``small_lm_minimind``; folders of the type ``minimind`` have other field names.
"""

import math
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
    Qwen3PreTrainedModel,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

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

    Raises ``InputError`` for a ``hidden_size`` that the heads do not divide.
    """

    model_type = "small_lm_minimind"
    attribute_map = {"n_routed_experts": "num_experts", "aux_loss_alpha": "router_aux_loss_coef"}  # noqa: RUF012

    hidden_size: int = 512
    num_hidden_layers: int = 8
    use_moe: bool = False
    minimind_version: int = 2

    vocab_size: int = 6400
    num_attention_heads: int = 8
    # None: as in this version. transformers knows no config that fills in a number that it requires.
    num_key_value_heads: int | None = None
    head_dim: int | None = None  # type: ignore[assignment]
    intermediate_size: int | None = None  # type: ignore[assignment]
    rms_norm_eps: float | None = None  # type: ignore[assignment]
    tie_word_embeddings: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2

    num_experts: int = 4
    num_experts_per_tok: int | None = None
    n_shared_experts: int | None = None
    router_aux_loss_coef: float | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        for name, value in VERSIONS[self.minimind_version].items():
            if vars(self)[name] is None:
                setattr(self, name, value)
        if self.head_dim is None:
            if self.hidden_size % (2 * self.num_attention_heads):
                raise InputError(
                    f"--hidden_size {self.hidden_size}: must be a multiple of "
                    f"{2 * self.num_attention_heads}, for {self.num_attention_heads} heads of even size"
                )
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.intermediate_size is None:
            width = {2: int(8 * self.hidden_size / 3), 3: self.hidden_size * math.pi}[self.minimind_version]
            self.intermediate_size = 64 * math.ceil(width / 64)
        if self.rope_parameters is None:
            self.rope_parameters = {"rope_type": "default", "rope_theta": kwargs.pop("rope_theta", 1e6)}
        super().__post_init__(**kwargs)


class Router(nn.Linear):
    """Hidden states [N, hidden] -> expert logits [N, num_experts]. A class of its own, because transformers
    records ``router_logits`` by class (``_can_record_outputs``)."""


class MoEFeedForward(nn.Module):
    """Each token goes through the ``num_experts_per_tok`` experts of highest gate probability, and through
    every shared expert. The weights of the chosen experts are made to add up to one."""

    # Whether every expert computes every token of a decoding step. Otherwise the host waits for the number of
    # tokens that chose it, so that no CUDA graph can be captured.
    all_in_steps = False

    def __init__(self, config: MiniMindConfig) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.gate = Router(config.hidden_size, config.num_experts, bias=False)
        self.experts = nn.ModuleList(Qwen3MLP(config) for _ in range(config.num_experts))
        self.shared_experts = nn.ModuleList(Qwen3MLP(config) for _ in range(config.n_shared_experts or 0))

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states [B, T, hidden] -> the same shape"""
        tokens = hidden.flatten(0, -2)  # [N, hidden]
        probs = self.gate(tokens).softmax(-1, dtype=torch.float32)  # [N, num_experts]
        weights, chosen = probs.topk(self.top_k)  # [N, top_k]
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)

        out = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            if self.all_in_steps and hidden.shape[1] == 1:
                share = (weights * (chosen == index)).sum(-1, keepdim=True)
                # 0 where the share is 0, even if the result is infinite
                out = out + (expert(tokens) * share).masked_fill(share == 0, 0).to(out.dtype)
                continue
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
    _can_record_outputs = {**Qwen3PreTrainedModel._can_record_outputs, "router_logits": Router}  # noqa: RUF012


class MiniMindModel(MiniMindPreTrainedModel, Qwen3Model):
    """The backbone: ``input_ids`` [B, T] -> ``last_hidden_state`` [B, T, hidden], final norm included.

    With ``output_router_logits=True`` the output has ``router_logits``: a tuple of one tensor
    [B * T, num_experts] per layer, with gradients; an empty tuple for a dense model.
    """

    def __init__(self, config: MiniMindConfig) -> None:
        super().__init__(config)
        for layer in self.layers:
            if config.minimind_version == 2:
                attention = layer.get_submodule("self_attn")
                attention.q_norm = nn.Identity()
                attention.k_norm = nn.Identity()
            if config.use_moe:
                layer.mlp = MoEFeedForward(config)
        self.post_init()


class MiniMindForCausalLM(MiniMindPreTrainedModel, Qwen3ForCausalLM):
    """The language model: ``input_ids`` [B, T] -> ``logits`` [B, T, vocab_size].

    It is called like any causal language model of transformers. ``loss`` is the cross-entropy alone: the
    trainer computes the experts' balance loss (trainer/compute/scoring.py), as it knows what is padding, and
    adds it itself.
    """

    def __init__(self, config: MiniMindConfig) -> None:
        PreTrainedModel.__init__(self, config)  # not Qwen3ForCausalLM's, which builds another backbone
        self.model = MiniMindModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


AutoConfig.register(MiniMindConfig.model_type, MiniMindConfig)
AutoModel.register(MiniMindConfig, MiniMindModel)
AutoModelForCausalLM.register(MiniMindConfig, MiniMindForCausalLM)


# ---------------------------------------------------------------- the same models as classes of transformers


def plain_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of a dense MiniMind -> that of the Llama (MiniMind 2) or Qwen3 (MiniMind 3) that has the
    same weights under the same names, and computes the same; any other config as it is."""
    if not isinstance(config, MiniMindConfig) or config.use_moe:
        return config
    kind: Any = LlamaConfig if config.minimind_version == 2 else Qwen3Config
    names = kind.__dataclass_fields__.keys() - PreTrainedConfig.__dataclass_fields__.keys()
    return kind(**{name: getattr(config, name) for name in names if hasattr(config, name)})
