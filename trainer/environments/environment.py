"""Environments and tools of the user's: ``--env file.py:Class`` and ``--tools file.py:f,g``.

    class Game:                             # a plain class, as TRL's environment_factory takes
        def reset(self, number, **columns): ...        # fields of the record, by name; a text for the prompt
        def guess(self, value: int) -> str: ...        # each public method is a tool
        def get_reward(self) -> float: ...             # at the end, if it is there
        def close(self) -> None: ...                   # once the response is scored, if it is there

A class with ``step(self, text) -> (observation, reward, done)`` and without ``get_reward`` is a text game: it
has no tools, and ``step`` gets the text of each turn. Methods may be async. Each response has an object of
its own.
"""

import copy
import inspect
import json
import math
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from inspect import Parameter
from typing import Any

import numpy as np
from transformers.utils import get_json_schema

from dataset.formats import Record, keys_found
from dataset.lm_dataset import RecordDataset, RLAIFDataset
from errors import InputError
from model.weights import short_hash
from trainer.environments.running import Stopped, Worker, awaited
from trainer.environments.tool_calls import CallError, as_unicode
from trainer.user_code import (
    Modules,
    as_exception,
    code_of,
    contained,
    described,
    load_named,
    mistake,
    shown,
)

Tool = Callable[..., object]
OWN = os.path.dirname(__file__)
BY_NAME = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
NO_TOOLS = ("reset", "get_reward", "close")  # public methods
TOOL_FORM = (
    "a tool needs a docstring, a type for each parameter, and a line of each below Args: in the docstring; a "
    "method that is no tool has a name that begins with _"
)


@dataclass(frozen=True)
class Environments:
    """What the flags name, loaded and checked."""

    schemas: list[Record]  # of the tools, as OpenAI has them; [] for a text game
    is_text_game: bool
    has_reward: bool  # of its own: get_reward, or the rewards of a text game
    code_hash: str  # of the code, for resume
    make: Callable[[], object] | None  # None without --env
    reset_takes: list[Parameter]  # [] without reset
    functions: dict[str, Tool]  # --tools
    methods: list[str]  # those of the object that are tools

    def check_fields(self, *datasets: RecordDataset | None) -> None:
        """Raise InputError if reset asks for what no record of one of the datasets has."""
        for data in filter(None, datasets):
            for name in needed(self.reset_takes):
                answers = isinstance(data, RLAIFDataset) and data.with_answer
                if name not in data.columns and not (name == "answer" and answers):
                    raise InputError(
                        f"--env: reset's parameter {name!r} is no key of the records of {data.path}; "
                        f"{keys_found(data.columns)}: rename it, or give it a default"
                    )


