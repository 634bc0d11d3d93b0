"""A dense MiniMind as the class of transformers that it is: others then load it without this repository."""

from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from errors import InputError
from model.model_minimind import MiniMindConfig

PLAIN = {2: (LlamaConfig, LlamaForCausalLM), 3: (Qwen3Config, Qwen3ForCausalLM)}  # by MiniMind's version
SHARED = (  # the fields that say what is computed, under the same names in all three configs
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
    "head_dim hidden_act max_position_embeddings initializer_range rms_norm_eps rope_parameters "
    "tie_word_embeddings pad_token_id bos_token_id eos_token_id attention_bias"
)


def as_plain(model):
    """A dense MiniMind 2 as a Llama, a dense MiniMind 3 as a Qwen3, any other model as it is.

    The weights are shared, not copied. Raises ``InputError`` for a MiniMind with experts.
    """
    config = model.config
    if not isinstance(config, MiniMindConfig):
        return model
    if config.use_moe:
        raise InputError(
            "a MiniMind with experts is not exported: it has them in a form of its own, which transformers, "
            "vLLM and llama.cpp could not load; chat.py and --model take its .pth"
        )
    config_class, model_class = PLAIN[config.minimind_version]
    plain = model_class(config_class(**{name: getattr(config, name) for name in SHARED.split()}))
    plain.load_state_dict(model.state_dict(), strict=True, assign=True)
    plain.tie_weights()
    plain.generation_config = model.generation_config
    return plain.eval()
