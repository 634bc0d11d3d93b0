"""The inputs of PPO: flags completed and checked, policy, tokenizer and prompts loaded and checked.

All of it happens before anything is trained or written. ``load_inputs`` checks that flags, policy, tokenizer
and data fit together; stages 1 and 2 use some of the checks.
"""

import math
import re
from pathlib import Path

from dataset.keys import Keys
from dataset.lm_dataset import RLAIFDataset
from dataset.logged_answers import LoggedAnswers
from dataset.prompt_template import (
    SWITCHES,
    load_thinking,
    parse_template_kwargs,
    set_system_prompt,
    set_template,
    set_template_kwargs,
)
from errors import InputError
from model.compatibility import eos_ids, most_positions, tokenizer_note
from model.loading import load_tokenizer, tokenizer_source
from trainer.evaluation import BATCH
from trainer.flags import AUTO, ROOT, complete_output_flags
from trainer.generation.engine import sample
from trainer.generation.sampling_noise import noise_keys
from trainer.offline import check_offline, load_logged
from trainer.policy_checks import load_checked
from trainer.rewards.rules import TAGS
from trainer.runs.distributed import World
from trainer.runs.learning_rate import rate_note, suited_rate
from trainer.shard_run import check_shard, load_once

ANSWER = "<answer>"  # the tag of --reasoning
LOOKED_AT = 256  # how many answers of the data are searched for it
SAMPLED = 16  # the same of the policy
SHARE = 0.25  # of them that must have it
FIRST_ANSWERS = -2  # the step of the policy's answers in the sampling noise

DEMO = {
    "model": ROOT / "model/demo/policy",
    "reward_model": ROOT / "model/demo/reward",
    "data_path": ROOT / "dataset/demo/ppo.jsonl",
    "eval_data_path": ROOT / "dataset/demo/eval.jsonl",
}


BATCH_SIZE, MINI_BATCH_SIZE = 128, 32  # where no flag says otherwise
CRITIC_WARMUP_STEPS = 2  # of a long run; at most a quarter of a short one
PTX_COEF = 0.1  # where only --ptx_data_path is given
OF_THE_CRITIC = ("critic_learning_rate", "critic_lam", "critic_init", "critic_warmup_steps", "vf_coef")
OF_THE_CRITIC += ("cliprange_value", "lam")
# What is the case without a critic.
NO_CRITIC = {"lam": 1.0, "critic_warmup_steps": 0, "vf_coef": 0.0, "cliprange_value": 0.0}
SHORT, LAM_OF_SHORT = 64, 0.95  # tokens of an answer, and the lambda that suited such answers best


def complete_flags(args, flags):
    """Check train_ppo.py's flags against each other and fill in paths -> the flags. Raises InputError.

    flags: the parser's {name: ``Flag``}. A flag that has its default counts as not given.
    """
    given = {name for name, flag in flags.items() if getattr(args, name) != flag.default}
    complete_output_flags(args)
    check_offline(args, given)  # first: what follows must not ask for a flag that it refuses
    if args.reward_url and not re.match("https?://.", args.reward_url):
        raise InputError(f"--reward_url {args.reward_url}: must begin with http:// or https://")
    if 0 < args.dual_clip <= 1:
        raise InputError(f"--dual_clip {args.dual_clip:g}: must be 0, for no limit, or above 1; 3 is usual")
    for name in ("min_gen_len", "overlong_buffer"):
        if (value := getattr(args, name)) > args.max_gen_len:
            raise InputError(f"--{name} {value}: must be at most --max_gen_len {args.max_gen_len}")
    if args.overlong_penalty and "overlong_penalty" in given and not args.overlong_buffer:
        what = f"--overlong_penalty {args.overlong_penalty:g}"
        raise InputError(f"{what}: is of use with --overlong_buffer only; give that too")
    if args.kl_target and not args.kl_coef:
        raise InputError(f"--kl_target {args.kl_target:g}: needs a --kl_coef above 0 to begin with")
    if args.kl_horizon and not args.kl_target:
        raise InputError(f"--kl_horizon {args.kl_horizon}: is of use with --kl_target only; give that too")
    if args.ptx_coef and not args.ptx_data_path:
        raise InputError(f"--ptx_coef {args.ptx_coef:g}: name the demonstrations with --ptx_data_path")
    if args.ptx_data_path and args.ptx_coef is None:
        args.ptx_coef = PTX_COEF
    if args.thinking_ratio is not None and args.chat_template_kwargs:
        for name in parse_template_kwargs(args.chat_template_kwargs):
            if name in SWITCHES:
                what = f"--thinking_ratio {args.thinking_ratio:g}"
                raise InputError(f"{what}: --chat_template_kwargs sets {name}; leave one of them out")
    complete_advantage(args, given)
    complete_sizes(args)
    fill_paths(args)
    return args


