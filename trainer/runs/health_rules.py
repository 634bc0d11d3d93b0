"""The rules of health.py: what is unusual in a run, and what to say of it.

A rule is a row: the texts of its finding by name, and below them its name and when there is one. The
function looks at a run so far (``Past``), before the first step too, and returns the values that it has seen,
by the names that its texts have for them; True where there are none; nothing if all is well. Some names mean
more: ``since``, the first step that shows it, if that is not the newest one; ``wrong``: it cannot be right,
whatever the level of the row; ``blamed``: see ``Finding``; the name of a text: this one instead of the row's.

Texts may name these values, metrics of the newest step ({kl/k1:.2f}), flags, facts of the start
(about_run.py), and what ``advice`` says. Flags are those of the config.json of the run, which has them all.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from trainer.runs.displays import PARTS, metric_names
from trainer.runs.displays import RULES as FORM_RULES
from trainer.runs.health_past import BEGIN, CLEAR, WINDOW, Past, rise_of, spread_of_steps

WRONG, LOOK = "wrong", "look"  # the levels of a finding
REPORT = "report it on the project's issue page"
RULES: list["Rule"] = []  # of findings since the same step the first in this order is said first


@dataclass(frozen=True)
class Rule:
    """A row, of whose texts ``Finding`` says what they are. Where a value is empty or not known, the words
    between it and the others are left out.

    numbers: parts with ", " between them; one with a number that is not known is left out; causes: "; "
    between them; remedy: " | " between ways of which the first that is not empty is said; source: of its
    limits; offline: also of logged responses, whose score, length and ratio are not the policy's.
    """

    name: str
    when: Callable[[Past], object]
    symptom: str
    numbers: str
    causes: str
    remedy: str
    level: str = LOOK
    source: str = "judgement: docs/health.md"  # a limit that was found here
    offline: bool = False


def rule(**row) -> Callable:
    """What adds the function below it to ``RULES``, with these fields of its row."""

    def add(when):
        RULES.append(Rule(name=when.__name__, when=when, **row))
        return when

    return add


# --------------------------------------------------------------------------------------------- advice

USUAL = {  # flags: the range outside which they rarely help, and a value inside
    "clip_epsilon": (0.02, 0.9, 0.2),
    "cliprange_value": (0.02, 1e6, 0.5),
    "grad_clip": (0.01, 1e6, 1.0),
    "temperature": (0.5, 1.5, 1.0),
    "ppo_epochs": (1, 10, 1),
    "kl_coef": (0.0, 2.0, 0.02),
    "target_kl": (1e-3, 1.0, 0.02),
    "gamma": (0.9, 1.0, 1.0),
    "lam": (0.8, 1.0, 1.0),
}
OFF = ("cliprange_value", "target_kl")  # 0 switches these off
TOP = {  # the most that a remedy raises a flag to: what is usual, or all that the flag takes
    **{name: most for name, (_, most, _) in USUAL.items()},
    **dict.fromkeys(("max_gen_len", "max_seq_len", "batch_size"), 2**20),
    **dict.fromkeys(("missing_eos_penalty", "repetition_penalty"), 1e6),
    **dict.fromkeys(("learning_rate", "critic_learning_rate"), 1.0),
}
WORTH = 1.25  # times a size: a smaller rise would hardly change anything
SHORTEST_WARMUP = 5  # batches, where the critic was worse than nothing
NARROW_VALUE_CLIP = 0.2
WEIGHT = re.compile(r"=[^=/\\]*$")  # behind a path in --reward_model


def advice(past: Past) -> dict[str, str]:
    """Causes and remedies that depend on the flags of the run, by the names that texts have for them. Those
    that do not apply are ""."""
    words = {}
    for name in ("learning_rate", "critic_learning_rate"):
        words[f"lower_{name}"] = lower_rate(past, name)
        words[f"{name}_is"], words[f"other_{name}"] = other_rate(past, name)
    target = past.known("kl_target")  # it moves --kl_coef
    kl_coef = 3.0 * past.known("kl_coef") or 0.05
    warmup = past.known("critic_warmup_steps")  # it can be "auto"
    warmup = max(SHORTEST_WARMUP, 2 * warmup if isinstance(warmup, int) else 0)
    clip = past.known("cliprange_value")
    eos_penalty = past.known("missing_eos_penalty")
    repetition_penalty = max(0.5, 2.0 * past.known("repetition_penalty"))
    return words | {
        "more_kl": f"--kl_target {target / 3:.2g}" if target else raised(past, "kl_coef", kl_coef),
        "many_epochs": "" if past.known("ppo_epochs") == 1 else "--ppo_epochs is too large",
        "one_epoch": fewer_epochs(past, 1),
        "lam_1": "" if past.known("lam") == 1 else "--lam 1",
        "longer_warmup": f"--critic_warmup_steps {warmup}",
        "value_clip_is_small": "--cliprange_value is too small" if clip else "",
        "wider_value_clip": "--cliprange_value 0.5" if clip < NARROW_VALUE_CLIP else "",
        "wider_grad_clip": raised(past, "grad_clip", max(1.0, 10 * past.known("grad_clip"))),
        "longer_answers": longer(past, "max_gen_len", 2),
        "more_eos_penalty": raised(past, "missing_eos_penalty", 2.0 * eos_penalty or 1.0),
        "less_eos_penalty": f"--missing_eos_penalty {0.3 * eos_penalty:.2g}" if eos_penalty else "",
        "eos_penalty_is_large": "--missing_eos_penalty is too large" if eos_penalty else "",
        "more_repetition_penalty": raised(past, "repetition_penalty", repetition_penalty),
        "larger_batch": raised(past, "batch_size", 2 * past.known("batch_size")),
        "sample_again": "" if past.known("filter_groups") else "--filter_groups 2",
        # Else it begins at the scale of the raw scores.
        "critic_from_actor": "" if past.known("critic_init") == "actor" else "--critic_init actor",
        "float32": "" if past.known("dtype") == "float32" else "--dtype float32; if it stays,",
        "positive_weights": with_weights(past, abs),
    }


def counted(count: int, word: str) -> str:
    """A count with its word: "1 step", "2 steps"."""
    return f"{count} {word}{'' if count == 1 else 's'}"


def raised(past: Past, name: str, wanted: float) -> str:
    """``--name`` with this larger value, at most its ``TOP``; "" where that is hardly more than the run has.
    A whole number stays one."""
    value = min(wanted, TOP[name])
    if value < WORTH * past.known(name):
        return ""
    return f"--{name} {value}" if isinstance(value, int) else f"--{name} {value:.2g}"


def longer(past: Past, name: str, factor: int) -> str:
    """``--max_gen_len`` or ``--max_seq_len`` times ``factor``, or what the model's positions leave; "" where
    they leave hardly more than the run has."""
    other = past.known("longest") if name == "max_gen_len" else past.known("max_gen_len")
    room = (past.known("positions") or math.inf) - other
    return raised(past, name, min(past.known(name) * factor, room))


def fewer_epochs(past: Past, count: int) -> str:
    """``--ppo_epochs`` with this count, if the run has more; else ""."""
    return f"--ppo_epochs {max(1, count)}" if past.known("ppo_epochs") > max(1, count) else ""


def lower_rate(past: Past, name: str) -> str:
    """A learning rate at a third, or at what suits the model's size if that is less."""
    rate = past.known(name)
    return f"--{name} {min(rate / 3, past.suited.get(name, rate)):.2g}" if rate else f"a smaller --{name}"


