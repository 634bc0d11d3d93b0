"""Dataset formats: records -> prompts, demonstrations, preference pairs, rated answers, by their keys.

    {"conversations": turns} or {"messages": turns}   MiniMind, ShareGPT, OpenAI; the answer, if any, last
    {"prompt": text or turns, …}                      with "answer" or "completion" (TRL), text or turns, or
                                                      {"reward_model": {"ground_truth": …}} (verl)
    {"chosen": …, "rejected": …}                      text beside a "prompt", turns with or without one (TRL),
                                                      transcripts (HH-RLHF), or texts that begin alike (TRL)
    {"user_input": text, "completion", "score"}       ChatLLaMA
    {"question": text, "answer": text}                GSM8K: a solution that ends with #### and a number
    {"instruction": text, "input", "output": text}    Alpaca
    {"text": text or transcript}                      a prompt, or a text to be learned

Each record is read by its own keys, so a file may mix forms. Keys that the user names (``Keys``) come first:
``renamed`` puts their values where the forms have them. Turns and transcripts: turns.py. Examples of all:
docs/data.md.

To support another format of records, change this file, in the function of the stage that is to read it:

    to_prompt         all stages: record -> prompt and answer. Add a branch for the new keys in
                      ``_prompt_and_answer``, and put the prompt's key into ``PROMPT_KEYS``. Enough for PPO
                      and, with an answer, for stage 1
    to_demonstration  stage 1 (train_sft.py): only if the answer is another one
    to_pair           stage 2 (train_reward.py), pairs; ``_preferred`` reads one side of a pair
    to_rated          stage 2, answers with a score; ``is_rated`` tells them from pairs

Another kind of file goes into record_files.py.

What fits no format raises ``InputError``. Its message has no file and line: ``located`` in record_files.py
puts them before it.
"""

import contextlib
import json
import math
import os
import re
from dataclasses import dataclass

from dataset.answers import without_solution
from dataset.turns import (
    as_messages,
    is_of_tools,
    is_transcript,
    split_transcript,
    split_turns,
    to_messages,
)
from errors import InputError

PLACEHOLDERS = ("", "空", "无")  # MiniMind's prompt files have these in place of an answer
PROMPT_KEYS = {"conversations", "messages", "chosen", "user_input", "prompt"}  # beside one, "text" is ignored
QUESTIONS = ("question", "query", "instruction", "input", "conversations", "messages", "user_input")
SHOWN = 200  # characters of the keys that an error message lists
TURNS = ("conversations", "messages", "prompt", "completion", "chosen", "rejected")  # may hold turns


@dataclass(frozen=True)
class Keys:
    """The keys that the user named, "" for those that the form of a record decides. A key is the name of a
    field, or a path to one in nested objects: ``reward_model.ground_truth``."""

    prompt: str = ""
    answer: str = ""
    chosen: str = ""
    rejected: str = ""


BY_FORM = Keys()  # nothing is named


def to_prompt(record: dict, keys: Keys = BY_FORM) -> tuple:
    """A record of any format -> (prompt: text or messages, answer: text or None). Raises InputError.

    The answer of verl's records is the ground truth; what is no text there becomes JSON text. Of a solution
    that ends with "#### 72", as GSM8K's do, the answer is "72".
    """
    prompt, answer = _prompt_and_answer(record, keys)
    checked = record.get("reward_model")
    if answer is None and isinstance(checked, dict) and (truth := checked.get("ground_truth")) is not None:
        answer = truth if isinstance(truth, str) else json.dumps(truth, ensure_ascii=False, default=str)
    return prompt, answer and without_solution(answer)


def to_demonstration(record: dict, keys: Keys = BY_FORM) -> tuple:
    """A record -> (prompt, answer: text), or (None, text) if the whole text is to be learned. Raises
    InputError. A ground truth of verl's is no answer to learn: it is there to be compared with."""
    text = record.get("text")
    elsewhere = PROMPT_KEYS & record.keys() or _is_gsm8k(record) or _is_alpaca(record)
    plain = isinstance(text, str) and text and not is_transcript(text)
    if plain and not (elsewhere or keys.prompt or keys.answer):
        return None, text
    prompt, answer = _prompt_and_answer(record, keys)
    if answer is None:
        tools = " (calls of tools are left out)" if tool_turns(record, keys) else ""
        raise InputError(
            f"no answer to learn from{tools}; {keys_found(record)}: end it with the assistant's turn, or "
            "name the answer with --answer_key"
        )
    return prompt, answer


