"""The chat template: where it is applied, conversations -> text -> token ids, and the flags that set it.

All datasets, chat.py and the reward models turn conversations into token ids here. ``--prompt_template``
gives a tokenizer a chat template, ``--system_prompt`` a system message, ``--chat_template_kwargs`` the values
of the template's switches. All become the tokenizer's own and are saved with the model, so the next stage and
chat.py use them too. ``--thinking_ratio`` turns a switch on for a share of the prompts; nothing of it is
saved.
"""

import hashlib
import json
import os
import re
import unicodedata
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from datetime import datetime
from functools import cache
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

from dataset.formats import (
    ANSWERS,
    PROMPTS,
    THOUGHT_FIELDS,
    AnyPrompt,
    Exchange,
    Messages,
    Record,
    Tools,
    TurnText,
    begun,
    is_transcript,
    to_messages,
    whole_answer,
)
from errors import InputError, as_input_error

# A system message comes first; each user turn is put into the template; each answer ends with EOS.
BARE_TURNS = (
    "{{{{- {bos} }}}}"
    "{{%- for message in messages %}}"
    "{{%- if message['role'] == 'system' %}}{{{{- message['content'] + '\\n\\n' }}}}"
    "{{%- elif message['role'] == 'assistant' %}}{{{{- message['content'] + {eos} }}}}"
    "{{%- else %}}{{{{- {prefix} + message['content'] + {suffix} }}}}"
    "{{%- endif %}}"
    "{{%- endfor %}}"
)
RESULT = ("<tool_response>", "</tool_response>")  # around the result of a tool, in Hermes' files
ROLES = ("system", "user", "assistant", "tool")  # the names that templates compare a role with
SYSTEM_PROMPT = "system_prompt"  # its name in tokenizer_config.json
TEMPLATE_KWARGS = "chat_template_kwargs"  # their name in tokenizer_config.json
SWITCHES = ("enable_thinking", "open_thinking")  # of thinking: Qwen3's, MiniMind-3's
# Number of a record -> the template's arguments for its prompt: a share of them thinks, drawn by the seed
Thinking = Callable[[int], dict[str, bool]]
TEMPLATE_THOUGHT = re.compile(r"<think>\s*(</think>\s*)?\Z")  # opened, or closed as well, in a prompt
EMPTY_THOUGHT = re.compile(r"\A<think>\s*</think>\s*")
Ids = list[int]  # of tokens
Turn = dict[str, Any]  # a message as the chat template gets it
MARK = "\ufdd0"  # Unicode reserves this code point for use inside programs
Marked = str  # a text for ``encode``, with a MARK inside each special token that users or models have written
# Without a chat template, a reward model of stage 2 reads prompt and response so:
PLAIN = "{prompt}\n{response}"
NEIGHBOURS = "a.:)\n"  # texts before another one, which then gets no space, for ``encode_piece``


# ---------------------------------------------------------------- special tokens in data stay text
#
# A prompt may contain the characters <|im_end|>, and a policy may write them. If they became the special
# token, a response could end its turn, write the next one itself and so mislead a reward model. So all text
# of users and models is marked before a template writes its own special tokens around it: MARK is put behind
# the first character of each special token that it spells. ``encode_marked`` encodes it without the mark, as
# ordinary text.


