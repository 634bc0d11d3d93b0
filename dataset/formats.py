"""Dataset formats: records -> prompts, demonstrations, preference pairs, rated answers, by their keys.

    {"conversations": turns} or {"messages": turns}   MiniMind, ShareGPT, OpenAI; the answer, if any, last
    {"prompt": text or turns, …}                      with "answer" or "completion" (TRL), text or turns
    {"chosen": …, "rejected": …}                      text beside a "prompt", turns with or without one (TRL),
                                                      transcripts (HH-RLHF), or texts that begin alike (TRL)
    {"user_input": text, "completion", "score"}       ChatLLaMA
    {"text": text or transcript}                      a prompt, or a text to be learned

A turn is {"role", "content"} or {"from", "value"}; without roles user and assistant alternate. A transcript
is "\\n\\nHuman: …\\n\\nAssistant: …". As a prompt it stays text up to the last "Assistant:". ``to_messages``
makes turns of it where a chat template is used. Examples of all: docs/data.md.

To support another format of records, change this file, in the function of the stage that is to read it:

    to_prompt         all stages: record -> prompt and answer. Add a branch for the new keys, and put the
                      prompt's key into ``PROMPT_KEYS``. Enough for PPO and, with an answer, for stage 1
    to_demonstration  stage 1 (train_sft.py): only if the answer is not what ``to_prompt`` returns
    to_pair           stage 2 (train_reward.py), pairs; ``_preferred`` reads one side of a pair
    to_rated          stage 2, answers with a score; ``is_rated`` tells them from pairs

Another name for a role goes into ``ROLE_NAMES``, another kind of file into record_files.py.

What fits no format raises ``InputError``. Its message has no file and line: ``located`` in record_files.py
puts them before it.
"""

import contextlib
import itertools
import math
import re

from errors import InputError

PLACEHOLDERS = ("", "空", "无")  # MiniMind's prompt files have these in place of an answer
PROMPT_KEYS = {"conversations", "messages", "chosen", "user_input", "prompt"}  # beside one, "text" is ignored
QUESTIONS = {"question", "query", "instruction", "input", "conversations", "messages", "user_input"}
ROLE_NAMES = {
    "human": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
}  # ShareGPT's names
SPEAKERS = {"Human": "user", "Assistant": "assistant"}  # the roles in transcripts
SPEAKS = re.compile("\n\n(Human|Assistant): ?")
ANSWERS = "\n\nAssistant:"  # comes before an answer in a transcript


def to_prompt(record):
    """A record of any format -> (prompt: text or messages, answer: text or None). Raises InputError."""
    if "conversations" in record or "messages" in record:
        turns = record["conversations"] if "conversations" in record else record["messages"]
        prompt, answer = _without_placeholder(*_split_turns(as_messages(turns)))
    elif "chosen" in record and "rejected" in record:
        prompt, answer = to_pair(record)[0]
    elif "user_input" in record:
        prompt, answer = _text(record, "user_input"), _optional_text(record, "completion")
    elif "prompt" in record:
        prompt, answer = _with_completion(_prompt(record), record)
    elif "text" in record:
        text = _text(record, "text")
        prompt, answer = (
            _without_placeholder(*_split_transcript(text)) if is_transcript(text) else (text, None)
        )
    else:
        raise InputError('no prompt; the line needs "conversations", "messages" or "prompt"')
    if not prompt:
        raise InputError("the prompt is empty; fill it in or delete the line")
    return prompt, answer


def to_demonstration(record):
    """A record -> (prompt, answer: text), or (None, text) if the whole text is to be learned. Raises
    InputError."""
    text = record.get("text")
    if isinstance(text, str) and text and record.keys().isdisjoint(PROMPT_KEYS) and not is_transcript(text):
        return None, text
    prompt, answer = to_prompt(record)
    if answer is None:
        raise InputError('no answer to learn from; end it with the assistant\'s turn or "answer"')
    return prompt, answer


def to_pair(record):
    """A record -> ((prompt, chosen text), (prompt, rejected text), margin). margin: how much better the
    chosen answer is, 0 if the record does not say. Raises InputError."""
    chosen, rejected = (_preferred(record, side) for side in ("chosen", "rejected"))
    if chosen[0] is None and rejected[0] is None:
        if other := sorted(QUESTIONS & record.keys()):
            raise InputError(f'the question is under "{other[0]}"; call it "prompt"')
        chosen, rejected = _common_start(chosen[1], rejected[1])
    if not chosen[0] or not rejected[0]:
        raise InputError('"chosen" and "rejected" must both be answers to a prompt that is not empty')
    return chosen, rejected, _number(record, "margin", 0.0)


def to_rated(record):
    """A record -> (prompt, response text, score). Raises InputError."""
    prompt, response = to_prompt(record)
    if "score" not in record or response is None:
        raise InputError('no rated answer; the line needs "completion" (or "answer") and "score"')
    return prompt, response, _number(record, "score")


