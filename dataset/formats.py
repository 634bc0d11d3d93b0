"""Dataset formats: records -> prompts, demonstrations, preference pairs, rated answers, by their keys.

A record is read by the first of these keys that it has, whatever form it is of:

    prompt     conversations, messages   turns: MiniMind, ShareGPT, OpenAI; the answer, if any, last
               user_input                ChatLLaMA
               prompt                    TRL, verl: text, a transcript (HH-RLHF) or turns
               question                  GSM8K
               instruction, input        Alpaca, beside an "output"
               text                      a prompt or transcript; in stage 1 a text to be learned
    answer     answer                    GSM8K's ends with #### and a number
               completion                TRL: text or turns
               output                    Alpaca
               reward_model.ground_truth verl: to compare with, not to learn
    pairs      chosen, rejected          text beside a prompt, turns with or without one (TRL), transcripts
    rating     score                     beside an answer

So a file may mix forms. Keys that the user names (``Keys``) come before all of them. Turns and transcripts:
turns.py. Examples: docs/data.md. Another name for one of these goes into ``PROMPTS`` or ``ANSWERS``, another
kind of file into record_files.py.

What fits no form raises ``InputError``. Its message has no file and line: ``located`` in record_files.py
puts them before it.
"""

import contextlib
import json
import math
from dataclasses import dataclass

from dataset.answers import without_solution
from dataset.turns import is_of_tools, is_transcript, split, to_messages
from errors import InputError