@cache  # called for every text, and some tokenizers have thousands of added tokens
def special_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[re.Pattern[str], set[int]]:
    """How a tokenizer's special tokens are written, as a group of a pattern, and the ids that no text of a
    user may become."""
    added = {i: str(token) for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    # The longest first: one may be the start of another.
    names = sorted({*tokenizer.all_special_tokens, *added.values()} - {""}, key=len, reverse=True)
    pattern = "|".join(map(re.escape, names)) or "(?!)"
    # Unknown characters become the unknown token, so its id is allowed, unless it is BOS, EOS or pad as well.
    ends = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
    unknown = {tokenizer.unk_token_id} - ends
    return re.compile(f"({pattern})"), {*tokenizer.all_special_ids, *added} - unknown


def mark_special(tokenizer: PreTrainedTokenizerBase, text: str) -> Marked:
    """``text`` with a mark inside each special token that it spells, before or after normalisation."""
    pattern, _ = special_tokens(tokenizer)

    def marked(text: str) -> str:
        return pattern.sub(lambda name: name[0][0] + MARK + name[0][1:], text)

    # The tokenizer may make the letters of a special token of full-width ones, for example.
    if not text.isascii() and pattern.search(unicodedata.normalize("NFKC", marked(text))):
        text = unicodedata.normalize("NFKC", text)
    return marked(text)


def mark_all(tokenizer: PreTrainedTokenizerBase, value: Any) -> Any:
    """JSON with all its texts marked."""
    match value:
        case str():
            return mark_special(tokenizer, value)
        case list():
            return [mark_all(tokenizer, item) for item in value]
        case dict():
            return {mark_special(tokenizer, str(name)): mark_all(tokenizer, x) for name, x in value.items()}
    return value


def unmark(text: Marked) -> str:
    """The text as it was before ``mark_special``."""
    return text.replace(MARK, "")


@cache  # called for every text
def prefix_space(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str] | None:
    """None for a tokenizer that puts no space before a text. For one that does: a pattern of the texts behind
    which it puts a space, too. With some (Llama 2's) these are the texts that end with an added token."""
    alone = tokenizer.encode(".a", add_special_tokens=False)

    def begins_alike(context: str) -> bool:
        """Has a text the same ids behind this one as alone?"""
        return tokenizer.encode(context + ".a", add_special_tokens=False)[-len(alone) :] == alone

    if begins_alike("a"):
        return None
    # The longest first, as in ``special_tokens``. Some take the white space beside them.
    added = sorted(tokenizer.added_tokens_decoder.values(), key=lambda x: len(x.content), reverse=True)
    names = [r"\s*" * x.lstrip + re.escape(x.content) + r"\s*" * x.rstrip for x in added]
    return re.compile(rf"({'|'.join(names)})\Z" if added and begins_alike(added[0].content) else "(?!)")


def encode_piece(tokenizer: PreTrainedTokenizerBase, text: Marked, context: Marked, split: bool) -> Ids:
    """The token ids that a text has behind ``context``, "" for none. split: marks are taken out, special
    tokens are split."""
    text = unmark(text) if split else text
    spaced = prefix_space(tokenizer)
    if context and spaced and not spaced.search(context):
        unknown = tokenizer.encode(MARK, add_special_tokens=False)
        for start in NEIGHBOURS:
            ids = tokenizer.encode(start, add_special_tokens=False)
            row = tokenizer.encode(start + text, add_special_tokens=False, split_special_tokens=split)
            if row[: len(ids)] == ids != unknown:  # then no token covers parts of both
                return row[len(ids) :]
    return tokenizer.encode(text, add_special_tokens=False, split_special_tokens=split)


def encode_marked(tokenizer: PreTrainedTokenizerBase, text: Marked, context: Marked) -> Ids:
    """The token ids of a text with marks: the marks become text, special tokens outside them stay special.
    context: as in ``encode``."""
    pattern, special = special_tokens(tokenizer)
    ids: Ids = []
    # Neighbours go together: a token may cover the end of one and the start of the next.
    for is_text, pieces in groupby(filter(None, pattern.split(text)), lambda piece: MARK in piece):
        piece = "".join(pieces)
        row = encode_piece(tokenizer, piece, context, split=is_text)
        if is_text and not special.isdisjoint(row):  # the vocabulary has the token as a word
            row = encode_piece(tokenizer, piece, context, split=False)
        ids += row
        context = piece
    return ids


def bos_and_eos(tokenizer: PreTrainedTokenizerBase) -> tuple[Ids, Ids]:
    """The ids that the tokenizer puts before and behind any text, such as a BOS and an EOS; none with a chat
    template, which writes its own."""
    return _bos_and_eos(tokenizer) if tokenizer.chat_template is None else ([], [])


@cache  # called for every text
def _bos_and_eos(tokenizer: PreTrainedTokenizerBase) -> tuple[Ids, Ids]:
    """``bos_and_eos`` without a chat template."""
    encoded = tokenizer("a", return_special_tokens_mask=True)
    ids = encoded["input_ids"]
    first = [*encoded["special_tokens_mask"], 0].index(0)
    return ids[:first], ids[first + encoded["special_tokens_mask"].count(0) :]


# ---------------------------------------------------------------- conversations -> text -> token ids


# In the place of ``datetime`` for templates that print today's date (Llama 3, SmolLM3), the same on all days:
# what is read must not change while a run goes on, nor when it is resumed.
ONE_DAY = SimpleNamespace(now=lambda: datetime(2026, 1, 1))


def plain_text(tokenizer: PreTrainedTokenizerBase, prompt: AnyPrompt) -> Marked:
    """A prompt as a tokenizer without a chat template gets it: turns joined by new lines."""
    text = prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)
    return mark_special(tokenizer, text)


