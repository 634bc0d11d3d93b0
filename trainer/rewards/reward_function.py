"""Rewards of your own: ``--reward_fn file.py:function`` scores responses with a Python function.

    def score(prompts, responses, answers):     # B prompts (text or messages), texts, answers (text or None)
        return [...]                            # B finite numbers, lists of steps, or None: nothing to say

Functions that were written for TRL or verl are known by their parameters (``kind_of``) and called as these
call them. What a function may ask for and return, with examples: docs/rewards.md. Its scores are a part of
the reward (combine.py). A call may take ``--reward_timeout`` seconds.
"""

import asyncio
import copy
import inspect
import math
import operator
import os
import re
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from inspect import Parameter
from modulefinder import ModuleFinder
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch

from dataset.formats import keys_found, whole_answer
from dataset.lm_dataset import Prompt, RecordDataset, RLAIFDataset
from errors import InputError
from model.weights import short_hash
from trainer.compute.batch import Steps
from trainer.rewards.reward_models import parse_spec

RewardFunction = Callable[..., object]  # the user's: what it returns is checked
RewardFunctions = dict[str, tuple[RewardFunction, float]]  # {name of the part: (function, weight)}
# The scores of B responses, None where the function says nothing of one; and their steps.
Returned = tuple[list[float | None], list[Steps]]
# Of ours. The places of names that can mean only one thing, None for no place: a function with another order
# must not be called wrongly.
PLACES: dict[str, int | None] = dict.fromkeys(("data_source", "data_sources", "extra_info"))
PLACES |= {"prompts": 0, "prompt": 0, "responses": 1, "response": 1, "completion": 1, "ground_truth": 2}
# What TRL gives beside the fields of the records; answers: where no field has this name.
TRL = ("prompts", "completions", "completion_ids", "answers", "trainer_state", "log_metric", "log_extra")
VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
MADE_UP = ("7", "The answer is 7.")  # responses with which a function is tried
OF_RUN = ("step", "total_steps")  # what a function may ask for that is no field
SIGNATURES = (
    "(prompts, responses, answers, ...), TRL's (prompts, completions, ..., **kwargs) or "
    "verl's (data_source, solution_str, ground_truth, extra_info)"
)


@dataclass
class Request:
    """B responses, and what rewards may know of them."""

    prompts: list[Prompt]
    responses: list[str]
    finished: list[bool]  # False for a response that was cut at --max_gen_len
    lengths: Sequence[int]  # in tokens
    ids: Sequence[list[int]] = ()  # their tokens
    of_run: dict[str, object] = field(default_factory=dict)  # ``values_of_run``
    logged: dict[str, list[float]] = field(default_factory=dict)  # {name: what a function gave log_metric}


# ---------------------------------------------------------------- files and flags


def named_functions(specs: list[str]) -> dict[str, tuple[str, str, float]]:
    """["path.py:function" or "path.py:function=WEIGHT", …] -> {name of the part: (path, function, weight)}. A
    single function is the part "function"; several are "function_<name>", named after their files where two
    functions have one name."""
    found: dict[str, tuple[str, str, float]] = {}
    parsed = []
    for spec in specs:
        text, weight = parse_spec(spec, "--reward_fn")
        path, _, function = text.rpartition(":")
        parsed.append((path, function, weight))
    count = Counter(function for _, function, _ in parsed)
    for path, function, weight in parsed:
        name = f"function_{function if count[function] == 1 else Path(path).stem}"
        if len(specs) == 1:
            name = "function"
        while name in found:
            name += "_"
        found[name] = path, function, weight
    return found


def load_reward_functions(specs: list[str]) -> RewardFunctions:
    """--reward_fn -> the functions with their weights. Raises InputError if one does not exist, if importing
    its file fails, or if its parameters are of no ``kind_of``."""
    modules: dict[str, ModuleType] = {}  # a file is imported once
    found = {}
    for part, (path, name, weight) in named_functions(specs).items():
        if path not in modules:
            modules[path] = import_file(path, name)
        function = getattr(modules[path], name, None)
        if not callable(function):
            raise InputError(f"--reward_fn {path}: has no function {name!r}")
        with named_in_errors(part):
            kind_of(function)
        found[part] = function, weight
    return found


