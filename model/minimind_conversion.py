"""Converts a MiniMind to a class of transformers with the same weights, and back.

Other programs can then load it without this repository. export.py uses it.
"""

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from errors import InputError
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM

PLAIN = {2: (LlamaConfig, LlamaForCausalLM), 3: (Qwen3Config, Qwen3ForCausalLM)}  # by MiniMind's version
SHARED = [  # fields that decide what is computed; they have the same names in all configs
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps"),
    *("rope_parameters", "tie_word_embeddings", "pad_token_id", "bos_token_id", "eos_token_id"),
    "attention_bias",
]
EXPERTS = ["num_experts", "num_experts_per_tok", "router_aux_loss_coef"]
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def as_plain(model):
    """A dense MiniMind 2 as a Llama, a MiniMind 3 as a Qwen3 or with experts a Qwen3-MoE, others as they are.

    Dense weights are shared, not copied. Raises ``InputError`` for a MiniMind 2 with experts, and for a
    MiniMind 3 with shared experts. Every token goes through shared experts; Qwen3-MoE has none, and Qwen2-MoE
    multiplies its own by a gate below 1.
    """
    config = model.config
    if not isinstance(config, MiniMindConfig):
        return model
    sizes, state = _fields(config, SHARED), dict(model.state_dict())
    if not config.use_moe:
        config_class, model_class = PLAIN[config.minimind_version]
        sizes["intermediate_size"] = config.intermediate_size
    elif config.minimind_version == 3 and not config.n_shared_experts:
        # norm_topk_prob: the weights of the chosen experts add up to one, as in MiniMind. as_minimind knows
        # by minimind_version that the model was a MiniMind.
        config_class, model_class = Qwen3MoeConfig, Qwen3MoeForCausalLM
        sizes |= {**_fields(config, EXPERTS), "moe_intermediate_size": config.intermediate_size}
        sizes |= {"norm_topk_prob": True, "minimind_version": 3}
        for layer in range(config.num_hidden_layers):
            _merge_experts(state, f"model.layers.{layer}.mlp.experts.", config.num_experts)
    else:
        raise InputError(
            "a MiniMind 2 with experts is not exported: transformers, vLLM and llama.cpp have no such shared "
            "expert and could not load it; use its .pth, which chat.py and --model can load"
        )
    return _filled(model_class(config_class(**sizes)), state, model)


def as_minimind(model):
    """A Qwen3-MoE that ``as_plain`` made from a MiniMind -> that MiniMind; any other model as it is."""
    config = model.config
    if not isinstance(config, Qwen3MoeConfig) or getattr(config, "minimind_version", None) != 3:
        return model
    state = dict(model.state_dict())
    for layer in range(config.num_hidden_layers):
        _split_experts(state, f"model.layers.{layer}.mlp.experts.")
    sizes = {**_fields(config, SHARED + EXPERTS), "intermediate_size": config.moe_intermediate_size}
    own = MiniMindForCausalLM(MiniMindConfig(minimind_version=3, use_moe=True, **sizes))
    return _filled(own, state, model)


def _fields(config, names):
    return {name: getattr(config, name) for name in names}


def _filled(empty, state, model):
    empty.load_state_dict(state, strict=True, assign=True)
    empty.tie_weights()
    empty.generation_config = model.generation_config
    return empty.eval()


def _merge_experts(state, prefix, count):
    """In place: 3 matrices per expert -> gate_up_proj [E, 2 I, H] (gate first) and down_proj [E, H, I]."""
    gate, up, down = (
        torch.stack([state.pop(f"{prefix}{expert}.{name}.weight") for expert in range(count)])
        for name in PROJECTIONS
    )
    state[f"{prefix}gate_up_proj"], state[f"{prefix}down_proj"] = torch.cat([gate, up], 1), down


def _split_experts(state, prefix):
    gate, up = state.pop(f"{prefix}gate_up_proj").chunk(2, dim=1)
    for name, stacked in zip(PROJECTIONS, (gate, up, state.pop(f"{prefix}down_proj")), strict=True):
        for expert, matrix in enumerate(stacked):
            state[f"{prefix}{expert}.{name}.weight"] = matrix.contiguous()
