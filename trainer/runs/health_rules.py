"""The rules of health.py: the rows of health.toml, and functions for those that have no conditions there.

A function looks at a run so far (``Past``), before the first step too, and returns what it has seen, by the
names that the texts of its row have for it; nothing if all is well. Two names mean more: ``since``, the first
step that shows it, if that is not the newest one; and ``wrong``: is the finding of that level?
"""

import math
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from trainer.runs.displays import RULES as FORM_RULES
from trainer.runs.health_past import BEGIN, CLEAR, WINDOW, Past

WRONG = "wrong"  # the levels of a finding
LOOK = "look"
ROWS = tomllib.loads(Path(__file__).with_name("health.toml").read_text(encoding="utf-8"))
MOVE = re.compile(r"--(\w+) ([x/]?)(\d[\w.+-]*|float32|actor)")  # of a remedy


@dataclass(frozen=True)
class Rule:
    """A row of health.toml, which says what its fields mean."""

    name: str
    symptom: str
    numbers: list[str]
    causes: list[str]
    remedy: list[str]
    source: str = "judgement: docs/health.md"  # a limit that was found here
    offline: bool = False
    look: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()

    def seen(self, past: Past) -> dict | None:
        """What a run so far shows of it; nothing if all is well."""
        if self.name in globals():
            return globals()[self.name](past)
        if wrong := past.holds(*self.wrong):
            return {**wrong, "wrong": True}
        return past.holds(*self.look)


RULES = [Rule(name=name, **row) for name, row in ROWS["rules"].items()]


# ----------------------------------------------------------------------------------------- remedies

FAR = 20  # times the learning rate that suits the model's size, or that part of it
POSITIONS = {"max_gen_len": "longest", "max_seq_len": "max_gen_len"}  # a length and what stands beside it


def usual_flags(past: Past) -> dict:
    """{flag: [the least and the most that help, a usual value]}."""
    suited = past.known("suited") or {}
    return ROWS["usual"] | {name: [rate / FAR, rate * FAR, rate] for name, rate in suited.items()}


def moved(past: Past, flag: str, sign: str, number: str) -> str:
    """A flag of a remedy with its value, for this run; "" where the run has it already."""
    if flag == "kl_coef" and past.known("kl_target"):  # it moves --kl_coef
        return moved(past, "kl_target", "/", "3")
    now = past.known(flag)
    _, most, usual = usual_flags(past).get(flag, (0, math.inf, now))
    if flag in POSITIONS:
        most = (past.known("positions") or math.inf) - past.known(POSITIONS[flag])
    value = number
    if sign == "x":
        value = plain(min(max(now * int(number), usual), most))
    elif sign:
        value = plain(min(now / int(number), usual))
    return "" if value == plain(now) else f"--{flag} {value}"


def plain(value: object) -> str:
    """A value of a flag as text; two digits of a number that is not whole."""
    return f"{value:.2g}" if isinstance(value, float) else str(value)


def remedy_of(ways: list[str], past: Past) -> str:
    """The first of these texts whose first flag changes, or that has none, with the values for this run."""
    for text in ways:
        moves = {move[0]: moved(past, *move.groups()) for move in MOVE.finditer(text)}
        if next(iter(moves.values()), text):
            for old, new in moves.items():
                text = text.replace(old, new)
            return " ".join(text.split())
    return "see docs/health.md"


# --------------------------------------------------------- before training: flags, data, templates

DROPPED = 0.2  # share of the records
NEARLY_ALL = 0.9
UNKNOWN = 0.02  # share of the prompts' tokens
OFTEN = 30  # times that a prompt is seen
FEW_SAMPLES = 16  # responses a step
FORM = 1.5  # the most that the format and its marks can give
SCORE_LIMIT = 3.0  # the most that a reward model of weight 1 can give


def judges_without(past: Past, what: str) -> dict:
    """``names`` of the reward models that lack this of their facts; nothing if none does."""
    names = [name for name, model in (past.known("reward_models") or {}).items() if not model[what]]
    return {"names": ", ".join(names)} if names else {}


def missing_header(past):
    """The prompts end before the assistant's turn begins."""
    return past.known("missing_header") and {"wrong": True}


def judge_is_blind(past):
    """The text that a reward model reads does not change with the answer."""
    found = judges_without(past, "sees_answer")
    return found and {**found, "wrong": True}


def judge_without_template(past):
    """The policy has a chat template and a reward model has none."""
    return past.known("chat_template") and judges_without(past, "template")


def records_dropped(past):
    """Much of the data is not used."""
    dropped = past.known("dropped")
    share = dropped / (past.known("read") or math.inf)
    seen = {"what": "prompts", "flag": "max_seq_len", "share": share, "wrong": share > NEARLY_ALL}
    if past.known("long_answers") > dropped / 2:  # of --offline_data_path
        seen |= {"what": "logged answers", "flag": "max_gen_len"}
    return share > DROPPED and seen


