"""The chat template: where it is applied, conversations -> text -> token ids, and the flags that set it.

All datasets, chat.py and the reward models turn conversations into token ids here. All text of users and
models comes in by ``for_tokenizer`` or ``conversation_text``, which mark special tokens that it spells
(special_tokens.py).

``--prompt_template`` gives a tokenizer a chat template, ``--system_prompt`` a system message,
``--chat_template_kwargs`` the values of the template's switches. All become the tokenizer's own and are saved
with the model. So the next stage and chat.py use them too. Every other program that loads the tokenizer uses
the template, but has to give it message and switches itself. ``--thinking_ratio`` turns a switch on for a
share of the prompts (``Thinking``); nothing of it is saved.
"""

import contextlib
import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from dataset.special_tokens import MARK, encode_marked, mark_special
from dataset.turns import is_transcript, to_messages
from errors import InputError
from model.loading import as_input_error

ROLES = ("system", "user", "assistant", "tool")  # the names that templates compare a role with
HOLE = "{prompt}"  # where a user's turn goes
# A system message comes first; each user turn is put into the template; each answer ends with EOS.
TURNS = (
    "{{%- for message in messages %}}"
    "{{%- if message['role'] == 'system' %}}{{{{- message['content'] + '\\n\\n' }}}}"
    "{{%- elif message['role'] == 'assistant' %}}{{{{- message['content'] + {eos} }}}}"
    "{{%- else %}}{{{{- {before} + message['content'] + {after} }}}}"
    "{{%- endif %}}"
    "{{%- endfor %}}"
)
SYSTEM_PROMPT = "system_prompt"  # its name in tokenizer_config.json
TEMPLATE_KWARGS = "chat_template_kwargs"  # their name in tokenizer_config.json
SWITCHES = ("enable_thinking", "open_thinking")  # of thinking: Qwen3's, MiniMind-3's


# ---------------------------------------------------------------- conversations -> text -> token ids


def for_tokenizer(tokenizer, prompt: list | str) -> list | str:
    """A prompt -> messages if the tokenizer has a chat template, otherwise one text. Texts are marked
    (special_tokens.py): all text of users and models comes in here or in ``conversation_text``."""
    if tokenizer.chat_template is None:
        text = prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)
        return mark_special(tokenizer, text)
    return [
        {
            "role": m["role"] if m["role"] in ROLES else mark_special(tokenizer, m["role"]),
            "content": mark_special(tokenizer, m["content"]),
        }
        for m in to_messages(prompt)
    ]


def render(tokenizer, messages: list, generate: bool = False, **kwargs) -> str:
    """The chat template's text of ``messages``; with ``generate``, an assistant turn begins at its end.
    kwargs: of the template, before those that the tokenizer was given (``set_template_kwargs``)."""
    kwargs = tokenizer.init_kwargs.get(TEMPLATE_KWARGS, {}) | kwargs
    with as_input_error("the tokenizer's chat template refuses the conversation"):
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=generate, **kwargs
        )


def encode(tokenizer, texts: list[str], opening: bool = True) -> list[list[int]]:
    """Texts -> a list of token-id lists. With a chat template no special tokens are added: the template has
    written its own. Without one, the tokenizer adds its defaults (a BOS, for example), but not if ``opening``
    is False, because then the text continues another one."""
    defaults = opening and tokenizer.chat_template is None
    ordinary = [text for text in texts if MARK not in text]
    options = {"add_special_tokens": defaults, "verbose": False}
    with as_input_error(f"the tokenizer {tokenizer.name_or_path} cannot encode the texts"):
        rows = iter(tokenizer(ordinary, **options)["input_ids"] if ordinary else [])
        return [encode_marked(tokenizer, text, defaults) if MARK in text else next(rows) for text in texts]


def prompt_text(tokenizer, prompt: list | str, **kwargs) -> str:
    """The prompt as the text that the policy reads, marked: the chat template up to the assistant's turn.
    kwargs: of the template."""
    asked = for_tokenizer(tokenizer, prompt)
    return asked if isinstance(asked, str) else render(tokenizer, asked, generate=True, **kwargs)


