"""The inputs of PPO: flags completed, policy, tokenizer and prompts loaded and checked.

All of it happens before anything is trained or written. The order of the prompts: ``global_batch`` in
dataset/lm_dataset.py, called by ``Session.records``. Stages 1 and 2 use some of the checks. What a family of
models must be able to do: docs/models.md."""

import math
import re
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.func import functional_call
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dataset.answers import alternatives, compares_formulas
from dataset.chat_template import (
    load_thinking,
    own_system,
    set_system_prompt,
    set_template,
    set_template_kwargs,
)
from dataset.formats import (
    BY_FORM,
    Keys,
    Record,
    Tools,
    is_pair,
    named,
    to_demonstration,
    to_pair,
    to_prompt,
    to_rated,
)
from dataset.lm_dataset import LoggedAnswers, RecordDataset, RLAIFDataset
from dataset.record_files import located, open_records
from errors import InputError, as_input_error
from model.loading import (
    check_output_head,
    check_tokenizer,
    embeddings,
    has_adapter,
    is_from_outside,
    is_moe,
    load_policy,
    load_tokenizer,
    most_positions,
    quiet,
    tokenizer_source,
)
from trainer.compute.batching import Layout
from trainer.compute.kernels import difference, few_layers
from trainer.compute.scoring import PolicyScorer, short_windows
from trainer.flags import ROOT, Flags, complete_output_flags, minimind_pth
from trainer.generation.engine import Sampler
from trainer.generation.sampling import noise_keys
from trainer.memory_plan import check_loading
from trainer.rewards.combine import named_as_evaluation
from trainer.rewards.reward_models import check_reward_model

Prompts = RLAIFDataset | LoggedAnswers  # what a run is trained on
ANSWER = "<answer>"  # the tag of --reasoning
ANSWERS_LOOKED_AT = 256  # how many answers of the data are searched for it
TAGGED_SHARE = 0.25  # of them that must have it
EVAL_BATCH = 256  # responses of an evaluation that are sampled at a time

DEMO = {
    "model": f"{ROOT}/model/demo/policy",
    "reward_model": f"{ROOT}/model/demo/reward",
    "data_path": f"{ROOT}/dataset/demo/ppo.jsonl",
    "eval_data_path": f"{ROOT}/dataset/demo/eval.jsonl",
}


# Where no flag says otherwise:
BATCH_SIZE = 128
MINI_BATCH_SIZE = 32
CRITIC_WARMUP_STEPS = 2  # of a long run; at most a quarter of a short one
PTX_COEF = 0.1
# The clips of each --policy_loss below and above 1; None: as below. docs/ppo.md, "CISPO and GSPO".
CLIPS = {"clip": (0.2, None), "cispo": (1.0, 4.0), "gspo": (3e-4, 4e-4)}
ADDRESS = r"https?://(\[[\da-fA-F:.]+\]|[^\s:/?#@[\]]+)(:\d+)?([/?#][!-~]*)?"  # host, port and path
SHORT_ANSWER = 64  # tokens of an answer
LAM_OF_SHORT_ANSWERS = 0.95  # the lambda that suited such answers best
# (trained parameters, peak learning rate). Between two points the line is straight in logarithms of both,
# beyond the ends it is level. Where the numbers come from: docs/ppo.md, "Learning rates".
RATES_BY_SIZE = {
    "actor": ((1.3e6, 5e-4), (4.9e6, 2e-4), (2.25e7, 3e-5), (1.345e8, 3e-5), (5e8, 1e-6), (8e9, 5e-7)),
    "critic": ((1.3e6, 5e-4), (4.9e6, 5e-4), (2.25e7, 2e-4), (1.345e8, 3.6e-5), (5e8, 1e-5), (8e9, 9e-6)),
    "sft": ((1.3e6, 2e-3), (5e8, 2e-5), (8e9, 5e-6)),
    "reward": ((1.3e6, 1e-3), (5e8, 1e-5), (8e9, 5e-6)),
}
LORA_FACTOR = 4  # measured on the demo: 2 to 6 times the rate of all weights works, 10 times is too much


