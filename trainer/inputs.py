"""Flags -> inputs that have been checked against each other, before anything is written or trained."""

import errno
import math
import os
import re
from pathlib import Path

from dataset.lm_dataset import RLAIFDataset
from dataset.templates import set_template
from errors import InputError
from model.checks import check_output_head, check_tokenizer, is_moe, most_positions, not_finite
from model.loading import as_input_error, load_policy, load_tokenizer, quiet, tokenizer_source
from trainer.noise import noise_keys
from trainer.rollout import sample
from trainer.scoring import PolicyScorer

ROOT = Path(__file__).resolve().parents[1]
DEMO = {
    "model": ROOT / "model/demo/policy",
    "reward_model": ROOT / "model/demo/reward",
    "data_path": ROOT / "dataset/demo/ppo.jsonl",
    "eval_data_path": ROOT / "dataset/demo/eval.jsonl",
}

COUNTS = "batch_size mini_batch_size max_gen_len max_seq_len epochs ppo_epochs accumulation_steps "
COUNTS += "update_old_actor_freq log_interval save_interval keep_checkpoints"
POSITIVE = "learning_rate critic_learning_rate grad_clip clip_epsilon cliprange_value temperature"
NOT_NEGATIVE = "vf_coef kl_coef target_kl missing_eos_penalty critic_warmup_steps max_steps num_workers "
NOT_NEGATIVE += "reward_timeout eval_interval gamma lam hidden_size num_hidden_layers seed "
NOT_NEGATIVE += "repetition_penalty length_reward "
NOT_NEGATIVE += "eval_size weight_decay warmup_ratio extra_layers parting_coef lm_coef score_penalty "
NOT_NEGATIVE += "reference_samples lora_r"
SIZES = "batch_size max_gen_len max_seq_len epochs max_steps ppo_epochs accumulation_steps "
SIZES += "hidden_size num_hidden_layers reference_samples"
WEIGHTS = "grad_clip clip_epsilon cliprange_value vf_coef kl_coef target_kl missing_eos_penalty "
WEIGHTS += "repetition_penalty length_reward reward_timeout weight_decay parting_coef lm_coef score_penalty"
PATHS = "model tokenizer data_path eval_data_path reward_fn out_dir run_name resume reference hf_dir"


def check_flags(args):
    """InputError for a value out of range, or a path that can be none. Of any script: a flag is asked
    about where there is one of that name."""
    for name, value in vars(args).items():
        if isinstance(value, list) and name != "reward_model":  # argparse's way of reading --flag=--
            raise InputError(f"--{name}: has no value; --help lists all flags")
    for names, rule, accepts in (
        (COUNTS, "at least 1", lambda x: x >= 1),
        (POSITIVE, "above 0", lambda x: 0 < x < math.inf),
        (NOT_NEGATIVE, "0 or more", lambda x: 0 <= x < math.inf),
        ("gamma lam learning_rate critic_learning_rate warmup_ratio", "at most 1", lambda x: x <= 1),
        ("extra_layers", "at most 64", lambda x: x <= 64),
        ("temperature", "0.01 to 100", lambda x: 0.01 <= x <= 100),  # or logits / temperature overflow
        (WEIGHTS, "at most 1000000", lambda x: x <= 1e6),
        (SIZES, "at most 1048576", lambda x: x <= 2**20),  # more would fill any memory, or take for ever
        ("num_workers", "at most 64", lambda x: x <= 64),
        ("seed", "below 2**63", lambda x: x < 2**63),
    ):
        for name in [name for name in names.split() if name in vars(args)]:
            if not accepts(getattr(args, name)):
                raise InputError(f"--{name} {str(getattr(args, name))[:100]}: must be {rule}")
    for name in [name for name in PATHS.split() if name in vars(args)]:
        check_path(name, getattr(args, name))
    if args.run_name in (".", "..") or "/" in args.run_name:
        raise InputError(f"--run_name {args.run_name}: must be a name and not a path; see --out_dir")