def other_rate(past: Past, name: str) -> tuple[str, str]:
    """Where too little is learned -> what is wrong with the rate, and the flag with another one.

    Three times the rate, or what suits the model's size if that is more. A rate that is twice what suits the
    size, or the highest that there is, is not raised but lowered.
    """
    rate = past.known(name)
    suited = past.suited.get(name, rate)
    if rate >= TOP[name] or rate > 2 * suited:
        return f"--{name} is too high", lower_rate(past, name)
    higher = f"--{name} {min(TOP[name], max(rate * 3, suited)):.2g}" if rate else f"a larger --{name}"
    return f"--{name} is too low", higher


def with_weights(past: Past, change: Callable[[float], float]) -> str:
    """``--reward_model`` with all that the run has, and the weights that ``change(weight)`` gives."""
    weights = [model["weight"] for model in past.reward_models.values()]
    paths = past.known("reward_model") or []
    if len(paths) != len(weights):
        paths = ["PATH"] * len(weights)
    words = ["--reward_model"]
    for path, weight in zip(paths, weights, strict=True):
        same = change(weight) == weight
        words.append(path if same else f"{WEIGHT.sub('', path)}={change(weight):g}")
    return " ".join(words)


# --------------------------------------------------------- before training: flags, data, templates

FAR = 20  # times the suited learning rate, or that part of it
DROPPED, NEARLY_ALL = 0.2, 0.9  # shares of the records
UNKNOWN = 0.02  # share of the prompts' tokens
OFTEN = 30  # times that a prompt is seen
FEW_SAMPLES = 16  # responses a step
FORM = 1.5  # the most that the format and its marks can give
SCORE_LIMIT = 3.0  # the most that a reward model of weight 1 can give


def models_that(past: Past, test: Callable[[dict], bool]) -> dict:
    """``names`` and ``weights`` of the reward models whose facts pass the test; nothing if there are none."""
    found = {name: model["weight"] for name, model in past.reward_models.items() if test(model)}
    weights = ", ".join(f"{name}: {weight:g}" for name, weight in found.items())
    return {"names": ", ".join(found), "weights": weights} if found else {}


@rule(
    level=WRONG,
    symptom="the prompts do not begin the assistant's turn, so the model has to write its header itself",
    numbers="the chat template puts {missing_header!r} between a prompt and its answer",
    causes="the chat template ignores add_generation_prompt",
    remedy="--prompt_template with a template that ends a prompt with this text",
    source="TRL's and transformers' pages on chat templates",
)
def missing_header(past):
    """The prompts end before the assistant's turn begins."""
    return past.known("missing_header")


@rule(
    level=WRONG,
    symptom="a reward model does not see the answers: two different ones give it the same text",
    numbers="{names}",
    causes="its chat template leaves out what the assistant says",
    remedy="give the reward model's tokenizer a chat template that contains the assistant's content",
)
def judge_is_blind(past):
    """The text that a reward model reads does not change with the answer."""
    return models_that(past, lambda model: not model["sees_answer"])


@rule(
    symptom="many {what} are longer than --{flag} and are left out",
    numbers="{dropped} of {read} ({share:.0%})",
    causes="--{flag} is too small for this data",
    remedy="{longer} | shorter {what}, or a smaller --{other}: together they fill the model's positions",
)
def records_dropped(past):
    """Much of the data is not used."""
    dropped = past.known("dropped")
    share = dropped / (past.known("read") or math.inf)
    what, flag, other = "prompts", "max_seq_len", "max_gen_len"
    if past.known("long_answers") > dropped / 2:  # of --offline_data_path
        what, flag, other = "logged answers", "max_gen_len", "max_seq_len"
    seen = {"what": what, "flag": flag, "other": other, "longer": longer(past, flag, 4)}
    return share > DROPPED and {**seen, "share": share, "wrong": share > NEARLY_ALL}


@rule(
    symptom="a flag has a value far from the usual ones",
    numbers="{odd}",
    causes="a typing mistake; a value from another trainer, where it means something else",
    remedy="{usual}",
    source="docs/ppo.md",
)
def unusual_flags(past):
    """Flags far outside the range in which they help."""
    odd, usual, blamed = [], [], []
    suited = {name: (rate / FAR, rate * FAR, rate) for name, rate in past.suited.items()}
    for name, (least, most, better) in {**USUAL, **suited}.items():
        value = past.args.get(name)
        if value is None or least <= value <= most or (value == 0 and name in OFF):
            continue
        words, why = ("small", "large"), f"usual: {least:g} to {most:g}"
        if name in suited:
            words, why = ("low", "high"), f"it suits this size of model: {better:g}"
        odd.append(f"--{name} {value:g} ({why})")
        usual.append(f"--{name} {better:g}")
        blamed.append(f"--{name} is too {words[value > most]}")
    return odd and {"odd": ", ".join(odd), "usual": " ".join(usual), "blamed": tuple(blamed)}


