"""A reward of your own: ``--reward_fn file.py:function`` scores responses with a Python function.

Nothing in this program has to be changed for it. The function gets a batch and returns a number for each
response:

    def score(prompts, responses, answers):     # B prompts (text or messages), texts, answers (text or None)
        return [...]                            # B finite numbers, or lists of steps (returned_scores.py)

These three are passed by position, so they may have other names. What the function asks for beyond them is
passed by name, one value for each response:

    def score(prompts, responses, answers, records):      # the records of the data file, as dicts
    def score(prompts, responses, answers, tests):        # the field "tests" of each record, None without it
    def score(prompts, responses, answers, **columns):    # every field that a record of the batch has

A parameter with a default keeps it where no record of the batch has the field. One without a default must be
a field of the file: a run checks that before it samples anything (``check_columns``).

The number is the part "function" of the response's score (reward.py), neither clipped nor normalised. The
function may take ``--reward_timeout`` seconds (time_limit.py). If it fails, the run saves and ends with one
line. An example: gsm8k.py. For a reward in another language or on another machine see reward_server.py; for a
new rule inside this program see reward.py.
"""

import copy
import importlib.util
import inspect
import sys
import traceback
from pathlib import Path
from typing import NamedTuple

import torch

from dataset.keys import keys_found
from errors import InputError
from progress_bar import phase
from trainer.rewards.returned_scores import as_scores
from trainer.rewards.time_limit import TimeUp, time_limit

RECORDS = "records"  # the parameter that gets whole records
# The places of names that can mean only one thing: a function with another order must not be called wrongly.
# "completions" is what TRL calls the responses.
PLACES = {"prompts": 0, "responses": 1, "completions": 1}


class Wanted(NamedTuple):
    """What a reward function asks for beyond prompts, responses and answers."""

    optional: dict  # {name of a parameter: has it a default?}
    every: bool  # has it **columns, which take every field?
    taken: set  # names that cannot be passed again


def load_reward_function(spec):
    """``path.py:function`` -> the function. Raises InputError if it does not exist, if importing it fails, or
    if it cannot be called with prompts, responses and answers."""
    path, _, name = spec.rpartition(":")
    if Path(spec).is_file():
        raise InputError(f"--reward_fn {spec}: names no function; write it as {spec}:function")
    if not path.endswith(".py") or not Path(path).is_file():
        raise InputError(f"--reward_fn {spec}: no such file; write it as path.py:function")
    # The prefix keeps a file called json.py from replacing Python's own module json.
    module_spec = importlib.util.spec_from_file_location(f"reward_fn_{Path(path).stem}", path)
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # dataclasses look up their module there
    try:
        module_spec.loader.exec_module(module)
    except KeyboardInterrupt:  # Ctrl-C while loading
        raise
    except BaseException as error:  # the user's file may raise anything
        raise InputError(f"--reward_fn {path}: importing it failed: {repr(error)[:200]}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise InputError(f"--reward_fn {path}: has no function {name!r}")
    wanted(function)
    return function


def wanted(function):
    """The function's parameters -> ``Wanted``. Raises InputError unless the first three can be prompts,
    responses and answers."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some functions that are not written in Python do not say
        return Wanted({}, False, set())
    kinds = {p.kind for p in parameters}
    placed = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    first, more = placed[:3], placed[3:] + [p for p in parameters if p.kind == p.KEYWORD_ONLY]
    in_order = all(PLACES.get(p.name, i) == i for i, p in enumerate(first))
    if not in_order or (len(first) < 3 and inspect.Parameter.VAR_POSITIONAL not in kinds):
        names = ", ".join(p.name for p in parameters)[:100]
        raise InputError(
            "--reward_fn: the function is called with prompts, responses, answers, so its first three "
            f"parameters must be these, in this order; they are ({names})"
        )
    optional = {p.name: p.default is not p.empty for p in more}
    return Wanted(optional, inspect.Parameter.VAR_KEYWORD in kinds, {p.name for p in first})


def check_columns(function, columns, path):
    """Raise InputError if the function asks for a field that no record of the data file has. columns: the
    keys of the file's records; path: the file."""
    for name, optional in wanted(function).optional.items():
        if not (optional or name == RECORDS or name in columns):
            raise InputError(
                f"--reward_fn: its parameter {name!r} is no key of the records of {path}; "
                f"{keys_found(dict.fromkeys(columns))}: rename it, or give it a default"
            )


def fields(function, records):
    """What the function asks for beyond prompts, responses and answers, of B records -> {name: list of B}."""
    optional, every, taken = wanted(function)
    found = dict.fromkeys(name for record in records for name in record)
    names = [name for name, default in optional.items() if name in found or not default]
    if every:
        names += [name for name in found if name not in taken | optional.keys()]
    values = {name: [record.get(name) for record in records] for name in names}
    return values | ({RECORDS: list(records)} if RECORDS in optional else {})


def call_reward_function(function, prompts, responses, answers, records, seconds):
    """Call the user's function on B responses -> scores [B], fp32, and for each response the rewards of its
    steps, a list of (character offset or None, score), empty without steps. seconds: time limit, 0 for none.

    Raises InputError if the function raises an exception (the message names file and line), takes longer, or
    returns anything else than B numbers or lists of steps.
    """
    try:
        # Copies, so that the function may change its arguments.
        *batch, more = copy.deepcopy((prompts, responses, answers, fields(function, records)))
        with phase("reward function"), time_limit(seconds):
            scores, steps = as_scores(function(*batch, **more), responses)
    except TimeUp:
        raise InputError(
            f"--reward_fn: no answer after {seconds:g} s; speed it up or raise --reward_timeout"
        ) from None
    except InputError:
        raise
    except BaseException as error:  # the user's code may raise anything
        frames = traceback.extract_tb(error.__traceback__)
        places = [f" at {f.filename}:{f.lineno}" for f in frames if f.filename != __file__]
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise InputError(
            f"--reward_fn: {reason}{places[0] if places else ' when it was called'}; correct the function"
        ) from error
    return torch.tensor(scores, dtype=torch.float32), steps