def complete_flags(args: Flags) -> Flags:
    """Fill in what train_ppo.py's flags leave open and no file has to be read for -> the flags. Raises
    InputError. What flags need and exclude was checked before (``FlagParser``)."""
    args = complete_output_flags(args)
    if args.reward_url and not re.fullmatch(ADDRESS, args.reward_url):
        raise InputError(
            f"--reward_url {args.reward_url}: must be as http://host:port/path, or with https://"
        )
    if 0 < args.dual_clip <= 1:
        raise InputError(f"--dual_clip {args.dual_clip:g}: must be 0, for no limit, or above 1; 3 is usual")
    if 0 < args.importance_cap < 1:
        raise InputError(
            f"--importance_cap {args.importance_cap:g}: must be 0, for no weights, or at least 1; 2 is usual"
        )
    for name in ("min_gen_len", "overlong_buffer"):
        if (value := getattr(args, name)) > args.max_gen_len:
            raise InputError(f"--{name} {value}: must be at most --max_gen_len {args.max_gen_len}")
    if args.offline_data_path or (args.mask_truncated and args.missing_eos_penalty is None):
        args.missing_eos_penalty = 0.0
    low, high = CLIPS[args.policy_loss]
    if args.clip_epsilon is None:
        args.clip_epsilon = low
    if args.clip_epsilon_high is None:
        args.clip_epsilon_high = high
    if args.kl_in is None:  # RLOO compares whole responses, whose KL it can take off (docs/learning.md)
        args.kl_in = "reward" if args.advantage == "rloo" else "loss"
    if args.ptx_data_path and args.ptx_coef is None:
        args.ptx_coef = PTX_COEF
    if args.advantage != "gae":
        args.lam = 1.0
        args.critic_warmup_steps = 0
    elif args.lam is None:  # a score would hardly reach the early tokens of a long answer with less than 1
        args.lam = LAM_OF_SHORT_ANSWERS if args.max_gen_len <= SHORT_ANSWER else 1.0
    complete_sizes(args)
    fill_paths(args)
    return args


def complete_sizes(args: Flags) -> None:
    """Where --batch_size or --mini_batch_size is not given, choose it so that it fits the other. Both count
    answers; a batch has all those to a prompt."""
    answers = args.num_generations
    mini = args.mini_batch_size
    if args.batch_size is None:
        multiple = math.lcm(mini or MINI_BATCH_SIZE, answers)
        args.batch_size = multiple * math.ceil(BATCH_SIZE / multiple)
    batch = args.batch_size
    if batch % answers:
        raise InputError(f"--batch_size {batch}: must be a multiple of --num_generations {answers}")
    if mini is None:
        sizes = range(min(MINI_BATCH_SIZE, batch), 0, -1)
        args.mini_batch_size = next(n for n in sizes if batch % n == 0)
    elif batch % mini:
        raise InputError(f"--mini_batch_size {mini}: must divide --batch_size {batch}")


def fill_paths(args: Flags) -> None:
    """Fill in paths that were not given: MiniMind's file names in --out_dir, or the demo's files.

    Raises InputError if there is no data or no reward.
    """
    args.reward_model = list(filter(None, args.reward_model))
    args.eval_reward_model = list(filter(None, args.eval_reward_model))
    args.reward_fn = list(filter(None, args.reward_fn))
    args.eval_reward_fn = list(filter(None, args.eval_reward_fn))
    if not args.model and (args.hidden_size or args.use_moe):
        reason = minimind_pth(args.out_dir, "reason", args.hidden_size, args.use_moe)
        sft = minimind_pth(args.out_dir, "full_sft", args.hidden_size, args.use_moe)
        if args.reasoning is None and reason.is_file():
            args.reasoning = 1  # it was trained to reason
        args.model = str(reason if args.reasoning else sft)
    # Whether the class of --env has a reward is known once it is loaded (``make_reward``).
    given = args.offline_data_path or args.reward_model or args.reward_fn or args.reward_url
    has_reward = given or args.env
    if not args.model:
        args.model = DEMO["model"]
        if not args.data_path:  # the demo's held-out prompts belong to the demo's prompts
            args.eval_data_path = args.eval_data_path or DEMO["eval_data_path"]
            args.data_path = "" if args.offline_data_path else DEMO["data_path"]
        if not has_reward:
            has_reward = args.reward_model = [DEMO["reward_model"]]
        if args.reasoning is None:
            args.reasoning = 1  # the demo's answers have the format
    if not (args.offline_data_path or args.data_path):
        raise InputError("--data_path: name the JSONL file with the prompts")
    if not has_reward:
        raise InputError(
            "--reward_model: name one, or a function with --reward_fn, a server with --reward_url, or an "
            "environment with --env"
        )
    if args.critic_init == "reward" and not args.reward_model:
        raise InputError("--critic_init reward: starts from a --reward_model; name one, or leave it out")
    for name in ("reward_template", "merge_history"):
        if getattr(args, name) and not (args.reward_model or args.eval_reward_model):
            raise InputError(f"--{name}: is of use only with --reward_model; leave it out")
    form = args.reward_template.replace("\\n", "\n").replace("\\t", "\t")
    args.reward_template = form
    if form and not form.count("{prompt}") == form.count("{response}") == 1:
        raise InputError("--reward_template: must hold {prompt} and {response} once each")
    for name in ("eval_reward_model", "eval_reward_fn", "best_metric"):
        if getattr(args, name) and not args.eval_data_path:
            raise InputError(f"--{name}: is of use in evaluations only; give --eval_data_path too")