@rule(
    symptom="a reward model has a negative weight: what it likes is punished",
    numbers="{weights}",
    causes="a wrong sign; or it is wanted: the model scores what is bad",
    remedy="{positive_weights}",
)
def judge_against(past):
    """A reward model counts with a negative weight."""
    return models_that(past, lambda model: model["weight"] < 0)


@rule(
    symptom="the format is worth more than all that the reward models can say",
    numbers="format and marks: up to 1.5; reward models: at most {most:g}",
    causes="the weight of the reward model is too small; --reasoning 1 for data without a format",
    remedy="{larger}, or --reasoning 0",
)
def form_outweighs_judge(past):
    """The reward of the format is larger than what the reward models can give."""
    most = SCORE_LIMIT * sum(abs(model["weight"]) for model in past.reward_models.values())
    weak = past.known("reasoning") and 0 < most < FORM
    return weak and {"most": most, "larger": with_weights(past, lambda weight: weight * FORM / most)}


@rule(
    symptom="nothing keeps the policy near its start, and a reward model can be exploited",
    numbers="--kl_coef 0",
    causes="--kl_coef 0 is for rewards that cannot be deceived, such as a test of the answer",
    remedy="--kl_coef 0.02",
    source="Gao et al. 2022, arXiv:2210.10760",
)
def nothing_holds_the_policy(past):
    """No KL term, and a reward model that can be exploited."""
    return past.args.get("kl_coef") == 0 and past.known("reward_model")


@rule(
    symptom="the chat template ends an answer without the EOS token: responses may never end",
    numbers="no token that ends a response stands behind the answer in the template's text",
    causes="eos_token of the tokenizer is not the model's end of turn",
    remedy="set eos_token in tokenizer_config.json, or eos_token_id in generation_config.json, to that token",
    source="TRL's PPO guide (the EOS trick)",
)
def template_without_eos(past):
    """The template ends an answer with another token than the one that the run waits for."""
    return past.facts.get("template_has_eos") is False


@rule(
    symptom="the tokenizer does not fit the policy or the prompts",
    numbers="{ids}{unknown_tokens:.0%} of the prompts' tokens are the unknown token",
    causes="a tokenizer of another model; prompts in a language that the tokenizer does not have",
    remedy="--tokenizer with the folder that the policy was trained with",
)
def other_tokenizer(past):
    """The tokenizer has too few ids for this model, or does not know the prompts' words."""
    fewer = past.known("fewer_ids")
    ids = f"{fewer[0]} ids, {fewer[1]} embeddings; " if fewer else ""
    return (fewer or past.known("unknown_tokens") > UNKNOWN) and {"ids": ids}


@rule(
    symptom="a reward model has no chat template, although the policy has one: it reads plain text",
    numbers="{names}",
    causes="its tokenizer was saved without the template that it was trained with",
    remedy="add the chat template of its training to its tokenizer; without one in training all is well",
)
def judge_without_template(past):
    """The policy has a chat template and a reward model has none."""
    return past.known("chat_template") and models_that(past, lambda model: not model["template"])


@rule(
    symptom="few prompts for so many samples: the policy may learn them by heart",
    numbers="{count}, {times:.0f} samples of each",
    causes="a small file; many --epochs",
    remedy="more prompts in --data_path, or {fewer}",
)
def few_prompts(past):
    """The same few prompts come back again and again."""
    prompts = past.known("prompts")
    steps = past.known("total_steps")
    end = "max_steps" if steps == past.known("max_steps") else "epochs"  # what ends the run
    seen = {
        "count": counted(prompts, "prompt"),
        "times": steps * past.responses / (prompts or math.inf),
        "fewer": f"--{end} {max(1, past.known(end) // 10)}",
    }
    if past.known("offline_data_path"):
        seen |= {
            "symptom": "few answers for so many passes: the policy may learn them by heart",
            "count": counted(prompts, "answer"),
            "numbers": "{count}, {times:.0f} passes",
            "remedy": "more answers in --offline_data_path, or {fewer}",
        }
    return seen["times"] > OFTEN and seen


@rule(
    symptom="a step has so few responses that chance decides where it goes",
    numbers="{count} a step",
    causes="--batch_size is too small",
    remedy="--batch_size 64 --mini_batch_size 16",
)
def small_batch(past):
    """So few responses a step that chance decides about a step."""
    return 0 < past.responses < FEW_SAMPLES and {"count": counted(past.responses, "response")}


# ------------------------------------------------- the policy: KL, ratio, steps, entropy, sampler

KL_LIMIT, KL_OF_A_TOKEN = 10.0, 0.1  # nats a response; nats a token, for long responses
HIGH_KL, HIGHEST_KL = 1.0, 3.0  # nats a token, of a single step
BELOW = -1.0  # nats a response
FIRST_RATIO = {"float32": 1e-3, "bfloat16": 0.05, "float16": 0.02}  # how far from 1
LARGEST_RATIO, LEAST_RATIO = 2.0, 0.1
STEP_KL, CLIPPED, CLIPPED_ONCE = 0.05, 0.4, 0.5  # approx_kl, clip fraction of three steps, of one
HUGE_KL, MOST_CLIPPED = 0.5, 0.6  # the same two where the run is broken
NARROW_CLIP = 0.05  # --clip_epsilon: below it, many clipped tokens say little
STUCK = 0.03  # nats a response that the policy is away from its start after a time
STILL, STUCK_FROM = 8, 12  # steps without a move; the first step that is judged
HEAVY_KL = 0.5  # --kl_coef, in standard deviations of the scores
STOPPED = 0.5  # share of early stops
USUAL_STOP = 0.02  # --target_kl: from here on it is not too small, and a larger mean of approx_kl is fast
LOST, FEWEST_IDS = 0.5, 100  # entropy, as a share of the largest; a smaller vocabulary may be a toy
COLLAPSED, RANDOM, MORE_ENTROPY = 0.1, 2.0, 0.3  # entropy: times its start, the same, nats above it
GAP, LARGE_GAP = 0.02, 0.1  # nats a token
LARGEST_WEIGHT, SAMPLE_SIZE = 2.0, 0.3  # importance weights: mean, effective sample size
CUT_GRADIENT = 30  # times --grad_clip
LONG = 5  # steps


