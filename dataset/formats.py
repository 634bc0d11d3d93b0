"""Dataset formats: records -> prompts, demonstrations, pairs, rated answers; conversations -> messages.

A record is read by the first of these keys that it has, so a file may mix forms (examples: docs/data.md):

    prompt     PROMPTS, or instruction and input beside an output, or text; it may end with the beginning of
               the answer (``_prompt_and_last_turn``)
    answer     ANSWERS, or the last turn of the prompt; to compare with also verl's reward_model.ground_truth
               or MiniMind's gt, and a list is several right answers
    tools      tools, functions, or tools in a turn
    pairs      chosen, rejected; rated answers: score beside an answer

What fits no form raises ``InputError``; ``located`` in record_files.py puts file and line before it.
"""

import json
import math
import re
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any

from dataset.answers import Answer, without_solution
from errors import InputError

Record = dict[str, Any]
Messages = list[dict[str, str]]  # {"role", "content"}
AnyPrompt = Messages | str  # a transcript stays text up to its last "Assistant:"
Exchange = tuple[AnyPrompt, str]  # a prompt and an answer to it (completion, response)
Tools = Sequence[Record]  # JSON schemas, or calls, as OpenAI has them

NAMED_PROMPT, NAMED_ANSWER = "--prompt_key", "--answer_key"  # where ``named`` puts them; no file has these
PROMPTS = (NAMED_PROMPT, "conversations", "messages", "user_input", "prompt", "question")
ANSWERS = (NAMED_ANSWER, "answer", "completion", "output")
HAVE_ANSWER = (*ANSWERS, "reward_model", "gt")  # fields
NO_TEXT = ("image", "images", "video", "videos", "audio", "audios")  # parts of prompts for other models
PLACEHOLDERS = ("", "空", "无")  # MiniMind's prompt files have these as the last turn, in place of an answer
QUOTED = 200  # characters of a record that an error message quotes
ROLE_NAMES = {  # in small letters
    "user": "user",
    "human": "user",  # ShareGPT's names
    "gpt": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "prompter": "user",  # OpenAssistant's
    "assistant": "assistant",
    "ai": "assistant",
    "model": "assistant",  # Gemma's
    "system": "system",
    "developer": "system",  # OpenAI's newer name
    "tool": "tool",  # what a tool gives back
    "tool_response": "tool",
    "function": "tool",
    "observation": "tool",
    "ipython": "tool",  # Llama's
    "tool_call": "assistant",
    "function_call": "assistant",
}
CALL_ROLES = ("tool_call", "function_call")  # the text of such a turn is calls of tools as JSON
THOUGHT_FIELDS = ("reasoning_content", "thinking", "reasoning")  # of a turn
SPEAKS = re.compile("\n\n(Human|Assistant): ?")  # in transcripts (HH-RLHF)
TURNS_AS_TEXT = re.compile(r'\s*\[\s*{\s*"(role|from|content|value)"')  # as tables keep conversations
REPLY = "\n\nAssistant:"  # comes before an answer in a transcript


class TurnText(str):
    """The text of a turn. A thought stands before the content and calls of tools stand behind it, as Qwen's
    templates write them. Chat templates that read these apart get ``content``, ``thought`` and ``calls``.
    ``weight``: OpenAI's, 0 for a turn that is not learned. ``is_begun``: the answer goes on behind this text
    (``begun``)."""

    content: str
    thought: str
    calls: Tools
    weight: float | None
    is_begun: bool

    def __new__(
        cls,
        content: str,
        thought: str = "",
        calls: Tools = (),
        weight: float | None = None,
        is_begun: bool = False,
    ) -> "TurnText":
        written = [f"<tool_call>\n{_as_json(call['function'])}\n</tool_call>" for call in calls]
        whole = "\n".join([content, *written] if content else written)
        turn = super().__new__(cls, f"<think>\n{thought}\n</think>\n\n{whole}" if thought else whole)
        vars(turn).update(content=content, thought=thought, calls=calls, weight=weight, is_begun=is_begun)
        return turn

    @classmethod
    def of(cls, text: str) -> "TurnText":
        """A text as a turn of which nothing else is known, unless it is one."""
        return text if isinstance(text, cls) else cls(text)


@dataclass(frozen=True)
class Keys:
    """The keys that the user named, "" for those that the form of a record decides. A key is the name of a
    field, or a path to one in nested objects: ``reward_model.ground_truth``."""

    prompt: str = ""
    answer: str = ""
    chosen: str = ""
    rejected: str = ""

    @classmethod
    def of(cls, args: Namespace) -> "Keys":
        """Those of the flags."""
        return cls(args.prompt_key, args.answer_key, args.chosen_key, args.rejected_key)


