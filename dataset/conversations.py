"""Conversations to text and tokens: what every dataset here is built from."""

from dataset.formats import is_transcript, to_messages
from dataset.special_tokens import MARK, encode_marked, mark_special, unmark
from model.loading import as_input_error

ROLES = ("system", "user", "assistant", "tool")  # what templates compare a role with


def for_tokenizer(tokenizer, prompt):
    """Messages where the tokenizer has a chat template, one text where it has none: marked, see
    ``special_tokens``. Here, and in ``conversation_text``, is where the texts of others come in."""
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


def render(tokenizer, messages, generate=False):
    """The chat template's text of ``messages``, opening an assistant turn at the end if ``generate``."""
    with as_input_error("the tokenizer's chat template refuses the conversation"):
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


def conversation_text(tokenizer, prompt, response):
    """What a reward model reads, marked: the template over prompt and response; without one both and a
    newline, or the transcript gone on with, behind a space."""
    asked, response = for_tokenizer(tokenizer, prompt), mark_special(tokenizer, response)
    if isinstance(asked, str):
        if isinstance(prompt, str) and is_transcript(prompt):
            return f"{asked} {response.removeprefix(' ')}"
        return f"{asked}\n{response}"
    return render(tokenizer, [*asked, {"role": "assistant", "content": response}])


def conversation_ids(tokenizer, prompt, response):
    """(messages or text, response text) -> the token ids a reward model scores, in training and in PPO."""
    return encode(tokenizer, [conversation_text(tokenizer, prompt, response)])[0]
