"""Rewards of your own: ``--reward_fn file.py:function`` scores responses with a Python function.

    def score(prompts, responses, answers):     # B prompts (text or messages), texts, answers (text or None)
        return [...]                            # B finite numbers, lists of steps, or None: nothing to say

Functions that were written for TRL or verl are known by their parameters (``signature_of``). There is one
mechanism for all: columns of B values (``columns_of``), of which a function gets those that its parameters
name. What a function may ask for and return, with examples: docs/rewards.md. Its scores are a part of the
reward (combine.py). A call may take ``--reward_timeout`` seconds.
"""

import asyncio
import copy
import inspect
import math
import operator
import re
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cache
from inspect import Parameter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dataset.formats import (
    AnyPrompt,
    Exchange,
    Messages,
    TurnText,
    begun,
    keys_found,
    plain_messages,
    to_messages,
    whole_answer,
)
from dataset.lm_dataset import Prompt, RecordDataset, RLAIFDataset
from errors import InputError
from model.weights import short_hash
from trainer.compute.batch import Dialogue, Steps
from trainer.rewards.reward_models import parse_spec
from trainer.user_code import (
    Modules,
    code_of,
    contained,
    end_async,
    end_of,
    load_named,
    mistake,
    shown,
    start_async,
)

RewardFunction = Callable[..., object]  # the user's: what it returns is checked
RewardFunctions = dict[str, tuple[RewardFunction, float]]  # {name of the part: (function, weight)}
# The scores of B responses, None where the function says nothing of one; and their steps.
Returned = tuple[list[float | None], list[Steps]]
# Of our kind of functions, which are called by position: {a name that can mean only one thing: its position,
# None for no position}. A function that has such a name elsewhere is refused.
PLACES: dict[str, int | None] = dict.fromkeys(("data_source", "data_sources", "extra_info"))
PLACES |= {"prompts": 0, "prompt": 0, "responses": 1, "response": 1, "completion": 1, "ground_truth": 2}
GIVEN = {  # {kind: the parameters that need no field of the records}
    "ours": (),  # its first three are given by position
    "TRL": (
        *("prompts", "completions", "completion_ids", "answers"),  # answers: where no field has this name
        *("trainer_state", "log_metric", "log_extra"),
    ),
    "verl": ("solution_str", "ground_truth", "extra_info"),
}
VERL = ("data_source", *GIVEN["verl"])  # all that it can ask for
MADE_UP = ("7", "The answer is 7.")  # responses with which a function is tried
SIGNATURES = (
    "(prompts, responses, answers, ...), TRL's (prompts, completions, ..., **kwargs) or "
    "verl's (data_source, solution_str, ground_truth, extra_info)"
)