def as_turn(tokenizer: PreTrainedTokenizerBase, role: str, content: str, name: str = "") -> Turn:
    """A message as the chat template reads it, marked: thought and calls of tools beside the content if it
    reads them there, otherwise in the content; the result of a tool without the tags that the template writes
    itself. name: of the tool that gave it."""
    turn = TurnText.of(content)
    thought = turn.thought
    calls = turn.calls
    more: Turn = {"name": name} if name else {}
    for field in THOUGHT_FIELDS:
        if thought and reads_field(tokenizer, field):
            more[field] = thought
            thought = ""
    if calls and reads_field(tokenizer, "tool_calls"):
        more["tool_calls"] = calls
        calls = ()
    text: str = TurnText(turn.content, thought, calls)
    if role == "tool" and "tool_response" in str(tokenizer.chat_template):
        text = text.strip().removeprefix(RESULT[0]).removesuffix(RESULT[1]).strip()
    role = role if role in ROLES else mark_special(tokenizer, role)
    return {"role": role, **mark_all(tokenizer, {"content": text, **more})}


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    generate: bool = False,
    tools: Tools | None = None,
    **kwargs: Any,
) -> Marked:
    """The chat template's text of ``messages``, marked; with ``generate``, an assistant turn begins at its
    end. tools: of the record; kwargs: of the template, before those that the tokenizer was given
    (``set_template_kwargs``). Raises InputError for a template that leaves out calls or results of tools."""
    turns = [as_turn(tokenizer, **message) for message in messages]
    kwargs = tokenizer.init_kwargs.get(TEMPLATE_KWARGS, {}) | kwargs
    one_day = mock.patch.object(chat_template_utils, "datetime", ONE_DAY)
    with as_input_error("the tokenizer's chat template refuses the conversation"), one_day:
        text = str(
            tokenizer.apply_chat_template(
                turns,
                tools=mark_all(tokenizer, tools) or None,
                tokenize=False,
                add_generation_prompt=generate,
                **kwargs,
            )
        )
    for turn in turns:
        results = [turn["content"]] if turn["role"] == "tool" else []
        if not all(is_in(part, text) for part in (*results, *called(turn))):
            raise InputError(
                "the chat template leaves out calls or results of tools; give another --prompt_template, or "
                "delete such records"
            )
    return text


def called(turn: Turn) -> list[str]:
    """The names of the tools that a turn calls, beside its text."""
    return [call["function"]["name"] for call in turn.get("tool_calls", ())]


def is_in(part: str, text: str) -> bool:
    """Is it a part of the text, but for white space, as it is or as JSON writes it?"""
    written = "".join(text.split())
    return any("".join(x.split()) in written for x in (part, json.dumps(part, ensure_ascii=False)[1:-1]))


def reads_field(tokenizer: PreTrainedTokenizerBase, name: str) -> bool:
    """Does the chat template read this field of a message?"""
    return bool(re.search(rf"[.'\"]{name}\b", str(tokenizer.chat_template)))


def can_encode(tokenizer: PreTrainedTokenizerBase) -> AbstractContextManager[None]:
    """Raises InputError for an error of the tokenizer in this block."""
    return as_input_error(f"the tokenizer {tokenizer.name_or_path} cannot encode the texts")


