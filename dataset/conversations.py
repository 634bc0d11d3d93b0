"""JSONL lines to conversations, conversations to text and tokens: what every dataset here is built from."""

import json

from jinja2 import TemplateError

from errors import InputError

PLACEHOLDERS = ("", "空", "无")  # what MiniMind's prompt files have in place of an answer


def read_jsonl(path):
    """Yield (line number from 1, object) for each non-blank line.

    Raises InputError: no such file, no records, or a line that is not UTF-8, not JSON or not an object.
    """
    try:
        file = open(path, "rb")  # noqa: SIM115  (closed by the with below; only the opening may fail here)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); check the path") from error
    count = 0
    with file:
        for number, raw in enumerate(file, 1):
            if not raw.strip():
                continue
            try:
                record = json.loads(raw.decode("utf-8-sig"))
            except UnicodeDecodeError as error:
                raise InputError(f"{path}:{number}: not UTF-8 ({error}); save the file as UTF-8") from error
            except json.JSONDecodeError as error:
                raise InputError(
                    f"{path}:{number}: not JSON ({error}); one object a line is needed"
                ) from error
            if not isinstance(record, dict):
                raise InputError(f"{path}:{number}: not a JSON object; write {{...}} on every line")
            if b"\\ud" in raw.lower() and not is_unicode(record):
                raise InputError(f"{path}:{number}: has half a surrogate pair (like \\ud800); remove it")
            count += 1
            yield number, record
    if count == 0:
        raise InputError(f"{path}: the file has no records; give it one JSON object a line")


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
    """Messages where the tokenizer has a chat template, one text where it has none."""
    if tokenizer.chat_template is not None:
        return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)


def render(tokenizer, messages, where="conversation", generate=False):
    """The chat template's text of ``messages``, opening an assistant turn at the end if ``generate``."""
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generate)
    except TemplateError as error:
        raise InputError(f"{where}: the tokenizer's chat template refuses it: {error}") from error


def encode(tokenizer, texts):
    """Texts -> a list of token-id lists. A chat template has already written its own special tokens;
    plain text gets the tokenizer's defaults (a BOS, where it adds one)."""
    plain = tokenizer.chat_template is None
    return tokenizer(texts, add_special_tokens=plain, verbose=False)["input_ids"] if texts else []


def conversation_text(tokenizer, prompt, response, where="conversation"):
    """What a reward model reads: the template over prompt and response, or both joined by a newline."""
    prompt = for_tokenizer(tokenizer, prompt)
    if isinstance(prompt, str):
        return f"{prompt}\n{response}"
    return render(tokenizer, [*prompt, {"role": "assistant", "content": response}], where)


def conversation_ids(tokenizer, prompt, response):
    """(messages or text, response text) -> the token ids a reward model scores, in training and in PPO."""
    return encode(tokenizer, [conversation_text(tokenizer, prompt, response)])[0]
