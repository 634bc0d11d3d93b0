"""What a PPO run says of itself when it begins: the first lines; facts for the checks of
runs/health_rules.py; and fingerprints of what it begins with, for resuming.

The facts are written to config.json, so ``python -m trainer.runs.health`` can speak of them later too.
"""

import math
import re
from contextlib import suppress
from pathlib import Path

from dataset.chat_template import conversation_ids, conversation_text, prompt_text
from errors import InputError
from model.loading import most_positions
from model.lora import describe as describe_adapters
from trainer.inputs import longest_prompt
from trainer.rewards.reward import SCORE_LIMIT
from trainer.rewards.reward_models import parse_spec
from trainer.runs.resume import short_hash, weights_hash

USUAL_IDS = 0.95  # of a model's embeddings: a few have no id
LOOKED_AT = 64  # prompts that are looked at
ANSWERS = "Seven.", "It is late, go home."  # two answers that no reward model should find the same
# Parts of the reward that are a number's: their names in the metrics, and their flags
FLAGS = {
    "thinking": "thinking_reward",
    "repetition": "repetition_penalty",
    "length_reward": "length_reward",
    "missing_eos": "missing_eos_penalty",
    "overlong": "overlong_buffer",
}
THOUGHT = re.compile(r"\s*<think>\s*</think>\s*")  # some templates put an empty thought before an answer


# --------------------------------------------------------------------------------------- the first lines


def describe_run(run) -> str:
    """What the run is made of, in a few lines."""
    args = run.args
    size = sum(p.numel() for p in run.ref.parameters()) / 1e6
    data = f"{'answers' if args.offline_data_path else 'prompts'}  {run.prompts.describe()}"
    if run.held_out:
        data += f", {len(run.held_out)} prompts held out"
    lines = [f"policy   {args.model}: {size:.2f}M parameters, {run.actor.config.model_type}"]
    if adapters := describe_adapters(run.actor):
        lines.append(f"lora     {adapters}")
    lines += [f"reward   {describe_reward(args, run.reward)}", data]
    if run.ptx:
        lines.append(f"ptx      {run.ptx.describe()}")
    lines += describe_texts(args, (run.prompts, run.held_out, run.ptx and run.ptx.data))
    if args.filter_groups and args.kl_target:
        lines.append("note     --kl_target sees only the answers that --filter_groups keeps")
    if run.critic:
        lines.append(f"lambda   {args.lam:g}, for answers of up to {args.max_gen_len} tokens (--lam)")
    if args.critic_warmup_steps:
        lines.append(
            f"warm-up  at first only the critic trains: --critic_warmup_steps {args.critic_warmup_steps}"
        )
    return "\n".join(lines + run.notes)


def describe_texts(args, datasets) -> list[str]:
    """Lines on how the texts of these datasets, or None, were read, for runs of all stages."""
    lines = [f"note     {data.note}" for data in datasets if data and data.note]
    if args.system_prompt:
        lines.append(f"system   {args.system_prompt}")
    if args.chat_template_kwargs:
        lines.append(f"template with {args.chat_template_kwargs}")
    return lines


def describe_reward(args, reward):
    """Every part of the score as the metrics call it, with its weight or flag, a line each."""
    if args.offline_data_path:
        return f"the scores of {args.offline_data_path}"
    parts = {}
    limit = f"clipped to ±{SCORE_LIMIT:g}"
    raw = "as it is"
    if args.normalize_reward:
        raw = limit = f"normalised and {limit} (--normalize_reward)"
    if args.reasoning:
        parts |= {"format": "0 or 0.5 (--reasoning)", "marks": "0 to 1 (--reasoning)"}
    for spec, (name, (_, weight)) in zip(args.reward_model, reward.models.items(), strict=True):
        parts[name] = f"weight {weight:g}, {limit}: {parse_spec(spec)[0]}"
    if args.reward_fn:
        parts["function"] = f"weight 1, as it is: {args.reward_fn}"
    if args.reward_url:
        parts["server"] = f"weight 1, {raw}: {args.reward_url}"
    for name, flag in FLAGS.items():
        if value := getattr(args, flag):
            parts[name] = f"--{flag} {value:g}"
    if args.missing_eos_penalty is None:
        parts["missing_eos"] = "minus the scores' standard deviation (--missing_eos_penalty)"
    return "\n         ".join(["the sum of:", *(f"{name:<14} {text}" for name, text in parts.items())])


# ------------------------------------------------------------------------------ facts and fingerprints