def unusual_flags(past):
    """Flags far outside the range in which they help. A flag that is 0 is off."""
    odd = []
    usual = []
    for name, (least, most, better) in usual_flags(past).items():
        value = past.args.get(name)
        if value and not least <= value <= most:
            odd.append(f"--{name} {value:g} (usual: {least:g} to {most:g})")
            usual.append(f"--{name} {better:g}")
    return odd and {"odd": ", ".join(odd), "usual": " ".join(usual)}


def form_outweighs_judge(past):
    """The reward of the format is larger than what the reward models can give."""
    models = past.known("reward_models") or {}
    most = SCORE_LIMIT * sum(abs(model["weight"]) for model in models.values())
    return past.known("reasoning") and 0 < most < FORM and {"most": most}


def nothing_holds_the_policy(past):
    """No KL term, and a reward model that can be exploited."""
    return past.args.get("kl_coef") == 0 and past.known("reward_model") and {"since": 0}


def template_without_eos(past):
    """The template ends an answer with another token than the one that the run waits for."""
    return past.facts.get("template_has_eos") is False and {"since": 0}


def other_tokenizer(past):
    """The tokenizer has too few ids for this model, or does not know the prompts' words."""
    return (past.known("fewer_ids") or past.known("unknown_tokens") > UNKNOWN) and {"since": 0}


def few_prompts(past):
    """The same few prompts come back again and again."""
    prompts = past.known("prompts")
    times = past.known("total_steps") * past.responses / (prompts or math.inf)
    return times > OFTEN and {"times": times, "most": math.ceil(OFTEN * prompts / past.responses)}


def small_batch(past):
    """So few responses a step that chance decides about a step."""
    return 0 < past.responses < FEW_SAMPLES and {"count": past.responses}


# ------------------------------------------------- the policy: ratio, steps, entropy

FIRST_RATIO = {"float32": 1e-3, "float16": 0.02}  # how far from 1; of bfloat16: 0.05


def first_ratio(past):
    """Before the first update of a batch the actor is the old actor, and their ratio is 1."""
    off = abs(past.now("policy/first_ratio") - 1) > FIRST_RATIO.get(past.known("dtype"), 0.05)
    return off and past.known("update_old_actor_freq") <= 1 and {"wrong": True}


def policy_is_stuck(past):
    """The policy trains and does not move. Where all scores are equal, scores_alike says why."""
    seen = past.holds(
        "kl/sequence < 0.03 in 10 steps and kl/sequence > -0.03 in 10 steps "
        "and reward/score_std > 0.0001 in 10 steps"
    )
    trains = len(past.values("policy/loss")) == WINDOW
    return trains and not past.score_rise > CLEAR and seen


def entropy_collapses(past):
    """The policy has become certain and no better."""
    return past.no_better and past.holds("policy/entropy < 0.1 times its start in 3 steps")


def entropy_rises(past):
    """The policy becomes random, and no better."""
    return past.no_better and past.holds(
        "policy/entropy > 2 times its start in 3 steps and policy/entropy > 0.4 in 3 steps"
    )


# ------------------------------------------------------------------------------------ the responses

NONE_ENDS = 0.02  # share of responses
FALLS_FROM = 0.2  # a smaller share at the start cannot fall far
FORMATTED = 0.01  # of reward/format: a share of 2 %
PAID = 0.5  # correlation of score and length, where there is no accuracy and no judge


def cuts_are_free(past: Past) -> bool:
    """Does the run say that answers may be cut?"""
    return past.args.get("missing_eos_penalty") == 0


def never_ends(past):
    """Hardly a response ends by itself from the start on."""
    count = max(2, past.enough)
    start = past.start("rollout/finished", count)
    seen = {"since": 1, "start": start, "wrong": not cuts_are_free(past)}
    return past.steps == count and start < NONE_ENDS and seen


def format_unknown(past):
    """The policy never writes the format that is rewarded."""
    start = past.start("reward/format", 2)
    judged = past.steps == 2 and past.known("reasoning")
    return judged and start < FORMATTED and {"since": 1, "start": start}


def few_end(past):
    """Many responses are cut at --max_gen_len."""
    if cuts_are_free(past) or forgets_to_stop(past):
        return None
    ends = past.start("rollout/finished", past.enough) >= NONE_ENDS  # else never_ends says it
    return ends and past.holds(f"rollout/finished < 0.7 in {max(3, past.enough)} steps")


def forgets_to_stop(past):
    """Responses ended by themselves at the start, and fewer and fewer do."""
    fell = past.holds("rollout/finished < 0.8 times its start in 3 steps")
    far = past.holds("rollout/finished < 0.5 times its start in 3 steps")
    return fell and fell["start"] > FALLS_FROM and {**fell, "wrong": bool(far)}