def complete_advantage(args, given):
    """Choose --lam where it is not given. Raises InputError for flags that do not go with --advantage. given:
    the names of the flags that do not have their defaults."""
    kind = f"--advantage {args.advantage}"
    if args.filter_groups and args.num_generations == 1:
        raise InputError(
            "--filter_groups: compares the answers to a prompt; set --num_generations, 4 for example"
        )
    if args.advantage == "gae":
        if args.lam is None:  # a score would hardly reach the early tokens of a long answer with less than 1
            args.lam = LAM_OF_SHORT if args.max_gen_len <= SHORT else 1.0
        return
    for name in OF_THE_CRITIC:
        if name in given and getattr(args, name) != NO_CRITIC.get(name):
            raise InputError(f"--{name} {getattr(args, name)}: {kind} has no critic; leave the flag out")
    args.lam = NO_CRITIC["lam"]
    args.critic_warmup_steps = NO_CRITIC["critic_warmup_steps"]
    if args.advantage == "reinforce":
        return
    if args.num_generations == 1:
        raise InputError(f"{kind}: compares the answers to a prompt; set --num_generations, 4 for example")
    if args.gamma != 1:
        raise InputError(f"--gamma {args.gamma:g}: {kind} takes the whole response as one step; leave it out")
    if args.advantage == "group" and args.kl_in == "reward":
        raise InputError(
            "--kl_in reward: --advantage group has the KL in the loss; leave it out, or use rloo"
        )


def complete_sizes(args):
    """Where --batch_size or --mini_batch_size is not given, choose it so that it fits the other. Both count
    answers; a batch has all those to a prompt."""
    answers, mini = args.num_generations, args.mini_batch_size
    if args.batch_size is None:
        unit = math.lcm(mini or MINI_BATCH_SIZE, answers)
        args.batch_size = unit * math.ceil(BATCH_SIZE / unit)
    batch = args.batch_size
    if batch % answers:
        raise InputError(f"--batch_size {batch}: must be a multiple of --num_generations {answers}")
    if mini is None:
        args.mini_batch_size = next(n for n in range(min(MINI_BATCH_SIZE, batch), 0, -1) if batch % n == 0)
    elif mini > batch or batch % mini:
        raise InputError(f"--mini_batch_size {mini}: must divide --batch_size {batch}")


def fill_paths(args):
    """Fill in paths that were not given: MiniMind's file names in --out_dir, or the demo's files.

    Raises InputError if there is no data or no reward.
    """
    offline = bool(args.offline_data_path)
    if not args.model and (args.hidden_size or args.use_moe):
        end = f"_{args.hidden_size or 512}{'_moe' if args.use_moe else ''}.pth"
        reason, plain = (Path(args.out_dir) / f"{name}{end}" for name in ("reason", "full_sft"))
        if args.reasoning is None and reason.is_file():
            args.reasoning = 1  # it was trained to reason
        wanted, other = (reason, plain) if args.reasoning else (plain, reason)
        args.model = str(wanted)
        if not wanted.is_file():
            hint = (
                f"; {other.name} is there: --reasoning {1 - (args.reasoning or 0)}" if other.is_file() else ""
            )
            raise InputError(f"{args.model}: no such file{hint}; --model names a file in another place")
    for name in ("reward_model", "eval_reward_model"):
        setattr(args, name, [path for path in getattr(args, name) if path])
    if not args.model:
        if not args.data_path:  # the demo's held-out prompts belong to the demo's prompts
            args.eval_data_path = args.eval_data_path or str(DEMO["eval_data_path"])
        args.model, args.data_path = str(DEMO["model"]), args.data_path or str(DEMO["data_path"])
        args.data_path = "" if offline else args.data_path
        if not (offline or args.reward_model or args.reward_fn or args.reward_url):
            args.reward_model = [str(DEMO["reward_model"])]
        if args.reasoning is None:
            args.reasoning = 1  # the demo's answers have the format
    if not (offline or args.data_path):
        raise InputError("--data_path: name the JSONL file with the prompts")
    if not (offline or args.reward_model or args.reward_fn or args.reward_url):
        raise InputError(
            "--reward_model: name one, or a function with --reward_fn, or a server with --reward_url"
        )
    for name in ("eval_reward_model", "eval_reward_fn", "best_metric"):
        if getattr(args, name) and not args.eval_data_path:
            raise InputError(f"--{name}: is of use in evaluations only; give --eval_data_path too")