@dataclass
class Request:
    """B responses, and what rewards may know of them. Where they have several turns (--env, --tools), rules,
    reward models and functions score the text of the last turn."""

    prompts: list[Prompt]
    responses: list[str]  # of several turns the last one's
    finished: Sequence[bool] = ()  # False for a response that was cut at --max_gen_len
    lengths: Sequence[int] = ()  # in sampled tokens
    ids: Sequence[list[int]] = ()  # their tokens, with observations
    run_values: dict[str, object] = field(default_factory=dict)  # ``run_values``
    logged: dict[str, list[float]] = field(default_factory=dict)  # {name: what a function gave log_metric}
    dialogues: Sequence[Dialogue] = ()  # of several turns
    whole_texts: Sequence[str] = ()  # all of each response, with observations

    @property
    def beginnings(self) -> list[str]:
        """What stands in the prompt of the answer that ``responses`` has (``begun``)."""
        several = [len(dialogue.messages) > 1 for dialogue in self.dialogues] or [False] * len(self.prompts)
        pairs = zip(self.prompts, several, strict=True)
        return ["" if later else begun(prompt.prompt) for prompt, later in pairs]

    @property
    def questions(self) -> list[AnyPrompt]:
        """The prompts. Where ``responses`` has a later turn, without the beginning of the first one."""
        pairs = zip(self.prompts, self.beginnings, strict=True)
        return [
            prompt.prompt if beginning or not begun(prompt.prompt) else to_messages(prompt.prompt)[:-1]
            for prompt, beginning in pairs
        ]

    @property
    def exchanges(self) -> list[Exchange]:
        """B pairs: all that comes before the last turn, and that turn, with its beginning."""
        if not self.dialogues:
            pairs = zip(self.prompts, self.responses, strict=True)
            return [whole_answer(prompt.prompt, text) for prompt, text in pairs]
        rows = zip(self.conversations, self.beginnings, self.responses, strict=True)
        return [([*asked, *turns[:-1]], beginning + text) for (asked, turns), beginning, text in rows]

    @property
    def conversations(self) -> list[tuple[Messages, Messages]]:
        """Of several turns: the messages of each prompt, and those of each response."""
        return [split_dialogue(*pair) for pair in zip(self.prompts, self.dialogues, strict=True)]

    @property
    def turn_columns(self) -> dict[str, Any]:
        """What a function may ask for by name where responses have several turns, of the names that
        ``run_values`` has: the whole conversations, and the environments; {} where they have one turn."""
        if not self.dialogues:
            return {}
        columns = {
            "messages": [plain_messages([*asked, *turns]) for asked, turns in self.conversations],
            "environments": [dialogue.environment for dialogue in self.dialogues],
        }
        return {name: column for name, column in columns.items() if name in self.run_values}


def split_dialogue(prompt: Prompt, dialogue: Dialogue) -> tuple[Messages, Messages]:
    """-> (the messages of the prompt, those of the response). The beginning of an answer is moved from the
    first to the second."""
    question = to_messages(prompt.prompt)
    first, *later = dialogue.messages
    if beginning := begun(question):
        turn = TurnText.of(first["content"])
        first = {**first, "content": TurnText(beginning + turn.content, turn.thought, turn.calls)}
        question = question[:-1]
    return question, [first, *later]


# ---------------------------------------------------------------- files and flags


def named_functions(specs: list[str]) -> dict[str, tuple[str, str, float]]:
    """["path.py:function" or "path.py:function=WEIGHT", …] -> {name of the part: (path, function, weight)}. A
    single function is the part "function"; several are "function_<name>", named after their files where two
    functions have one name."""
    named: dict[str, tuple[str, str, float]] = {}
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
        while name in named:
            name += "_"
        named[name] = path, function, weight
    return named


def load_reward_functions(specs: list[str], modules: Modules | None = None) -> RewardFunctions:
    """--reward_fn -> the functions with their weights. modules: files that other flags have imported; these
    are added. Raises InputError as ``load_named``, or as ``signature_of``."""
    modules = {} if modules is None else modules
    functions = {}
    for part, (path, name, weight) in named_functions(specs).items():
        function: Any = load_named(path, name, "--reward_fn", modules)
        if not isinstance(function, Hashable):  # an object such as a dataclass, whose method has a hash
            function = function.__call__
        with named_in_errors(part):
            signature_of(function)
        functions[part] = function, weight
    return functions


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


def code_hash(specs: list[str]) -> str:
    """--reward_fn -> the hash of the code, with that of files beside it that it imports, and of weights other
    than 1; "" for none."""
    code: list[str | float] = []
    for path, name, weight in named_functions(specs).values():
        code += code_of(path, name)
        code += [weight] if weight != 1 else []
    return short_hash(code) if code else ""


# ---------------------------------------------------------------- what it takes


@dataclass(frozen=True)
class Signature:
    """What a function takes."""

    kind: str  # by whose custom it is called: "ours", "TRL" or "verl"
    first_three: list[str]  # of ours: the parameters that get prompts, responses and answers, by position
    names: dict[str, bool]  # {another parameter, given by name: whether it has no default}
    takes_all: bool  # it has **columns

    def takes(self, name: str) -> bool:
        """Whether a column of this name is passed on, if there is one."""
        return name in self.names or (self.takes_all and name not in self.first_three)