@rule(
    symptom="the policy is far from its start and may write nonsense: read samples.jsonl",
    numbers="kl/k1 {kl/k1:.2f} nats per token (below 0.1 is usual), "
    "kl/sequence {kl/sequence:.1f} nats per response (6 to 10 is much)",
    causes="--learning_rate is too high; --kl_coef is too small; {many_epochs}",
    remedy="{lower_learning_rate} {more_kl}",
    source="Ziegler et al. 2019; Gao et al. 2022, arXiv:2210.10760",
)
def kl_far(past):
    """The policy has left the reference."""
    limit = max(KL_LIMIT, KL_OF_A_TOKEN * past.now("rollout/length"))
    seen = past.lasting("kl/sequence", lambda x: x > limit)
    token = past.now("kl/k1")
    return (seen or token > HIGH_KL) and {**seen, "wrong": token > HIGHEST_KL or past.trend == -1}


@rule(
    level=WRONG,
    symptom="the KL to the reference is negative: the tokens do not come from the policy that is scored",
    numbers="kl/sequence {kl/sequence:.2f}",
    causes="the sampler computes in another precision; a fault in the program",
    remedy=f"{{float32}} {REPORT}",
    source="TRL issue 235",
)
def kl_negative(past):
    """The mean log ratio to the reference is negative, which no policy's own samples give."""
    return past.lasting("kl/sequence", lambda x: x < BELOW)


@rule(
    level=WRONG,
    symptom="the ratio of actor and old actor is not 1 before the first update of a batch",
    numbers="policy/first_ratio {policy/first_ratio:.4f}",
    causes="log-probs of actor and old actor are computed in different ways: a fault in the program",
    remedy=f"{{float32}} {REPORT}",
    source="Huang et al. 2022, The 37 implementation details of PPO",
)
def first_ratio(past):
    """Before the first update of a batch the actor is the old actor, and their ratio is 1."""
    limit = FIRST_RATIO.get(past.known("dtype"), FIRST_RATIO["bfloat16"])
    seen = past.lasting("policy/first_ratio", lambda x: abs(x - 1) > limit, 1)
    return past.known("update_old_actor_freq") <= 1 and seen


@rule(
    level=WRONG,
    symptom="the updates of one batch change the policy beyond what PPO can correct",
    numbers="policy/ratio {policy/ratio:.3g}",
    causes="--learning_rate is too high; {many_epochs}",
    remedy="{lower_learning_rate} {one_epoch}",
    source="TRL's PPO guide",
)
def ratio_drastic(past):
    """The mean ratio is far from 1."""
    return past.lasting("policy/ratio", lambda x: not LEAST_RATIO < x < LARGEST_RATIO, 1)


