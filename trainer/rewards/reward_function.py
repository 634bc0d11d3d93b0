"""A reward of your own: ``--reward_fn file.py:function`` scores responses with a Python function.

Nothing in this program has to be changed for it. The function gets a batch and returns a number for each
response:

    def score(prompts, responses, answers):     # B prompts (text or messages), texts, answers (text or None)
        return [...]                            # B finite numbers, or lists of steps

These three are passed by position, so they may have other names. What the function asks for beyond them is
passed by name, one value for each response:

    def score(prompts, responses, answers, records):      # the records of the data file, as dicts
    def score(prompts, responses, answers, tests):        # the field "tests" of each record, None without it
    def score(prompts, responses, answers, **columns):    # every field that a record of the batch has

A parameter with a default keeps it where no record of the batch has the field. One without a default must be
a field of the file: a run checks that before it samples anything (``check_columns``).

A number is the score of the whole response. Instead of one, a list of pairs (character offset, score) may be
returned for a response: each score is the reward of the step that ends with this character, and the
response's score is their sum. trainer/collect.py finds the tokens. The score is the part "function" of
the response's (reward.py), neither clipped nor normalised.

The function may take ``--reward_timeout`` seconds (time_limit.py). If it fails, the run saves and ends with
one line. An example: gsm8k.py. For a reward in another language or on another machine see reward_server.py;
for a new rule inside this program see reward.py.
"""

import copy
import importlib.util
import inspect
import operator
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path

import torch

from dataset.formats import keys_found
from errors import InputError
from progress_bar import phase
from trainer.rewards.time_limit import TimeUp, time_limit

RECORDS = "records"  # the parameter that gets whole records
# The places of names that can mean only one thing: a function with another order must not be called wrongly.
# "completions" is what TRL calls the responses.
PLACES = {"prompts": 0, "responses": 1, "completions": 1}