def encode(
    tokenizer: PreTrainedTokenizerBase, texts: list[Marked], context: Marked = "", closing: bool = False
) -> list[Ids]:
    """Texts -> a list of token-id lists. context: the text that they continue; without one they begin
    with the BOS that the tokenizer puts before any text. closing: they also end with its EOS, as texts do
    that do not go on."""
    if not texts:
        return []
    with can_encode(tokenizer):
        bos, eos = bos_and_eos(tokenizer)
        rows = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        for number, text in enumerate(texts):
            if MARK in text or (context and prefix_space(tokenizer)):
                rows[number] = encode_marked(tokenizer, text, context)
        return [bos * (not context) + row + eos * closing for row in rows]


def prompt_text(
    tokenizer: PreTrainedTokenizerBase, prompt: AnyPrompt, tools: Tools | None = None, **kwargs: Any
) -> Marked:
    """The prompt as the text that the policy reads: the chat template up to the assistant's turn, and the
    beginning of that. tools: that it may call; kwargs: of the template."""
    if tokenizer.chat_template is None:
        return plain_text(tokenizer, prompt)
    # Not the template's own text of a last turn: it may put a thought before it, or close one.
    messages, beginning = whole_answer(to_messages(prompt), "")
    text = render(tokenizer, to_messages(messages), generate=True, tools=tools, **kwargs)
    return continued(text, mark_special(tokenizer, beginning))


def continued(text: Marked, beginning: Marked) -> Marked:
    """A prompt and the beginning of its answer. A thought that the template opens is not opened twice."""
    return (TEMPLATE_THOUGHT.sub("", text) if beginning.startswith("<think>") else text) + beginning


def conversation_text(
    tokenizer: PreTrainedTokenizerBase, prompt: AnyPrompt, response: str, form: str = PLAIN
) -> Marked:
    """The text that a reward model reads: the chat template applied to prompt and response. Without a
    template: ``form`` with these two and {eos} in it; behind a transcript a space, and no newline."""
    if tokenizer.chat_template:
        return render(tokenizer, conversation(prompt, response))
    prompt, response = whole_answer(prompt, response)
    if is_transcript(prompt):
        response = " " + response.removeprefix(" ")
        form = form.replace("\n{response}", "{response}")
    texts = {
        "{prompt}": plain_text(tokenizer, prompt),
        "{response}": mark_special(tokenizer, response),
        "{eos}": tokenizer.eos_token or "",
    }
    return re.sub("|".join(texts), lambda name: texts[name[0]], form)


def conversation(prompt: AnyPrompt, answer: str) -> Messages:
    """Prompt and answer as messages."""
    question, full_answer = whole_answer(to_messages(prompt), answer)
    return [*question, {"role": "assistant", "content": full_answer}]


def learned_pieces(
    tokenizer: PreTrainedTokenizerBase, prompt: AnyPrompt | None, answer: str, tools: Tools | None = None
) -> list[tuple[Marked, bool]]:
    """A prompt and the answer to it -> [(text, is it learned? (loss mask)), …]; the last one is the answer
    with what ends it. prompt: None for a text that is all to be learned; tools: as in ``prompt_text``.
    Raises InputError for a template that does not put answers behind prompts, or not as they are."""
    eos = tokenizer.eos_token
    if eos is None:
        raise InputError(f"the tokenizer {tokenizer.name_or_path} has no EOS token to end answers with")
    learned = TurnText.of(answer).weight != 0
    if prompt is None or tokenizer.chat_template is None:
        pieces = [(plain_text(tokenizer, prompt), False)] if prompt else []
        return [*pieces, (mark_special(tokenizer, answer) + eos, learned)]
    messages = conversation(prompt, answer)
    full = render(tokenizer, messages, tools=tools)
    pieces = []
    done = ""  # the text up to here, as the template writes it once more turns follow
    for k, message in enumerate(messages):
        if message["role"] != "assistant" or k == 0:
            continue
        context = render(tokenizer, messages[:k], generate=True, tools=tools)
        turns = render(tokenizer, messages[: k + 1], tools=tools)
        later = turns
        if not full.startswith(turns) and not any(turn["role"] == "user" for turn in messages[k:]):
            later = without_empty_thought(turns)
        # Some templates rewrite earlier turns (Qwen3 removes old thoughts). Such a turn is context only.
        if full.startswith(later) and turns.startswith(context) and context.startswith(done):
            turn_text = turns[len(context) :]
            is_learned = TurnText.of(message["content"]).weight != 0
            if is_learned and not is_complete(tokenizer, message, turn_text):
                raise InputError(
                    "the chat template changes the answer or leaves out a part, such as a thought, so it is "
                    "not learned; give another --prompt_template, or take thoughts out of the records"
                )
            pieces += [(context[len(done) :], False), (turn_text, is_learned)]
            done = later
    if not pieces or done != full:
        raise InputError("this chat template cannot be split into prompt and answer for training")
    if beginning := begun(prompt):
        (context, _), (turn_text, _) = pieces[-2:]
        _, found, end = turn_text.rpartition(mark_special(tokenizer, beginning + answer).rstrip())
        if not found:
            raise InputError("the chat template changes the beginning of the answer; take it out")
        context = continued(context, mark_special(tokenizer, beginning))
        pieces[-2:] = [(context, False), (mark_special(tokenizer, answer).rstrip() + end, learned)]
    return pieces