def start_facts(run):
    """A ``PpoRun`` -> {name: value}, as JSON has them.

    prompts, read, dropped, held_out    counts of records; offline the first three are of logged answers
    held_out_pairs                      of offline PPO, 0 without
    long_answers                        those dropped because a logged answer is too long
    longest                             tokens of the longest prompt, trained on or held out
    positions                           of the policy: tokens of prompt plus response; None: no limit
    distinct_prompts                    share of different ones among the first ``LOOKED_AT`` prompts
    chat_template                       has the policy's tokenizer one?
    missing_header                      the text between a prompt and its answer, "" as it should be
    template_has_eos                    does the template write a token that ends a response after an answer?
    unknown_tokens                      share of the unknown token in the prompts
    fewer_ids                           [ids of the tokenizer, embeddings] where the first are clearly fewer
    vocabulary                          embeddings of the policy
    dtype                               of mixed precision and sampling
    suited                              {flag: the learning rate that suits the model's size}
    reward_models                       {name: weight, template, sees_answer}
    """
    prompts = run.prompts
    tokenizer = run.tokenizer
    first = [prompts[i] for i in range(min(len(prompts), LOOKED_AT))]
    header, ends = turns_of(tokenizer, first[0].prompt, run.eos)
    rows = run.ref.get_input_embeddings().weight.shape[0]
    ids = len(tokenizer.get_vocab())
    positions = most_positions(run.ref.config)
    return {
        "prompts": len(prompts),
        "read": prompts.read,
        "dropped": prompts.dropped,
        "long_answers": prompts.long_answers,
        "held_out": len(run.held_out or ()),
        "held_out_pairs": len(run.held_out_pairs or ()),
        "longest": longest_prompt(prompts, run.held_out),
        "positions": None if positions == math.inf else positions,
        "distinct_prompts": len({tuple(prompt.prompt_ids) for prompt in first}) / len(first),
        "chat_template": bool(tokenizer.chat_template),
        "missing_header": header,
        "template_has_eos": ends,
        "unknown_tokens": unknown_share(tokenizer, first),
        "fewer_ids": [ids, rows] if ids < USUAL_IDS * rows else None,
        "vocabulary": rows,
        "dtype": str(run.dtype).removeprefix("torch."),
        "suited": run.suited,
        "reward_models": {
            name: {"weight": weight, **reads(model.tokenizer, first[0].prompt)}
            for name, (model, weight) in run.reward.models.items()
        },
    }


def turns_of(tokenizer, prompt, eos):
    """How the chat template goes from a prompt to an answer and on -> (missing header, has it an EOS?).

    prompt: text or messages; eos: the ids that end a response. ("", True) where there is no template, or
    where it rewrites what stands before the answer, so that nothing can be said.
    """
    if tokenizer.chat_template is None:
        return "", True
    answer = ANSWERS[0]
    try:
        before = prompt_text(tokenizer, prompt)
        after = conversation_text(tokenizer, prompt, answer)
        ids = tokenizer(after.rpartition(answer)[2], add_special_tokens=False)["input_ids"]
    except InputError:
        return "", True
    header, there, _ = after.removeprefix(before).partition(answer)
    if not (there and after.startswith(before)):
        return "", True
    return THOUGHT.sub("", header).strip(), bool(set(ids) & set(eos))


def unknown_share(tokenizer, prompts):
    """The share of the tokenizer's unknown token in the prompts (list of Prompt)."""
    ids = [i for prompt in prompts for i in prompt.prompt_ids]
    special = (None, tokenizer.bos_token_id, tokenizer.eos_token_id)  # GPT-2 has one token for all three
    return 0.0 if tokenizer.unk_token_id in special else ids.count(tokenizer.unk_token_id) / len(ids)


def reads(tokenizer, prompt):
    """Whether a reward model's tokenizer has a template, and whether the answer is in what it reads."""
    sees = True
    with suppress(InputError):  # the first batch will say so
        one, other = conversation_ids(tokenizer, [(prompt, answer) for answer in ANSWERS])
        sees = one != other
    return {"template": bool(tokenizer.chat_template), "sees_answer": sees}


def fingerprints(run):
    """{flag: a hash of what it names}: the weights that the run starts from, its reward models, the texts
    and tokens of its prompts, the code of its reward function. Call it before frozen weights are
    rounded."""
    found = {
        "model": short_hash([weights_hash(run.ref), run.eos]),
        "tokenizer": short_hash(sorted(run.tokenizer.get_vocab().items())),
        "offline_data_path" if run.args.offline_data_path else "data_path": run.prompts.fingerprint,
    }
    if run.ptx:
        found["ptx_data_path"] = run.ptx.data.fingerprint
    reward_models = []
    for model, weight in run.reward.models.values():
        config = model.model.config.to_dict()
        reward_models.append(
            [
                weights_hash(model.model),
                sorted(model.tokenizer.get_vocab().items()),
                model.tokenizer.chat_template,
                weight,
                config.get("reward_offset", 0.0),
                config.get("pad_token_id"),  # the score is read at the last token that is not this one
            ]
        )
    if reward_models:
        found["reward_model"] = short_hash(reward_models)
    if run.args.reward_fn:
        path, _, name = run.args.reward_fn.rpartition(":")
        found["reward_fn"] = short_hash([name, Path(path).read_bytes().hex()])
    return found