@contextmanager
def errors_renamed(pattern: str, new: str) -> Iterator[None]:
    """In this block or function, what an error says of a flag becomes something else."""
    try:
        yield
    except InputError as error:
        error.args = (re.sub(pattern, new, str(error)),)
        raise


def named_in_errors(part: str) -> AbstractContextManager[None]:
    """In this block, errors name the function of this part, where there are several."""
    return errors_renamed("^--reward_fn", f"--reward_fn {part.partition('_')[2]}".rstrip())


def import_file(path: str, name: str) -> ModuleType:
    """The module of a file that has a function of this name. Raises InputError."""
    if not Path(path).is_file():
        spec = f"{path}:{name}" if path else name
        raise InputError(
            f"--reward_fn {spec}: no such file, or no function named; write it as path.py:function"
        )
    # The prefix keeps a file called json.py from replacing Python's own module json.
    module = ModuleType(f"reward_fn_{Path(path).stem}")
    module.__file__ = os.path.abspath(path)  # the function may change the working directory
    sys.modules[module.__name__] = module  # dataclasses look up their module there
    folder = os.path.dirname(module.__file__)
    if folder not in sys.path:  # files beside it can be imported, as when it is run as a script
        sys.path.append(folder)  # behind all that has such a name already
    try:
        with contained():
            exec(compile(Path(path).read_bytes(), path, "exec"), vars(module))
    except (Exception, SystemExit) as error:
        raise InputError(f"--reward_fn {path}: importing it failed: {repr(error)[:200]}") from error
    return module


def code_hash(specs: list[str]) -> str:
    """--reward_fn -> the hash of the code, with that of files beside it that it imports, and of weights other
    than 1; "" for none."""
    found: list[str | float] = []
    for path, name, weight in named_functions(specs).values():
        finder = ModuleFinder([os.path.dirname(os.path.abspath(path))])  # other modules are not found
        finder.run_script(path)
        files = {str(module.__file__ or path) for module in finder.modules.values()} - {path}  # type: ignore[attr-defined]
        found += [name, *(Path(file).read_bytes().hex() for file in (path, *sorted(files)))]
        found += [weight] if weight != 1 else []
    return short_hash(found) if found else ""


@contextmanager
def contained() -> Iterator[None]:
    """In this block the user's code runs. What it sets for the whole process is set back."""
    dtype = torch.get_default_dtype()
    device = torch.get_default_device()
    threads = torch.get_num_threads()
    streams = sys.stdout, sys.stderr
    try:
        with torch.set_grad_enabled(True):
            yield
    finally:
        torch.set_default_dtype(dtype)
        if torch.get_default_device() != device:
            torch.set_default_device(None)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        sys.stdout, sys.stderr = streams
        for number, name in ((1, "stdout"), (2, "stderr")):
            if getattr(sys, name).closed:
                setattr(sys, name, open(number, "w", errors="replace", closefd=False))  # noqa: SIM115


# ---------------------------------------------------------------- what it takes


def parameters(function: RewardFunction) -> dict[str, Parameter]:
    """{name: parameter}. Raises InputError where Python does not know them."""
    try:
        return dict(inspect.signature(function).parameters)
    except ValueError:
        raise InputError(
            "--reward_fn: the parameters of a compiled function are not known; call it in one of your own"
        ) from None


def kind_of(function: RewardFunction) -> str:
    """By whose custom a function is called: "verl", "TRL" or "ours". Raises InputError if its parameters fit
    none of these."""
    names = parameters(function)
    kinds = [p.kind for p in names.values()]
    described = f"({', '.join(map(str, names.values()))[:100]})"
    if kinds == [Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD]:
        raise InputError(
            f"--reward_fn: {described} does not say what the function takes; put @functools.wraps(function) "
            "into its decorator, or name the parameters"
        )
    if "solution_str" in names:
        kind = "verl"
        fits = {*VERL}.issuperset(name for name, p in names.items() if must_have(p))
    elif [*names] == ["prompts", "completions", "answers"]:  # TRL's have to take more: **kwargs
        kind = "ours"
        fits = True
    elif {"completions", "completion_ids"} & names.keys() or kinds == [Parameter.VAR_KEYWORD]:
        kind = "TRL"
        fits = Parameter.POSITIONAL_ONLY not in kinds
    else:
        kind = "ours"
        places = enumerate([*names][:3])
        fits = bool(first_three(function)) and all(PLACES.get(name, place) == place for place, name in places)
    if not fits:
        raise InputError(f"--reward_fn: a function takes {SIGNATURES}; this one takes {described}")
    return kind