def without_empty_thought(turns: Marked) -> Marked:
    """A text without the last thought in it, if that is empty. Qwen3's template writes one into the last turn
    only, so one that calls a tool loses it once the result follows. A policy that is sampled keeps what it
    wrote, and so does its demonstration."""
    start = turns.rfind("<think>")
    return turns[:start] + EMPTY_THOUGHT.sub("", turns[start:]) if start >= 0 else turns


def is_complete(tokenizer: PreTrainedTokenizerBase, message: dict[str, str], turn_text: str) -> bool:
    """Has the chat template written all parts of a turn of the assistant's, and its thought once?"""
    turn = as_turn(tokenizer, **message)
    parts = [turn["content"], *(turn[name] for name in THOUGHT_FIELDS if name in turn), *called(turn)]
    # Templates strip what is said, and may open its thought in the prompt.
    has_all = all(is_in(part.strip().removeprefix("<think>"), turn_text) for part in parts)
    return has_all and turn_text.count("</think>") <= max(1, message["content"].count("</think>"))


def pair_ids(
    tokenizer: PreTrainedTokenizerBase, conversations: list[Exchange]
) -> tuple[list[Ids], list[Ids]]:
    """Pairs (prompt, response text) -> token ids and token types of ``tokenizer(prompt, response)``, as
    encoders without a chat template are trained on them. Marks stay in the texts."""
    pairs = [whole_answer(*pair) for pair in conversations]
    with can_encode(tokenizer):
        encoded = tokenizer(
            [plain_text(tokenizer, prompt) for prompt, _ in pairs],
            [mark_special(tokenizer, response) for _, response in pairs],
            return_token_type_ids=True,
            verbose=False,
        )
    return encoded["input_ids"], encoded["token_type_ids"]


def conversation_ids(
    tokenizer: PreTrainedTokenizerBase, conversations: list[Exchange], form: str = PLAIN
) -> list[Ids]:
    """Pairs (prompt, response text) -> the token ids that a reward model reads, in stage 2 and in PPO: a list
    for each pair, all from one call of the tokenizer. form: as in ``conversation_text``."""
    texts = [conversation_text(tokenizer, *pair, form) for pair in conversations]
    return encode(tokenizer, texts, closing=True)


# ---------------------------------------------------------------- texts that the template has written already
#
# People save what ``apply_chat_template`` returned. Such a text is read as the messages of which the template
# makes it again.