@cache
def signature_of(function: RewardFunction) -> Signature:
    """The parameters of a function, read once. Raises InputError if they are of no kind that is known."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        raise InputError(
            "--reward_fn: the parameters of a compiled function are not known; call it in one of your own"
        ) from None
    parameters = signature.parameters
    kinds = [p.kind for p in parameters.values()]
    described = str(signature)[:100]
    if kinds == [Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD]:
        raise InputError(
            f"--reward_fn: {described} does not say what the function takes; put @functools.wraps(function) "
            "into its decorator, or name the parameters"
        )
    names = {
        name: p.default is p.empty
        for name, p in parameters.items()
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }
    first_three: list[str] = []
    if "solution_str" in names:
        kind = "verl"
        fits = all(name in VERL for name, needed in names.items() if needed)
    elif [*parameters] != ["prompts", "completions", "answers"] and (  # TRL's have to take more: **kwargs
        {"completions", "completion_ids"} & names.keys() or kinds == [Parameter.VAR_KEYWORD]
    ):
        kind = "TRL"
        fits = Parameter.POSITIONAL_ONLY not in kinds
    else:
        kind = "ours"
        places = enumerate([*parameters][:3])
        fits = all(PLACES.get(name, place) == place for place, name in places)
        try:
            first_three = [*signature.bind_partial("prompts", "responses", "answers").arguments]
        except TypeError:  # it takes fewer
            fits = False
    if not fits:
        raise InputError(f"--reward_fn: a function takes {SIGNATURES}; this one takes {described}")
    names = {name: needed for name, needed in names.items() if name not in first_three}
    return Signature(kind, first_three, names, Parameter.VAR_KEYWORD in kinds)


def check_fields(functions: RewardFunctions, known: Iterable[str], *datasets: RecordDataset | None) -> None:
    """Raise InputError if a function asks for what the records of one of the datasets do not have. known:
    what it may ask for besides (``run_values``)."""
    for part, (function, _) in functions.items():
        with named_in_errors(part):
            signature = signature_of(function)
            needed = [name for name, needed in signature.names.items() if needed]
            for data in filter(None, datasets):
                for name in needed:
                    if name not in (*data.columns, *known, *GIVEN[signature.kind]):
                        raise InputError(
                            f"--reward_fn: its parameter {name!r} is no key of the records of "
                            f"{data.path}; {keys_found(data.columns)}: rename it, or give it a default"
                        )
                for name in signature.first_three[2:]:
                    if name not in data.columns or name in ("answer", data.keys.answer):
                        continue
                    if data[0].record.get(name) != data[0].answer:
                        raise InputError(
                            f"--reward_fn: its third parameter {name!r} gets the answers, but records of "
                            f"{data.path} have a field of that name with something else in it; give "
                            f"--answer_key {name}, or call the third answers and ask for {name} behind it"
                        )


def run_values(
    step: int, total_steps: int, *datasets: RecordDataset | None, of_turns: Sequence[str] = ()
) -> dict[str, object]:
    """{name: value} of what a function may ask for that is no field in any of these datasets: a field comes
    first. step: batches learned from so far. of_turns: names of ``Request.turn_columns``, which has their
    values. These come before fields: a field ``messages`` is the conversation that the prompt was taken from.
    """
    state = SimpleNamespace(global_step=step, max_steps=total_steps)
    values = {"step": step, "total_steps": total_steps, "trainer_state": state}
    fields = {name for data in filter(None, datasets) for name in data.columns}
    return {name: x for name, x in values.items() if name not in fields} | dict.fromkeys(of_turns)


def fields_read(function: RewardFunction, columns: Iterable[str]) -> list[str]:
    """Those of the records' fields (columns) that a function asks for."""
    signature = signature_of(function)
    if signature.kind == "verl":
        return [x for x in columns if x == "reward_model" or (x in VERL and signature.takes(x))]
    given = signature.names.keys() & GIVEN[signature.kind]
    return [name for name in columns if signature.takes(name) and name not in given]