def to_pair(record: dict, keys: Keys = BY_FORM) -> tuple:
    """A record -> ((prompt, chosen text), (prompt, rejected text), margin). margin: how much better the
    chosen answer is, 0 if the record does not say. Raises InputError."""
    record = renamed(record, keys)
    for side in ("chosen", "rejected"):
        if record.get(side) is None:
            raise InputError(
                f'no "{side}"; {keys_found(record)}: rename the key, or name it in train_reward.py with '
                f"--{side}_key"
            )
    chosen, rejected = (_preferred(record, side) for side in ("chosen", "rejected"))
    if chosen[0] is None and rejected[0] is None:
        if other := _question(record):
            raise InputError(f'the question is under "{other}": add --prompt_key {other}')
        chosen, rejected = _common_start(chosen[1], rejected[1])
    if not chosen[0] or not rejected[0]:
        raise InputError('"chosen" and "rejected" must both be answers to a prompt that is not empty')
    return chosen, rejected, _number(record, "margin", 0.0)


def to_rated(record: dict, keys: Keys = BY_FORM) -> tuple:
    """A record -> (prompt, response text, score). Raises InputError."""
    prompt, response = _prompt_and_answer(record, keys)
    if "score" not in record or response is None:
        raise InputError(
            f'no rated answer; {keys_found(record)}: the line needs "score", and "completion" or "answer" '
            "(or name the answer with --answer_key)"
        )
    return prompt, response, _number(record, "score")


def is_rated(record: dict, keys: Keys = BY_FORM) -> bool:
    """Is the record one answer with a score? If not, it is taken for a pair."""
    return "score" in record and "chosen" not in record and not keys.chosen


def tool_turns(record: dict, keys: Keys = BY_FORM) -> int:
    """The number of turns of a record that are left out because they call a tool or hold its result."""
    record = renamed(record, keys)
    turns = [turn for name in TURNS if isinstance(record.get(name), list) for turn in record[name]]
    return sum(is_of_tools(turn) for turn in turns if isinstance(turn, dict))


# ---------------------------------------------------------------- forms


def _prompt_and_answer(record, keys):
    """A record of any format -> (prompt: text or messages, the text that answers it, or None)."""
    record = renamed(record, keys)
    if "conversations" in record or "messages" in record:
        turns = record.get("conversations", record.get("messages"))
        prompt, answer = split_turns(as_messages(turns))
        answer = _without_placeholder(answer)
    elif "chosen" in record and "rejected" in record:
        prompt, answer = to_pair(record)[0]
    elif "user_input" in record:
        prompt = _text(record, "user_input")
        answer = _text(record, "completion")
    elif "prompt" in record:
        prompt, answer = _with_completion(_prompt(record), record)
    elif _is_gsm8k(record):
        prompt = _text(record, "question")
        answer = _text(record, "answer")
    elif _is_alpaca(record):
        asked = [_text(record, "instruction"), _text(record, "input") or ""]
        prompt = "\n\n".join(text for text in asked if text.strip())
        answer = _text(record, "output")
    elif "text" in record:
        text = _text(record, "text") or ""
        prompt, answer = split_transcript(text) if is_transcript(text) else (text, None)
        answer = _without_placeholder(answer)
    else:
        raise InputError(
            'no prompt (a "question" needs an "answer" beside it, an "instruction" an "output"); '
            f"{keys_found(record)}: name the prompt with --prompt_key {_question(record)} and the answer, if "
            "any, with --answer_key, or rename them"
        )
    if not prompt:
        raise InputError("the prompt is empty; fill it in or delete the line")
    return prompt, record["answer"] if keys.answer else answer


def _is_gsm8k(record):
    return record.get("question") is not None and record.get("answer") is not None


def _is_alpaca(record):
    return record.get("instruction") is not None and record.get("output") is not None


def _question(record):
    """The key under which the record seems to have its question, "" if there is none."""
    return next((name for name in QUESTIONS if name in record), "")