def first_three(function: RewardFunction) -> list[str]:
    """The names of the parameters that get prompts, responses and answers; [] if it takes fewer."""
    try:
        return [*inspect.signature(function).bind_partial("prompts", "responses", "answers").arguments]
    except TypeError:
        return []


def wanted(function: RewardFunction) -> dict[str, Parameter]:
    """What a function asks for beside what every function of its kind is given -> {name: parameter}: fields
    of the records, and ``OF_RUN``. Raises InputError as ``kind_of``."""
    kind = kind_of(function)
    given = {"verl": VERL[1:], "TRL": TRL, "ours": first_three(function)}[kind]
    return {
        name: p
        for name, p in parameters(function).items()
        if name not in given and p.kind != p.VAR_POSITIONAL and (kind != "verl" or name in VERL)
    }


def must_have(p: Parameter) -> bool:
    """Whether a parameter has no default, and is not *rest or **columns."""
    return p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)


def takes(function: RewardFunction, name: str) -> bool:
    """Whether a function has a parameter of this name, or takes all names."""
    found = parameters(function)
    return name in found or any(p.kind == p.VAR_KEYWORD for p in found.values())


def check_fields(functions: RewardFunctions, of_run: list[str], *datasets: RecordDataset | None) -> None:
    """Raise InputError if a function asks for what the records of one of the datasets do not have. of_run:
    what it may ask for besides (``names_of_run``)."""
    for part, (function, _) in functions.items():
        with named_in_errors(part):
            check_fields_of(function, of_run, *datasets)


def check_fields_of(function: RewardFunction, of_run: list[str], *datasets: RecordDataset | None) -> None:
    """``check_fields`` of one function."""
    asked = wanted(function)
    third = first_three(function)[2:] if kind_of(function) == "ours" else []  # it gets the answers
    for data in filter(None, datasets):
        for parameter, p in asked.items():
            if must_have(p) and parameter not in data.columns and parameter not in of_run:
                raise InputError(
                    f"--reward_fn: its parameter {parameter!r} is no key of the records of {data.path}; "
                    f"{keys_found(data.columns)}: rename it, or give it a default"
                )
        for name in third:
            if name not in data.columns or name in ("answer", data.keys.answer):
                continue
            if data[0].record.get(name) != data[0].answer:
                raise InputError(
                    f"--reward_fn: its third parameter {name!r} gets the answers, but records of {data.path} "
                    f"have a field of that name with something else in it; give --answer_key {name}, or "
                    f"call the third answers and ask for {name} behind it"
                )


def names_of_run(*datasets: RecordDataset | None) -> list[str]:
    """Those of ``OF_RUN`` that are no field in any of these datasets: a field comes first."""
    fields = {name for data in filter(None, datasets) for name in data.columns}
    return [name for name in OF_RUN if name not in fields]


def values_of_run(names: list[str], step: int, total_steps: int) -> dict[str, object]:
    """{one of ``names_of_run``: its value}, and TRL's trainer_state. step: batches learned from so far."""
    known = {"step": step, "total_steps": total_steps}
    state = SimpleNamespace(global_step=step, max_steps=total_steps)
    return {name: known[name] for name in names} | {"trainer_state": state}


def fields_read(function: RewardFunction, columns: Iterable[str]) -> list[str]:
    """Those of the records' fields (columns) that a function asks for."""
    if kind_of(function) == "verl":
        read = {"reward_model", *filter(partial(takes, function), VERL)}
        return [name for name in columns if name in read]
    asked = wanted(function)
    takes_all = any(p.kind == p.VAR_KEYWORD for p in asked.values())
    given = parameters(function).keys() - asked.keys()
    return [name for name in columns if name in asked or (takes_all and name not in given)]