@rule(
    symptom="the steps are too large: {who} the policy further than PPO allows for",
    numbers="policy/approx_kl {policy/approx_kl:.3f} (usual: below 0.05), "
    "policy/clip_fraction {policy/clip_fraction:.2f} (below 0.3)",
    causes="--learning_rate is too high; {many_epochs}; {old_actor}",
    remedy="{lower_learning_rate} {fewer_epochs} {stop} {newer_old_actor}",
    source="Spinning Up in Deep RL: 0.01 to 0.05",
)
def steps_too_large(past):
    """One batch changes the policy too much."""
    kl = past.now("policy/approx_kl")
    clipped = past.now("policy/clip_fraction")
    far = past.lasting("policy/approx_kl", lambda x: x > STEP_KL)
    often = past.lasting("policy/clip_fraction", lambda x: x > CLIPPED)
    if 0 < past.known("clip_epsilon") < NARROW_CLIP and not kl >= STEP_KL:  # many clipped tokens say little
        clipped, often = 0.0, {}
    if not (far or often or kl > HUGE_KL or clipped > CLIPPED_ONCE):
        return None
    seen = {
        **far,
        **often,
        "wrong": kl > HUGE_KL or clipped > MOST_CLIPPED,
        "who": "one batch moves",
        "fewer_epochs": fewer_epochs(past, past.known("ppo_epochs") // 4),
        "stop": "" if 0 < past.known("target_kl") <= STEP_KL else f"--target_kl {STEP_KL:g}",
    }
    batches = past.known("update_old_actor_freq")  # that one old actor samples
    if batches > 1:
        seen |= {
            "who": f"{batches} batches move",
            "old_actor": "--update_old_actor_freq is too large",
            "newer_old_actor": "--update_old_actor_freq 1",
        }
    return seen


@rule(
    symptom="the sampler draws from another policy than the one that is trained",
    numbers="rollout/sampler_gap {rollout/sampler_gap:.3g} nats per token (usual: below 0.001), "
    "mean importance weight {rollout/importance_weight:.2f}, "
    "effective sample size {rollout/importance_ess:.2f}",
    causes="a low precision that this model does not bear; a fault in the program",
    remedy=f"{{float32}} {REPORT}",
    source="verl's page on rollout correction",
)
def sampler_apart(past):
    """The sampler draws from another policy than the one that is scored."""
    gap = past.now("rollout/sampler_gap")
    weight = past.now("rollout/importance_weight")
    off = weight <= 1 / LARGEST_WEIGHT or weight >= LARGEST_WEIGHT
    off = off or past.now("rollout/importance_ess") < SAMPLE_SIZE
    return (off or gap > GAP) and {"wrong": off or gap > LARGE_GAP}


@rule(
    level=WRONG,
    symptom="updates are skipped in one batch after the other, because a loss or a gradient is not finite",
    numbers="policy/skipped_steps {policy/skipped_steps:.2f}",
    causes="a precision that is too low for this model; --learning_rate is too high",
    remedy="--dtype float32 {lower_learning_rate}",
    source="docs/metrics.md",
)
def updates_skipped(past):
    """Losses or gradients that are not finite."""
    return past.lasting("policy/skipped_steps", lambda x: x > 0)


@rule(
    symptom="the policy does not move: it is where it was at the start",
    numbers="kl/sequence {kl:.4f} nats per response after {steps} steps",
    causes="{kl_coef_is}; {learning_rate_is}; all answers get the same score; --grad_clip is too small",
    remedy="{other_learning_rate}",
)
def policy_is_stuck(past):
    """The policy does not move. Where all scores are equal, scores_alike says why."""
    seen = past.lasting("kl/sequence", lambda x: abs(x) < STUCK, STILL)
    trains = past.steps >= STUCK_FROM and past.values("policy/loss", STILL)
    if not (seen and trains) or past.score_rise > CLEAR or not past.widest:
        return None
    seen |= {"kl": past.now("kl/sequence", 3), "steps": past.steps}
    kl_coef = past.known("kl_coef")
    if kl_coef > HEAVY_KL * (past.now("reward/score_std") or 1.0) and not past.known("kl_target"):
        seen |= {
            "kl_coef_is": "--kl_coef is too large",
            "remedy": f"--kl_coef {min(0.02, kl_coef / 10):.2g}",
        }
    return seen


@rule(
    symptom="--target_kl ends most updates before they have begun: the actor hardly trains",
    numbers="policy/early_stop {policy/early_stop:.2f} (1: at the first minibatch), "
    "policy/approx_kl {kl:.3f}, --target_kl {target_kl:g}",
    causes="--target_kl is too small; --learning_rate is too high",
    remedy="{wider}",
)
def early_stop_starves(past):
    """--target_kl ends the updates of nearly every batch."""
    seen = past.lasting("policy/early_stop", lambda x: x >= STOPPED)
    if not seen:
        return None
    target = past.known("target_kl")
    kl = past.now("policy/approx_kl", 3)
    seen["kl"] = kl
    strict = target < USUAL_STOP
    if strict:
        seen["wider"] = f"--target_kl {max(USUAL_STOP, min(3 * target, STEP_KL)):.2g}"
    if kl >= USUAL_STOP or not strict:
        seen |= {
            "symptom": "--target_kl ends most updates early: single steps move the policy far",
            "causes": "--learning_rate is too high" + "; --target_kl is too small" * strict,
            "remedy": "{lower_learning_rate} {wider}",
        }
    return seen


@rule(
    symptom="from the start on the policy hardly knows how to go on: the prompts do not look as it knows "
    "them",
    numbers="policy/entropy {start:.2f} nats per token; all tokens equally likely: {most:.2f}",
    causes="a tokenizer of another model; another prompt template; a policy that was not trained yet",
    remedy="--tokenizer and --prompt_template of the policy's training; or stage 1 first "
    "(trainer/train_sft.py)",
)
def policy_is_lost(past):
    """From the start on the policy is nearly as uncertain as if every token were equally likely."""
    size = past.known("vocabulary")
    start = past.start("policy/entropy")
    most = math.log(size or 1)
    return size >= FEWEST_IDS and start > LOST * most and {"start": start, "most": most}


@rule(
    symptom="the policy gives nearly the same tokens always, and it is not better for it",
    numbers="policy/entropy {now:.3g}, at the start {start:.3g} nats per token",
    causes="--learning_rate is too high; --kl_coef is too small; the reward pays for one kind of answer",
    remedy="{lower_learning_rate} {more_kl}",
)
def entropy_collapses(past):
    """The policy has become certain and no better."""
    seen = past.changed("policy/entropy", lambda start, now: now < COLLAPSED * start)
    return seen and past.no_better and seen


@rule(
    symptom="the responses become random",
    numbers="policy/entropy {now:.3g}, at the start {start:.3g} nats per token",
    causes="--learning_rate is too high; the reward is noise",
    remedy="{lower_learning_rate} {more_kl}",
)
def entropy_rises(past):
    """The policy becomes random, and no better."""
    seen = past.changed("policy/entropy", lambda start, now: now > max(RANDOM * start, start + MORE_ENTROPY))
    return seen and past.no_better and seen


@rule(
    symptom="every gradient of the actor is cut to a small part of its length",
    numbers="policy/grad_norm {policy/grad_norm:.3g}, --grad_clip {grad_clip:g}",
    causes="--grad_clip is too small; extreme scores",
    remedy="{wider_grad_clip} | a reward with a smaller scale",
)
def gradient_is_cut(past):
    """The gradient is many times longer than --grad_clip lets through."""
    limit = CUT_GRADIENT * past.known("grad_clip")
    return past.lasting("policy/grad_norm", lambda x: x > limit > 0, LONG)


# ------------------------------------------------------------------------------------ the responses

NONE_ENDS, FEW_END, FALL = 0.02, 0.7, 0.2  # shares of responses
FEWEST = 64  # responses: of fewer, chance decides how many end
FORMATTED = 0.01  # of reward/format: a share of 2 %
FINISHED_LEAST = 0.2  # a smaller share at the start cannot fall far
EMPTY = 1.5  # tokens, of which one is the EOS
PAID = 0.5  # correlation of score and length, where there is no accuracy and no judge
LONGER = 1.4  # times the length at the start
REPEATED, MORE_REPEATED, MOST_REPEATED = 0.2, 0.1, 0.6  # share of trigrams; above the start; where broken
ALIKE, CLEARLY = 0.5, 0.2  # distinct responses: share of those at the start; below the start by so much


def cuts_are_free(past: Past) -> bool:
    """Does the run say that answers may be cut?"""
    return past.args.get("missing_eos_penalty") == 0


@rule(
    symptom="{how_many} response ends by itself",
    numbers="rollout/finished {now:.3f}, --max_gen_len {max_gen_len}",
    causes="the EOS token is not the one that the policy ends with; --max_gen_len is too small; "
    "the prompt template is not the one of the policy's training",
    remedy="{longer}; or check eos_token in tokenizer_config.json",
    source="TRL's PPO guide (the EOS trick)",
)
def never_ends(past):
    """No response ends by itself from the start on."""
    count = max(2, past.steps_of(FEWEST))
    seen = past.changed("rollout/finished", lambda *means: all(x < NONE_ENDS for x in means), count, count)
    if not seen:
        return None
    seen |= {
        "since": past.latest[-count]["step"],
        "wrong": not cuts_are_free(past),
        "how_many": "hardly any" if seen["now"] else "no",
        "longer": longer(past, "max_gen_len", 4),
    }
    if template_without_eos(past):
        seen["causes"] = (
            "the chat template ends answers without the EOS token; the EOS token is not the one that the "
            "policy ends with; --max_gen_len is too small"
        )
    if not seen["longer"]:
        seen["remedy"] = (
            "check eos_token in tokenizer_config.json and --prompt_template; the model has no positions for "
            "longer answers"
        )
    return seen


@rule(
    symptom="no response has the think / answer format that is rewarded, so there is nothing to learn it "
    "from",
    numbers="reward/format {start:.3f}, mean of the first 2 steps (0.5: each response)",
    causes="a policy that was not trained on this format; a tokenizer or a template of another model; "
    "--max_gen_len is too small",
    remedy="--reasoning 0, or stage 1 on answers with the format; and check --tokenizer and "
    "--prompt_template",
)
def format_unknown(past):
    """The policy never writes the format that is rewarded."""
    start = past.start("reward/format", 2)
    judged = past.steps == 2 and past.known("reasoning")
    return judged and start < FORMATTED and {"since": 1, "start": start}


@rule(
    symptom="many responses are cut at --max_gen_len",
    numbers="rollout/finished {mean:.2f}, at the start {start:.2f}",
    causes="--max_gen_len is too small; the reward pays for long answers; --learning_rate is too high",
    remedy="{longer_answers} | {more_eos_penalty}, or shorter prompts: the model has no positions for longer "
    "answers",
    source="TRL's PPO guide (the EOS trick)",
)
def few_end(past):
    """Many responses are cut at --max_gen_len, from the start or more and more."""
    count = past.steps_of(FEWEST)
    start = past.start("rollout/finished", count)
    count = max(3, count)
    enough = 0.0 if cuts_are_free(past) else FEW_END
    seen = past.lasting("rollout/finished", lambda x: x < max(enough, start - FALL), count)
    if not (seen and start >= NONE_ENDS):
        return None
    forgets = past.lasting("rollout/finished", lambda x: x < start / 2, count)
    seen |= {"wrong": start >= FINISHED_LEAST and forgets, "start": start}
    if seen["mean"] < start - FALL:
        seen |= {
            "symptom": "the model forgets to stop",
            "causes": "the reward pays for long answers; --learning_rate is too high",
            "remedy": "{more_eos_penalty} {lower_learning_rate}",
        }
    return seen


@rule(
    level=WRONG,
    symptom="most answers are empty: to end at once pays more than to answer",
    numbers="rollout/length {now:.1f} tokens, at the start {start:.1f}",
    causes="{eos_penalty_is_large}; the reward of an empty answer is too high",
    remedy="{less_eos_penalty} {more_kl} | a reward that gives less to an empty answer",
    source="docs/rewards.md",
)
def empty_answers(past):
    """The model has learned to end at once. A response's only token is then its EOS."""
    return past.changed("rollout/length", lambda start, now: now < EMPTY and start > 2 * EMPTY, last=1)


@rule(
    symptom="the answers get {how}, and not clearly better",
    numbers="rollout/length {now:.1f}, at the start {start:.1f}",
    causes="the reward pays for length, not for content; --kl_coef is too small",
    remedy="{more_kl}, or another reward",
    source="Singhal et al. 2023, arXiv:2310.03716",
)
def length_is_gamed(past):
    """The length changes much while nothing independent gets better."""
    paid = past.now("rollout/score_length_corr", 3)
    shorter = past.changed("rollout/length", lambda start, now: now < start / LONGER, 2)
    seen = shorter or past.changed("rollout/length", lambda start, now: now > LONGER * start, 2)
    gamed = past.trend in (0, -1) if past.independent else (-paid if shorter else paid) >= PAID
    return seen and gamed and {**seen, "how": "shorter" if shorter else "longer"}


@rule(
    symptom="the responses repeat themselves",
    numbers="rollout/repetition {now:.2f}, at the start {start:.2f} of a response's trigrams",
    causes="the reward pays for it; --kl_coef is too small; --learning_rate is too high",
    remedy="{more_repetition_penalty} {more_kl} | {lower_learning_rate}",
)
def repetition(past):
    """Responses repeat themselves, and more than at the start."""
    seen = past.lasting("rollout/repetition", lambda x: x > REPEATED)
    more = past.changed("rollout/repetition", lambda start, now: now > start + MORE_REPEATED)
    return seen and more and {**seen, **more, "wrong": more["now"] > MOST_REPEATED}


@rule(
    symptom="many prompts get the same response{not_better}",
    numbers="rollout/distinct {now:.2f}, at the start {start:.2f}",
    causes="the reward pays for one answer whatever the prompt is; --learning_rate is too high",
    remedy="{lower_learning_rate} {more_kl}",
)
def answers_alike(past):
    """Different prompts get the same response. Equal prompts may get equal responses."""
    prompts = (past.known("distinct_prompts") or 1.0) / (past.known("num_generations") or 1)
    seen = past.changed(
        "rollout/distinct", lambda start, now: now < min(ALIKE * min(start, prompts), start - CLEARLY)
    )
    if not seen or past.trend == 1:
        return None
    not_better = "" if past.trend is None else ", and the evaluations do not rise"
    return {**seen, "wrong": past.trend == -1, "not_better": not_better}


# ------------------------------------------------------------------------------- scores and rewards

BY_LENGTH = 0.6  # correlation of score and length
FIRST_STEPS = 4  # in which the policy has hardly moved
SAME = 1e-4  # standard deviation of the scores
SCORED = 500  # responses: of fewer, a reward that is seldom earned can be earned by none
AT_LIMIT = 0.2  # share of responses
ALIKE_GROUPS = 0.8  # share of prompts
FLAT = 1.0  # standard errors of a rise
MOVED = 0.1  # nats a response
REST_OF_GAIN = 0.2  # of the score: the part that is not by rules about the form
LEAST_FALL = 0.02  # of that part
SMALLEST_PRICE = 2e-4  # of a nat, in standard deviations of the score
LIGHTER = {  # rule about the form -> how it weighs less
    **{name: f"a smaller --{name}_penalty" for name in ("repetition", "missing_eos", "overlong")},
    "length_reward": "a smaller --length_reward",
    "thinking": "a smaller --thinking_reward",
    "format": "--reasoning 0",
    "marks": "--reasoning 0",
}


@rule(
    symptom="all responses get the same score: nothing can be learned from them",
    numbers="reward/score_std {reward/score_std:.2g} in {steps} steps",
    causes="a reward function that returns a constant or never finds the answer; "
    "no response so far was right: the task is too hard for this policy; "
    "a reward model that reads its score at a wrong place: pad token or chat template",
    remedy="call the reward on two different answers yourself; see docs/rewards.md",
)
def scores_alike(past):
    """All responses get the same score from the start. Few answers of a hard task can all be wrong."""
    steps = past.steps
    same = past.widest < SAME and past.lasting("reward/score_std", lambda x: x < SAME)
    many = steps * (past.responses or SCORED) >= SCORED
    return same and {"since": past.step - steps + 1, "wrong": many, "steps": steps}


@rule(
    symptom="the answers to most prompts all score the same: there is nothing to compare",
    numbers="rollout/equal_groups {rollout/equal_groups:.2f} of the prompts",
    causes="a reward of few values, as 0 and 1; prompts that are all too easy or all too hard; few answers",
    remedy="{sample_again}, or a finer reward, or prompts that are neither too easy nor too hard",
    source="Yu et al. 2025, arXiv:2503.14476",
)
def groups_alike(past):
    """Most prompts' answers all score the same, where answers are compared."""
    compared = past.known("advantage") in ("rloo", "group")
    return compared and past.lasting("rollout/equal_groups", lambda x: x > ALIKE_GROUPS, LONG)


@rule(
    symptom="many {kind} scores lie outside ±3, where they are cut: better answers get no more",
    numbers="reward/at_limit {reward/at_limit:.2f} of the responses",
    causes="a reward model with a large scale; the policy exploits it",
    remedy="--normalize_reward 1 {critic_from_actor}",
    source="docs/rewards.md",
)
def scores_at_limit(past):
    """The reward model's scores lie outside the range that counts."""
    seen = past.lasting("reward/at_limit", lambda x: x > AT_LIMIT)
    if seen and past.known("normalize_reward"):
        return {**seen, "kind": "normalised", "remedy": "{more_kl}, or another reward"}
    return seen and {**seen, "kind": "raw"}


@rule(
    symptom="the reward prefers the {which} answers of the untrained policy",
    numbers="rollout/score_length_corr {mean:.2f}, mean of the first 3 steps",
    causes="a reward model that learned length; a reward function that counts words or characters",
    remedy="{more_kl}, or another reward",
    source="Singhal et al. 2023, arXiv:2310.03716",
)
def score_follows_length(past):
    """The score of a response is mostly its length, seen before the policy has moved."""
    mean = past.start("rollout/score_length_corr", 3)
    found = past.steps <= FIRST_STEPS and abs(mean) > BY_LENGTH
    return found and {"since": 1, "mean": mean, "which": "longer" if mean > 0 else "shorter"}


@rule(
    offline=True,
    symptom="the held-out {what} falls",
    numbers="{name} {best.value:.3f} at step {best.step}, {last.value:.3f} at step {last.step}; "
    "at the start {first.value:.3f}",
    causes="--learning_rate is too high; the reward is noise; --kl_coef is too small",
    remedy="{more_kl} {lower_learning_rate}; the best weights are kept",
    source="Gao et al. 2022, arXiv:2210.10760",
)
def held_out_falls(past):
    """The score that trains rises, and what it was to improve falls."""
    name = past.quality
    found = past.evaluations(name)
    if not found:
        return None
    first, best, last = found
    least = past.least_difference(name)
    early = not past.independent and first.value == best.value and math.isnan(past.score_rise)
    if early or not best.value - last.value > least:
        return None
    seen = {
        "since": last.step,
        "wrong": first.value - last.value > 2 * least,
        "name": name,
        "what": name.removeprefix("eval/"),
        "first": first,
        "best": best,
        "last": last,
    }
    scores = past.evaluations(past.score.replace("reward/", "eval/"))
    if scores and past.independent and scores[2].value > scores[0].value:
        seen |= {
            "symptom": "the held-out {what} falls while the score rises: the reward is exploited",
            "causes": "the reward pays for something else; --kl_coef is too small; the run is too long",
        }
    return seen


@rule(
    level=WRONG,
    symptom="training makes the model worse by its own reward",
    numbers="{score}: mean of the last {count} steps {now:.3f}, of the first {count} {start:.3f}",
    causes="--learning_rate is too high; the critic is useless; a part of the reward works against it",
    remedy="{lower_learning_rate}",
)
def score_below_start(past):
    """The score has been below its start for ``WINDOW`` steps, by more than it varies from step to step."""
    score = past.score
    chance = max(2 * spread_of_steps(past.starts(score)), 0.0)
    seen = past.changed(score, lambda start, now: start - now > chance, WINDOW, WINDOW)
    if past.steps < 2 * WINDOW or not seen:
        return None
    return {**seen, "since": past.step - WINDOW + 1, "score": score, "count": WINDOW}


@rule(
    symptom="the policy changes, and the score does not rise",
    numbers="{score} {now:.3f}, at the start {start:.3f}, which is {rise:.1f} standard errors; "
    "kl/sequence {moved:.2f}",
    causes="the reward is noise; nothing better can be reached; --batch_size is too small",
    remedy="compare a step's best and worst answers in samples.jsonl: if they are alike, mend the reward; "
    "{larger_batch}",
)
def score_is_flat(past):
    """The policy moves, and neither the score nor the evaluations rise."""
    rise = past.score_rise
    moved = past.now("kl/sequence", WINDOW)
    if not (rise <= FLAT and moved > MOVED) or past.trend == 1:
        return None
    start, now = past.start(past.score, BEGIN), past.now(past.score, WINDOW)
    return {"score": past.score, "start": start, "now": now, "rise": rise, "moved": moved}


@rule(
    symptom="the score rises by rules about the form alone, and the rest of the reward {does}",
    numbers="{gains}",
    causes="{largest} weighs too much beside the rest of the reward",
    remedy="{heavier}, or {lighter}",
)
def form_gains_judge_loses(past):
    """The score rises by rules about the form alone, while the rest of the reward does not rise, or falls."""
    if past.steps < 2 * WINDOW or (past.independent and past.trend == 1):
        return None
    parts = [name.removeprefix("reward/") for name in metric_names(PARTS, past.latest)]
    rules = [part for part in parts if part in FORM_RULES]

    def rest(of):
        """The score without these rules, step by step."""
        columns = [of(past.score), *(of(f"reward/{part}") for part in rules)]
        return [score - sum(form) for score, *form in zip(*columns, strict=False)]

    begin, end = rest(past.starts), rest(past.values)
    if not rules or len(begin) < WINDOW or len(end) < WINDOW:
        return None
    own, least = rise_of(begin, end)
    gain, chance = rise_of(past.starts(past.score), past.values(past.score))
    if not (gain > chance and own <= min(least, REST_OF_GAIN * gain)):
        return None
    gains = {n: rise_of(past.starts(f"reward/{n}"), past.values(f"reward/{n}"))[0] for n in parts}
    largest = max(rules, key=gains.get)
    falls = -own > max(LEAST_FALL, least)
    heavier = with_weights(past, lambda weight: 2 * weight)
    return {
        "wrong": falls,
        "does": "falls" if falls else "does not rise",
        "gains": ", ".join(f"{name} {x:+.2f}" for name, x in gains.items()),
        "largest": largest,
        "heavier": heavier if past.reward_models else "larger scores in the rest of the reward",
        "lighter": LIGHTER[largest],
    }


@rule(
    symptom="the scores are so large that the KL to the reference counts for nothing",
    numbers="--kl_coef {kl_coef:g} beside scores with a standard deviation of {spread:.3g}",
    causes="a reward with a large scale",
    remedy="{heavier}, or a reward divided by {spread:.3g}",
)
def kl_weighs_nothing(past):
    """The KL's price is nothing beside the size of the scores. --kl_target moves the price."""
    spread = past.start("reward/score_std", 2)
    nothing = 0 < past.known("kl_coef") < SMALLEST_PRICE * spread and not past.known("kl_target")
    heavier = f"--kl_coef {0.02 * spread:.2g}" if 0.02 * spread <= TOP["kl_coef"] else ""
    return nothing and past.steps <= FIRST_STEPS and {"since": 1, "spread": spread, "heavier": heavier}


# --------------------------------------- the critic, which suffers from all that is above; the advantages

USELESS = -0.1  # explained variance; a healthy critic can be at 0 where nothing is foreseen
NONSENSE = -2.0  # explained variance of a critic that is broken
BIASED = 0.7  # standard deviations of the scores
VALUE_CLIPPED = 0.2  # share of tokens
ONLY_THE_MEAN = 1.5  # the critic's error; 1 is that of a single number
GONE = 0.05  # standard deviation of the advantages, against its start


@rule(
    offline=True,
    symptom="the critic makes the advantages noisier than no critic would",
    numbers="value/explained_variance {mean:.2f}, mean of {count} steps (0: no use, 1: perfect)",
    causes="--critic_learning_rate is too high; the critic's warm-up was too short; the reward is noise",
    remedy="{lower_critic_learning_rate} {lam_1} {longer_warmup}",
    source="VC-PPO, arXiv:2503.01491",
)
def critic_useless(past):
    """The critic's values are worse than one number for all."""
    seen = past.lasting("value/explained_variance", lambda x: x < USELESS, LONG)
    return seen and {**seen, "wrong": past.lasting("value/explained_variance", lambda x: x < NONSENSE, LONG)}


@rule(
    offline=True,
    symptom="the critic's values are too {where}: it does not follow the policy",
    numbers="value/bias {mean:.2f}, the scores' standard deviation {spread:.2f}",
    causes="{critic_learning_rate_is}; {value_clip_is_small}; the scores change fast",
    remedy="{other_critic_learning_rate} {lam_1}",
    source="VC-PPO, arXiv:2503.01491",
)
def critic_biased(past):
    """The critic's mean is far from that of the returns, for long."""
    spread = past.now("reward/score_std", LONG)
    seen = past.lasting("value/bias", lambda x: abs(x) > BIASED * spread > 0, LONG)
    return seen and {**seen, "spread": spread, "where": "high" if seen["mean"] > 0 else "low"}


@rule(
    offline=True,
    symptom="the clip of the values takes the gradient of many tokens from the critic",
    numbers="value/clip_fraction {value/clip_fraction:.2f}, --cliprange_value {cliprange_value:g}",
    causes="--cliprange_value is too small; --critic_learning_rate is too high",
    remedy="{wider_value_clip} | {lower_critic_learning_rate}",
    source="Andrychowicz et al. 2020, arXiv:2006.05990",
)
def critic_is_held(past):
    """The clip of the values stops the critic."""
    return past.lasting("value/clip_fraction", lambda x: x > VALUE_CLIPPED)


@rule(
    offline=True,
    symptom="the critic's error does not fall below that of a single number for all",
    numbers="value/error {mean:.2f} (about 1: knows only the mean)",
    causes="{critic_learning_rate_is}; extreme scores",
    remedy="{other_critic_learning_rate}",
)
def critic_learns_nothing(past):
    """The critic's error is as large as that of a single number, and does not fall."""
    return past.lasting("value/error", lambda x: x > ONLY_THE_MEAN, LONG)


@rule(
    offline=True,
    symptom="the advantages have become nearly equal: nothing is left to learn from but noise",
    numbers="policy/advantage_std {now:.3g}, at the start {start:.3g}",
    causes="the task is learned: the run can end; the reward knows few different values",
    remedy="harder prompts in --data_path, or a finer reward",
)
def advantages_gone(past):
    """All responses of a batch are equally good: what is learned from is noise."""
    seen = past.changed("policy/advantage_std", lambda start, now: now == 0 or now < GONE * start)
    if seen and not seen["now"]:
        seen["symptom"] = "the advantages are all equal: there is nothing to learn from"
    return seen