@dataclass(eq=False)
class Episode:
    """One response's environment. Its methods are jobs for ``run_all``, in its ``worker``. seed: for reset,
    where it asks for one."""

    environments: Environments
    record: Record
    seed: int
    environment: object | None = None  # the user's object, once ``reset`` was called; None without --env
    worker: Worker = field(default_factory=Worker)
    _drawn: Any = None  # the states of Python's and numpy's generators

    @contextmanager
    def _own_randomness(self) -> Iterator[None]:
        """In this block, what is drawn from the global generators of Python and numpy depends on the seed
        alone, unless other jobs run at the same time."""
        before = random.getstate(), np.random.get_state()
        if self._drawn is None:
            random.seed(self.seed)
            np.random.seed(self.seed)
        else:
            random.setstate(self._drawn[0])
            np.random.set_state(self._drawn[1])
        try:
            yield
        finally:
            self._drawn = random.getstate(), np.random.get_state()
            random.setstate(before[0])
            np.random.set_state(before[1])

    def reset(self) -> str | None:
        """Make the object and reset it -> the text for the prompt, if any. Raises InputError."""
        make = self.environments.make
        if make is None:
            return None
        with in_one_line("--env"), self._own_randomness():
            self.environment = environment = make()
        reset = getattr(environment, "reset", None)
        if reset is None:
            return None
        with in_one_line("--env: reset"), self._own_randomness():
            given, named = self._for_reset()
            text = awaited(reset(*given, **named))
        if isinstance(text, tuple) and len(text) == 2 and isinstance(text[1], dict):  # gymnasium's
            text = text[0]
        if not isinstance(text, str | None):
            raise InputError(f"--env: reset returned {shown(text)}; it must return a text or None")
        return text and as_unicode(text)

    def _for_reset(self) -> tuple[list[object], dict[str, object]]:
        """Copies of the record's fields: those that reset gets by position, and those by name. None for one
        that other records have."""
        takes = self.environments.reset_takes
        fields = {"seed": self.seed, **copy.deepcopy(self.record)}
        given = [
            fields.pop(x.name, None if x.default is x.empty else x.default)
            for x in takes
            if x.kind == x.POSITIONAL_ONLY
        ]
        named = {
            x.name: fields.get(x.name)
            for x in takes
            if x.kind in BY_NAME and (x.name in fields or x.default is x.empty)
        }
        if any(x.kind == x.VAR_KEYWORD for x in takes):
            named |= {name: fields[name] for name in self.record if name in fields}
        return given, named

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Call a tool -> its result as text. Raises CallError if there is no such tool or it takes other
        arguments, and whatever the tool raises, SystemExit as a RuntimeError."""
        functions = self.environments.functions
        methods = self.environments.methods
        if name not in (*functions, *methods):
            raise CallError(f"there is no tool {name!r}; the tools are: {', '.join([*functions, *methods])}")
        tool = functions[name] if name in functions else getattr(self.environment, name)
        try:
            inspect.signature(tool).bind(**arguments)
        except TypeError as error:
            raise CallError(f"{name}: {error}") from error
        try:
            with self._own_randomness():
                return as_text(awaited(tool(**copy.deepcopy(arguments))))
        except Stopped:  # with it the other calls of the turn
            raise
        except BaseException as error:
            raise as_exception(error) from None

    def step(self, text: str) -> tuple[str, float, bool]:
        """Give a turn to the text game -> (observation, reward, done). Raises InputError."""
        environment: Any = self.environment
        with in_one_line("--env: step"), self._own_randomness():
            returned = awaited(environment.step(text))
            match returned:
                case (observation, reward, done) | (observation, reward, done, dict()):
                    pass
                case (observation, reward, terminated, truncated, dict()):  # gymnasium's
                    done = terminated or truncated
                case _:
                    done = None
            if done not in (True, False):
                raise InputError(
                    f"--env: step returned {shown(returned)}; a text game returns (observation, reward, "
                    "done), and a tool needs another name"
                )
            return "" if observation is None else as_text(observation), as_number("step", reward), bool(done)

    def get_reward(self) -> float | None:
        """The reward of the whole response, None where the environment says nothing of it. Raises
        InputError."""
        environment: Any = self.environment
        if not callable(getattr(environment, "get_reward", None)):
            return None
        with in_one_line("--env: get_reward"), self._own_randomness():
            reward = awaited(environment.get_reward())
        return None if reward is None else as_number("get_reward", reward)

    @property
    def can_close(self) -> bool:
        """Whether the object has a ``close``. That of a thread which hangs is left alone."""
        return callable(getattr(self.environment, "close", None)) and self.worker.thread is not None

    def close(self) -> None:
        """Nothing more is asked of the object. Raises InputError."""
        environment: Any = self.environment
        with in_one_line("--env: close"):
            awaited(environment.close())


# ---------------------------------------------------------------- flags


def load_environments(env: str, tools: str | Sequence[str], modules: Modules | None = None) -> Environments:
    """--env ("" for none) and --tools -> what they name. modules: files that other flags have imported; these
    are added. Raises InputError if something does not exist or is no tool."""
    modules = {} if modules is None else modules
    functions: dict[str, Tool] = {}
    schemas: dict[str, Record] = {}
    code: list[str] = []
    for spec in tools.split() if isinstance(tools, str) else tools:
        path, _, names = spec.rpartition(":")
        for name in names.split(","):
            functions[name] = load_named(path, name, "--tools", modules)
            add_schema(schemas, f"--tools {path}:{name}", functions[name], name)
            code += code_of(path, name)
    if not env:
        return Environments([*schemas.values()], False, False, short_hash(code), None, [], functions, [])
    path, _, name = env.rpartition(":")
    make = load_named(path, name, "--env", modules)
    probe = first_made(make, f"--env {env}")
    reset = getattr(probe, "reset", None)
    with in_one_line(f"--env {env}: reset"):
        reset_takes = [*inspect.signature(reset).parameters.values()] if reset else []
    has_reward = callable(getattr(probe, "get_reward", None))
    # Beside get_reward, ``step`` is a tool: a text game pays in its steps.
    is_text_game = callable(getattr(probe, "step", None)) and not has_reward
    methods = {} if is_text_game else public_methods(probe)
    for method_name, method in methods.items():
        add_schema(schemas, f"--env {env}: {method_name}", method, method_name)
    if is_text_game and schemas:
        raise InputError(f"--tools: {env} has a step, as a text game, which has no tools; leave out --tools")
    has_reward = has_reward or is_text_game
    if not schemas and not has_reward and reset is None:
        raise InputError(
            f"--env {env}: {type(probe).__name__} has no public method: each tool is one, with a docstring "
            "and types, and a text game has step(self, text)"
        )
    return Environments(
        schemas=[*schemas.values()],
        is_text_game=is_text_game,
        has_reward=has_reward,
        code_hash=short_hash([*code, "env", *code_of(path, name)]),
        make=make,
        reset_takes=reset_takes,
        functions=functions,
        methods=[*methods],
    )


def first_made(make: Callable[[], object], what: str) -> object:
    """An object by which its class is known. Raises InputError if none can be made."""
    with in_one_line(what):
        takes = [*inspect.signature(make).parameters.values()]
    if needed(takes):
        raise InputError(
            f"{what}: it is called without arguments, but {needed(takes)[0]!r} has no default; give it "
            "one, or name a function that makes the object"
        )
    with contained(), in_one_line(what):
        return make()


def needed(takes: list[Parameter]) -> list[str]:
    """The parameters that have no default, without the seed, which is always there."""
    by_name = [x for x in takes if x.kind in (*BY_NAME, x.POSITIONAL_ONLY) and x.name != "seed"]
    return [x.name for x in by_name if x.default is x.empty]


def public_methods(environment: object) -> dict[str, Tool]:
    """{name: method} of all that are tools, with those of the classes that it inherits from."""
    found: dict[str, Tool] = {}
    for name in dir(type(environment)):
        is_value = isinstance(inspect.getattr_static(environment, name), property | cached_property)
        if name.startswith("_") or name in NO_TOOLS or is_value:
            continue
        method = getattr(environment, name)
        if inspect.isroutine(method):
            found[name] = method
    return found


def add_schema(schemas: dict[str, Record], what: str, tool: Tool, name: str) -> None:
    """Add {name: its schema}. Raises InputError if it has none, or if there is another tool of this name."""
    if name in schemas:
        raise InputError(f"{what}: there is another tool of this name; rename one")
    try:
        schema = copy.deepcopy(get_json_schema(tool))
        takes = inspect.signature(tool).parameters.values()
    except Exception as error:  # of transformers, or of the annotations
        raise InputError(f"{what}: {described(error)[:200]}; {TOOL_FORM}") from error
    for parameter in takes:
        if parameter.kind in (Parameter.POSITIONAL_ONLY, Parameter.VAR_POSITIONAL):
            raise InputError(f"{what}: a call names each argument, which {parameter} does not allow")
    schema["function"]["name"] = name
    schemas[name] = schema


# ---------------------------------------------------------------- what the user's code returns or raises


@contextmanager
def in_one_line(what: str) -> Iterator[None]:
    """In this block, an exception of the user's code becomes an InputError with its place."""
    try:
        yield
    except (InputError, KeyboardInterrupt, Stopped):
        raise
    except BaseException as error:
        raise mistake(what, error, OWN) from error


def as_text(result: object) -> str:
    """What a tool returned, as text: lists and objects as JSON where they can be, anything else as Python
    prints it."""
    if isinstance(result, list | dict):
        with suppress(ValueError, TypeError, RecursionError):
            return as_unicode(json.dumps(result, ensure_ascii=False, default=str))
    return as_unicode(str(result))


def as_number(what: str, value: Any) -> float:
    """A reward. Raises InputError for what is no finite number."""
    number = math.nan
    if not isinstance(value, str | bytes):
        with suppress(ValueError, TypeError, RuntimeError, OverflowError):
            number = float(value)
    if not math.isfinite(number):
        raise InputError(f"--env: the reward of {what} is {shown(value)}; it must be a finite number")
    return number
