"""Observations as tokens: what the chat template writes between two turns of a response.

Sampled tokens are kept and never rendered again. The template renders a conversation in which ``TURN`` stands
for the sampled turn. What comes behind ``TURN`` is tokenised alone: the marks that end the turn, the results
of its calls or the user's next turn, the header of the next turn.

The policy has sampled the end of its turn itself, so the template's own is left out. After a stop string the
template's end is a part of the observation. Templates such as Qwen3's leave old thoughts out once the user
speaks again. Their tokens are kept here: the policy goes on reading what it thought.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from dataset.chat_template import (
    MARK,
    TEMPLATE_THOUGHT,
    Ids,
    Marked,
    encode,
    is_read,
    render,
)
from dataset.formats import AnyPrompt, Messages, Tools, to_messages, whole_answer
from errors import InputError, as_input_error
from trainer.environments.tool_calls import CALL_END
from trainer.generation.stops import Endings

TURN = 2 * MARK  # in the place of a sampled turn
QUESTION = to_messages("question")  # in the place of what stands before it
CHARACTERS = 8  # that a token may have before a text is tokenised as a whole, and not only its beginning
BEHIND = "."  # a context for ``encode``: a text begins behind another one
OTHER = "give another --prompt_template"


def around_turn(
    tokenizer: PreTrainedTokenizerBase,
    prompt: AnyPrompt,
    observations: Messages,
    tools: Tools,
    **switches: Any,
) -> tuple[Marked, Marked]:
    """What the chat template writes before and behind a turn that answers ``prompt``. Behind it stand what
    ends it, the observations, the beginning of the next turn. switches: of the template, as for thinking.
    Raises InputError where the template refuses such a conversation."""
    turns = [*asked(prompt), {"role": "assistant", "content": TURN}, *observations]
    before, _, behind = render(tokenizer, turns, generate=True, tools=tools, **switches).partition(TURN)
    return before, behind


def asked(prompt: AnyPrompt) -> Messages:
    """The messages of a prompt, without the beginning of an answer."""
    return to_messages(whole_answer(to_messages(prompt), "")[0])


def tool_message(result: str, name: str = "unknown") -> dict[str, str]:
    """The message of a tool's result. name: of the tool, for templates that write it."""
    return {"role": "tool", "name": name, "content": result}


@dataclass(frozen=True)
class Observer:
    """Observations -> the ids between two turns."""

    tokenizer: PreTrainedTokenizerBase
    endings: Endings
    role: str  # of an observation: "tool", or "user" in a text game

    @cached_property
    def ends(self) -> set[int]:
        """The ids that end a turn and are no text of it. --stop may name the end of a call, which is."""
        names = self.tokenizer.convert_ids_to_tokens(self.endings.eos)
        return {i for i, name in zip(self.endings.eos, names, strict=True) if name != CALL_END}

    @cached_property
    def end_len(self) -> int:
        """The number of tokens with which the template ends a turn, up to an EOS. 0: it ends turns without
        one."""
        _, behind = around_turn(self.tokenizer, QUESTION, [self.observation(TURN)], ())
        (ids,) = encode(self.tokenizer, [behind.partition(TURN)[0]], BEHIND)
        return next((place + 1 for place, i in enumerate(ids) if i in self.ends), 0)

    def observation(self, text: str) -> dict[str, str]:
        """The message of an observation."""
        return tool_message(text) if self.role == "tool" else {"role": self.role, "content": text}

    def check(self, prompt: AnyPrompt, tools: Tools, **switches: Any) -> None:
        """Raise InputError if conversations that begin with this prompt cannot go on over several turns with
        this chat template. tools: of the prompt; switches: as in ``around_turn``."""
        flag = "--env" if self.role == "user" else "--tools, --env"
        if self.tokenizer.chat_template is None:
            raise InputError(f"{flag}: the tokenizer has no chat template; add --prompt_template")
        if tools and not is_read(self.tokenizer, "tools"):
            raise InputError(f"{flag}: the chat template does not show tools to the policy; {OTHER}")
        with as_input_error(f"{flag}: a response cannot go on over several turns"):
            once = [self.observation("0")]
            again = [*QUESTION, {"role": "assistant", "content": "1"}, *once]
            texts = set()
            for start in (prompt, QUESTION, again):
                before, behind = around_turn(self.tokenizer, start, once, tools, **switches)
                text = render(self.tokenizer, asked(start), generate=True, tools=tools, **switches)
                # A thought that the template opens for a new turn may be missing in a turn of the past.
                if not behind or not before.startswith(TEMPLATE_THOUGHT.sub("", text)):
                    raise InputError(
                        f"the chat template rewrites what stands before, once more turns follow; {OTHER}"
                    )
                texts.add(behind)
            if len(texts) > 1:
                raise InputError(f"the chat template writes equal turns in different ways; {OTHER}")
            if not (self.end_len or self.endings.stops):
                ends = " ".join(self.tokenizer.convert_ids_to_tokens(self.endings.eos))
                raise InputError(
                    f"the chat template ends turns with none of the policy's ends {ends}; name what ends "
                    "them with --stop"
                )

    def ids(self, last: int, observations: Messages, tools: Tools, room: int, **switches: Any) -> Ids:
        """The ids behind a turn that has ended; only their beginning where they are far more than ``room``.
        last: the last id of the turn; the others: as in ``around_turn``."""
        _, text = around_turn(self.tokenizer, QUESTION, observations, tools, **switches)
        enough = 2 * max(room, 256)  # the last tokens of a part may be others than those of the whole
        (ids,) = encode(self.tokenizer, [text[: CHARACTERS * enough]], BEHIND)
        if len(ids) <= enough and len(text) > CHARACTERS * enough:
            (ids,) = encode(self.tokenizer, [text], BEHIND)
        return ids[self.end_len :] if last in self.ends else ids