def is_rated(record):
    """Is the record one answer with a score? If not, it is taken for a pair."""
    return "score" in record and "chosen" not in record


# ---------------------------------------------------------------- turns


def as_messages(turns):
    """A list of turns -> [{"role", "content"}, …]; missing roles alternate user, assistant."""
    if not isinstance(turns, list) or not turns:
        raise InputError('a conversation must be a list of {"role", "content"} turns, not empty')
    messages = []
    for i, turn in enumerate(turns):
        turn = turn if isinstance(turn, dict) else {}
        content = turn.get("content", turn.get("value"))
        role = turn.get("role", turn.get("from", ("user", "assistant")[i % 2]))
        if not isinstance(content, str):
            raise InputError(f'turn {i + 1} of the conversation has no text "content"')
        if not isinstance(role, str):
            raise InputError(f'the "role" of turn {i + 1} must be text (user, assistant, system)')
        messages.append({"role": ROLE_NAMES.get(role, role), "content": content})
    return messages


def is_transcript(text):
    """Does a text begin with "Human:", to be answered by an "Assistant:"?"""
    return text.lstrip().startswith("Human:") and ANSWERS in text


def to_messages(prompt):
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


def add_system(prompt, system_prompt):
    """The prompt with a system message first, unless it has one or ``system_prompt`` is empty."""
    if not system_prompt or (isinstance(prompt, list) and prompt[0]["role"] == "system"):
        return prompt
    return [{"role": "system", "content": system_prompt}, *to_messages(prompt)]


def _split_turns(messages):
    """Messages -> (those before the answer, the answer); the answer is None if the user speaks last."""
    if messages[-1]["role"] != "assistant":
        return messages, None
    return messages[:-1], messages[-1]["content"]


def _split_transcript(text):
    """A transcript -> (its text up to the last answer, the answer: None if a human speaks last)."""
    before, human, last = text.rpartition("\n\nHuman:")
    question, answers, response = last.partition(ANSWERS)
    if not answers:
        return text + ANSWERS, None
    # A few answers in HH-RLHF consist of two assistant turns.
    return before + human + question + answers, response.removeprefix(" ").replace(f"{ANSWERS} ", "\n\n")


def _without_placeholder(prompt, answer):
    return prompt, None if answer is not None and answer.strip() in PLACEHOLDERS else answer


# ---------------------------------------------------------------- parts of records


def _prompt(record):
    return record["prompt"] if isinstance(record["prompt"], str) else as_messages(record["prompt"])


def _with_completion(prompt, record):
    """A prompt and the record's "answer" or "completion" -> (prompt, answer or None). If the completion is a
    list of turns, all but the last are added to the prompt."""
    completion = record.get("completion")
    if isinstance(completion, list):
        turns, answer = _split_turns(as_messages(completion))
        if answer is None:
            raise InputError('"completion" must end with an assistant turn')
        return (to_messages(prompt) + turns if turns else prompt), answer
    return prompt, _optional_text(record, "completion" if record.get("answer") is None else "answer")


def _preferred(record, side):
    """One side of a pair -> (prompt, response). The prompt is None if only a comparison of both sides can
    find it."""
    value, prompt = record.get(side), _prompt(record) if "prompt" in record else None
    if isinstance(value, str) and is_transcript(value):
        prompt, response = _split_transcript(value)
    elif isinstance(value, str):
        response = value
    elif isinstance(value, list):
        turns, response = _split_turns(as_messages(value))
        asked = to_messages(prompt) if prompt else []
        # Some files repeat the prompt in both sides: then it is not added again.
        prompt = turns if turns[: len(asked)] == asked else asked + turns
    else:
        raise InputError(f'"{side}" must be text beside a "prompt", a transcript, or a list of messages')
    if response is None:
        raise InputError(f'"{side}" must hold a question and end with an assistant turn')
    return prompt, response


def _common_start(chosen, rejected):
    """Two texts without a prompt -> ((start, rest), (start, other rest)). The prompt is their common start,
    cut back to the end of a word."""
    alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))
    start = "".join(letter for letter, _ in alike)
    start = re.match(r"(.*\s)?", start, re.DOTALL)[0].rstrip()
    if not start:
        raise InputError('no prompt; the texts do not begin alike: add a "prompt"')
    return (start, chosen[len(start) :]), (start, rejected[len(start) :])


def _text(record, name):
    if not isinstance(record[name], str):
        raise InputError(f'"{name}" must be text; put it in quotes')
    return record[name]


def _optional_text(record, name):
    return None if record.get(name) is None else _text(record, name)


def _number(record, name, default=None):
    value = record.get(name, default)
    number = math.nan
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        with contextlib.suppress(ValueError, OverflowError):
            number = float(value)  # ChatLLaMA's files have numbers in quotes
    if not math.isfinite(number):
        raise InputError(f'"{name}" must be a number, not {repr(value)[:50]}')
    return number
