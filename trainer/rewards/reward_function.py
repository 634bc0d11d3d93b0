"""A reward of your own: ``--reward_fn file.py:function`` scores responses with a Python function.

Nothing in this program has to be changed for it. The function gets a batch and returns a number for each
response:

    def score(prompts, responses, answers):     # B prompts (text or messages), texts, answers (text or None)
        return [...]                            # B finite numbers

The number is the part "function" of the response's score (reward.py), neither clipped nor normalised. The
function may take ``--reward_timeout`` seconds (time_limit.py). If it fails, the run saves and ends with one
line. For a reward in another language or on another machine see reward_server.py; for a new rule inside this
program see reward.py.
"""

import copy
import importlib.util
import sys
import traceback
from pathlib import Path

import torch

from errors import InputError
from trainer.rewards.time_limit import TimeUp, time_limit


def load_reward_function(spec):
    """``path.py:function`` -> the function. Raises InputError if it does not exist or importing it fails."""
    path, _, name = spec.rpartition(":")
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
    return function


def call_reward_function(function, prompts, responses, answers, seconds):
    """Call the user's function on B responses -> scores [B], fp32. seconds: time limit, 0 for none.

    Raises InputError if the function raises an exception (the message names file and line), takes longer, or
    returns a wrong number of scores.
    """
    try:
        copies = copy.deepcopy((prompts, responses, answers))  # so the function may change its arguments
        with time_limit(seconds):
            scores = [float(score) for score in function(*copies)]
    except TimeUp:
        raise InputError(
            f"--reward_fn: no answer after {seconds:g} s; speed it up or raise --reward_timeout"
        ) from None
    except BaseException as error:  # the user's code may raise anything
        frames = traceback.extract_tb(error.__traceback__)
        places = [f" at {f.filename}:{f.lineno}" for f in frames if f.filename != __file__]
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise InputError(
            f"--reward_fn: {reason}{places[0] if places else ', in what it returned'}; correct the function"
        ) from error
    if len(scores) != len(responses):
        raise InputError(
            f"--reward_fn: returned {len(scores)} scores for {len(responses)} responses; return one each"
        )
    return torch.tensor(scores)