def choose_warmup(args: Flags, steps: int) -> None:
    """Choose --critic_warmup_steps where it is not given. Raises InputError if it takes all ``steps`` of the
    run, or --lr_warmup_steps more than are left to the actor."""
    if args.critic_warmup_steps is None:
        most = steps - 1 if args.lr_schedule == "constant" else steps // 4  # constant: the length may change
        args.critic_warmup_steps = min(CRITIC_WARMUP_STEPS, most)
    if args.critic_warmup_steps >= steps:
        raise InputError(
            f"--critic_warmup_steps {args.critic_warmup_steps}: the run has only {steps} steps, so the actor "
            "would never train; lower it, or train longer with --epochs or --max_steps"
        )
    if args.lr_warmup_steps > (left := steps - args.critic_warmup_steps):
        raise InputError(
            f"--lr_warmup_steps {args.lr_warmup_steps}: the actor trains in only {left} steps, so its rate "
            "would never reach its peak; lower it, or train longer with --epochs or --max_steps"
        )


def choose_reasoning(args: Flags, prompts: Prompts) -> str | None:
    """Choose --reasoning where it is not given -> a line that says why it is 1, else None. It is 1 if a
    quarter or more of the data's answers have ``<answer>``.

    A ``<think>`` says nothing: models of today think without that format.
    """
    if args.reasoning is not None:
        return None
    first = [prompts[i] for i in range(min(len(prompts), ANSWERS_LOOKED_AT))]
    answers = [text for p in first for text in alternatives(getattr(p, "response", p.answer) or [])]
    count = sum(ANSWER in text for text in answers)
    args.reasoning = int(count >= max(1, TAGGED_SHARE * len(answers)))
    if not args.reasoning:
        return None
    where = args.data_path or args.offline_data_path
    return f"format   --reasoning 1, as {count} of {len(answers)} first answers of {where} have {ANSWER}"


def accuracy_note(held_out: RLAIFDataset | None) -> str | None:
    """A line that says why there is no accuracy although held-out records have answers, or that formulas are
    compared as texts, else None."""
    if not held_out or not held_out.with_answer:
        return None
    if held_out.has_accuracy:
        if not held_out.formulas or compares_formulas():
            return None
        return (
            f"accuracy {held_out.formulas} held-out answers are formulas, which are compared as texts; to "
            "compare what they mean: pip install 'math-verify[antlr4_13_2]'"
        )
    return (
        f"accuracy none: of {held_out.with_answer} held-out answers only {held_out.comparable_answers} are a "
        "number or a few words, which a response can equal; --eval_reward_fn can judge the responses"
    )


def rate_by_size(kind: str, parameters: int, lora: bool = False) -> float:
    """The peak learning rate for a model of so many ``parameters``, of two digits.

    kind: "actor", "critic", "sft" or "reward"; lora: only adapters beside these parameters train.
    """
    sizes, rates = np.log(RATES_BY_SIZE[kind]).T
    rate = math.exp(np.interp(math.log(parameters), sizes, rates))
    return float(f"{rate * (LORA_FACTOR if lora else 1):.1e}")


def choose_rates(
    args: Flags, models: Mapping[str, tuple[str, PreTrainedModel]], lora: bool = False
) -> tuple[dict[str, float], str | None]:
    """Choose the learning rates that are not given, by the models' sizes -> ({flag: the rate that suits}, a
    line that says so, or None). models: {flag: (a kind of ``rate_by_size``, model)}; lora: only adapters
    train."""
    suited = {
        name: rate_by_size(kind, model.num_parameters(), lora) for name, (kind, model) in models.items()
    }
    chosen = []
    for name, rate in suited.items():
        if getattr(args, name) is None:
            setattr(args, name, rate)
            chosen.append(f"--{name} {rate:g}")
    return suited, f"rates    by size: {', '.join(chosen)}" if chosen else None


