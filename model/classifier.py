"""Makes a reward model from a causal language model: a transformers sequence classifier with one label."""

import torch
from transformers import AutoModelForSequenceClassification

from errors import InputError
from model.loading import disable_dropout
from model.minimind_conversion import as_plain


def reward_from(policy, tokenizer, extra_layers=0):
    """A policy's backbone, ``extra_layers`` new ones and a new score head -> a reward model, fp32, eval mode.

    The policy is not changed. Why extra layers: only the last layer of a policy knows which token should come
    next, so no layer is left to compare this with the token that did come. The extra layers can compare them.
    They start as the identity (their output matrices are zero), so the policy's knowledge is kept. Raises
    InputError for families that have no such classifier.
    """
    try:
        policy = as_plain(policy)  # a dense MiniMind becomes a Llama or a Qwen3
    except InputError:
        raise InputError(
            "--model: no sequence classifier exists for a MiniMind with experts; start from a dense one"
        ) from None
    sizes = policy.config.to_dict()
    sizes["num_hidden_layers"] += extra_layers
    if extra_layers:
        sizes.pop("layer_types", None)  # one entry per layer; the config makes the list again
    config = type(policy.config).from_dict(sizes)
    config.num_labels = 1
    # transformers reads the score at the last token that is not this pad token. Without a pad token in the
    # config, it could not find that token in a padded batch.
    config.pad_token_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    try:
        reward = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    except ValueError as error:
        raise InputError(f"--model: no sequence classifier exists for {config.model_type} models") from error
    if not isinstance(dict(reward.named_children()).get("score"), torch.nn.Linear):
        raise InputError(f"--model: {type(reward).__name__} has no linear score head to train")
    reward.base_model.load_state_dict(policy.base_model.state_dict(), strict=extra_layers == 0)
    if extra_layers:
        for layer in reward.base_model.layers[policy.config.num_hidden_layers :]:
            torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
            torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    disable_dropout(reward)
    return reward.eval()