@cache
def turn_marks(tokenizer: PreTrainedTokenizerBase, template: str) -> dict[str, str]:
    """What the tokenizer's chat template writes before turns: {text: whose turn it is}."""
    marks: dict[str, str] = {}
    special, _ = special_tokens(tokenizer)
    for roles in (("system", "user", "assistant", "user"), ("user", "assistant", "user")):
        messages = [{"role": role, "content": f"{MARK}{i}"} for i, role in enumerate(roles)]
        with suppress(InputError, ValueError):  # of templates that refuse a system message or leave it out
            pieces = re.split(f"{MARK}.", render(tokenizer, messages, generate=True))
            marks |= dict(zip(map(str.strip, pieces), (*roles, "assistant"), strict=True))
    # Some save the texts without the BOS, or without the system message that the template writes by itself.
    marks |= {re.sub(rf"\A{special.pattern}\s*", "", text): role for text, role in marks.items()}
    return {text: role for text, role in marks.items() if text and not text.isalnum()}


def read_back(tokenizer: PreTrainedTokenizerBase, text: str) -> Messages | None:
    """The messages of which the chat template makes this text, None for a text of another kind. Raises
    InputError for one that only begins as the template does."""
    marks = turn_marks(tokenizer, tokenizer.chat_template)
    pattern = "|".join(map(re.escape, sorted(marks, key=len, reverse=True))) or "(?!)"
    start, *rest = re.split(rf"\s*({pattern})\s*", text)
    if start or not rest:
        return None
    roles = [marks[mark] for mark in rest[::2]]
    *texts, last = rest[1::2]
    ended = without_end(tokenizer, last)
    is_begun = ended == last and roles[-1] == "assistant"
    texts.append(TurnText(ended, is_begun=is_begun))
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
    if is_begun and not last:
        messages.pop()
    again = prompt_text(tokenizer, messages) if is_begun else render(tokenizer, messages)
    text = text.removeprefix(tokenizer.bos_token or "")
    if " ".join(again.split()).endswith(" ".join(text.split())):  # so without marks
        return messages
    if special_tokens(tokenizer)[0].search(rest[0]):
        raise InputError(
            f"the text begins with {rest[0]} as what the chat template writes, but the template would not "
            "write it so; give the messages in its place"
        )
    return None


