"""Checks of health.py on what a run knows when it begins: its flags, its data, its templates.

Each is a pure function: ``Past`` -> ``Finding``, or None. They read the flags and ``facts`` of
config.json (start_facts.py), so they are silent about runs of versions that did not write these.
"""

from trainer.runs.health_past import JUDGEMENT, LOOK, USUAL, WRONG, Finding, counted, too

BETTER = {  # values for flags outside their range in ``USUAL``
    "clip_epsilon": 0.2,
    "cliprange_value": 0.5,
    "grad_clip": 1.0,
    "temperature": 1.0,
    "ppo_epochs": 1,
    "kl_coef": 0.02,
    "target_kl": 0.02,
    "gamma": 1.0,
    "lam": 1.0,
}
OFF = ("cliprange_value", "target_kl")  # 0 switches these off
FAR = 20  # times the suited learning rate, or that part of it
DROPPED, NEARLY_ALL = 0.2, 0.9  # shares of the records
UNKNOWN = 0.02  # share of the prompts' tokens
OFTEN = 30  # times that a prompt is seen
FEW_SAMPLES = 16  # responses a step
FORM = 1.5  # the most that the format and its marks can give
SCORE_LIMIT = 3.0  # the most that a reward model of weight 1 can give


def unusual_flags(past):
    """Flags far outside the range in which they help."""
    odd, blamed = {}, []
    for name, (least, most) in USUAL.items():
        value = past.flag(name)
        if value is not None and not (value == 0 and name in OFF) and not least <= value <= most:
            odd[name] = f"--{name} {value:g} (usual: {least:g} to {most:g})", f"--{name} {BETTER[name]:g}"
            blamed.append(too(name, value > most))
    for name, suited in past.facts.get("suited", {}).items():
        rate = past.flag(name)
        if rate and not suited / FAR <= rate <= suited * FAR:
            odd[name] = f"--{name} {rate:g} (it suits this size of model: {suited:g})", f"--{name} {suited:g}"
            blamed.append(too(name, rate > suited))
    if not odd:
        return None
    return Finding(
        LOOK,
        0,
        "a flag has a value far from the usual ones",
        ", ".join(numbers for numbers, _ in odd.values()),
        ("a typing mistake", "a value from another trainer, where it means something else"),
        " ".join(remedy for _, remedy in odd.values()),
        "docs/ppo.md",
        tuple(blamed),
    )


def missing_header(past):
    """The prompts end before the assistant's turn begins."""
    if not (header := past.facts.get("missing_header")):
        return None
    return Finding(
        WRONG,
        0,
        "the prompts do not begin the assistant's turn, so the model has to write its header itself",
        f"the chat template puts {header!r} between a prompt and its answer",
        ("the chat template ignores add_generation_prompt",),
        "--prompt_template with a template that ends a prompt with this text",
        "TRL's and transformers' pages on chat templates",
    )


def template_without_eos(past):
    """The template ends an answer with another token than the one that the run waits for."""
    if past.facts.get("template_has_eos", True):
        return None
    return Finding(
        LOOK,
        0,
        "the chat template ends an answer without the EOS token: responses may never end",
        "no token that ends a response stands behind the answer in the template's text",
        ("eos_token of the tokenizer is not the model's end of turn",),
        "set eos_token in tokenizer_config.json, or eos_token_id in generation_config.json, to that token",
        "TRL's PPO guide (the EOS trick)",
    )


def other_tokenizer(past):
    """The tokenizer has too few ids for this model, or does not know the prompts' words."""
    unknown, fewer = past.facts.get("unknown_tokens", 0.0), past.facts.get("fewer_ids")
    if not (fewer or unknown > UNKNOWN):
        return None
    numbers = f"{unknown:.0%} of the prompts' tokens are the unknown token"
    if fewer:
        numbers = f"{fewer[0]} ids, {fewer[1]} embeddings; {numbers}"
    return Finding(
        LOOK,
        0,
        "the tokenizer does not fit the policy or the prompts",
        numbers,
        ("a tokenizer of another model", "prompts in a language that the tokenizer does not have"),
        "--tokenizer with the folder that the policy was trained with",
        JUDGEMENT,
    )


def records_dropped(past):
    """Much of the data is not used."""
    dropped, read = past.facts.get("dropped", 0), past.facts.get("read", 0)
    if not read or dropped / read <= DROPPED:
        return None
    what, name, default = "prompts", "max_seq_len", 256
    otherwise = "shorter prompts, or a smaller --max_gen_len"
    if past.facts.get("long_answers", 0) > dropped / 2:  # of --offline_data_path
        what, name, default = "logged answers", "max_gen_len", 64
        otherwise = "shorter answers, or a smaller --max_seq_len"
    return Finding(
        WRONG if dropped / read > NEARLY_ALL else LOOK,
        0,
        f"many {what} are longer than --{name} and are left out",
        f"{dropped} of {read} ({dropped / read:.0%})",
        (f"--{name} is too small for this data",),
        past.larger(name, 4, default) or f"{otherwise}: together they fill the model's positions",
        JUDGEMENT,
    )