BY_FORM = Keys()  # nothing is named


# ---------------------------------------------------------------- records


def named(record: Record, keys: Keys) -> Record:
    """The record, with what the user named under the first name that the functions below look for. Raises
    InputError, with flag and keys found, where a named key leads to nothing."""
    fields = dict(record)
    for name, key in vars(keys).items():
        if not key:
            continue
        value: Any = record
        for part in [key] if key in record else key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value is None:
            raise InputError(f'no "{key[:80]}" (--{name}_key); {keys_found(record)}')
        fields[{"prompt": NAMED_PROMPT, "answer": NAMED_ANSWER}.get(name, name)] = value
    return fields


def to_prompt(record: Record) -> tuple[AnyPrompt, Answer | None]:
    """A record of any form -> (prompt, answer or None). Raises InputError.

    The answer of verl's records is the ground truth, of MiniMind's with tools gt. Of a solution that ends
    with "#### 72", as GSM8K's do, the answer is "72". Each text of a list is right; an empty list is
    no answer.
    """
    answer = _first(record, ANSWERS)
    is_list = isinstance(answer, list) and not _is_turns(answer)
    if is_list:
        record = {name: None if name in ANSWERS else value for name, value in record.items()}
    prompt, last = _prompt_and_answer(record)
    right: Any = answer if is_list and answer else last
    match record:
        case {"reward_model": {"ground_truth": truth}} if truth is not None and answer in (None, "", []):
            right = truth
        case {"gt": truth} if right is None:
            right = truth
    accepted = right if isinstance(right, list) else [right]
    texts = [without_solution(_as_text(text)) for text in accepted if text not in (None, "")]
    return prompt, texts[0] if len(texts) == 1 else texts or None


def to_demonstration(record: Record) -> tuple[AnyPrompt | None, str]:
    """A record -> (prompt, answer), or (None, text) if the whole text is to be learned. Raises InputError.
    A ground truth of verl's is no answer to learn."""
    prompt, answer = _prompt_and_answer(record)
    if answer and answer.strip():
        return prompt, answer
    if isinstance(prompt, str) and prompt == record.get("text") and not is_transcript(prompt):
        return None, prompt
    raise InputError(
        f"no answer to learn from (the result of a tool is none); {keys_found(record)}: end it with the "
        "assistant's turn, or name the answer with --answer_key"
        + (
            ' ("prompt" ends with the beginning of one: call it "messages" if it is all of it)'
            * bool(begun(prompt))
        )
    )


def to_pair(record: Record) -> tuple[list[Exchange], float]:
    """A record -> ([(prompt, chosen text), (prompt, rejected text)], margin). margin: how much better the
    chosen answer is, 0 if the record does not say. Raises InputError."""
    prompt, _ = _prompt_and_last_turn(record, _question(record) or "")
    sides = []
    for which in ("chosen", "rejected"):
        side = record.get(which)
        if side is None:
            raise InputError(
                f'no "{which}"; {keys_found(record)}: rename the key, or name it with '
                f'--{which}_key; or give each answer a "score"'
            )
        if isinstance(side, dict) and {"content", "value"} & side.keys():
            side = [side]  # a single turn, as in LLaMA-Factory's files
        turns, response = _with_answer(prompt, side, is_transcript(side))
        if _is_empty(turns) or response is None:
            raise InputError(
                f'"{which}" must be an answer to a prompt that is more than a system message: text beside a '
                '"prompt" (--prompt_key), a transcript, or turns that end with the assistant\'s'
            )
        sides.append((add_system(turns, _system(record)), response))
    return sides, _number("margin", record.get("margin", 0.0))


def to_rated(record: Record) -> tuple[list[Exchange], float]:
    """A record -> ([(prompt, response text)], score). Raises InputError."""
    prompt, response = _prompt_and_answer(record)
    if "score" not in record or response is None:
        raise InputError(
            f'no rated answer; {keys_found(record)}: the line needs "score", and "completion" or "answer" '
            "(or name the answer with --answer_key)"
        )
    return [(prompt, response)], _number("score", record["score"])


def keys_found(record: Record) -> str:
    """The keys of a record, for an error message."""
    names = json.dumps([name for name in record if not name.startswith("--")], ensure_ascii=False).strip("[]")
    return f"keys found: {names[:QUOTED] or 'none'}"