def columns_of(kind: str, request: Request) -> dict[str, Any]:
    """{name: a list of B values} of all that a function of this kind can get by name, but for
    ``Request.run_values``. Of TRL's, a few are no lists."""
    records = [prompt.record for prompt in request.prompts]
    fields: dict[str, Any] = {
        name: [record.get(name) for record in records] for name in sorted(set().union(*records))
    }
    if kind == "ours":
        return fields
    if kind == "verl":
        return {
            "data_source": [record.get("data_source") for record in records],
            "solution_str": request.whole_texts or request.responses,
            "ground_truth": [ground_truth(prompt) for prompt in request.prompts],
            "extra_info": [record.get("extra_info") or {} for record in records],
        }

    def log_metric(name: str, value: float) -> None:
        request.logged.setdefault(str(name), []).append(float(value))

    def log_extra(column: str, values: list) -> None:
        """TRL's table of completions has these; samples.jsonl has not."""

    whole: list[tuple[Any, Any]] = [
        (prompt, text if isinstance(prompt, str) else [{"role": "assistant", "content": text}])
        for prompt, text in request.exchanges  # messages where the prompt is
    ]
    if request.dialogues:
        whole = [(prompt, plain_messages(turns)) for prompt, turns in request.conversations]
    return fields | {
        "prompts": [prompt for prompt, _ in whole],
        "completions": [completion for _, completion in whole],
        "completion_ids": request.ids,
        "answers": [prompt.record.get("answers", prompt.answer) for prompt in request.prompts],
        "trainer_state": request.run_values.get("trainer_state"),
        "log_metric": log_metric,
        "log_extra": log_extra,
    }


def ground_truth(prompt: Prompt) -> object:
    """What verl calls the answer of a record."""
    match prompt.record:
        case {"reward_model": {"ground_truth": truth}} | {"ground_truth": truth}:
            return truth
    return prompt.answer


def arguments(function: RewardFunction, request: Request) -> dict[str, Any]:
    """-> {parameter: the column that it gets}"""
    signature = signature_of(function)
    given = {name: x for name, x in columns_of(signature.kind, request).items() if signature.takes(name)}
    if signature.kind == "verl":  # it asks for no other names
        return given
    wanted = {*given, *signature.names}
    if signature.kind == "TRL" and signature.takes_all:
        wanted.add("environments")
    given |= {name: column for name, column in request.turn_columns.items() if name in wanted}
    for name, needed in signature.names.items():
        if name in request.run_values and name not in given:
            given[name] = request.run_values[name]
        elif needed and name not in given:
            given[name] = [None] * len(request.prompts)  # no record of the batch has this field
    return given


# ---------------------------------------------------------------- the call


def try_reward_functions(
    functions: RewardFunctions,
    values: dict[str, object],
    seconds: float,
    *datasets: RecordDataset | None,
    environments: Callable[[list[Prompt]], list[Any]] | None = None,
) -> None:
    """Call each function once, with made-up responses to the first prompts, and once more for another dataset
    if that has other fields for it or no answers. The scores are thrown away. Raises InputError as
    ``call_reward_function``, and where the first scores are all None and no record has an answer.

    environments: prompts -> an object for each, on which reset was called, and nothing else yet; None for
    each with --tools; [] where responses have one turn.
    """
    for part, (function, _) in functions.items():
        tried: list[object] = []
        for data in datasets:
            if not isinstance(data, RLAIFDataset):  # none, or logged answers, which have their scores
                continue
            given = {*fields_read(function, data.columns)}, data.with_answer > 0
            if given in tried:
                continue
            prompts = [data[i % len(data)] for i in range(len(MADE_UP))]
            ids = [prompt.prompt_ids[:4] for prompt in prompts]
            texts = [[{"role": "assistant", "content": text}] for text in MADE_UP]
            begun_ones = environments(prompts) if environments else []
            request = Request(
                prompts,
                [*MADE_UP],
                ids=ids,
                run_values=values,
                dialogues=[Dialogue(*pair, score=None) for pair in zip(texts, begun_ones, strict=False)],
            )
            hint = "" if data.with_answer else "; no record has an answer: --answer_key names its field"
            with named_in_errors(part):
                try:
                    scores, _ = call_reward_function(function, request, seconds)
                except InputError as error:
                    raise InputError(f"{error}; it was called for {data.path}{hint}") from error
                if hint and not tried and set(scores) == {None}:
                    raise InputError(f"--reward_fn: it says nothing of any response{hint}")
            tried.append(given)