def arguments(function: RewardFunction, request: Request) -> dict[str, object]:
    """What the function asks for (``wanted``) -> {name: its value}, of fields of the records a list of B.
    ``of_run`` has names that are no fields."""
    asked = wanted(function)
    records = [prompt.record for prompt in request.prompts]
    needed = {name for name, p in asked.items() if must_have(p)}
    names = needed.union(fields_read(function, set().union(*records)))
    found: dict[str, object] = {name: [record.get(name) for record in records] for name in sorted(names)}
    return found | {name: value for name, value in request.of_run.items() if name in asked}


Call = tuple[tuple[object, ...], dict[str, object]]  # by position, by name


def calls_of(function: RewardFunction, request: Request) -> list[Call]:
    """How to call a function for B responses: once, or verl's once for each."""
    pairs = [*zip(request.prompts, request.responses, strict=True)]
    prompts = [prompt.prompt for prompt in request.prompts]
    answers = [prompt.answer for prompt in request.prompts]
    match kind_of(function):
        case "ours":
            return [((prompts, request.responses, answers), arguments(function, request))]
        case "verl":
            rows = [verl_row(prompt, response) for prompt, response in pairs]
        case _:
            rows = [arguments(function, request) | trl_row(request)]
    return [((), {name: x for name, x in row.items() if takes(function, name)}) for row in rows]


def verl_row(prompt: Prompt, response: str) -> dict[str, object]:
    """What verl gives a function."""
    record = prompt.record
    truth = record.get("ground_truth", prompt.answer)
    match record:
        case {"reward_model": {"ground_truth": of_model}}:
            truth = of_model
    extra = record.get("extra_info") or {}
    return dict(zip(VERL, (record.get("data_source"), response, truth, extra), strict=True))


def trl_row(request: Request) -> dict[str, object]:
    """What TRL gives a function beside fields: completions are messages where the prompt is."""

    def log_metric(name: str, value: float) -> None:
        request.logged.setdefault(str(name), []).append(float(value))

    def log_extra(column: str, values: list) -> None:
        """TRL's table of completions has these; samples.jsonl has not."""

    whole = [
        whole_answer(prompt.prompt, text)
        for prompt, text in zip(request.prompts, request.responses, strict=True)
    ]
    prompts = [prompt for prompt, _ in whole]
    completions = [
        text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        for prompt, text in whole
    ]
    answers = [prompt.record.get("answers", prompt.answer) for prompt in request.prompts]
    state = request.of_run.get("trainer_state")
    values = (prompts, completions, request.ids, answers, state, log_metric, log_extra)
    return dict(zip(TRL, values, strict=True))


# ---------------------------------------------------------------- the call


def try_reward_functions(
    functions: RewardFunctions, of_run: dict[str, object], seconds: float, *datasets: RecordDataset | None
) -> None:
    """Call each function once, and once more for another dataset if that has other fields for it or no
    answers. Raises InputError as ``try_reward_function``."""
    for part, (function, _) in functions.items():
        tried: list[object] = []
        for data in filter(None, datasets):
            given = {*fields_read(function, data.columns)}, getattr(data, "with_answer", 0) > 0
            if given not in tried:
                with named_in_errors(part):
                    try_reward_function(function, data, of_run, seconds, must_say=not tried)
                tried.append(given)


def try_reward_function(
    function: RewardFunction, data: RecordDataset, of_run: dict[str, object], seconds: float, must_say: bool
) -> None:
    """Call a function once, with made-up responses to the first prompts. Raises InputError as
    ``call_reward_function``, with a hint where no record has an answer; the scores are thrown away. must_say:
    also raised where these are all None and there are no answers."""
    prompts = [data[i % len(data)] for i in range(len(MADE_UP))]
    request = Request(
        prompts=prompts,
        responses=[*MADE_UP],
        finished=[True] * len(MADE_UP),
        lengths=[len(text.split()) for text in MADE_UP],
        ids=[prompt.prompt_ids[:4] for prompt in prompts],
        of_run=of_run,
    )
    known = not isinstance(data, RLAIFDataset) or data.with_answer
    hint = "" if known else "; no record has an answer: --answer_key names its field"
    try:
        scores, _ = call_reward_function(function, request, seconds)
    except InputError as error:
        raise InputError(f"{error}; it was called for {data.path}{hint}") from error
    if must_say and hint and set(scores) == {None}:
        raise InputError(f"--reward_fn: it says nothing of any response{hint}")


