"""Checks that a tokenizer, a model and this trainer fit together. They run before training begins.

No list of model families decides. Every causal language model of transformers is tried, and two checks refuse
it if it would be trained wrong: ``check_output_head`` here and ``check_sampling`` in
trainer/policy_checks.py. The families that were tried: docs/models.md.
"""

import math

import torch

from errors import InputError
from model.shards import local_part

FEWEST_IDS, USUAL_IDS = 0.5, 0.95  # of a model's embeddings: models have a few that no id uses


def check_tokenizer(tokenizer, model):
    """Raise ``InputError`` if the tokenizer cannot be this model's: it has no ids, an id for which the model
    has no embedding, or ids for less than half of the embeddings."""
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest < 0:
        raise InputError(f"--tokenizer {tokenizer.name_or_path}: its vocabulary is empty")
    rows = model.get_input_embeddings().weight.shape[0]
    if largest >= rows:
        raise InputError(
            f"--tokenizer {tokenizer.name_or_path}: its largest id is {largest}, but the model has {rows} "
            "embeddings: it is not this model's tokenizer"
        )
    if (count := len(tokenizer.get_vocab())) < FEWEST_IDS * rows:
        raise InputError(
            f"--tokenizer {tokenizer.name_or_path}: it has {count} ids, but the model has {rows} embeddings: "
            "it is not this model's tokenizer"
        )


def tokenizer_note(tokenizer, model):
    """A line for a tokenizer with clearly fewer ids than the model has embeddings, else None."""
    rows, count = model.get_input_embeddings().weight.shape[0], len(tokenizer.get_vocab())
    if count >= USUAL_IDS * rows:
        return None
    return (
        f"note     the tokenizer has {count} ids, the model {rows} embeddings: is it this model's tokenizer?"
    )


def not_finite(module):
    """The name of the first parameter that holds a NaN or an infinity in this process; '' if none does."""
    found = ((name, local_part(p)) for name, p in module.named_parameters())
    return next((name for name, x in found if not x.isfinite().all()), "")


def is_moe(model):
    """Is the model a mixture of experts? MiniMind's config says so in ``use_moe``. In other families, only
    the configs of such models have a weight for the load-balancing loss."""
    config = model.config.to_dict()
    return bool(config.get("use_moe", "router_aux_loss_coef" in config))


def most_positions(config):
    """The longest sequence, in tokens, that a model computes the same alone and in a batch; inf: no limit."""
    limits = [getattr(config, "max_position_embeddings", None) or math.inf]  # ALiBi models have no limit
    if "local" in getattr(config, "attention_layers", ()):  # GPT-Neo: the window depends on the longest row
        limits.append(config.window_size)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":  # Phi-3: one longer row changes the rotation of all rows
        limits.append(rope.get("original_max_position_embeddings") or math.inf)
    return min(limits)


def eos_ids(tokenizer, model):
    """The ids that end a response, sorted: the tokenizer's EOS and those of the model's generation config.

    Raises ``InputError`` if there is no such id, or if one of them is not a token id.
    """
    configured = model.generation_config.eos_token_id
    ids = configured if isinstance(configured, list) else [configured]
    ids = [i for i in (*ids, tokenizer.eos_token_id) if i is not None]
    if not all(type(i) is int and 0 <= i < 2**31 for i in ids):
        raise InputError(
            f"the generation config's eos_token_id is {configured!r:.100}: give a token id, or a list"
        )
    if not ids:
        raise InputError(
            f"neither the tokenizer {tokenizer.name_or_path} nor the model's generation config names an EOS "
            "token: responses would never end; set eos_token in tokenizer_config.json"
        )
    return sorted(set(ids))


def check_ends(item, tokenizer, model):
    """Raise InputError if a demonstration, (token ids, mask), teaches the model to end answers with a token
    at which PPO does not stop."""
    if not any(mask and token in eos_ids(tokenizer, model) for token, mask in zip(*item, strict=True)):
        raise InputError(
            f"the chat template does not end answers with the tokenizer's EOS, {tokenizer.eos_token}: set "
            "eos_token in tokenizer_config.json to the token that ends a turn, or give another "
            "--prompt_template"
        )


@torch.no_grad()
def check_output_head(model):
    """Raise ``InputError`` unless the output head applied to the backbone's output gives the model's logits.

    Training computes the logits in this way, because it needs them at response positions only. A family that
    also changes the logits (a soft-cap, a scale) would be trained as a different model, without any error.
    """
    generator = torch.Generator().manual_seed(0)
    rows = model.get_input_embeddings().weight.shape[0]
    tokens = torch.randint(rows, (2, 8), generator=generator).to(model.device)
    logits = model(tokens, use_cache=False).logits
    head, backbone = model.get_output_embeddings(), model.base_model
    fits = head is not None and backbone is not model
    if fits:
        by_hand = head(backbone(tokens, use_cache=False).last_hidden_state)
        fits = by_hand.shape == logits.shape and bool(
            torch.allclose(by_hand, logits, rtol=1e-5, atol=1e-5 * logits.abs().max().item())
        )
    if not fits:
        raise InputError(
            f"models of type {model.config.model_type} are not supported: their logits are more than the "
            "output head applied to the last hidden state (a soft-cap or a scale)"
        )
