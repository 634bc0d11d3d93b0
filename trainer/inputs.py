"""The inputs of PPO: flags completed and checked, policy, tokenizer and prompts loaded and checked.

All of it happens before anything is trained or written. ``load_inputs`` checks that flags, policy, tokenizer
and data fit together; stages 1 and 2 use some of the checks.
"""

import math
import re
from pathlib import Path

from dataset.lm_dataset import RLAIFDataset
from dataset.prompt_template import set_template
from errors import InputError
from model.compatibility import check_output_head, check_tokenizer, is_moe, most_positions, not_finite
from model.loading import as_input_error, load_policy, load_tokenizer, quiet, tokenizer_source
from trainer.compute.scoring import PolicyScorer
from trainer.flags import ROOT, complete_output_flags
from trainer.generation.engine import sample
from trainer.generation.sampling_noise import noise_keys

DEMO = {
    "model": ROOT / "model/demo/policy",
    "reward_model": ROOT / "model/demo/reward",
    "data_path": ROOT / "dataset/demo/ppo.jsonl",
    "eval_data_path": ROOT / "dataset/demo/eval.jsonl",
}


def complete_flags(args):
    """Check train_ppo.py's flags against each other and fill in paths -> the flags. Raises InputError."""
    complete_output_flags(args)
    if args.reward_url and not re.match("https?://.", args.reward_url):
        raise InputError(f"--reward_url {args.reward_url}: must begin with http:// or https://")
    if args.mini_batch_size > args.batch_size or args.batch_size % args.mini_batch_size:
        raise InputError(
            f"--mini_batch_size {args.mini_batch_size}: must divide --batch_size {args.batch_size}"
        )
    fill_paths(args)
    return args


def fill_paths(args):
    """Fill in paths that were not given: MiniMind's file names in --out_dir, or the demo's files.

    Raises InputError if there is no data or no reward.
    """
    if not args.model and (args.hidden_size or args.use_moe):
        end = f"_{args.hidden_size or 512}{'_moe' if args.use_moe else ''}.pth"
        wanted, other = ("reason", "full_sft") if args.reasoning else ("full_sft", "reason")
        args.model = str(Path(args.out_dir) / f"{wanted}{end}")
        if not Path(args.model).is_file():
            there = (Path(args.out_dir) / f"{other}{end}").is_file()
            hint = f"; {other}{end} is there: --reasoning {1 - args.reasoning}" if there else ""
            raise InputError(f"{args.model}: no such file{hint}")
    args.reward_model = [path for path in args.reward_model if path]
    if not args.model:
        for name, path in DEMO.items():
            if name != "reward_model" and not getattr(args, name):
                setattr(args, name, str(path))
        if not (args.reward_model or args.reward_fn or args.reward_url):
            args.reward_model = [str(DEMO["reward_model"])]
    if not args.data_path:
        raise InputError("--data_path: name the JSONL file with the prompts")
    if not (args.reward_model or args.reward_fn or args.reward_url):
        raise InputError(
            "--reward_model: name one, or a function with --reward_fn, or a server with --reward_url"
        )


def count_steps(args, n_prompts, processes):
    """The number of batches of the whole run. Raises InputError if critic warm-up takes all of them."""
    steps = math.ceil(args.epochs * n_prompts / (args.batch_size * processes))
    steps = min(steps, args.max_steps or steps)
    if steps <= args.critic_warmup_steps:
        raise InputError(
            f"--critic_warmup_steps {args.critic_warmup_steps}: the run has only {steps} steps, so the actor "
            "would never train; lower it or train longer"
        )
    return steps


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


def check_positions(args, model):
    """Raise InputError if a conversation of --max_seq_len tokens is too long for the model."""
    if args.max_seq_len > (limit := most_positions(model.config)):
        raise InputError(f"--max_seq_len {args.max_seq_len}: {args.model} has {limit} positions; lower it")


def load_inputs(args):
    """Flags -> (policy, tokenizer, prompts, held-out prompts or None), checked against each other.

    Raises InputError. The policy is in fp32 on the CPU.
    """
    tokenizer = load_tokenizer(args.tokenizer or tokenizer_source(args.model), args.trust_remote_code)
    set_template(tokenizer, args.prompt_template)
    actor = load_policy(args.model, args.trust_remote_code)
    check_policy(args, actor, tokenizer)
    check_sampling(actor)
    prompts, held_out = (
        RLAIFDataset(path, tokenizer, args.max_seq_len, args.system_prompt) if path else None
        for path in (args.data_path, args.eval_data_path)
    )
    longest = max(data.longest for data in (prompts, held_out) if data)
    limit = most_positions(actor.config)
    if longest + args.max_gen_len > limit:
        raise InputError(
            f"--max_gen_len {args.max_gen_len}: with prompts of {longest} tokens it exceeds the {limit} "
            f"positions of {args.model}; lower it or --max_seq_len"
        )
    return actor, tokenizer, prompts, held_out
