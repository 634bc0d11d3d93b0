"""Facts of a PPO run that are known when it begins, for the checks of runs/health_start.py, and fingerprints
of what it begins with, for resuming.

They are written to config.json, so ``python -m trainer.runs.health`` can speak of them later too.
"""

import math
import re
from pathlib import Path

from dataset.lm_dataset import SAMPLE
from dataset.tokenization import conversation_ids, for_tokenizer, render
from dataset.turns import to_messages
from errors import InputError
from model.compatibility import most_positions, tokenizer_note
from trainer.runs.fingerprints import short_hash, weights_hash
from trainer.runs.learning_rate import suited_rate

LOOKED_AT = 64  # prompts that are looked at
ANSWERS = "Seven.", "It is late, go home."  # two answers that no reward model should find the same
THOUGHT = re.compile(r"\s*<think>\s*</think>\s*")  # some templates put an empty thought before an answer


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
    prompts, tokenizer = run.prompts, run.tokenizer
    dropped = prompts.dropped
    first = [prompts[i] for i in range(min(len(prompts), LOOKED_AT))]
    header, ends = turns_of(tokenizer, first[0].prompt, run.eos)
    rows, count = run.ref.get_input_embeddings().weight.shape[0], len(tokenizer.get_vocab())
    lora = run.args.lora_r > 0
    positions = most_positions(run.ref.config)
    sizes = {"learning_rate": ("actor", run.ref)}
    if run.critic:
        sizes["critic_learning_rate"] = ("critic", run.critic)
    return {
        "prompts": len(prompts),
        "read": len(prompts) + dropped if prompts.whole else SAMPLE,
        "dropped": dropped,
        "long_answers": prompts.long_answers,
        "held_out": len(run.held_out or ()),
        "held_out_pairs": len(run.held_out_pairs or ()),
        "longest": max(data.longest for data in (prompts, run.held_out) if data),
        "positions": None if positions == math.inf else positions,
        "distinct_prompts": len({tuple(prompt.prompt_ids) for prompt in first}) / len(first),
        "chat_template": bool(tokenizer.chat_template),
        "missing_header": header,
        "template_has_eos": ends,
        "unknown_tokens": unknown_share(tokenizer, first),
        "fewer_ids": [count, rows] if tokenizer_note(tokenizer, run.ref) else None,
        "vocabulary": rows,
        "dtype": str(run.dtype).removeprefix("torch."),
        "suited": {
            flag: suited_rate(kind, sum(p.numel() for p in model.parameters()), lora)
            for flag, (kind, model) in sizes.items()
        },
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
    asked, answer = for_tokenizer(tokenizer, to_messages(prompt)), ANSWERS[0]
    try:
        before = render(tokenizer, asked, generate=True)
        after = render(tokenizer, [*asked, {"role": "assistant", "content": answer}])
        ids = tokenizer(after.rpartition(answer)[2], add_special_tokens=False)["input_ids"]
    except InputError:
        return "", True
    if not after.startswith(before) or answer not in after[len(before) :]:
        return "", True
    header = THOUGHT.sub("", after[len(before) :].partition(answer)[0]).strip()
    return header, bool(set(ids) & set(eos))


def unknown_share(tokenizer, prompts):
    """The share of the tokenizer's unknown token in the prompts (list of Prompt)."""
    ids = [i for prompt in prompts for i in prompt.prompt_ids]
    special = (None, tokenizer.bos_token_id, tokenizer.eos_token_id)  # GPT-2 has one token for all three
    return 0.0 if tokenizer.unk_token_id in special else ids.count(tokenizer.unk_token_id) / len(ids)


def reads(tokenizer, prompt):
    """Whether a reward model's tokenizer has a template, and whether the answer is in what it reads."""
    try:
        one, other = conversation_ids(tokenizer, [(prompt, answer) for answer in ANSWERS])
    except InputError:  # the first batch will say so
        one, other = [], [0]
    return {"template": bool(tokenizer.chat_template), "sees_answer": one != other}


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
    for reward_model, weight in run.reward.models.values():
        tokenizer, config = reward_model.tokenizer, reward_model.model.config.to_dict()
        vocabulary = sorted(tokenizer.get_vocab().items())
        read_at = config.get("pad_token_id")  # the score is read at the last token that is not this one
        scale = [weight, config.get("reward_offset", 0.0), read_at]
        weights = weights_hash(reward_model.model)
        reward_models.append([weights, vocabulary, tokenizer.chat_template, *scale])
    if reward_models:
        found["reward_model"] = short_hash(reward_models)
    if run.args.reward_fn:
        path, _, name = run.args.reward_fn.rpartition(":")
        found["reward_fn"] = short_hash([name, Path(path).read_bytes().hex()])
    return found