def load_reward_function(spec: str, *datasets):
    """``path.py:function`` -> the function, None for "". Raises InputError if it does not exist, if importing
    it fails, if it cannot be called with prompts, responses and answers, or if it asks for what the records
    of one of the datasets (or None) do not have."""
    if not spec:
        return None
    path, _, name = spec.rpartition(":")
    if not path.endswith(".py") or not Path(path).is_file():
        what = "names no function" if Path(spec).is_file() else "no such file"
        raise InputError(f"--reward_fn {spec}: {what}; write it as path.py:function")
    # The prefix keeps a file called json.py from replacing Python's own module json.
    module_spec = importlib.util.spec_from_file_location(f"reward_fn_{Path(path).stem}", path)
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # dataclasses look up their module there
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise InputError(f"--reward_fn {path}: importing it failed: {repr(error)[:200]}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise InputError(f"--reward_fn {path}: has no function {name!r}")
    wanted(function)
    for data in filter(None, datasets):
        check_columns(function, data.columns, data.path)
    return function


def wanted(function) -> dict:
    """What a reward function asks for beyond its first three parameters -> {name: its parameter}. Raises
    InputError unless the first three can be prompts, responses and answers."""
    signature = inspect.signature(function)
    names = list(signature.parameters)
    try:
        given = signature.bind_partial("prompts", "responses", "answers").arguments
    except TypeError:  # it takes fewer
        given = {}
    if not given or any(PLACES.get(name, place) != place for place, name in enumerate(names[:3])):
        raise InputError(
            "--reward_fn: the function is called with prompts, responses, answers, so its first three "
            f"parameters must be these, in this order; they are ({', '.join(names)[:100]})"
        )
    more = {name: p for name, p in signature.parameters.items() if name not in given}
    return {name: p for name, p in more.items() if p.kind != p.VAR_POSITIONAL}


def must_have(p):
    """Whether a parameter has no default, and is not **columns, which takes every field."""
    return p.default is p.empty and p.kind != p.VAR_KEYWORD


def check_columns(function, columns, path):
    """Raise InputError if the function asks for a field that no record of the data file has. columns: the
    keys of the file's records; path: the file."""
    for name, p in wanted(function).items():
        if must_have(p) and name != RECORDS and name not in columns:
            raise InputError(
                f"--reward_fn: its parameter {name!r} is no key of the records of {path}; "
                f"{keys_found(dict.fromkeys(columns))}: rename it, or give it a default"
            )


def fields(function, records) -> dict:
    """What the function asks for beyond prompts, responses and answers, of B records -> {name: list of B}."""
    asked = wanted(function)
    found = dict.fromkeys(name for record in records for name in record)
    names = [name for name, p in asked.items() if name in found or must_have(p)]
    if any(p.kind == p.VAR_KEYWORD for p in asked.values()):
        taken = asked.keys() | inspect.signature(function).parameters
        names += [name for name in found if name not in taken]
    values = {name: [record.get(name) for record in records] for name in names}
    return values | ({RECORDS: records} if RECORDS in asked else {})


def call_reward_function(function, request, seconds: float):
    """Call the user's function on a ``Request`` -> scores [B], fp32, and for each response the rewards of its
    steps, a list of (character offset or None, score), empty without steps. seconds: time limit, 0 for none.

    Raises InputError if the function raises an exception (the message names file and line), takes longer, or
    returns anything else than B numbers or lists of steps.
    """
    prompts = request.prompts
    batch = [p.prompt for p in prompts], request.responses, [p.answer for p in prompts]
    try:
        # Copies, so that the function may change its arguments.
        batch, more = copy.deepcopy((batch, fields(function, [p.record for p in prompts])))
        with phase("reward function"), time_limit(seconds):
            scores, steps = as_scores(function(*batch, **more), request.responses)
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


# ---------------------------------------------------------------- what it returned


def as_scores(returned, responses):
    """-> (a float for each response: its number, or the sum of its steps; a list of (offset or None, float)
    for each response, empty where a number was returned). responses: the texts that were scored.

    Raises InputError that says what is wrong with what was returned.
    """
    count = len(responses)
    scores = (
        list(returned)
        if isinstance(returned, Iterable) and not isinstance(returned, str | bytes | dict | set)
        else []
    )
    if len(scores) != count:
        what = f"{len(scores)} scores for {count} responses" if scores else _shown(returned)
        raise InputError(
            f"--reward_fn: returned {what}; return a list of {count} numbers, one for each response"
        )
    found = []
    steps = []
    for i, (score, response) in enumerate(zip(scores, responses, strict=True)):
        place = f"score {i + 1}"
        stepwise = isinstance(score, list | tuple)
        steps.append(_steps(score, place, len(response)) if stepwise else [])
        found.append(sum((x for _, x in steps[-1]), 0.0) if stepwise else _number(score, place))
    return found, steps


def _steps(pairs, place, length):
    """The pairs that were returned for a response of ``length`` characters -> [(offset or None, float), …]"""
    steps = []
    for number, pair in enumerate(pairs):
        here = f"{place}, entry {number + 1}"
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise InputError(
                f"--reward_fn: {here} is {_shown(pair)}; a list must hold pairs (character offset, score)"
            )
        offset, score = pair
        if offset is not None and not (hasattr(offset, "__index__") and 0 <= offset <= length):
            raise InputError(
                f"--reward_fn: {here}: the offset {_shown(offset)} is no whole number from 0 to "
                f"{length}, the number of characters; count them from 0, or give None for the end"
            )
        if offset is not None:
            offset = operator.index(offset)
        steps.append((offset, _number(score, f"{here}: its score")))
    return steps


def _number(score, place):
    try:
        return float(score)
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"--reward_fn: {place} is {_shown(score)} and no number; correct it") from None


def _shown(value):
    return f"{' '.join(repr(value).split())[:60]} ({type(value).__name__})"