def _first(record: Record, names: tuple[str, ...]) -> Any:
    """What the record has under the first of these names that it has."""
    return next((record[name] for name in names if record.get(name) is not None), None)


def _question(record: Record) -> Any:
    """What a record asks, with or without the answer: text or turns."""
    for name in NO_TEXT:
        if record.get(name):
            raise InputError(f'"{name}" is not empty, and only text can be read; delete the line or the key')
    question = _first(record, PROMPTS)
    if question is None and {"instruction", "output"} <= record.keys():
        texts = [str(record.get(name) or "") for name in ("instruction", "input")]
        question = "\n\n".join(filter(str.strip, texts))
        history = record.get("history")
        if history and isinstance(history, list):  # LLaMA-Factory's: [[question, answer], …]
            earlier = [text for pair in history for text in (pair if isinstance(pair, list) else [pair])]
            question = [{"content": text} for text in (*earlier, question)]
    return record.get("text") if question is None else question


def _system(record: Record) -> str:
    """The system message beside a conversation, as in LLaMA-Factory's files, or ''."""
    system = record.get("system")
    return system.strip() if isinstance(system, str) else ""


def is_pair(record: Record) -> bool:
    """Has the record two answers to compare?"""
    return {"chosen", "rejected"} <= record.keys()


def _is_turns(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(turn, dict) for turn in value)


def _as_text(answer: Any) -> str:
    """Text as it is, the only one of a list, anything else as JSON. Raises InputError for several."""
    if isinstance(answer, list):
        if len(answer) != 1:
            raise InputError(
                f"an answer is a list of {len(answer)} texts, where one is needed; write one in each line"
            )
        return _as_text(answer[0])
    return answer if isinstance(answer, str) else _as_json(answer)


def _prompt_and_answer(record: Record) -> tuple[AnyPrompt, str | None]:
    """A record of any form -> (prompt, the text that answers it, or None)."""
    answer: str | None
    beside = _first(record, ANSWERS)
    if {"messages", "conversations"} & record.keys() and not (
        NAMED_ANSWER in record or isinstance(beside, str | int | float) or _is_turns(beside)
    ):
        beside = None  # something else beside a conversation, such as a list of accepted answers
    if is_pair(record):
        prompt, answer = to_pair(record)[0][0]
    else:
        question = _question(record)
        if question is None:
            raise InputError(
                f'no prompt (an "instruction" needs an "output" beside it); {keys_found(record)}: name the '
                "prompt with --prompt_key and the answer, if any, with --answer_key, or rename them"
            )
        prompt, answer = _prompt_and_last_turn(record, question)
    if beside is not None and not (answer and beside == ""):  # an empty column beside whole conversations
        prompt, answer = _with_answer(prompt, beside)
    if _is_empty(prompt):
        raise InputError("the prompt is empty, or only a system message; fill it in or delete the line")
    return add_system(prompt, _system(record)), answer


def _prompt_and_last_turn(record: Record, question: Any) -> tuple[AnyPrompt, str | None]:
    """What a record asks -> (prompt, the answer at its end, or None). The assistant's turn at the end of
    "prompt" is no answer but the beginning of one; of a transcript, if there is an answer beside it. So is an
    open thought beside an answer."""
    prompt, last = split(question)
    if last is None or last.strip() in PLACEHOLDERS:
        return prompt, None
    is_open = last.rfind("<think>") > last.rfind("</think>")
    is_prompt = question == record.get("prompt")
    if isinstance(prompt, str):
        is_begun = is_prompt and _first(record, ANSWERS) is not None
        return (question, None) if is_begun else (prompt, last)
    has_answer = is_pair(record) or not record.keys().isdisjoint(HAVE_ANSWER)
    if is_prompt or (is_open and has_answer):
        return [*prompt, {"role": "assistant", "content": TurnText(last, is_begun=True)}], None
    return prompt, last


def _with_answer(prompt: AnyPrompt, reply: Any, to_split: bool = False) -> tuple[AnyPrompt, str | None]:
    """A prompt, empty if there is none, and what answers it -> (prompt, answer). reply: text, or turns, which
    may repeat the prompt; anything else becomes JSON text. to_split: reply is a transcript."""
    if not (_is_turns(reply) or to_split):
        return prompt, _as_text(reply)
    turns, answer = split(reply)
    if not prompt or isinstance(turns, str):
        return turns, answer
    prompt_turns = to_messages(prompt)
    beginning = begun(prompt_turns)
    if beginning and turns == prompt_turns[:-1] and answer and answer.startswith(beginning):  # it is repeated
        return prompt, answer[len(beginning) :]
    if turns[: len(prompt_turns)] == prompt_turns:
        return turns, answer
    speakers = [turn["role"] for turn in turns if turn["role"] != "system"]
    if speakers[:1] == ["user"] and prompt_turns[-1]["role"] != "assistant":  # the same in other words
        system = prompt_turns[0]["content"] if prompt_turns[0]["role"] == "system" else ""
        return add_system(turns, system), answer
    return prompt_turns + turns, answer


