"""Turns: conversations as messages, transcripts as text; system turns, tools, parts of a turn's content.

A turn is {"role", "content"} or {"from", "value"}; without roles user and assistant alternate. ``content``
is text, or OpenAI's list of parts, of which all must be text. A transcript is "\\n\\nHuman: …\\n\\nAssistant:
…". As a prompt it stays text up to the last "Assistant:". ``to_messages`` makes turns of it where a chat
template is used.

Tools are ignored: ``as_messages`` leaves out the turns that call a tool and those that hold its result. A
dataset says at the start how many records have them (lm_dataset.py). Another name for a role goes into
``ROLE_NAMES``.
"""

import re

from errors import InputError

ROLE_NAMES = {
    "human": "user",  # ShareGPT's names
    "gpt": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "developer": "system",  # OpenAI's newer name
}
TOOL_ROLES = ("tool", "function", "function_call", "observation")
SPEAKERS = {"Human": "user", "Assistant": "assistant"}  # the roles in transcripts
SPEAKS = re.compile("\n\n(Human|Assistant): ?")
ANSWERS = "\n\nAssistant:"  # comes before an answer in a transcript


def as_messages(turns: list) -> list[dict]:
    """A list of turns -> [{"role", "content"}, …] without the turns of tools; missing roles alternate user,
    assistant. Raises InputError."""
    if not isinstance(turns, list) or not turns:
        raise InputError('a conversation must be text or a list of {"role", "content"} turns, not empty')
    messages = []
    for i, turn in enumerate(turns):
        turn = turn if isinstance(turn, dict) else {}
        if is_of_tools(turn):
            continue
        content = _text_of(turn.get("content", turn.get("value")), i + 1)
        role = turn.get("role", turn.get("from", ("user", "assistant")[i % 2]))
        if not isinstance(role, str):
            raise InputError(f'the "role" of turn {i + 1} must be text (user, assistant, system)')
        messages.append({"role": ROLE_NAMES.get(role, role), "content": content})
    if not messages:
        raise InputError("the conversation has only turns of tools; delete the line")
    return messages


def is_of_tools(turn: dict) -> bool:
    """Is this turn a call of a tool or its result?"""
    role = turn.get("role", turn.get("from"))
    return bool(role in TOOL_ROLES or turn.get("tool_calls") or turn.get("function_call"))


def _text_of(content, number):
    """A turn's content, text or a list of parts -> its text. ``number``: which turn it is, from 1."""
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise InputError(f'turn {number} of the conversation has no text "content"; only text can be read')
    return "".join(texts)


def is_transcript(text: str) -> bool:
    """Does a text begin with "Human:", to be answered by an "Assistant:"?"""
    return text.lstrip().startswith("Human:") and ANSWERS in text


def to_messages(prompt: list | str) -> list[dict]:
    """A prompt (text or messages) -> messages: the turns of a transcript, or one user turn for other text.

    If one speaker of a transcript speaks twice in a row, both parts become one turn, because many chat
    templates accept only alternating roles.
    """
    if not isinstance(prompt, str):
        return prompt
    if not is_transcript(prompt):
        return [{"role": "user", "content": prompt}]
    messages = []
    _, *pieces = SPEAKS.split("\n\n" + prompt.strip())
    for speaker, content in zip(pieces[::2], pieces[1::2], strict=True):
        if messages and messages[-1]["role"] == SPEAKERS[speaker]:
            messages[-1]["content"] += f"\n\n{content}"
        else:
            messages.append({"role": SPEAKERS[speaker], "content": content})
    return messages[:-1] if messages[-1] == {"role": "assistant", "content": ""} else messages


def add_system(prompt: list | str, system_prompt: str) -> list | str:
    """The prompt with a system message first, unless it has one or ``system_prompt`` is empty."""
    if not system_prompt or (isinstance(prompt, list) and prompt[0]["role"] == "system"):
        return prompt
    return [{"role": "system", "content": system_prompt}, *to_messages(prompt)]


def split(whole: list | str) -> tuple[list | str, str | None]:
    """Text or turns -> (the prompt: text or messages; the answer at its end, None where there is none).

    Raises InputError for what is neither.
    """
    if not isinstance(whole, str):
        messages = as_messages(whole)
        if messages[-1]["role"] != "assistant":
            return messages, None
        return messages[:-1], messages[-1]["content"]
    if not is_transcript(whole):
        return whole, None
    before, human, last = whole.rpartition("\n\nHuman:")
    question, answers, response = last.partition(ANSWERS)
    if not answers:
        return whole + ANSWERS, None
    # A few answers in HH-RLHF consist of two assistant turns.
    return before + human + question + answers, response.removeprefix(" ").replace(f"{ANSWERS} ", "\n\n")