def load_trained_tokenizer(args: Flags) -> PreTrainedTokenizerBase:
    """The tokenizer of --tokenizer or --model with the chat template, the arguments of that and the system
    message of the flags or its own; the flags then name those."""
    if has_adapter(args.model):
        raise InputError(
            f"--model {args.model}: a LoRA adapter lies there; merge it: with python export.py {args.model} "
            "NEW.pth where the model lies beside it, else with peft"
        )
    tokenizer = load_tokenizer(args.tokenizer or tokenizer_source(args.model), args.trust_remote_code)
    set_template(tokenizer, args.prompt_template)
    args.system_prompt = set_system_prompt(tokenizer, args.system_prompt)
    args.chat_template_kwargs = set_template_kwargs(tokenizer, args.chat_template_kwargs)
    return tokenizer


def describe_texts(args: Namespace, datasets: Iterable[RecordDataset[Any] | None]) -> list[str]:
    """Lines on how the texts of these datasets, or None, were read, for runs of all stages."""
    notes = set()
    if args.num_workers:
        notes.add("--num_workers changes nothing: the main process reads the records")
    own = ""
    for data in filter(None, datasets):
        own = own_system(data.tokenizer)
        notes |= {f"{data.path}: {note}" for note in data.notes()}
    lines = [f"note     {note}" for note in sorted(notes)]
    if args.system_prompt:
        lines.append(f"system   {args.system_prompt}")
    elif own:
        lines.append(
            f"system   the chat template's own: {' '.join(own.split())} (--system_prompt replaces it, '' "
            "leaves it in)"
        )
    if args.chat_template_kwargs:
        lines.append(f"template with {args.chat_template_kwargs}")
    return lines


# ------------------------------------------------------------------------- can this policy be trained here?