def conversation_text(tokenizer, prompt: list | str, response: str) -> str:
    """The text that a reward model reads, marked: the chat template applied to prompt and response. Without a
    template, a newline is between prompt and response, or a space if the prompt is a transcript."""
    asked = for_tokenizer(tokenizer, prompt)
    response = mark_special(tokenizer, response)
    if isinstance(asked, str):
        if isinstance(prompt, str) and is_transcript(prompt):
            return f"{asked} {response.removeprefix(' ')}"
        return f"{asked}\n{response}"
    return render(tokenizer, [*asked, {"role": "assistant", "content": response}])


def learned_pieces(tokenizer, prompt, answer: str) -> list[tuple[str, bool]]:
    """A prompt and the answer to it -> [(text, does the assistant say it?), …], marked; the last
    one is the answer with what ends it. prompt: text or messages; None for a text that is all to be learned.
    Raises InputError for a template that does not put answers behind prompts."""
    answer = mark_special(tokenizer, answer)
    eos = tokenizer.eos_token
    if eos is None:
        raise InputError(f"the tokenizer {tokenizer.name_or_path} has no EOS token to end answers with")
    if prompt is None:
        return [(answer, True), (eos, True)]
    prompt = for_tokenizer(tokenizer, prompt)
    if isinstance(prompt, str):
        return [(prompt, False), (answer + eos, True)]
    messages = [*prompt, {"role": "assistant", "content": answer}]
    full = render(tokenizer, messages)
    pieces = []
    done = 0  # characters of the text that the pieces have
    for k, message in enumerate(messages):
        if message["role"] != "assistant" or k == 0:
            continue
        before = render(tokenizer, messages[:k], generate=True)
        after = render(tokenizer, messages[: k + 1])
        # Some templates rewrite earlier turns (Qwen3 removes old thoughts). Such a turn is context only.
        if full.startswith(after) and after.startswith(before) and len(before) > done:
            pieces += [(full[done : len(before)], False), (full[len(before) : len(after)], True)]
            done = len(after)
    if done < len(full):
        raise InputError("this chat template cannot be split into prompt and answer for training")
    return pieces


def conversation_ids(tokenizer, conversations: list[tuple]) -> list[list[int]]:
    """Pairs (messages or text, response text) -> the token ids that a reward model reads, in stage 2 and in
    PPO: a list for each pair, all from one call of the tokenizer."""
    return encode(tokenizer, [conversation_text(tokenizer, *pair) for pair in conversations])


# ---------------------------------------------------------------- the flags


def set_system_prompt(tokenizer, text: str | None) -> str:
    """Give the tokenizer a system message, to be saved with it -> the message, '' if there is none.

    text: the message; '' for none; None for the one that the tokenizer was saved with. Raises InputError for
    a tokenizer without a chat template.
    """
    text = tokenizer.init_kwargs.get(SYSTEM_PROMPT, "") if text is None else text
    if text and tokenizer.chat_template is None:
        raise InputError("--system_prompt: the tokenizer has no chat template; add --prompt_template")
    tokenizer.init_kwargs[SYSTEM_PROMPT] = text
    return text


def parse_template_kwargs(text: str) -> dict:
    """--chat_template_kwargs as on the command line -> the arguments. Raises InputError for a text that is no
    JSON object."""
    given = None
    with contextlib.suppress(ValueError):
        given = json.loads(text)
    if not isinstance(given, dict):
        raise InputError(
            f"--chat_template_kwargs {text[:100]}: must be a JSON object, as '{{\"enable_thinking\": false}}'"
        )
    return given


