"""Can this causal LM be trained here? Loaded and tried before anything else is built.

``load_checked`` is for PPO; stages 1 and 2 use ``check_policy``. What a family of models must be able to do:
docs/models.md.
"""

import torch
from torch.distributed.fsdp import FSDPModule

from errors import InputError
from model.compatibility import check_output_head, check_tokenizer, is_moe, not_finite
from model.loading import as_input_error, load_policy, quiet
from model.pretrained import is_from_outside
from trainer.compute.packing import pack_sequences
from trainer.compute.scoring import PolicyScorer
from trainer.generation.engine import sample
from trainer.generation.sampling_noise import noise_keys
from trainer.memory_check import check_loading


def load_checked(args, tokenizer):
    """Flags -> the policy, in fp32 on the CPU. Raises InputError if it cannot be trained here."""
    check_loading(args.model, alone=args.shard)
    actor = load_policy(args.model, args.trust_remote_code)
    if args.shard and is_from_outside(actor):
        raise InputError(
            f"--shard 1: --model {args.model} brings its own code, which may use its weights in other ways; "
            "leave the flag out"
        )
    if args.shard and is_moe(actor) and not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        raise InputError(
            f"--shard 1: torch {torch.__version__} may sum the gradients of experts wrong; install torch 2.13"
        )
    check_policy(args, actor, tokenizer)
    check_sampling(actor)
    if args.shard:  # here, where the weights are: it compares results
        pack_sequences(actor.base_model)
    return actor


def check_policy(args, policy, tokenizer):
    """Raise InputError if the causal LM cannot be trained here, or does not fit tokenizer and flags."""
    check_tokenizer(tokenizer, policy)
    if name := not_finite(policy):
        raise InputError(f"--model {args.model}: {name} has weights that are not finite; it is damaged")
    check_output_head(policy)
    for flag in ("hidden_size", "num_hidden_layers"):
        wanted = getattr(args, flag)
        if wanted and wanted != (has := getattr(policy.config, flag)):
            raise InputError(f"--{flag} {wanted}: {args.model} has {has}; leave the flag out")
    if args.use_moe and not is_moe(policy):
        raise InputError(f"--use_moe 1: {args.model} is not a mixture of experts; leave the flag out")


def check_sampling(policy):
    """Raise ``InputError`` unless sampling with a KV cache gives the log-probs of the training forward.

    It does not for models that keep more than keys and values from token to token (a recurrent state,
    positions of their own). Without this check their samples would silently come from another distribution.
    """
    kind = policy.config.model_type
    rows = policy.get_input_embeddings().weight.shape[0]
    prompts = [[i % rows for i in range(1, length)] for length in (10, 4, 7)]
    what = f"models of type {kind} are not supported: the sampler's KV cache does not work with them"
    with quiet(), as_input_error(what):
        rollout = sample(policy, prompts, noise_keys(0, 0, [0, 1, 2]), [-1], 4, 0.0, slots=2)
        scored = PolicyScorer(policy)(*rollout.sequences, 1.0)[0]
    gap = (scored - rollout.sampler_logprobs).abs().max().item()
    if not gap < 1e-2:
        raise InputError(
            f"models of type {kind} are not supported: sampling with a KV cache gives other log-probs than "
            f"their training forward (they differ by {gap:.3g})"
        )