def renamed(record: dict, keys: Keys) -> dict:
    """The record with the values of the keys that the user named under the names that the forms have.

    A named prompt takes the place of every other form of prompt; its answer is looked for as beside a
    "prompt". A named answer takes the place of the answer of every form. Raises InputError.
    """
    if keys == BY_FORM:
        return record
    named = dict(record)
    if keys.prompt:
        value = value_at(record, keys, "prompt")
        if not isinstance(value, str | list):
            raise InputError(f'"{keys.prompt}" (--prompt_key) must be text or a list of turns')
        answered = isinstance(value, list) and as_messages(value)[-1]["role"] == "assistant"
        for name in PROMPT_KEYS - {"chosen"}:
            named.pop(name, None)
        named["messages" if answered else "prompt"] = value
    if keys.answer:
        named.pop("completion", None)
        named["answer"] = _named_answer(value_at(record, keys, "answer"), keys.answer)
    for side in ("chosen", "rejected"):
        if getattr(keys, side):
            named[side] = value_at(record, keys, side)
    return named


def value_at(record, keys, which):
    """The value under the key that ``keys`` names for ``which`` ("prompt", "answer", …). A key that the
    record has as it is comes before a path. InputError that names flag and keys found if there is none."""
    key = getattr(keys, which)
    if record.get(key) is not None:
        return record[key]
    value = record
    for name in key.split("."):
        if not isinstance(value, dict) or value.get(name) is None:
            raise InputError(f'no "{key[:80]}" (--{which}_key); {keys_found(value)}')
        value = value[name]
    return value


def keys_found(record):
    """The keys of a record (or of an object in it), for an error message."""
    if not isinstance(record, dict):
        return "what is there has no keys"
    names = json.dumps(list(record), ensure_ascii=False)[1:-1] or "none"
    return f"keys found: {names[:SHOWN]}{'…' if len(names) > SHOWN else ''}"


def _named_answer(value, key):
    """The value under --answer_key -> text."""
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict):
        turns, answer = split_turns(as_messages(value))
        if not turns and answer is not None:
            return answer
    raise InputError(
        f'"{key}" (--answer_key) must be text, a number or one assistant turn; a --reward_fn can take the '
        "whole record"
    )


def _without_placeholder(answer):
    return None if (answer or "").strip() in PLACEHOLDERS else answer


# ---------------------------------------------------------------- parts of records


def _prompt(record):
    return record["prompt"] if isinstance(record["prompt"], str) else as_messages(record["prompt"])


def _with_completion(prompt, record):
    """A prompt and the record's "answer" or "completion" -> (prompt, answer or None). If the completion is a
    list of turns, all but the last are added to the prompt."""
    completion = record.get("completion")
    if isinstance(completion, list):
        turns, answer = split_turns(as_messages(completion))
        if answer is None:
            raise InputError('"completion" must end with an assistant turn')
        return (to_messages(prompt) + turns if turns else prompt), answer
    return prompt, _text(record, "completion" if record.get("answer") is None else "answer")


def _preferred(record, side):
    """One side of a pair -> (prompt, response). The prompt is None if only a comparison of both sides can
    find it."""
    value = record.get(side)
    prompt = _prompt(record) if "prompt" in record else None
    if isinstance(value, str) and is_transcript(value):
        prompt, response = split_transcript(value)
    elif isinstance(value, str):
        response = value
    elif isinstance(value, list):
        turns, response = split_turns(as_messages(value))
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
    start = os.path.commonprefix([chosen, rejected])  # noqa: RUF071  (by letters, as it should be)
    start = re.match(r"(.*\s)?", start, re.DOTALL)[0].rstrip()
    if not start:
        raise InputError('no prompt; the texts do not begin alike: add a "prompt"')
    return (start, chosen[len(start) :]), (start, rejected[len(start) :])


def _text(record, name):
    value = record.get(name)
    if not isinstance(value, str | None):
        raise InputError(f'"{name}" must be text; put it in quotes')
    return value


def _number(record, name, default=None):
    value = record.get(name, default)
    number = math.nan
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        number = float(value)  # ChatLLaMA's files have numbers in quotes
    if isinstance(value, bool) or not math.isfinite(number):
        raise InputError(f'"{name}" must be a number, not {repr(value)[:50]}')
    return number