def check_policy(args: Flags, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise InputError if the causal LM cannot be trained here, or does not fit tokenizer and flags."""
    check_tokenizer(tokenizer, policy)
    for name, p in policy.named_parameters():
        if not p.isfinite().all():
            raise InputError(f"--model {args.model}: {name} has weights that are not finite; it is damaged")
    with few_layers(policy):
        check_output_head(policy)
    for flag in ("hidden_size", "num_hidden_layers"):
        wanted = getattr(args, flag)
        if wanted and wanted != (has := getattr(policy.config, flag)):
            raise InputError(f"--{flag} {wanted}: {args.model} has {has}; leave the flag out")
    device = trial_device(args)
    if device.type != "cpu":
        check_device(policy, device)


def trial_device(args: Flags) -> torch.device:
    """Where a model is tried: on a Mac's GPU if it is asked for, as nobody has tried one; else on the CPU."""
    return torch.device(args.device if args.device.startswith("mps") else "cpu")


def check_device(policy: PreTrainedModel, device: torch.device) -> None:
    """Raise ``InputError`` unless this device computes the log-probs of a few tokens by all layers of a
    model, and the gradient of its embeddings, as the CPU does."""
    tokens = torch.arange(16).view(2, 8) % embeddings(policy)
    scorer = PolicyScorer(policy)

    def logprobs(place: torch.device) -> Tensor:
        moved = {name: x.to(place) for name, x in (*scorer.named_parameters(), *scorer.named_buffers())}
        layout = Layout.of_responses([2, 4], [6, 3], place)
        return functional_call(scorer, moved, (tokens.to(place), layout))[0].cpu()

    cpu = torch.device("cpu")
    table = [*policy.get_input_embeddings().parameters()]
    if reason := difference(lambda: logprobs(cpu), lambda: logprobs(device), cpu, table, tolerance=1e-3):
        raise InputError(
            f"--device {device}: computes this model otherwise than a CPU: {reason}; leave it out"
        )


def check_sampling(policy: PreTrainedModel, device: torch.device) -> None:
    """Raise ``InputError`` unless sampling with a KV cache, on this device, gives the log-probs of the
    training forward on the CPU, which is tried with the first layers (``few_layers``).

    It does not for models that keep more than keys and values from token to token (a recurrent state,
    positions of their own). Without this check their samples would silently come from another distribution.
    """
    kind = policy.config.model_type
    rows = embeddings(policy)
    prompts = [[i % rows for i in range(1, length)] for length in (10, 4, 7)]
    what = f"models of type {kind} are not supported: the sampler's KV cache does not work with them"
    with (
        quiet(),
        warnings.catch_warnings(action="ignore"),
        as_input_error(what),
        few_layers(policy),
        short_windows(policy),
    ):
        rollout = Sampler(policy, slots=2, device=device).sample(
            prompts, noise_keys(0, 0, [0, 1, 2]), [-1], 4, 0.0
        )
        layout = Layout.of_responses(rollout.layout.prompt_len, rollout.layout.response_len)
        scored = PolicyScorer(policy)(rollout.tokens.cpu(), layout)[0]
    gap = (scored - rollout.sampler_logprobs.cpu()).abs().max().item()
    if not gap < 1e-2:
        raise InputError(
            f"models of type {kind} are not supported: sampling with a KV cache gives other log-probs than "
            f"their training forward (they differ by {gap:.3g})"
        )


# ------------------------------------------------------------------------------------------------ all of them


def check_files(args: Flags) -> None:
    """Raise InputError where a file or folder that a flag names is missing or cannot be what it is named for:
    of a reward model the config is read, of a file of records the first one."""
    for spec in args.reward_model:
        check_reward_model(spec, args.trust_remote_code)
    with named_as_evaluation():
        for spec in args.eval_reward_model:
            check_reward_model(spec, args.trust_remote_code)
    keys = Keys.of(args)
    readers: list[tuple[str, Keys, Callable[[Record], object]]] = [
        (args.data_path, keys, to_prompt),
        (args.eval_data_path, keys, to_prompt),
        (
            args.offline_data_path,
            keys,
            lambda x: to_pair(x) if is_pair(x) or "score" not in x else to_rated(x),
        ),
        (args.ptx_data_path, BY_FORM, to_demonstration),
    ]
    for path, names, read in readers:
        if path:
            records = open_records(path)
            with located(records, 0):
                read(named(records[0], names))


def read_prompts(
    args: Flags, tokenizer: PreTrainedTokenizerBase, tools: Tools = ()
) -> tuple[RLAIFDataset | None, RLAIFDataset | None]:
    """-> (the prompts of --data_path, those of an evaluation), None for a flag that is not given. tools: the
    schemas of those that are run. Raises InputError for a wrong file or record, or a template that refuses
    one."""
    thinking = load_thinking(tokenizer, args.thinking_ratio, args.seed)

    def read(path: str) -> RLAIFDataset | None:
        if not path:
            return None
        keys = Keys.of(args)
        return RLAIFDataset(
            path, tokenizer, args.max_seq_len, args.system_prompt, keys, thinking, tools=tools
        )

    return read(args.data_path), read(args.eval_data_path)


def load_actor(args: Flags, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """The policy, fp32 on the CPU. Raises InputError if it cannot be trained here as the flags ask."""
    check_loading(args.model)
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
    check_sampling(actor, trial_device(args))
    return actor


class SamplerLimits(NamedTuple):
    """What the sampler must have memory for."""

    max_num_seqs: int  # prompts that a process samples at once
    max_seq_len: int  # tokens of a prompt with its response
    max_response_len: int


def sampler_limits(
    args: Flags, actor: PreTrainedModel, data: Prompts, held_out: RLAIFDataset | None
) -> SamplerLimits:
    """Flags and data -> ``SamplerLimits``. Raises InputError for more positions than the actor has."""
    limit = most_positions(actor.config)
    prompts = max(x.longest for x in (data, held_out) if x)
    if args.env:  # reset may add to a prompt
        prompts = max(prompts, min(args.max_seq_len, limit - args.max_gen_len))
    longest = args.max_gen_len + prompts
    if longest > limit:
        raise InputError(
            f"--max_gen_len {args.max_gen_len}: with prompts of {prompts} tokens it "
            f"exceeds the {limit} positions of {args.model}; lower it or --max_seq_len"
        )
    group_size = args.num_generations + 1  # an evaluation has a greedy answer too
    evaluated = min(max(EVAL_BATCH, group_size), len(held_out or ()) * group_size)
    sampled = 0 if args.offline_data_path else args.batch_size
    return SamplerLimits(max(sampled, evaluated), longest, args.max_gen_len)