def check_ppo_flags(args):
    """``check_flags``, and what only PPO has."""
    check_flags(args)
    for path in args.reward_model:
        check_path("reward_model", path)
    if args.reward_url and not re.match("https?://.", args.reward_url):
        raise InputError(f"--reward_url {args.reward_url}: must begin with http:// or https://")
    if args.mini_batch_size > args.batch_size or args.batch_size % args.mini_batch_size:
        raise InputError(
            f"--mini_batch_size {args.mini_batch_size}: must divide --batch_size {args.batch_size}"
        )


def check_path(flag, path):
    """InputError for what no file or folder can be called: asking whether it exists would fail."""
    try:
        os.stat(path)
    except ValueError as error:
        raise InputError(f"--{flag} {path[:100]!r}: is no path ({error}); check it") from error
    except OSError as error:  # that there is nothing there yet is for others to judge
        if error.errno == errno.ENAMETOOLONG:
            raise InputError(f"--{flag} {path[:100]}…: is too long for a path; shorten it") from error


def fill_paths(args):
    """Fill in the paths that depend on other flags: MiniMind's names in out/, or the demo's files.

    Where things are written must not depend on the working directory, which a reward function may change.
    """
    args.out_dir = os.path.abspath(args.out_dir)
    if not args.model and (args.hidden_size or args.use_moe):
        name = f"{'reason' if args.reasoning else 'full_sft'}_{args.hidden_size or 512}"
        args.model = str(Path(args.out_dir) / f"{name}{'_moe' if args.use_moe else ''}.pth")
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
    """Batches of the whole run. InputError if critic warm-up takes them all."""
    steps = math.ceil(args.epochs * n_prompts / (args.batch_size * processes))
    steps = min(steps, args.max_steps or steps)
    if steps <= args.critic_warmup_steps:
        raise InputError(
            f"--critic_warmup_steps {args.critic_warmup_steps}: the run has {steps} steps, the actor would "
            "never train; lower it or train longer"
        )
    return steps


def check_sampling(policy):
    """Raise ``InputError`` unless the sampler, with its cache, finds the log-probs of the training forward.

    Models that keep more than keys and values from token to token (a recurrent state, positions of their own)
    would silently be sampled from as another model.
    """
    kind = policy.config.model_type
    rows = policy.get_input_embeddings().weight.shape[0]
    prompts = [[i % rows for i in range(1, length)] for length in (10, 4, 7)]
    what = (
        f"models of type {kind} are not supported: the sampler's cache of keys and values does not fit them"
    )
    with quiet(), as_input_error(what):
        rollout = sample(policy, prompts, noise_keys(0, 0, [0, 1, 2]), [-1], 4, 0.0, slots=2)
        scored = PolicyScorer(policy)(*rollout.sequences, 1.0)[0]
    gap = (scored - rollout.sampler_logprobs).abs().max().item()
    if not gap < 1e-2:
        raise InputError(
            f"models of type {kind} are not supported: what their cache remembers is not what their training "
            f"forward sees (log-probs differ by {gap:.3g})"
        )


def check_policy(args, policy, tokenizer):
    """InputError for a causal LM that cannot be trained here, or is not what flags and tokenizer say."""
    check_tokenizer(tokenizer, policy)
    if name := not_finite(policy):
        raise InputError(f"--model {args.model}: {name} has weights that are not finite; it is damaged")
    check_output_head(policy)
    for flag in ("hidden_size", "num_hidden_layers"):
        wanted = getattr(args, flag)
        if wanted and wanted != (has := getattr(policy.config, flag)):
            raise InputError(f"--{flag} {wanted}: {args.model} has {has}; leave the flag out")
    if args.use_moe and not is_moe(policy):
        raise InputError(f"--use_moe 1: {args.model} is no mixture of experts; leave the flag out")


def check_positions(args, model):
    """InputError where a conversation of --max_seq_len tokens would be too long for the model."""
    if args.max_seq_len > (limit := most_positions(model.config)):
        raise InputError(f"--max_seq_len {args.max_seq_len}: {args.model} has {limit} positions; lower it")


def load_inputs(args):
    """Flags -> (policy, tokenizer, prompts, held-out prompts or None), each checked against the others."""
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
