"""``--prompt_template``: gives a tokenizer a chat template, or replaces the one that it has.

The template becomes the tokenizer's own. So all stages, the rewards and chat.py use it, and so does every
program that loads the tokenizer saved with the model.
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
