"""JSONL lines to conversations, conversations to text and tokens: what every dataset here is built from."""

import json

from dataset.special_tokens import MARK, encode_marked, mark_special, unmark
from errors import InputError
from model.loading import as_input_error

PLACEHOLDERS = ("", "空", "无")  # what MiniMind's prompt files have in place of an answer
ROLES = ("system", "user", "assistant", "tool")  # what templates compare a role with


def read_jsonl(path):
    """Yield (line number from 1, object) for each non-blank line.

    Raises InputError: no such file, no records, or a line that is not UTF-8, not JSON or not an object.
    """
    try:
        file = open(path, "rb")  # noqa: SIM115  (closed by the with below; only the opening may fail here)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); check the path") from error
    except ValueError as error:  # a NUL or half a surrogate pair
        raise InputError(f"{str(path)!r} is not a path ({error}); check it") from error
    count = 0
    with file:
        for number, raw in enumerate(file, 1):
            if not raw.strip():
                continue
            record = parse_line(raw, f"{path}:{number}")
            count += 1
            yield number, record
    if count == 0:
        raise InputError(f"{path}: the file has no records; give it one JSON object a line")


def parse_line(raw, where):
    """The bytes of one line -> the object in it. ``where`` ("file:line") opens the InputError's message."""
    try:
        record = json.loads(raw.decode("utf-8-sig"))
        sound = b"\\ud" not in raw.lower() or is_unicode(record)
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: not UTF-8 ({error}); save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: not JSON ({error}); one object a line is needed") from error
    except ValueError as error:  # Python's own limit
        raise InputError(f"{where}: has a number of thousands of digits; put it in quotes") from error
    except RecursionError as error:
        raise InputError(f"{where}: has lists or objects nested too deeply; one object a line") from error
    if not isinstance(record, dict):
        raise InputError(f"{where}: not a JSON object; write {{...}} on every line")
    if not sound:
        raise InputError(f"{where}: has half a surrogate pair (like \\ud800); remove it")
    return record


def is_unicode(record):
    """Can the texts of a record be encoded? Half a surrogate pair, which JSON can escape, cannot."""
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def as_messages(turns, where):
    """A list of turns -> [{"role", "content"}, ...]; missing roles alternate user, assistant.

    ``where`` ("file:line") opens the message of the InputError raised for anything else.
    """
    if not isinstance(turns, list) or not turns:
        raise InputError(f'{where}: a conversation must be a list of {{"role", "content"}} turns, not empty')
    messages = []
    for i, turn in enumerate(turns):
        if not isinstance(turn, dict) or not isinstance(turn.get("content"), str):
            raise InputError(f'{where}: turn {i + 1} of the conversation has no text "content"')
        role = turn.get("role", ("user", "assistant")[i % 2])
        if not isinstance(role, str):
            raise InputError(f'{where}: the "role" of turn {i + 1} must be text (user, assistant, system)')
        messages.append({"role": role, "content": turn["content"]})
    return messages


def split_record(record, where):
    """A prompt or SFT record -> (prompt: messages or text, answer: text or None)."""
    if "conversations" in record:
        messages = as_messages(record["conversations"], where)
        if messages[-1]["role"] != "assistant":
            prompt, answer = messages, None
        else:
            prompt, answer = messages[:-1], messages[-1]["content"]
            answer = None if answer.strip() in PLACEHOLDERS else answer
    elif "prompt" in record:
        prompt, answer = record["prompt"], record.get("answer")
        if not isinstance(prompt, str):
            prompt = as_messages(prompt, where)
        if answer is not None and not isinstance(answer, str):
            raise InputError(f'{where}: "answer" must be text; put it in quotes')
    else:
        raise InputError(f'{where}: no prompt; the line needs "conversations" or "prompt"')
    if not prompt:
        raise InputError(f"{where}: the prompt is empty; fill it in or delete the line")
    return prompt, answer


def for_tokenizer(tokenizer, prompt):
    """Messages where the tokenizer has a chat template, one text where it has none: marked, see
    ``special_tokens``. Here, and in ``conversation_text``, is where the texts of others come in."""
    if tokenizer.chat_template is None:
        text = prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)
        return mark_special(tokenizer, text)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return [
        {
            "role": m["role"] if m["role"] in ROLES else mark_special(tokenizer, m["role"]),
            "content": mark_special(tokenizer, m["content"]),
        }
        for m in messages
    ]


def render(tokenizer, messages, where="conversation", generate=False):
    """The chat template's text of ``messages``, opening an assistant turn at the end if ``generate``."""
    with as_input_error(f"{where}: the tokenizer's chat template refuses it"):
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generate)


def encode(tokenizer, texts, opening=True):
    """Texts -> a list of token-id lists. A chat template has already written its own special tokens;
    plain text gets the tokenizer's defaults (a BOS, where it adds one) unless it goes on from another."""
    defaults = opening and tokenizer.chat_template is None
    ordinary = [text for text in texts if MARK not in text]
    options = {"add_special_tokens": defaults, "verbose": False}
    with as_input_error(f"the tokenizer {tokenizer.name_or_path} cannot encode the texts"):
        rows = iter(tokenizer(ordinary, **options)["input_ids"] if ordinary else [])
        return [encode_marked(tokenizer, text, defaults) if MARK in text else next(rows) for text in texts]


def prompt_text(tokenizer, prompt):
    """What the policy is asked, as text: the chat template up to the assistant's turn."""
    asked = for_tokenizer(tokenizer, prompt)
    return unmark(tokenizer, asked if isinstance(asked, str) else render(tokenizer, asked, generate=True))


def conversation_text(tokenizer, prompt, response, where="conversation"):
    """What a reward model reads, marked: the template over prompt and response, or both and a newline."""
    prompt, response = for_tokenizer(tokenizer, prompt), mark_special(tokenizer, response)
    if isinstance(prompt, str):
        return f"{prompt}\n{response}"
    return render(tokenizer, [*prompt, {"role": "assistant", "content": response}], where)


def conversation_ids(tokenizer, prompt, response):
    """(messages or text, response text) -> the token ids a reward model scores, in training and in PPO."""
    return encode(tokenizer, [conversation_text(tokenizer, prompt, response)])[0]