def length_is_gamed(past):
    """The length changes much while nothing independent gets better, or where it is paid for."""
    longer = past.holds("rollout/length > 1.4 times its start in 3 steps")
    seen = longer or past.holds("rollout/length < 0.7 times its start in 3 steps")
    paid = past.now("rollout/score_length_corr", 3)
    gamed = past.trend in (0, -1) if past.independent else (paid if longer else -paid) >= PAID
    return gamed and seen


def answers_alike(past):
    """Different prompts get the same response. Equal prompts may get equal responses."""
    prompts = (past.known("distinct_prompts") or 1.0) / (past.known("num_generations") or 1)
    seen = past.holds(
        f"rollout/distinct < 0.5 times its start in 3 steps and rollout/distinct < {0.5 * prompts} in 3 steps"
    )
    return seen and past.trend != 1 and {**seen, "wrong": past.trend == -1}


# ------------------------------------------------------------------------------- scores and rewards

SAME = 1e-4  # standard deviation of the scores
SCORED = 500  # responses: of fewer, a reward that is seldom earned can be earned by none
BY_LENGTH = 0.6  # correlation of score and length
FIRST_STEPS = 4  # in which the policy has hardly moved
BROKEN = -4.0  # standard errors of a rise of the score
FLAT = 1.0
MOVED = 0.1  # nats a response
ALONE = 0.8  # share of the rise of the score
SMALLEST_PRICE = 2e-4  # of a nat, in standard deviations of the score


def scores_alike(past):
    """All responses get the same score from the start. Few answers of a hard task can all be wrong."""
    same = past.holds("reward/score_std < 0.0001 in 3 steps")
    many = past.steps * past.responses >= SCORED
    seen = {"since": 1, "wrong": many, "steps": past.steps}
    return same and past.start("reward/score_std", min(past.steps, WINDOW)) < SAME and seen


def groups_alike(past):
    """Most prompts' answers all score the same, where answers are compared."""
    compared = past.known("advantage") in ("rloo", "group")
    return compared and past.holds("rollout/equal_groups > 0.8 in 5 steps")


def score_follows_length(past):
    """The score of a response is mostly its length, seen before the policy has moved."""
    mean = past.start("rollout/score_length_corr", 3)
    found = past.steps <= FIRST_STEPS and abs(mean) > BY_LENGTH
    return found and {"since": 1, "mean": mean, "which": "longer" if mean > 0 else "shorter"}


def held_out_falls(past):
    """What was held out gets worse."""
    found = past.evaluations(past.witness)
    if not found:
        return None
    first, best, last = found
    least = past.least_difference(best, last)
    scores = past.evaluations(past.score.replace("reward/", "eval/"))
    exploited = past.independent and scores and scores[2].value > scores[0].value
    return best.value - last.value > least and {
        "wrong": first.value - last.value > 2 * least,
        "what": past.witness.removeprefix("eval/"),
        "exploited": " while the score rises: the reward is exploited" if exploited else "",
        "first": first,
        "best": best,
        "last": last,
    }


def score_change(past: Past) -> dict:
    """The score at the start and in the latest steps, by the names that texts have for it."""
    return {
        "score": past.score,
        "start": past.start(past.score, BEGIN),
        "now": past.now(past.score, WINDOW),
        "rise": past.score_rise,
    }


def score_below_start(past):
    """The score falls far below its start."""
    return past.score_rise < BROKEN and {**score_change(past), "wrong": True}


def score_is_flat(past):
    """The policy moves, and neither the score nor the evaluations rise."""
    flat = BROKEN <= past.score_rise <= FLAT and past.trend != 1
    return flat and past.now("kl/sequence", WINDOW) > MOVED and score_change(past)


def form_gains_judge_loses(past):
    """The score rises by rules about the form alone, and nothing independent gets better."""
    names = [f"reward/{rule}" for rule in FORM_RULES if past.values(f"reward/{rule}")]
    form = sum(past.now(name, WINDOW) - past.start(name, BEGIN) for name in names)
    seen = score_change(past)
    alone = past.score_rise > CLEAR and form > ALONE * (seen["now"] - seen["start"])
    better = past.independent and past.trend == 1
    return alone and not better and {**seen, "form": form, "names": ", ".join(names)}


def kl_weighs_nothing(past):
    """The KL's price is nothing beside the size of the scores. --kl_target moves the price."""
    spread = past.start("reward/score_std", 2)
    nothing = 0 < past.known("kl_coef") < SMALLEST_PRICE * spread and not past.known("kl_target")
    return nothing and past.steps <= FIRST_STEPS and {"since": 1, "spread": spread}