PROMPTS = ("conversations", "messages", "user_input", "prompt", "question")
ANSWERS = ("answer", "completion", "output")
PLACEHOLDERS = ("", "空", "无")  # MiniMind's prompt files have these as the last turn, in place of an answer
SHOWN = 200  # characters of the keys that an error message lists


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
    """A record of any form -> (prompt: text or messages, answer: text or None). Raises InputError.

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
    is_text = isinstance(text, str) and text and not is_transcript(text)
    if is_text and keys == BY_FORM and not _is_pair(record, keys) and _asked(record, keys) is None:
        return None, text
    prompt, answer = _prompt_and_answer(record, keys)
    if answer is None:
        raise InputError(
            f"no answer to learn from (a call of a tool is none); {keys_found(record)}: end it with the "
            "assistant's turn, or name the answer with --answer_key"
        )
    return prompt, answer


def to_pair(record: dict, keys: Keys = BY_FORM) -> tuple:
    """A record -> ((prompt, chosen text), (prompt, rejected text), margin). margin: how much better the
    chosen answer is, 0 if the record does not say. Raises InputError."""
    asked = _asked(record, keys)
    prompt = None if asked is None else split(asked)[0]
    chosen, rejected = (_side(record, keys, side, prompt) for side in ("chosen", "rejected"))
    return chosen, rejected, _number("margin", record.get("margin", 0.0))


def to_rated(record: dict, keys: Keys = BY_FORM) -> tuple:
    """A record -> (prompt, response text, score). Raises InputError."""
    prompt, response = _prompt_and_answer(record, keys)
    if "score" not in record or response is None:
        raise InputError(
            f'no rated answer; {keys_found(record)}: the line needs "score", and "completion" or "answer" '
            "(or name the answer with --answer_key)"
        )
    return prompt, response, _number("score", record["score"])


def is_rated(record: dict, keys: Keys = BY_FORM) -> bool:
    """Is the record one answer with a score? If not, it is taken for a pair."""
    return "score" in record and not _is_pair(record, keys)


def has_tools(record: dict) -> bool:
    """Has the record tools, or turns that are left out because they call one or hold its result?"""
    lists = [value for value in record.values() if isinstance(value, list)]
    turns = [turn for turns in lists for turn in turns if isinstance(turn, dict)]
    return bool(record.get("tools")) or any(map(is_of_tools, turns))


def keys_found(record: dict) -> str:
    """The keys of a record (or of an object in it), for an error message."""
    if not isinstance(record, dict):
        return "what is there has no keys"
    names = json.dumps(list(record), ensure_ascii=False)[1:-1] or "none"
    return f"keys found: {names[:SHOWN]}{'…' if len(names) > SHOWN else ''}"


# ---------------------------------------------------------------- parts of records


def _found(record, keys, which, names):
    """(key, value) of what ``keys`` names for ``which`` ("prompt", "answer", …); else of the first of
    ``names`` that the record has; ("", None) if it has none. A key that the record has as it is comes before
    a path. Raises InputError, with flag and keys found, where a named key leads to nothing."""
    key = getattr(keys, which)
    if not key:
        return next(((name, record[name]) for name in names if record.get(name) is not None), ("", None))
    value = record
    for name in [key] if record.get(key) is not None else key.split("."):
        if not isinstance(value, dict) or value.get(name) is None:
            raise InputError(f'no "{key[:80]}" (--{which}_key); {keys_found(value)}')
        value = value[name]
    return key, value


def _asked(record, keys):
    """What a record asks, with or without the answer: text or turns. None if only a "text" may say it."""
    _, asked = _found(record, keys, "prompt", PROMPTS)
    if asked is None and isinstance(record.get("instruction"), str) and record.get("output") is not None:
        texts = (record["instruction"], str(record.get("input") or ""))
        return "\n\n".join(text for text in texts if text.strip())
    return asked


def _is_pair(record, keys):
    return bool(keys.chosen or keys.rejected) or {"chosen", "rejected"} <= record.keys()


def _prompt_and_answer(record, keys):
    """A record of any form -> (prompt: text or messages, the text that answers it, or None)."""
    key, said = _found(record, keys, "answer", ANSWERS)
    of_turns = isinstance(said, list) and all(isinstance(turn, dict) for turn in said)
    is_answer = of_turns or isinstance(said, str | int | float)
    if not (is_answer or keys.answer) and {"messages", "conversations"} & record.keys():
        said = None  # something else beside a conversation, such as a list of accepted answers
    if _is_pair(record, keys):
        prompt, answer = to_pair(record, keys)[0]
    else:
        asked = _asked(record, keys)
        asked = record.get("text") if asked is None else asked
        if asked is None:
            raise InputError(
                f'no prompt (an "instruction" needs an "output" beside it); {keys_found(record)}: name the '
                "prompt with --prompt_key and the answer, if any, with --answer_key, or rename them"
            )
        prompt, answer = split(asked)
        if isinstance(asked, str) and said is not None and asked == record.get("prompt"):
            prompt, answer = asked, None  # it may end with the beginning of its answer
        if (answer or "").strip() in PLACEHOLDERS:
            answer = None
    if said is not None:
        turns, answer = split(said) if isinstance(said, list) else ([], said)
        prompt = to_messages(prompt) + turns if turns else prompt
        if isinstance(answer, int | float):
            answer = json.dumps(answer)
        if not isinstance(answer, str):
            raise InputError(f'"{key}" must be text, a number, or turns that end with the assistant\'s')
    if not prompt:
        raise InputError("the prompt is empty; fill it in or delete the line")
    return prompt, answer


def _side(record, keys, which, prompt):
    """One side of a pair -> (prompt, response). prompt: that of the record, None if it has none."""
    key, value = _found(record, keys, which, [which])
    if value is None:
        raise InputError(
            f'no "{which}"; {keys_found(record)}: rename the key, or name it in train_reward.py with '
            f"--{which}_key"
        )
    response = value
    if not isinstance(value, str) or is_transcript(value):
        asked = to_messages(prompt) if prompt else []
        prompt, response = split(value)
        # Some files repeat the prompt in both sides: then it is not added again.
        if isinstance(prompt, list) and prompt[: len(asked)] != asked:
            prompt = asked + prompt
    if not prompt or response is None:
        raise InputError(
            f'"{key}" must be an answer to a prompt that is not empty: text beside a "prompt" '
            "(--prompt_key), a transcript, or turns that end with the assistant's"
        )
    return prompt, response


def _number(name, value):
    number = math.nan
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        number = float(value)  # ChatLLaMA's files have numbers in quotes
    if not math.isfinite(number):
        raise InputError(f'"{name}" must be a number, not {repr(value)[:50]}')
    return number
