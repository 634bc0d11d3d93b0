"""The calls of tools in a turn of the policy's: text -> what is said, what is called, what is thought.

A tokenizer with a ``response_template`` (transformers) reads its own format. Others are read as

- Qwen, Hermes, MiniMind and SmolLM write: <tool_call>{"name": …, "arguments": {…}}</tool_call>, several in a
  turn, with text around them. Hermes' data has Python's dicts there, with single quotes;
- Llama 3 writes: {"name": …, "parameters": {…}} is the whole turn, with the name of a tool.

A call inside <think>…</think> is none. Another format: here only.
"""

import ast
import json
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from dataset.formats import THOUGHT_FIELDS, Record
from trainer.user_code import described

TAG = re.compile("<think>|</think>|<tool_call>")
CALL_END = "</tool_call>"
DEEPEST = 32  # levels of lists and objects in a call: what renders or copies it again is recursive
FORM = '{"name": "...", "arguments": {...}}'


@dataclass(frozen=True)
class Call:
    """A call of a tool."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class BadCall:
    """A call that cannot be read, and why."""

    error: str


class CallError(Exception):
    """A call that can be read and that no tool can be given."""


@dataclass(frozen=True)
class Turn:
    """A turn of the policy's. content: what stands outside of thoughts and calls; a call that cannot be read
    stays there as it is."""

    content: str
    calls: list[Call | BadCall]
    thought: str


def read_turn(
    tokenizer: PreTrainedTokenizerBase, text: str, before: str = "", tools: Sequence[Record] = ()
) -> Turn:
    """The text of a turn, without the token that ends it -> its parts. before: the prompt and the turns up to
    here, as text: its end may have opened a thought. tools: schemas, by which a response_template converts
    arguments. No text raises an error."""
    if tokenizer.response_template is not None:
        return _read_by_template(tokenizer, text, before, tools)
    return _read_tags(text, before, [tool["function"]["name"] for tool in tools])


def error_result(error: BadCall | Exception) -> str:
    """What answers a call that failed, as a tool's result: {"error": "ValueError: …"} as JSON."""
    match error:
        case BadCall():
            reason = error.error
        case CallError():
            reason = str(error)
        case _:
            reason = described(error)
    return json.dumps({"error": as_unicode(reason)}, ensure_ascii=False)


def as_unicode(text: str) -> str:
    """A text that can be encoded: halves of surrogate pairs become question marks."""
    return text.encode(errors="replace").decode()


# ---------------------------------------------------------------- <tool_call>


def _read_tags(text: str, before: str, names: Sequence[str] = ()) -> Turn:
    content: list[str] = []
    thoughts: list[str] = []
    calls: list[Call | BadCall] = []
    tag = TAG.search(text)
    thinks = before.rstrip().endswith("<think>") or bool(tag and tag[0] == "</think>")
    place = 0
    while place < len(text):
        if thinks:
            thought, _, _ = text[place:].partition("</think>")
            thoughts.append(thought.strip())
            place += len(thought) + len("</think>")
            thinks = False
        tag = TAG.search(text, place)
        content.append(text[place : tag.start() if tag else None])
        if tag is None:
            break
        place = tag.end()
        if tag[0] == "<tool_call>":
            found, place = _read_call(text, place)
            calls += found
            if any(isinstance(call, BadCall) for call in found):
                content.append(text[tag.start() : place])
        else:
            thinks = tag[0] == "<think>"
    said = "".join(content).strip()
    if not calls and (call := _whole_turn(said, names)):
        calls = [call]
        said = said if isinstance(call, BadCall) else ""
    return Turn(said, calls, "\n".join(filter(None, thoughts)))


