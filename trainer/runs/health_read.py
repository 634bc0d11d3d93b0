"""A run folder -> what health.py judges: the lines of metrics.jsonl, and config.json.

Both may come from an older version, a run that was killed, or an editor. What the checks cannot compute with
is named in one line, with its file. The checks ask only for flags and facts that are listed here.
"""

import json
import math
from pathlib import Path

from errors import InputError

LARGEST = 2**63  # of a whole number: no run writes a larger one
# Flags that are numbers.
NUMBERS = (
    "batch_size",
    "clip_epsilon",
    "cliprange_value",
    "critic_learning_rate",
    "critic_warmup_steps",  # or "auto"
    "epochs",
    "filter_groups",
    "gamma",
    "grad_clip",
    "kl_coef",
    "kl_target",
    "lam",
    "learning_rate",
    "max_gen_len",
    "max_seq_len",
    "max_steps",
    "missing_eos_penalty",
    "normalize_reward",
    "num_generations",
    "ppo_epochs",
    "processes",
    "reasoning",
    "repetition_penalty",
    "target_kl",
    "temperature",
    "total_steps",
    "update_old_actor_freq",
)
COUNTS = (  # facts that are numbers, 0 or more; "longest" is needed beside "positions"
    "distinct_prompts",
    "dropped",
    "held_out",
    "held_out_pairs",
    "long_answers",
    "longest",
    "positions",
    "prompts",
    "read",
    "unknown_tokens",
    "vocabulary",
)


def read_run(folder):
    """A run folder -> (lines of metrics.jsonl, config.json), as ``findings`` of health.py takes them.

    An incomplete last line, of a run that was killed, is left out. InputError names what cannot be read.
    """
    path, lines = Path(folder) / "metrics.jsonl", []
    try:
        texts = path.read_text(encoding="utf-8").split("\n")
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{folder}: is no run folder ({reason}); name one such as out/run_1") from None
    for number, text in enumerate(texts, 1):
        try:
            if text:
                lines.append(checked_line(json.loads(text)))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            if number == len(texts):  # cut while it was written
                break
            raise InputError(f"{path}, line {number}: is no line of metrics ({error}); restore it") from None
    if problem := problem_of(config):
        raise InputError(f"{folder}/config.json: {problem}; restore it, or name another run folder")
    return lines, config


def checked_line(record):
    """A line of metrics.jsonl, as JSON -> the same. Raises ValueError, KeyError or TypeError for one that no
    run writes."""
    if type(record["step"]) is not int or record["step"] < 0:
        raise ValueError("its step is no whole number from 0 on")
    for name, x in record.items():
        if isinstance(x, int) and abs(x) > LARGEST:
            raise ValueError(f"{name} is too large")
    return record


def problem_of(config):
    """What is wrong with a config.json; "" where the checks can compute with it."""
    if not isinstance(config, dict):
        return "holds no flags"
    for name in NUMBERS:
        value = config.get(name)
        if not (value is None or is_number(value) or (name, value) == ("critic_warmup_steps", "auto")):
            return f"{name} is no number"
    models = config.get("reward_model")
    if not (isinstance(models, str | None) or (isinstance(models, list) and all(map(is_text, models)))):
        return "reward_model is no list of paths"
    if not isinstance(config.get("dtype"), str | None):
        return "dtype is no text"
    facts = config.get("facts", {})
    return problem_of_facts(facts) if isinstance(facts, dict) else "facts is no object"


def problem_of_facts(facts):
    """What is wrong with the facts of a config.json (start_facts.py); "" for nothing. Any may be missing."""
    for name in COUNTS:
        value = facts.get(name)
        if not (value is None or (is_number(value) and value >= 0)):
            return f"facts, {name}: is no number from 0 on"
    if facts.get("positions") and facts.get("longest") is None:
        return "facts: has positions, but not longest"
    if not isinstance(facts.get("dtype"), str | None):
        return "facts, dtype: is no text"
    fewer = facts.get("fewer_ids")
    if not (fewer is None or (isinstance(fewer, list) and len(fewer) == 2)):
        return "facts, fewer_ids: is not two numbers"
    suited, models = facts.get("suited", {}), facts.get("reward_models", {})
    if not (isinstance(suited, dict) and all(map(is_number, suited.values()))):
        return "facts, suited: is no object of numbers"
    if not (isinstance(models, dict) and all(map(is_model, models.values()))):
        return "facts, reward_models: has no weight, template and sees_answer for each"
    return ""


def is_text(x):
    """Is this a text?"""
    return isinstance(x, str)


def is_number(x):
    """Is this a number that one can compute with?"""
    if isinstance(x, int):
        return abs(x) <= LARGEST
    return isinstance(x, float) and math.isfinite(x)


def is_model(facts):
    """Are these the facts of a reward model? A weight of 0 is refused when a run begins."""
    known = isinstance(facts, dict) and {"template", "sees_answer"} <= facts.keys()
    return known and is_number(facts.get("weight")) and facts["weight"] != 0