def call_reward_function(function: RewardFunction, request: Request, seconds: float) -> Returned:
    """Call the user's function -> the scores of B responses, and the steps of each, [] where it returned a
    number. It is not asked about no responses. seconds: time limit, 0 for none.

    Raises InputError if the function raises an exception (the message names file and line), takes longer, or
    returns anything else than B numbers or lists of steps.
    """
    if not request.responses:
        return [], []
    kind = kind_of(function)
    calls = copy.deepcopy(calls_of(function, request))  # so that the function may change its arguments
    try:
        with time_limit(seconds), contained():
            returned = [function(*given, **named) for given, named in calls]
            if any(map(inspect.isawaitable, returned)):
                returned = await_all(returned)
            if kind == "verl":
                found: object = [x.get("score", x) if isinstance(x, dict) else x for x in returned]
            else:
                [found] = returned
            scores, steps = as_scores(found, request.responses)
    except TimeUp:
        raise InputError(
            f"--reward_fn: no answer after {seconds:g} s; speed it up or raise --reward_timeout"
        ) from None
    except InputError:
        raise
    except BaseException as error:  # the user's code may raise anything
        frames = traceback.extract_tb(error.__traceback__)
        own = (__file__, os.path.dirname(asyncio.__file__))
        places = [f" at {f.filename}:{f.lineno}" for f in frames if not f.filename.startswith(own)]
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise InputError(
            f"--reward_fn: {reason}{places[0] if places else ' when it was called'}; correct the function"
        ) from error
    if kind == "TRL":  # there NaN is None
        scores = [
            None if not of_steps and x is not None and math.isnan(x) else x
            for x, of_steps in zip(scores, steps, strict=True)
        ]
    return scores, steps


@cache
def event_loop() -> asyncio.Runner:
    """One for all calls: what an async function keeps open between them, such as a client, belongs to it."""
    return asyncio.Runner()


def await_all(returned: list[object]) -> list[object]:
    """What async calls return, all of them at work at the same time."""

    async def value(x: object) -> object:
        return await x if isinstance(x, Awaitable) else x

    async def gathered() -> list[object]:
        return await asyncio.gather(*map(value, returned))

    runner = event_loop()
    try:
        return runner.run(gathered())
    except BaseException:
        event_loop.cache_clear()
        runner.close()  # ends the calls that are still at work
        raise


# ---------------------------------------------------------------- what it returned


UNORDERED = (str, bytes, dict, set)  # no lists of scores


def as_scores(returned: object, responses: list[str]) -> Returned:
    """-> a number for each of these responses, the sum of its steps where it has any, or None; and the steps
    of each. Raises InputError that says what is wrong with what was returned."""
    single = getattr(returned, "ndim", 1) == 0  # a tensor of one number
    is_list = isinstance(returned, Iterable) and not isinstance(returned, UNORDERED) and not single
    given = list(returned) if is_list else []  # type: ignore[call-overload]
    if len(given) != len(responses):
        raise InputError(
            f"--reward_fn: returned {len(given)} scores for {len(responses)} responses: {_shown(returned)}; "
            "return a list of one number for each response"
        )
    scores: list[float | None] = []
    steps: list[Steps] = []
    for number, (score, response) in enumerate(zip(given, responses, strict=True), 1):
        by_step = isinstance(score, list | tuple)
        found: Steps = []
        try:
            for offset, points in score if by_step else [(None, 0.0 if score is None else score)]:
                place = len(response) if offset is None else operator.index(offset)
                if not 0 <= place <= len(response):
                    raise ValueError
                found.append((place, float(points)))
        except (TypeError, ValueError, OverflowError):
            raise InputError(
                f"--reward_fn: score {number} is {_shown(score)}; it must be a number, or a list of pairs "
                f"(character offset, score) with offsets from 0 to {len(response)}, or None for the end"
            ) from None
        scores.append(None if score is None else sum(points for _, points in found))
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