def without_end(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """The text without a special token at its end."""
    return re.sub(rf"{special_tokens(tokenizer)[0].pattern}\s*\Z", "", text)


def unrendered(tokenizer: PreTrainedTokenizerBase, record: Record) -> Record:
    """The record, with messages in the place of texts that the tokenizer's chat template has written."""
    given = record
    if {"instruction", "output"} <= record.keys() and not any(map(record.get, ("input", *PROMPTS))):
        given = {**record, "prompt": record["instruction"]}  # Alpaca's: it may be a whole prompt
    fields = dict(given)
    for name in (*PROMPTS, "text", "chosen", "rejected") if tokenizer.chat_template else ():
        match given.get(name):
            case str(text) | [{"content": str(text)}]:  # TinyZero's are in a turn of the user's
                fields[name] = read_back(tokenizer, text) or fields[name]
    if fields == given:
        return record
    for name in (*ANSWERS, "chosen", "rejected"):
        if isinstance(answer := fields.get(name), str):
            fields[name] = without_end(tokenizer, answer)
    return fields


# ---------------------------------------------------------------- the flags


def set_system_prompt(tokenizer: PreTrainedTokenizerBase, text: str | None) -> str:
    """Give the tokenizer a system message, to be saved with it -> the message, '' if there is none.

    text: the message; '' for none, so that the template's own stays (``own_system``); None for the one that
    the tokenizer was saved with. Raises InputError for a tokenizer without a chat template.
    """
    text = tokenizer.init_kwargs.get(SYSTEM_PROMPT, "") if text is None else text
    if text and tokenizer.chat_template is None:
        raise InputError("--system_prompt: the tokenizer has no chat template; add --prompt_template")
    tokenizer.init_kwargs[SYSTEM_PROMPT] = text
    return text


def own_system(tokenizer: PreTrainedTokenizerBase) -> str:
    """The system text that the chat template writes by itself, in the place of a message that is not there;
    "" for none, and for templates that take no system message."""
    if tokenizer.chat_template is None:
        return ""
    question = to_messages("question")
    alone = render(tokenizer, question)
    try:
        given = render(tokenizer, [{"role": "system", "content": MARK}, *question])
    except InputError:
        return ""
    start, _, end = given.partition(MARK)
    own = alone.removeprefix(start).removesuffix(end)
    return own.strip() if alone == start + own + end else ""


def set_template_kwargs(tokenizer: PreTrainedTokenizerBase, text: str | None) -> str | None:
    """Give the tokenizer's chat template arguments, to be saved with it -> these as JSON, None without any.

    text: JSON, '{}' for none; None for those that the tokenizer was saved with. Raises InputError for a text
    that is no JSON object, or an argument that the template does not read: it would change nothing.
    """
    given = tokenizer.init_kwargs.pop(TEMPLATE_KWARGS, {})
    if text is not None:
        try:
            given = dict(**json.loads(text))
        except (TypeError, ValueError):
            raise InputError(
                f"--chat_template_kwargs {text[:100]}: must be a JSON object, as "
                "'{\"enable_thinking\": false}'"
            ) from None
    for name, value in given.items():
        if value in ("true", "false", "True", "False"):  # a template takes any text for true
            raise InputError(f"--chat_template_kwargs: {name} is text; write {value.lower()} without quotes")
        if not is_read(tokenizer, name):
            raise InputError(
                f"--chat_template_kwargs: {name} is not read by the chat template, if the tokenizer has one "
                "(--prompt_template gives it one); leave it out, or give '{}' for none"
            )
    if not given:
        return None
    tokenizer.init_kwargs[TEMPLATE_KWARGS] = given
    return json.dumps(given, sort_keys=True)


def is_read(tokenizer: PreTrainedTokenizerBase, name: str) -> bool:
    """Does the name of an argument occur in the chat template?"""
    return bool(re.search(rf"\b{re.escape(name)}\b", str(tokenizer.chat_template)))


def load_thinking(tokenizer: PreTrainedTokenizerBase, ratio: float | None, seed: int) -> Thinking | None:
    """--thinking_ratio -> ``Thinking``, None without it. Raises InputError if the template has no switch."""
    if ratio is None:
        return None
    switches = [name for name in SWITCHES if is_read(tokenizer, name)]
    if not switches:
        raise InputError(
            f"--thinking_ratio {ratio:g}: the chat template reads neither {' nor '.join(SWITCHES)}, so "
            "thinking cannot be switched; leave the flag out"
        )

    def thinking(index: int) -> dict[str, bool]:
        digest = hashlib.sha256(f"{seed} {index}".encode()).digest()
        return dict.fromkeys(switches, int.from_bytes(digest[:4], "big") < ratio * 2**32)

    return thinking


def set_template(tokenizer: PreTrainedTokenizerBase, template: str) -> None:
    """Give the tokenizer a chat template: Jinja, a text with {prompt} in it, or the path of a file that has
    either. In a text on the command line, \\n stands for a new line. '' changes nothing.

    Raises InputError for a text that is neither, or for a template that cannot be used.
    """
    if not template:
        return
    with as_input_error(f"--prompt_template {template[:100]!r}: cannot be used"):
        if os.path.isfile(template):  # an editor has added a newline to its last line
            text = Path(template).read_text("utf-8-sig").removesuffix("\n")
        else:
            text = template.replace("\\n", "\n").replace("\\t", "\t")
        prefix, hole, suffix = text.partition("{prompt}")  # where a user's turn goes
        if "{{" not in text and "{%" not in text:
            if not hole or hole in suffix:
                raise InputError("it must hold {prompt} once, or be a Jinja template, or a file")
            if tokenizer.eos_token is None:
                raise InputError("the tokenizer has no EOS token to end answers with")
            begins = tokenizer.encode("")[:1] == [tokenizer.bos_token_id]
            bos = tokenizer.bos_token if begins else ""
            texts = {"bos": bos, "prefix": prefix, "suffix": suffix, "eos": tokenizer.eos_token}
            # A JSON string is also a valid Jinja string.
            text = BARE_TURNS.format(**{name: json.dumps(x, ensure_ascii=False) for name, x in texts.items()})
        tokenizer.chat_template = text
        if "question" not in render(tokenizer, to_messages("question")):
            raise InputError("the user's message is missing in the text that it makes")
