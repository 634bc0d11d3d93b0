"""How a MiniMind ``.pth`` is recognised: by the keys and shapes of its state-dict.

    version                 3 if layer 0 has self_attn.q_norm.weight, 2 if not
    mixture of experts      if layer 0 has mlp.gate.weight; its rows are the number of experts
    shared experts          the number of mlp.shared_experts.N in layer 0
    layers                  the number of different N in model.layers.N
    head size               version 3: rows of q_norm; version 2: rows of q_proj / 8
    heads, key/value heads  rows of q_proj and of k_proj / head size
    vocabulary, hidden      rows of model.embed_tokens.weight and of model.norm.weight
    feed-forward            rows of mlp.gate_proj.weight, with experts of expert 0's gate_proj.weight
    tied embeddings         if lm_head.weight is missing or equals the embeddings

Everything else has the default of its version (model_minimind.py). loading.py calls ``minimind_config_of``
only if there is no folder of the same stem with a config.json beside the ``.pth``; otherwise that config.json
says what the model is. In both cases loading.py then compares every key and shape with the model's own.
"""

import re

import torch

from errors import InputError
from model.model_minimind import MiniMindConfig

MINIMIND_HEADS = 8  # MiniMind 2 has 8 heads at every size; its state-dict does not show the number


def minimind_config_of(state, path):
    """The ``MiniMindConfig`` whose model has the keys and shapes of ``state``; see the top of this file.

    Raises ``InputError`` if a key that it needs is missing, or if queries and keys do not split into heads.
    Other differences from a MiniMind are found later, when loading.py compares all keys and shapes.
    """

    def rows(name):
        if name not in state or state[name].dim() == 0:
            raise InputError(
                f"{path} has no {name}: not a MiniMind checkpoint. Any other model needs its config.json in "
                f"the folder {path.with_suffix('')}"
            )
        return state[name].shape[0]

    layer = "model.layers.0."
    version = 3 if f"{layer}self_attn.q_norm.weight" in state else 2
    query_rows, key_rows = rows(f"{layer}self_attn.q_proj.weight"), rows(f"{layer}self_attn.k_proj.weight")
    if version == 3:
        head_dim = rows(f"{layer}self_attn.q_norm.weight")
    else:
        head_dim = query_rows // MINIMIND_HEADS
    if head_dim == 0 or head_dim % 2 or query_rows % head_dim or key_rows % head_dim or not key_rows:
        raise InputError(
            f"{path}: queries of {query_rows} and keys of {key_rows} rows do not split into heads "
            f"of size {head_dim}: not a MiniMind checkpoint"
        )
    layers = {found[1] for name in state if (found := re.match(r"model\.layers\.(\d+)\.", name))}
    sizes = {
        "vocab_size": rows("model.embed_tokens.weight"),
        "hidden_size": rows("model.norm.weight"),
        "num_hidden_layers": len(layers),
        "head_dim": head_dim,
        "num_attention_heads": query_rows // head_dim,
        "num_key_value_heads": key_rows // head_dim,
    }
    use_moe = f"{layer}mlp.gate.weight" in state
    if use_moe:
        shared = re.compile(re.escape(f"{layer}mlp.shared_experts.") + r"\d+\.gate_proj\.weight")
        sizes["num_experts"] = rows(f"{layer}mlp.gate.weight")
        sizes["n_shared_experts"] = sum(shared.fullmatch(name) is not None for name in state)
        sizes["intermediate_size"] = rows(f"{layer}mlp.experts.0.gate_proj.weight")
    else:
        sizes["intermediate_size"] = rows(f"{layer}mlp.gate_proj.weight")
    tied = "lm_head.weight" not in state or torch.equal(
        state["lm_head.weight"], state["model.embed_tokens.weight"]
    )
    return MiniMindConfig(minimind_version=version, use_moe=use_moe, tie_word_embeddings=tied, **sizes)
