"""``--prompt_template`` gives a tokenizer a chat template, ``--system_prompt`` a system message,
``--chat_template_kwargs`` the values of the template's switches.

All become the tokenizer's own and are saved with the model. So the next stage and chat.py use them too. Every
other program that loads the tokenizer uses the template, but has to give it message and switches itself.
``--thinking_ratio`` turns a switch on for a share of the prompts (``Thinking``); nothing of it is saved.
"""

import hashlib
import json
import os
from dataclasses import dataclass

from jinja2 import Environment

from errors import InputError
from model.loading import as_input_error

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


def set_system_prompt(tokenizer, text):
    """Give the tokenizer a system message, to be saved with it -> the message, '' if there is none.

    text: the message; '' for none; None for the one that the tokenizer was saved with. Raises InputError for
    a tokenizer without a chat template.
    """
    text = tokenizer.init_kwargs.get(SYSTEM_PROMPT, "") if text is None else text
    check_system_prompt(tokenizer, text)
    tokenizer.init_kwargs[SYSTEM_PROMPT] = text
    return text


def check_system_prompt(tokenizer, text):
    """Raise InputError for a system message (not '') where the tokenizer has no chat template to hold it."""
    if text and tokenizer.chat_template is None:
        raise InputError("--system_prompt: the tokenizer has no chat template; add --prompt_template")


TEMPLATE_KWARGS = "chat_template_kwargs"  # their name in tokenizer_config.json
OURS = ("messages", "add_generation_prompt")  # what every template gets from this program
SWITCHES = ("enable_thinking", "open_thinking")  # of thinking: Qwen3's, MiniMind-3's


def parse_template_kwargs(text: str) -> dict:
    """--chat_template_kwargs as on the command line -> the arguments. Raises InputError for a text that is no
    JSON object."""
    try:
        given = json.loads(text)
    except ValueError as error:
        raise InputError(f"--chat_template_kwargs {text[:100]}: is not JSON ({error}); correct it") from None
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
    if not given:
        tokenizer.init_kwargs.pop(TEMPLATE_KWARGS, None)
        return None
    if tokenizer.chat_template is None:
        raise InputError("--chat_template_kwargs: the tokenizer has no chat template; add --prompt_template")
    read = names_in_template(tokenizer)
    if wrong := [name for name in given if name in OURS or name not in read]:
        why = "is set by this program" if wrong[0] in OURS else "is not read by the chat template"
        raise InputError(f"--chat_template_kwargs: {wrong[0]} {why}; leave it out, or give '{{}}' for none")
    tokenizer.init_kwargs[TEMPLATE_KWARGS] = given
    return json.dumps(given, sort_keys=True)


def names_in_template(tokenizer) -> set:
    """The names that the chat template reads. Parsing it would need transformers' own tags."""
    if tokenizer.chat_template is None:
        return set()
    with as_input_error("the tokenizer's chat template cannot be read"):
        tokens = Environment().lex(tokenizer.get_chat_template())
        return {value for _, kind, value in tokens if kind == "name"}


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
    read = names_in_template(tokenizer)
    switches = tuple(name for name in SWITCHES if name in read)
    if not switches:
        raise InputError(
            f"--thinking_ratio {ratio:g}: the chat template reads neither {' nor '.join(SWITCHES)}, so "
            "thinking cannot be switched; leave the flag out"
        )
    return Thinking(ratio, seed, switches)


def set_template(tokenizer, template):
    """Give the tokenizer a chat template: Jinja, a text with {prompt} in it, or the path of a file that has
    either. In a text on the command line, \\n stands for a new line. '' changes nothing.

    Raises InputError for a text that is neither, or for a template that cannot be used.
    """
    if not template:
        return
    if os.path.isfile(template):  # an editor has added a newline to its last line
        with (
            as_input_error(f"--prompt_template {template}: cannot be read"),
            open(template, encoding="utf-8") as f,
        ):
            text = f.read().removesuffix("\n")
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
    bos = tokenizer.bos_token if opening and opening[0] == tokenizer.bos_token_id else ""
    # A JSON string is also a valid Jinja string.
    texts = {"before": before, "after": after, "eos": tokenizer.eos_token}
    turns = TURNS.format(**{name: json.dumps(text, ensure_ascii=False) for name, text in texts.items()})
    return f"{{{{- {json.dumps(bos)} }}}}{turns}"