def _is_empty(prompt: AnyPrompt) -> bool:
    return not any(turn["content"].strip() for turn in to_messages(prompt) if turn["role"] != "system")


def _number(name: str, value: Any) -> float:
    try:
        number = float(value)  # ChatLLaMA's files have numbers in quotes
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise InputError(f'"{name}" must be a number, not {repr(value)[:50]}')
    return number


# ---------------------------------------------------------------- turns and transcripts


def as_messages(turns: Any) -> Messages:
    """A list of turns, {"role", "content"} or {"from", "value"}, -> messages. A turn without a role is the
    user's, behind one of the user's the assistant's. A content is text, or OpenAI's list of text parts; what
    a tool gives back may be any JSON. Raises InputError."""
    messages: Messages = []
    for i, turn in enumerate(turns if isinstance(turns, list) else []):
        turn = turn if isinstance(turn, dict) else {}
        after_user = messages and messages[-1]["role"] == "user"
        given: Any = turn.get("role", turn.get("from", "assistant" if after_user else "user"))
        name = str(given).lower().replace("-", "_")
        role = ROLE_NAMES.get(name, given)
        content = turn.get("content", turn.get("value"))
        called = content if name in CALL_ROLES else turn.get("tool_calls") or turn.get("function_call")
        calls = calls_in(called)
        if name in CALL_ROLES or (content is None and (calls or role == "tool")):
            content = ""
        parts = content if isinstance(content, list) else [{"text": content}]
        texts: list[Any] = [part.get("text") if isinstance(part, dict) else None for part in parts]
        if role == "tool" and not all(isinstance(text, str) for text in texts):
            texts = [_as_json(content)]
        if not all(isinstance(text, str) for text in (role, *texts)):
            raise InputError(
                f'turn {i + 1} of the conversation has no text "content", or a "role" that is no text; only '
                "text can be read"
            )
        text = "".join(texts)
        if role == "system" and turn.get("tools") and not text:
            continue  # MiniMind's files have their tools in such a turn
        thought = "" if "</think>" in text else str(_first(turn, THOUGHT_FIELDS) or "").strip()
        messages.append({"role": role, "content": TurnText(text, thought, calls, turn.get("weight"))})
    if not messages:
        raise InputError('a conversation must be text or a list of {"role", "content"} turns, not empty')
    return messages


def calls_in(value: Any) -> Tools:
    """Calls of tools as OpenAI has them, their arguments as JSON objects. Raises InputError for what is no
    call."""
    value = _from_json(value)
    calls = []
    for call in value if isinstance(value, list) else [value] if value else []:
        match _from_json(call):
            case {"function": {"name": str(name), **more}} | {"name": str(name), **more}:
                function = {"name": name, "arguments": _from_json(more.get("arguments", {}))}
                calls.append({"type": "function", "function": function})
            case _:
                raise InputError(f'the call of a tool has no "name": {_as_json(call)[:QUOTED]}')
    return calls


def plain_messages(messages: Messages) -> list[Record]:
    """Messages as OpenAI has them, which JSON can hold: calls of tools stand beside the content."""
    plain = []
    for message in messages:
        turn = TurnText.of(message["content"])
        calls = {"tool_calls": [*turn.calls]} if turn.calls else {}
        plain.append({**message, "content": str(TurnText(turn.content, turn.thought)), **calls})
    return plain


def tools_of(record: Record) -> Tools:
    """The tools of a record: its own, or those in one of its turns. Raises InputError."""
    conversations = map(_turns_of, (_question(record), _first(record, ANSWERS), record.get("chosen")))
    turns = chain(*filter(_is_turns, conversations))
    tools: Any = []
    for place in (record, {"tools": record.get("functions")}, *turns):
        tools = tools or _from_json(place.get("tools")) or []
    tools = [*map(_from_json, tools)]
    if not all(isinstance(tool, dict) for tool in tools):
        raise InputError(
            '"tools" (or "functions") must be a list of JSON objects; correct it or delete the key'
        )
    return [{"type": "function", "function": tool} if "name" in tool else tool for tool in tools]


