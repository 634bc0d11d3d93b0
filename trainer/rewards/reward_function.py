"""A reward of your own: ``--reward_fn file.py:function`` scores responses with a Python function.

    def score(prompts, responses, answers):     # B prompts (text or messages), texts, answers (text or None)
        return [...]                            # B finite numbers, or lists of steps

What else it may ask for, what it may return, and examples: docs/rewards.md. Its scores are the part
"function" of the reward (combine.py), neither clipped nor normalised. It may take ``--reward_timeout`` s.
"""

import copy
import inspect
import operator
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import Parameter
from pathlib import Path
from types import ModuleType

import torch

from dataset.formats import keys_found
from dataset.lm_dataset import Prompt, RecordDataset
from errors import InputError
from model.weights import short_hash

RewardFunction = Callable[..., object]  # the user's: what it returns is checked
Steps = list[tuple[int, float]]  # (character offset, the length for the end; score) of a response
Returned = tuple[list[float], list[Steps]]  # the scores of B responses, and their steps
# The places of names that can mean only one thing: a function with another order must not be called wrongly.
# "completions" is what TRL calls the responses.
PLACES = {"prompts": 0, "responses": 1, "completions": 1}
MADE_UP = ("7", "The answer is 7.")  # responses with which a function is tried
OF_RUN = ("step", "total_steps")  # what a function may ask for that is no field of the records


@dataclass
class Request:
    """B responses, and what rewards may know of them."""

    prompts: list[Prompt]
    responses: list[str]
    finished: list[bool]  # False for a response that was cut at --max_gen_len
    lengths: Sequence[int]  # in tokens
    # {one of ``names_of_run``: its value}; step: batches that were learned from so far
    of_run: dict[str, int] = field(default_factory=dict)