def set_template_kwargs(tokenizer, text: str | None) -> str | None:
    """Give the tokenizer's chat template arguments, to be saved with it -> these as JSON, None without any.

    text: JSON, '{}' for none; None for those that the tokenizer was saved with. Raises InputError for one
    that the template does not read, because it would change nothing.
    """
    given = tokenizer.init_kwargs.pop(TEMPLATE_KWARGS, {}) if text is None else parse_template_kwargs(text)
    for name in given:
        if not is_read(tokenizer, name):
            raise InputError(
                f"--chat_template_kwargs: {name} is not read by the chat template, if the tokenizer has one "
                "(--prompt_template gives it one); leave it out, or give '{}' for none"
            )
    if not given:
        tokenizer.init_kwargs.pop(TEMPLATE_KWARGS, None)
        return None
    tokenizer.init_kwargs[TEMPLATE_KWARGS] = given
    return json.dumps(given, sort_keys=True)


def is_read(tokenizer, name: str) -> bool:
    """Does the name of an argument occur in the chat template?"""
    return bool(re.search(rf"\b{re.escape(name)}\b", str(tokenizer.chat_template)))


@dataclass(frozen=True)
class Thinking:
    """Which prompts are rendered with thinking: a share of ``ratio``, drawn by seed and number of the record.
    switches: the template's."""

    ratio: float
    seed: int
    switches: tuple

    def kwargs(self, index: int) -> dict:
        """The template's arguments for the prompt of this record."""
        digest = hashlib.sha256(f"{self.seed} {index}".encode()).digest()
        thinks = int.from_bytes(digest[:4], "big") < self.ratio * 2**32
        return dict.fromkeys(self.switches, thinks)


def load_thinking(tokenizer, ratio: float | None, seed: int) -> Thinking | None:
    """--thinking_ratio -> ``Thinking``, None without it. Raises InputError if the template has no switch."""
    if ratio is None:
        return None
    switches = tuple(name for name in SWITCHES if is_read(tokenizer, name))
    if not switches:
        raise InputError(
            f"--thinking_ratio {ratio:g}: the chat template reads neither {' nor '.join(SWITCHES)}, so "
            "thinking cannot be switched; leave the flag out"
        )
    return Thinking(ratio, seed, switches)


def set_template(tokenizer, template: str) -> None:
    """Give the tokenizer a chat template: Jinja, a text with {prompt} in it, or the path of a file that has
    either. In a text on the command line, \\n stands for a new line. '' changes nothing.

    Raises InputError for a text that is neither, or for a template that cannot be used.
    """
    if not template:
        return
    if os.path.isfile(template):  # an editor has added a newline to its last line
        with as_input_error(f"--prompt_template {template}: cannot be read"):
            text = Path(template).read_text("utf-8").removesuffix("\n")
    else:
        text = template.replace("\\n", "\n").replace("\\t", "\t")
    if "{{" in text or "{%" in text:
        tokenizer.chat_template = text
    elif text.count(HOLE) == 1:
        tokenizer.chat_template = _as_jinja(tokenizer, *text.split(HOLE))
    else:
        raise InputError(
            f"--prompt_template {template[:100]!r}: must hold {HOLE} once, or be a Jinja template, or a file"
        )
    with as_input_error(f"--prompt_template {template[:100]!r}: cannot be used"):
        asked = tokenizer.apply_chat_template([{"role": "user", "content": "question"}], tokenize=False)
        if "question" not in asked:
            raise InputError("the user's message is missing in the text that it makes")


def _as_jinja(tokenizer, before, after):
    if tokenizer.eos_token is None:
        raise InputError("--prompt_template: the tokenizer has no EOS token to end answers with")
    opening = tokenizer("", verbose=False)["input_ids"][:1]
    bos = tokenizer.bos_token if opening == [tokenizer.bos_token_id] else ""
    # A JSON string is also a valid Jinja string.
    texts = {"before": before, "after": after, "eos": tokenizer.eos_token}
    turns = TURNS.format(**{name: json.dumps(text, ensure_ascii=False) for name, text in texts.items()})
    return f"{{{{- {json.dumps(bos)} }}}}{turns}"