def tool_name(tool: Record) -> str:
    """The name of a tool as ``tools_of`` gives it, "" without one."""
    match tool:
        case {"function": {"name": str(name)}}:
            return name
    return ""


def without_calls(record: Record, prompt: AnyPrompt) -> AnyPrompt:
    """The prompt of a record without the calls and results at its end: the policy makes its own, and they are
    run. What a record has under "prompt" stays as it is."""
    turns = to_messages(prompt)
    users = [place for place, turn in enumerate(turns) if turn["role"] == "user"]
    if turns[-1]["role"] != "tool" or not users or _question(record) == record.get("prompt"):
        return prompt
    return turns[: users[-1] + 1]


def _from_json(value: Any) -> Any:
    """What a text has as JSON; anything else as it is."""
    with suppress(ValueError, TypeError):
        return json.loads(value)
    return value


def _turns_of(whole: Any) -> Any:
    """The turns of a text in which a table keeps them; anything else as it is."""
    return _from_json(whole) if isinstance(whole, str) and TURNS_AS_TEXT.match(whole) else whole


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def replaces_turn(record: Record) -> bool:
    """Does an answer beside a conversation take the place of the assistant's turn at its end?"""
    turns = _first(record, ("messages", "conversations"))
    reply = _first(record, ANSWERS)
    if not _is_turns(turns) or not isinstance(reply, str | int | float) or reply == "" or is_pair(record):
        return False
    return _prompt_and_last_turn(record, turns)[1] is not None


def is_transcript(prompt: AnyPrompt) -> bool:
    """Is it a text that begins with "Human:", to be answered by an "Assistant:"?"""
    return isinstance(prompt, str) and prompt.lstrip().startswith("Human:") and REPLY in prompt


def to_messages(prompt: AnyPrompt) -> Messages:
    """A prompt -> messages: the turns of a transcript, or one user turn for other text.

    If one speaker of a transcript speaks twice in a row, both parts become one turn, because many chat
    templates accept only alternating roles.
    """
    if not isinstance(prompt, str):
        return prompt
    if not is_transcript(prompt):
        return [{"role": "user", "content": prompt}]
    _, *pieces = SPEAKS.split("\n\n" + prompt.strip())
    turns = zip(pieces[::2], pieces[1::2], strict=True)
    messages = [
        {"role": ROLE_NAMES[speaker.lower()], "content": "\n\n".join(text for _, text in parts)}
        for speaker, parts in groupby(turns, lambda turn: turn[0])
    ]
    last = messages[-1]
    if last["role"] == "assistant":
        beginning = TurnText(last["content"], is_begun=True)
        messages[-1:] = [last | {"content": beginning}] if beginning else []
    return messages


def begun(prompt: AnyPrompt) -> str:
    """What a prompt has of the answer already: the last turn, if the answer continues it, else ''."""
    last = to_messages(prompt)[-1]["content"] if prompt else ""
    return last if TurnText.of(last).is_begun else ""


def whole_answer(prompt: AnyPrompt, response: str) -> Exchange:
    """A prompt and what was sampled -> (the prompt without the beginning of the answer, the answer)."""
    beginning = "" if isinstance(prompt, str) else begun(prompt)
    return (prompt[:-1], beginning + response) if beginning else (prompt, response)


def add_system(prompt: AnyPrompt, system_prompt: str) -> AnyPrompt:
    """The prompt with a system message first, unless it has one or ``system_prompt`` is empty."""
    messages = to_messages(prompt)
    if not system_prompt or messages[0]["role"] == "system":
        return prompt
    return [{"role": "system", "content": system_prompt}, *messages]


def split(whole: Any) -> tuple[AnyPrompt, str | None]:
    """Text or turns -> (the prompt; the answer at its end, None where there is none). Raises InputError for
    what is neither."""
    whole = _turns_of(whole)
    if not isinstance(whole, str):
        messages = as_messages(whole)
        if messages[-1]["role"] != "assistant":
            return messages, None
        return messages[:-1], messages[-1]["content"]
    if not is_transcript(whole):
        return whole, None
    before, human, last = whole.rpartition("\n\nHuman:")
    question, reply, response = last.partition(REPLY)
    if not reply:
        return whole + REPLY, None
    # A few answers in HH-RLHF consist of two assistant turns.
    return before + human + question + reply, response.removeprefix(" ").replace(f"{REPLY} ", "\n\n")