def load_reward_function(spec: str) -> RewardFunction | None:
    """``path.py:function`` -> the function, None for "". Raises InputError if it does not exist, if importing
    it fails, or if it cannot be called with prompts, responses and answers."""
    if not spec:
        return None
    path, _, name = spec.rpartition(":")
    if not Path(path).is_file():
        raise InputError(
            f"--reward_fn {spec}: no such file, or no function named; write it as path.py:function"
        )
    # The prefix keeps a file called json.py from replacing Python's own module json.
    module = ModuleType(f"reward_fn_{Path(path).stem}")
    module.__file__ = os.path.abspath(path)  # the function may change the working directory
    sys.modules[module.__name__] = module  # dataclasses look up their module there
    try:
        with torch.set_grad_enabled(True):  # what the code sets ends with this block
            exec(compile(Path(path).read_bytes(), path, "exec"), vars(module))
    except (Exception, SystemExit) as error:
        raise InputError(f"--reward_fn {path}: importing it failed: {repr(error)[:200]}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise InputError(f"--reward_fn {path}: has no function {name!r}")
    wanted(function)
    return function


def check_fields(function: RewardFunction, of_run: list[str], *datasets: RecordDataset | None) -> None:
    """Raise InputError if a function asks for what the records of one of the datasets do not have. of_run:
    what it may ask for besides (``names_of_run``)."""
    asked = wanted(function)
    for data in filter(None, datasets):
        for parameter, p in asked.items():
            if must_have(p) and parameter not in data.columns and parameter not in of_run:
                raise InputError(
                    f"--reward_fn: its parameter {parameter!r} is no key of the records of {data.path}; "
                    f"{keys_found(data.columns)}: rename it, or give it a default"
                )


def try_reward_function(
    function: RewardFunction, data: RecordDataset, of_run: dict[str, int], seconds: float
) -> None:
    """Call a function once, with made-up responses to the first prompts. Raises InputError as
    ``call_reward_function``; the scores themselves are thrown away."""
    request = Request(
        prompts=[data[i % len(data)] for i in range(len(MADE_UP))],
        responses=[*MADE_UP],
        finished=[True] * len(MADE_UP),
        lengths=[len(text.split()) for text in MADE_UP],
        of_run=of_run,
    )
    call_reward_function(function, request, seconds)


def names_of_run(*datasets: RecordDataset | None) -> list[str]:
    """Those of ``OF_RUN`` that are no field in any of these datasets: a field comes first."""
    fields = {name for data in filter(None, datasets) for name in data.columns}
    return [name for name in OF_RUN if name not in fields]


def wanted(function: RewardFunction) -> dict[str, Parameter]:
    """What a reward function asks for beyond its first three parameters -> {name: its parameter}. Raises
    InputError unless the first three can be prompts, responses and answers."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        raise InputError(
            "--reward_fn: the parameters of a compiled function are not known; call it in one of your own"
        ) from None
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
    return {
        name: p
        for name, p in signature.parameters.items()
        if name not in given and p.kind != p.VAR_POSITIONAL
    }


def must_have(p: Parameter) -> bool:
    """Whether a parameter has no default, and is not **columns, which takes every field."""
    return p.default is p.empty and p.kind != p.VAR_KEYWORD


def arguments(function: RewardFunction, request: Request) -> dict[str, object]:
    """What the function asks for beyond prompts, responses and answers -> {name: its value}, of fields of
    the records a list of B. ``of_run`` has names that are no fields."""
    asked = wanted(function)
    records = [prompt.record for prompt in request.prompts]
    needed = {name for name, p in asked.items() if must_have(p)}
    names = needed.union(fields_read(function, set().union(*records)))
    found: dict[str, object] = {name: [record.get(name) for record in records] for name in sorted(names)}
    return found | {name: value for name, value in request.of_run.items() if name in asked}


def fields_read(function: RewardFunction, columns: Iterable[str]) -> list[str]:
    """Those of the records' fields (columns) that a function asks for."""
    asked = wanted(function)
    takes_all = any(p.kind == p.VAR_KEYWORD for p in asked.values())
    first = inspect.signature(function).parameters.keys() - asked.keys()  # prompts, responses, answers
    return [name for name in columns if name in asked or (takes_all and name not in first)]


def code_hash(flag: str) -> str:
    """A flag, path.py:function -> the hash of the code; "" for none."""
    path, _, name = flag.rpartition(":")
    return short_hash([name, Path(path).read_bytes().hex()]) if flag else ""


def call_reward_function(function: RewardFunction, request: Request, seconds: float) -> Returned:
    """Call the user's function -> the scores of B responses, and the steps of each, [] where it returned a
    number. It is not asked about no responses. seconds: time limit, 0 for none.

    Raises InputError if the function raises an exception (the message names file and line), takes longer, or
    returns anything else than B numbers or lists of steps.
    """
    if not request.responses:
        return [], []
    prompts = [prompt.prompt for prompt in request.prompts]
    answers = [prompt.answer for prompt in request.prompts]
    # A copy, so that the function may change its arguments.
    prompts, responses, answers, more = copy.deepcopy(
        (prompts, request.responses, answers, arguments(function, request))
    )
    try:
        with time_limit(seconds), torch.set_grad_enabled(True):
            returned = function(prompts, responses, answers, **more)
            return as_scores(returned, request.responses)
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


# ---------------------------------------------------------------- what it returned


UNORDERED = (str, bytes, dict, set)  # no lists of scores


def as_scores(returned: object, responses: list[str]) -> Returned:
    """-> a number for each of these responses, the sum of its steps where it has any; and the steps of each.
    Raises InputError that says what is wrong with what was returned."""
    given = list(returned) if isinstance(returned, Iterable) and not isinstance(returned, UNORDERED) else []
    if len(given) != len(responses):
        raise InputError(
            f"--reward_fn: returned {len(given)} scores for {len(responses)} responses: {_shown(returned)}; "
            "return a list of one number for each response"
        )
    scores: list[float] = []
    steps: list[Steps] = []
    for number, (score, response) in enumerate(zip(given, responses, strict=True), 1):
        by_step = isinstance(score, list | tuple)
        found: Steps = []
        try:
            for offset, points in score if by_step else [(None, score)]:
                place = len(response) if offset is None else operator.index(offset)
                if not 0 <= place <= len(response):
                    raise ValueError
                found.append((place, float(points)))
        except (TypeError, ValueError, OverflowError):
            raise InputError(
                f"--reward_fn: score {number} is {_shown(score)}; it must be a number, or a list of pairs "
                f"(character offset, score) with offsets from 0 to {len(response)}, or None for the end"
            ) from None
        scores.append(sum(points for _, points in found))
        steps.append(found if by_step else [])
    return scores, steps


def _shown(value: object) -> str:
    return f"{' '.join(repr(value).split())[:60]} ({type(value).__name__})"


# ---------------------------------------------------------------- how long it may take


class TimeUp(BaseException):
    """The time is up. Not an Exception, so that ``except Exception`` in the user's code does not catch it."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeUp in this block after ``seconds``, and again every second after that; 0 means no limit.

    It uses SIGALRM, so it works in the main thread only, and not on Windows, which has none.
    """
    if not seconds or not hasattr(signal, "SIGALRM"):
        yield
        return
    on = [True]

    def end(number, frame):
        if on:
            raise TimeUp

    old = signal.signal(signal.SIGALRM, end)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)  # a very short time is up before the next line
        yield
    finally:
        on.clear()  # first, and in one instruction: the time may be up in each of the following lines
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