def _read_call(text: str, start: int) -> tuple[list[Call | BadCall], int]:
    """What stands behind <tool_call>, a call or a list of them -> (calls, the place behind </tool_call>)."""
    start += len(text[start:]) - len(text[start:].lstrip())
    try:
        value, end = JSON.raw_decode(text, start)
        behind = text[end:].lstrip()
        if behind.startswith(CALL_END):
            return _calls_of(value), len(text) - len(behind) + len(CALL_END)
        error = f"{CALL_END} is missing" if CALL_END not in behind else "more than one JSON value in a call"
    except (ValueError, RecursionError) as reason:
        error = f"no JSON in a call: {described(reason)}"
    inside, closed, _ = text[start:].partition(CALL_END)
    end = start + len(inside) + len(closed)
    if not closed:
        error = f"{CALL_END} is missing"
    elif (literal := _python_literal(inside)) is not None:
        return _calls_of(literal), end
    return [BadCall(f"{error}; write {FORM}")], end


def _python_literal(text: str) -> Any:
    """What JSON can hold of a dict or list as Python writes it, None for any other text. Nothing is run."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of "\\d" in a text
            value = ast.literal_eval(text.strip())
        return json.loads(json.dumps(value)) if isinstance(value, dict | list) else None
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _whole_turn(text: str, names: Sequence[str]) -> Call | BadCall | None:
    """The call that a turn is, None for any other turn. names: of the tools, () for any."""
    try:
        value = JSON.decode(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or (names and value.get("name") not in names):
        return None
    is_call = value.keys() - {"type"} in ({"name", "parameters"}, {"name", "arguments"})
    return _call_of(value) if is_call else None


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


JSON = json.JSONDecoder(parse_constant=_no_number)  # NaN, Infinity


def _calls_of(value: Any) -> list[Call | BadCall]:
    """JSON -> calls, at least one."""
    values = value if isinstance(value, list) else [value]
    return [*map(_call_of, values)] or [BadCall(f"a call is empty; write {FORM}")]


def _call_of(value: Any) -> Call | BadCall:
    """JSON -> a call. It may stand in "function", and its arguments in a text, as OpenAI has them."""
    if isinstance(value, dict):
        value = value.get("function", value)
    match value:
        case {"name": str(name), **more} if name:
            pass
        case {"name": _}:
            return BadCall(f'the "name" of a call is no text; write {FORM}')
        case _:
            return BadCall(f'a call has no "name"; write {FORM}')
    arguments = more.get("arguments", more.get("parameters"))
    try:
        if isinstance(arguments, str):
            arguments = JSON.decode(arguments)
        if _is_deep(arguments, DEEPEST):
            raise ValueError(f"more than {DEEPEST} levels")
        json.dumps([name, arguments], ensure_ascii=False).encode()  # half a surrogate pair is no text
    except (ValueError, RecursionError) as error:
        return BadCall(f'"arguments" of {as_unicode(name)}: {described(error)}')
    if not isinstance(arguments, dict | None):
        return BadCall(f'"arguments" of {name} must be an object, {{"name": value}}')
    return Call(name, arguments or {})


def _is_deep(value: Any, levels: int) -> bool:
    """Whether lists and objects are nested in more levels."""
    if not isinstance(value, list | dict):
        return False
    inside = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_deep(x, levels - 1) for x in inside)


# ---------------------------------------------------------------- response_template


def _read_by_template(
    tokenizer: PreTrainedTokenizerBase, text: str, before: str, tools: Sequence[Record]
) -> Turn:
    end = tokenizer.eos_token or ""  # some templates close a call by it
    try:
        message: Any = tokenizer.parse_response(text + end, prefix=before, tools=[*tools])
        called = message.get("tool_calls")
    except Exception as error:  # whatever a text leads to in a parser of the model's
        return Turn(text, [BadCall(f"a call cannot be read: {described(error)[:200]}")], "")
    thoughts = [str(message[name]).strip() for name in THOUGHT_FIELDS if message.get(name)]
    content = str(message.get("content") or "").removesuffix(end).strip()
    return Turn(content, _calls_of(called) if called else [], "\n".join(thoughts))
