"""``--prompt_template`` gives a tokenizer a chat template, ``--system_prompt`` a system message.

Both become the tokenizer's own and are saved with the model. So the next stage and chat.py use them too.
Every other program that loads the tokenizer uses the template, but has to add the system message itself.
"""

import json
import os

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