def count_steps(args, n_prompts, processes):
    """The number of batches of the whole run; also chooses --critic_warmup_steps where it is not given.

    Raises InputError if critic warm-up takes all of them, or if the actor's rate never gets to its peak.
    """
    per_batch = args.batch_size // args.num_generations * processes  # prompts
    steps = math.ceil(args.epochs * n_prompts / per_batch)
    steps = min(steps, args.max_steps or steps)
    if args.critic_warmup_steps is None:
        most = steps - 1 if args.lr_schedule == "constant" else steps // 4  # constant: the length may change
        args.critic_warmup_steps = min(CRITIC_WARMUP_STEPS, most)
    if args.critic_warmup_steps != AUTO and steps <= args.critic_warmup_steps:
        raise InputError(
            f"--critic_warmup_steps {args.critic_warmup_steps}: the run has only {steps} steps, so the actor "
            "would never train; lower it, or train longer with --epochs or --max_steps"
        )
    rest = steps - (0 if args.critic_warmup_steps == AUTO else args.critic_warmup_steps)
    if args.lr_warmup_steps >= rest:
        raise InputError(
            f"--lr_warmup_steps {args.lr_warmup_steps}: the actor trains in only {rest} batches, so its rate "
            "would never get to --learning_rate; lower it"
        )
    return steps


def choose_reasoning(args, world, actor, tokenizer, prompts):
    """Set --reasoning where it is not given: 1 if a quarter or more of the answers have ``<answer>``, those
    of the data or else the policy's own first ones -> lines that say so and what a template spoils, or None.

    A ``<think>`` says nothing: models of today think without that format.
    """
    said = None
    if args.reasoning is None:
        where = args.data_path or args.offline_data_path
        first = [prompts[i] for i in range(min(len(prompts), LOOKED_AT))]
        answers = list(filter(None, (getattr(p, "response", p.answer) for p in first)))
        if not (args.offline_data_path or have_format(answers)):
            where = "the policy"
            answers = first_answers(args, world, actor, tokenizer, first[:SAMPLED])
        args.reasoning = int(have_format(answers))
        count = f"{sum(ANSWER in text for text in answers)} of {len(answers)}"
        said = f"{count} first answers of {where} have {ANSWER}; --reasoning {1 - args.reasoning} switches it"
        said = f"format   rewarded: {said} off" if args.reasoning else f"format   not rewarded: {said} on"
    if args.reasoning and prompts[0].text.rstrip().endswith(TAGS[:2]):
        note = "format   the chat template writes <think> before each response, which must write it again"
        said = "\n".join(filter(None, [said, f"{note}; --reasoning 0 rewards no format"]))
    return said


def have_format(answers: list) -> bool:
    """Whether enough of these answers have ``<answer>``."""
    return sum(ANSWER in text for text in answers) >= max(1, SHARE * len(answers))


def first_answers(args, world: World, actor, tokenizer, prompts: list) -> list:
    """The policy's answers to these prompts, the same in all processes: those of the main one, which alone
    has weights with --shard. Their noise is that of no --seed: what is rewarded must not depend on it."""
    texts = None
    with world.all_or_none():
        if world.is_main:
            if not args.shard:  # else it need not fit on a GPU
                actor.to(world.device)
            ids = [prompt.prompt_ids for prompt in prompts]
            keys = noise_keys(0, FIRST_ANSWERS, range(len(ids)))
            rollout = sample(actor, ids, keys, eos_ids(tokenizer, actor), args.max_gen_len, 1.0)
            texts = tokenizer.batch_decode(rollout.responses(), skip_special_tokens=True)
    return world.from_main(texts)