def judge_is_blind(past):
    """The text that a reward model reads does not change with the answer."""
    blind = [n for n, m in past.facts.get("reward_models", {}).items() if not m["sees_answer"]]
    if not blind:
        return None
    return Finding(
        WRONG,
        0,
        "a reward model does not see the answers: two different ones give it the same text",
        ", ".join(blind),
        ("its chat template leaves out what the assistant says",),
        "give the reward model's tokenizer a chat template that contains the assistant's content",
        JUDGEMENT,
    )


def judge_without_template(past):
    """The policy has a chat template and a reward model has none."""
    models = past.facts.get("reward_models", {})
    plain = [name for name, model in models.items() if not model["template"]]
    if not (plain and past.facts.get("chat_template")):
        return None
    return Finding(
        LOOK,
        0,
        "a reward model has no chat template, although the policy has one: it reads plain text",
        ", ".join(plain),
        ("its tokenizer was saved without the template that it was trained with",),
        "add the chat template of its training to its tokenizer; without one in training all is well",
        JUDGEMENT,
    )


def form_outweighs_judge(past):
    """The reward of the format is larger than what the reward models can give."""
    weights = [abs(model["weight"]) for model in past.facts.get("reward_models", {}).values()]
    most = SCORE_LIMIT * sum(weights)
    if not (past.flag("reasoning") and weights and most < FORM):
        return None
    larger = {n: x["weight"] * FORM / most for n, x in past.facts["reward_models"].items()}
    return Finding(
        LOOK,
        0,
        "the format is worth more than all that the reward models can say",
        f"format and marks: up to {FORM:g}; reward models: at most {most:g}",
        ("the weight of the reward model is too small", "--reasoning 1 for data without a format"),
        f"{past.reward_models(**larger)}, or --reasoning 0",
        JUDGEMENT,
    )


def judge_against(past):
    """A reward model counts with a negative weight."""
    against = {
        name: model["weight"]
        for name, model in past.facts.get("reward_models", {}).items()
        if model["weight"] < 0
    }
    if not against:
        return None
    return Finding(
        LOOK,
        0,
        "a reward model has a negative weight: what it likes is punished",
        ", ".join(f"{name}: {weight:g}" for name, weight in against.items()),
        ("a wrong sign", "or it is wanted: the model scores what is bad"),
        past.reward_models(**{name: -weight for name, weight in against.items()}),
        JUDGEMENT,
    )


def nothing_holds_the_policy(past):
    """No KL term, and a reward model that can be exploited."""
    if past.flag("kl_coef", 1) or not past.flag("reward_model"):
        return None
    return Finding(
        LOOK,
        0,
        "nothing keeps the policy near its start, and a reward model can be exploited",
        "--kl_coef 0",
        ("--kl_coef 0 is for rewards that cannot be deceived, such as a test of the answer",),
        "--kl_coef 0.02",
        "Gao et al. 2022, arXiv:2210.10760",
    )


def few_prompts(past):
    """The same few prompts come back again and again."""
    prompts, total = past.facts.get("prompts"), past.flag("total_steps", 0)
    samples = total * past.flag("batch_size", 0) * past.flag("processes", 1)
    if not prompts or samples / prompts <= OFTEN:
        return None
    end = "max_steps" if total == past.flag("max_steps") else "epochs"  # what ends the run
    what, numbers, path = "prompts for so many samples", "samples of each", "prompts in --data_path"
    if past.flag("offline_data_path"):
        what, numbers, path = "answers for so many passes", "passes", "answers in --offline_data_path"
    return Finding(
        LOOK,
        0,
        f"few {what}: the policy may learn them by heart",
        f"{counted(prompts, path.split()[0][:-1])}, {samples / prompts:.0f} {numbers}",
        ("a small file", "many --epochs"),
        f"more {path}, or --{end} {max(1, past.flag(end, 1) // 10)}",
        JUDGEMENT,
    )


def small_batch(past):
    """So few responses a step that chance decides about a step."""
    size = past.flag("batch_size")
    if size is None or size * past.flag("processes", 1) >= FEW_SAMPLES:
        return None
    return Finding(
        LOOK,
        0,
        "a step has so few responses that chance decides where it goes",
        f"{counted(size * past.flag('processes', 1), 'response')} a step",
        ("--batch_size is too small",),
        "--batch_size 64 --mini_batch_size 16",
        JUDGEMENT,
    )


ROWS = (
    missing_header,
    judge_is_blind,
    records_dropped,
    unusual_flags,
    judge_against,
    form_outweighs_judge,
    nothing_holds_the_policy,
    template_without_eos,
    other_tokenizer,
    judge_without_template,
    few_prompts,
    small_batch,
)
