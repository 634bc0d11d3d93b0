"""A causal language model -> a reward model: a sequence classifier with one label."""

import torch
from transformers import AutoModelForSequenceClassification

from errors import InputError
from model.loading import disable_dropout
from model.plain import as_plain


def reward_from(policy, tokenizer, extra_layers=0):
    """A policy's backbone, ``extra_layers`` more, a new score head. The policy is left as it was.

    A policy's last layer knows which token should come next, too late to compare it with the one that did.
    The extra layers can. They start as the identity (their outputs are zero), so nothing is lost. Raises
    InputError for families that have no such classifier.
    """
    try:
        policy = as_plain(policy)  # a dense MiniMind is a Llama or a Qwen3
    except InputError:
        raise InputError(
            "--model: no sequence classifier exists for a MiniMind with experts; start from a dense one"
        ) from None
    sizes = policy.config.to_dict()
    sizes["num_hidden_layers"] += extra_layers
    if extra_layers:
        sizes.pop("layer_types", None)  # one a layer; the config derives it anew
    config = type(policy.config).from_dict(sizes)
    config.num_labels = 1
    # The score is read at the last token that is not padding, so that batched and single scores agree.
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