def accuracy_note(held_out: RLAIFDataset | None) -> str | None:
    """A line that says why there is no accuracy although held-out records have answers, else None."""
    if not held_out or not held_out.answers or held_out.has_accuracy:
        return None
    return (
        f"accuracy none: of {held_out.answers} held-out answers only {held_out.comparable_answers} are a "
        "number or a few words, which a response can equal; --eval_reward_fn can judge the responses"
    )


def choose_rates(args, actor, critic_start):
    """Set the learning rates that are not given, by the models' sizes -> a line that says so, or None.
    critic_start: the model that the critic starts from, None without a critic."""
    said, notes = [], []
    for name, kind, model in (
        ("learning_rate", "actor", actor),
        ("critic_learning_rate", "critic", critic_start),
    ):
        if model is None:
            continue
        size = sum(p.numel() for p in model.parameters())
        suited = suited_rate(kind, size, args.lora_r > 0)
        if getattr(args, name) is None:
            setattr(args, name, suited)
            said.append(f"{kind} {suited:g} ({size / 1e6:.1f}M parameters, --{name})")
        notes.append(rate_note(name, getattr(args, name), suited))
    how = "with adapters, by size" if args.lora_r else "by size"
    lines = [f"rates    {how}: {', '.join(said)}" if said else None, *notes]
    return "\n".join(filter(None, lines)) or None


def check_positions(args, model):
    """Raise InputError if a conversation of --max_seq_len tokens is too long for the model."""
    if args.max_seq_len > (limit := most_positions(model.config)):
        raise InputError(f"--max_seq_len {args.max_seq_len}: {args.model} has {limit} positions; lower it")


def load_trained_tokenizer(args, source):
    """The tokenizer at ``source`` with the chat template, the arguments of that and the system message of the
    flags or its own."""
    tokenizer = load_tokenizer(source, args.trust_remote_code)
    set_template(tokenizer, args.prompt_template)
    args.system_prompt = set_system_prompt(tokenizer, args.system_prompt)
    args.chat_template_kwargs = set_template_kwargs(tokenizer, args.chat_template_kwargs)
    return tokenizer


def sampling_sizes(args, prompts, held_out):
    """(most prompts that a process samples at once, longest prompt plus response, longest response) of a run:
    what the sampler must have room for."""
    batch = 0 if args.offline_data_path else args.batch_size
    rows = max(batch, min(max(BATCH, args.num_generations), len(held_out or ()) * args.num_generations))
    longest = max(data.longest for data in (prompts, held_out) if data)
    return rows, longest + args.max_gen_len, args.max_gen_len


def load_inputs(args, world):
    """Flags -> (policy, tokenizer, prompts, held-out prompts or None, lines that say what was chosen).

    All are checked against each other: raises InputError. The policy is in fp32 on the CPU. In a run with
    --shard the processes other than the main one get its ``outline``.
    """
    check_shard(args, world)
    tokenizer = load_trained_tokenizer(args, args.tokenizer or tokenizer_source(args.model))
    actor = load_once(args, world, load_checked, args, tokenizer)
    keys = Keys(args.prompt_key, args.answer_key)
    thinking = load_thinking(tokenizer, args.thinking_ratio, args.seed)
    prompts, held_out = (
        RLAIFDataset(path, tokenizer, args.max_seq_len, args.system_prompt, keys, thinking) if path else None
        for path in (args.data_path, args.eval_data_path)
    )
    if args.offline_data_path:
        prompts = load_logged(LoggedAnswers, args.offline_data_path, args, tokenizer, actor)
    longest = max(data.longest for data in (prompts, held_out) if data)
    limit = most_positions(actor.config)
    if longest + args.max_gen_len > limit:
        raise InputError(
            f"--max_gen_len {args.max_gen_len}: with prompts of {longest} tokens it exceeds the {limit} "
            f"positions of {args.model}; lower it or --max_seq_len"
        )
    notes = [tokenizer_note(tokenizer, actor), choose_reasoning(args, world, actor, tokenizer, prompts)]
    notes = notes[:1] if args.offline_data_path else notes  # the second says whether the format is rewarded
    notes.append(accuracy_note(held_out))
    if args.shard and world.size == 1:
        notes.append("shard    nothing is split: there is one process (--shard 1); torchrun starts several")
    return actor, tokenizer, prompts, held_out, notes