def call_reward_function(function: RewardFunction, request: Request, seconds: float) -> Returned:
    """Call the user's function -> the scores of B responses, and the steps of each, [] where it returned a
    number. It is not asked about no responses. seconds: time limit, 0 for none.

    Raises InputError if the function raises an exception (the message names file and line), takes longer, or
    returns anything else than B numbers or lists of steps.
    """
    if not request.responses:
        return [], []
    kind = signature_of(function).kind
    # Copies, so that the function may change its arguments; but not of environments: they may hold sockets
    environments = [dialogue.environment for dialogue in request.dialogues]
    given = copy.deepcopy(arguments(function, request), {id(x): x for x in environments})
    first = []
    if kind == "ours":
        first = copy.deepcopy(
            [request.questions, request.responses, [prompt.answer for prompt in request.prompts]]
        )
    try:
        with time_limit(seconds), contained():
            if kind == "verl":
                rows = [dict(zip(given, row, strict=True)) for row in zip(*given.values(), strict=True)]
                returned = await_all([function(**row) for row in rows])
                result: object = [x.get("score", x) if isinstance(x, dict) else x for x in returned]
            else:
                [result] = await_all([function(*first, **given)])
            scores, steps = as_scores(result, request.responses, nan_is_none=kind == "TRL")
    except TimeUp:
        raise InputError(
            f"--reward_fn: no answer after {seconds:g} s; speed it up or raise --reward_timeout"
        ) from None
    except InputError:
        raise
    except BaseException as error:  # the user's code may raise anything
        raise mistake("--reward_fn", error, __file__) from error
    return scores, steps


def await_all(returned: list[object]) -> list[object]:
    """What calls return: of async ones, all at work at the same time, what they end with."""
    if not any(isinstance(x, Awaitable) for x in returned):
        return returned

    async def gathered() -> list[object]:
        return await asyncio.gather(*map(end_of, returned))

    future = start_async(gathered())
    try:
        return future.result()
    except BaseException:  # TimeUp too
        end_async(future)
        raise


# ---------------------------------------------------------------- what it returned


UNORDERED = (str, bytes, dict, set)  # no lists of scores


def as_scores(returned: Any, responses: list[str], nan_is_none: bool) -> Returned:
    """-> a number for each of these responses, the sum of its steps where it has any, or None; and the steps
    of each. Raises InputError that says what is wrong with what was returned."""
    try:
        items = iter(()) if isinstance(returned, UNORDERED) else iter(returned)
    except TypeError:
        items = iter(())
    items = [*items]
    if len(items) != len(responses):
        raise InputError(
            f"--reward_fn: returned {len(items)} scores for {len(responses)} responses: {shown(returned)}; "
            "return a list of one number for each response"
        )
    scores: list[float | None] = []
    steps: list[Steps] = []
    for number, (score, response) in enumerate(zip(items, responses, strict=True), 1):
        by_step = isinstance(score, list | tuple)
        pairs: Steps = []
        try:
            for offset, points in score if by_step else [(None, 0.0 if score is None else score)]:
                place = len(response) if offset is None else operator.index(offset)
                if not 0 <= place <= len(response):
                    raise ValueError
                pairs.append((place, float(points)))
        except (TypeError, ValueError, OverflowError):
            raise InputError(
                f"--reward_fn: score {number} is {shown(score)}; it must be a number, or a list of pairs "
                f"(character offset, score) with offsets from 0 to {len(response)}, or None for the end"
            ) from None
        total = sum(points for _, points in pairs)
        nothing = score is None or (nan_is_none and not by_step and math.isnan(total))
        scores.append(None if nothing else total)
        steps.append(pairs if by_step else [])
    return scores, steps


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
