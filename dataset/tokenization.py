"""Tokenization: conversations -> text, by the chat template -> token ids. All datasets use it."""

from dataset.prompt_template import TEMPLATE_KWARGS
from dataset.special_tokens import MARK, encode_marked, mark_special
from dataset.turns import is_transcript, to_messages
from model.loading import as_input_error

ROLES = ("system", "user", "assistant", "tool")  # the names that templates compare a role with


def for_tokenizer(tokenizer, prompt):
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


def render(tokenizer, messages, generate=False, **kwargs):
    """The chat template's text of ``messages``; with ``generate``, an assistant turn begins at its end.
    kwargs: of the template, before those that the tokenizer was given (``set_template_kwargs``)."""
    kwargs = tokenizer.init_kwargs.get(TEMPLATE_KWARGS, {}) | kwargs
    with as_input_error("the tokenizer's chat template refuses the conversation"):
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=generate, **kwargs
        )


def encode(tokenizer, texts, opening=True):
    """Texts -> a list of token-id lists. With a chat template no special tokens are added: the template has
    written its own. Without one, the tokenizer adds its defaults (a BOS, for example), but not if ``opening``
    is False, because then the text continues another one."""
    defaults = opening and tokenizer.chat_template is None
    ordinary = [text for text in texts if MARK not in text]
    options = {"add_special_tokens": defaults, "verbose": False}
    with as_input_error(f"the tokenizer {tokenizer.name_or_path} cannot encode the texts"):
        rows = iter(tokenizer(ordinary, **options)["input_ids"] if ordinary else [])
        return [encode_marked(tokenizer, text, defaults) if MARK in text else next(rows) for text in texts]


def prompt_text(tokenizer, prompt, **kwargs):
    """The prompt as the text that the policy reads, marked: the chat template up to the assistant's turn.
    kwargs: of the template."""
    asked = for_tokenizer(tokenizer, prompt)
    return asked if isinstance(asked, str) else render(tokenizer, asked, generate=True, **kwargs)


def conversation_text(tokenizer, prompt, response):
    """The text that a reward model reads, marked: the chat template applied to prompt and response. Without a
    template, a newline is between prompt and response, or a space if the prompt is a transcript."""
    asked, response = for_tokenizer(tokenizer, prompt), mark_special(tokenizer, response)
    if isinstance(asked, str):
        if isinstance(prompt, str) and is_transcript(prompt):
            return f"{asked} {response.removeprefix(' ')}"
        return f"{asked}\n{response}"
    return render(tokenizer, [*asked, {"role": "assistant", "content": response}])


def conversation_ids(tokenizer, conversations):
    """Pairs (messages or text, response text) -> the token ids that a reward model reads, in stage 2 and in
    PPO: a list for each pair, all from one call of the tokenizer."""
    return encode(tokenizer, [conversation_text(tokenizer, *pair) for pair in conversations])
