"""Conversations: responses of several turns, which an environment or tools answer (--env, --tools).

    talks = turns.begin(prompts, keys)                     # reset
    while any(not talk.over for talk in talks):
        turns.reply(those, sampled)                        # calls or steps, and what the policy reads of them
    batch = turns.as_batch(talks, device)                  # get_reward
    turns.close()                                          # close, once all rewards are there

One budget, ``--max_gen_len``, is for turns and observations together. A response is over

- finished: where a turn calls no tool, the game is done, or ``--max_turns`` is reached. The calls of a last
  turn are run, so that ``get_reward`` sees them, but not answered;
- cut: where a turn does not end in the budget, an observation leaves no room for a turn behind it (it is left
  out), or the environment takes longer than ``--reward_timeout`` (``hung``; its score is None then).

A tool's exception is its result. That of ``reset``, ``step`` or ``get_reward`` ends the run.
"""

import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from dataset.chat_template import TEMPLATE_THOUGHT, Ids, Thinking, encode, prompt_text, render, unmark
from dataset.formats import AnyPrompt, Exchange, Messages, Record, Tools, TurnText, is_transcript, to_messages
from dataset.lm_dataset import Prompt
from errors import InputError
from trainer.compute.batch import Batch, Dialogue, new_batch
from trainer.compute.batching import Device, pad_right, send
from trainer.environments.environment import Environments, Episode
from trainer.environments.observations import Observer, asked, tool_message
from trainer.environments.running import Hung, run_all
from trainer.environments.tool_calls import BadCall, Call, error_result, read_turn
from trainer.generation.stops import Endings, decode, response_text

SEED_BITS = 31  # of the seed that reset gets: numpy takes 32, and some games take no more
T = TypeVar("T")


@dataclass(frozen=True)
class OpenedPrompt(Prompt):
    """A prompt with what ``reset`` adds to it. ``original``: as the dataset has it. A prompt that is sampled
    again is opened again from there."""

    original: Prompt


class Result(NamedTuple):
    """What a call of a tool came to."""

    message: dict[str, str]
    failed: bool


@dataclass
class Conversation:
    """A response that grows turn by turn. Lists over its tokens: ``ids``, ``is_action``, ``logprobs``."""

    prompt: Prompt  # as reset has opened it
    episode: Episode
    hung: bool  # its environment has taken too long
    no_room: bool = False  # an observation did not fit
    ids: Ids = field(default_factory=list)  # turns and the observations between them
    is_action: list[bool] = field(default_factory=list)  # False on observations
    logprobs: list[float] = field(default_factory=list)  # the sampler's, 0 on observations
    messages: Messages = field(default_factory=list)
    text: str = ""  # of the last turn
    observations: Messages = field(default_factory=list)  # what answers that turn, also where nobody reads it
    turn_ends: list[int] = field(default_factory=list)  # the place of the last token of each turn
    turn_rewards: list[float] = field(default_factory=list)  # of a text game
    calls: int = 0
    failed_calls: int = 0
    over: bool = False
    finished: bool = False

    @property
    def context(self) -> Ids:
        """The ids behind which the next turn is sampled."""
        return self.prompt.prompt_ids + self.ids

    def add_turn(self, ids: Ids, logprobs: list[float]) -> None:
        """Put sampled tokens behind it."""
        self.ids += ids
        self.is_action += [True] * len(ids)
        self.logprobs += logprobs
        self.turn_ends.append(len(self.ids) - 1)

    def add_observation(self, ids: Ids) -> None:
        """Put tokens behind it that were not sampled."""
        self.ids += ids
        self.is_action += [False] * len(ids)
        self.logprobs += [0.0] * len(ids)

    def end(self, finished: bool) -> None:
        """No more turns. finished: it was not cut."""
        self.over = True
        self.finished = finished


@dataclass
class MultiTurn:
    """Responses of several turns: the part of a rollout beside the sampler."""

    environments: Environments
    tokenizer: PreTrainedTokenizerBase
    endings: Endings
    thinking: Thinking | None  # of the dataset
    args: Namespace  # max_gen_len, max_turns, reward_timeout
    longest_prompt: int  # tokens for which there is room
    open: list[Episode] = field(default_factory=list)  # begun since ``close``

    @cached_property
    def observer(self) -> Observer:
        """What makes tokens of observations."""
        role = "user" if self.environments.is_text_game else "tool"
        return Observer(self.tokenizer, self.endings, role)

    def check(self, prompt: Prompt) -> None:
        """Raise InputError where the chat template cannot go on behind a turn (``Observer.check``)."""
        self.observer.check(prompt.prompt, prompt.tools, **self._switches(prompt))
        if not self.environments.is_text_game and self.tokenizer.response_template is None:
            check_calls(self.tokenizer, self.observer.ends, prompt.tools)

    def example(self, prompt: Prompt) -> Exchange:
        """A response of two turns to this prompt, as reward models read it."""
        turn = assistant("0") if self.environments.is_text_game else assistant("", calls=[Call("f", {})])
        return [*asked(prompt.prompt), turn, self.observer.observation("0")], "0"

    def _switches(self, prompt):
        return self.thinking(prompt.index) if self.thinking else {}

    # ------------------------------------------------------------ the beginning

    def begin(self, prompts: Sequence[Prompt], keys: Tensor) -> list[Conversation]:
        """Prompts -> conversations without a turn, reset. keys [B]: of ``noise_keys``; they seed ``reset``.
        Raises InputError if reset raises an exception, or if the prompt gets too long."""
        originals = [p.original if isinstance(p, OpenedPrompt) else p for p in prompts]
        seeds = [key % 2**SEED_BITS for key in keys.tolist()]
        begun = reset_all(self.environments, originals, seeds, self.args.reward_timeout)
        self.open += [episode for episode, _ in begun]
        return [
            Conversation(
                self._opened(prompt, "" if isinstance(text, Hung) else text or ""),
                episode,
                hung=isinstance(text, Hung),
            )
            for prompt, (episode, text) in zip(originals, begun, strict=True)
        ]

    def _opened(self, prompt: Prompt, text: str) -> Prompt:
        """The prompt with ``text`` at the end of its last user turn."""
        if not text:
            return prompt
        longer = with_added(prompt.prompt, text)
        written = prompt_text(self.tokenizer, longer, prompt.tools, **self._switches(prompt))
        (ids,) = encode(self.tokenizer, [written])
        if len(ids) > self.longest_prompt:
            raise InputError(
                f"--env: the prompt of record {prompt.index + 1} has {len(ids)} tokens with what reset adds, "
                f"and there is room for {self.longest_prompt}; raise --max_seq_len, or lower --max_gen_len"
            )
        return OpenedPrompt(
            index=prompt.index,
            prompt=longer,
            answer=prompt.answer,
            prompt_ids=ids,
            record=prompt.record,
            text=unmark(written),
            tools=prompt.tools,
            original=prompt,
        )

    # ------------------------------------------------------------ turn by turn

    def reply(self, talks: Sequence[Conversation], turns: Batch) -> None:
        """Put the next turn of each conversation behind it, and what its environment answers. turns: B rows,
        as sampled behind ``Conversation.context``. Raises InputError if step raises an exception."""
        rows = zip(
            talks, turns.responses(), turns.finished.tolist(), turns.sampler_logprobs.tolist(), strict=True
        )
        waiting: list[Conversation] = []
        jobs: list[Callable[[], Any]] = []
        for talk, ids, ended, logprobs in rows:
            talk.add_turn(ids, logprobs[: len(ids)])
            talk.text = response_text(ids, ended, self.tokenizer, self.endings.stops)
            talk.observations = []
            if not ended or talk.hung:
                talk.messages.append(assistant(talk.text))
                talk.end(finished=False)
            elif job := self._job(talk, ids):
                waiting.append(talk)
                jobs.append(job)
            else:
                talk.end(finished=True)
        results = run_jobs([talk.episode for talk in waiting], jobs, self.args.reward_timeout)
        for talk, result in zip(waiting, results, strict=True):
            self._take(talk, result)

    def _job(self, talk, ids):
        """What the environment is to do with a turn that has ended, None for nothing. The turn becomes a
        message."""
        if self.environments.is_text_game:
            talk.messages.append(assistant(talk.text))
            return partial(talk.episode.step, talk.text)
        tools = talk.prompt.tools
        # With a stop string, which may be the end of a call.
        said = decode(self.tokenizer, ids[:-1] if ids[-1] in self.observer.ends else ids)
        before = decode(self.tokenizer, talk.context[: -len(ids)])
        turn = read_turn(self.tokenizer, said, before, tools)
        if not turn.calls:
            talk.messages.append(assistant(talk.text))
            return None
        good = [call for call in turn.calls if isinstance(call, Call)]
        talk.messages.append(assistant(turn.content, turn.thought, good))
        talk.calls += len(turn.calls)
        return partial(run_calls, talk.episode, turn.calls)

    def _take(self, talk, result):
        """Put what the environment has answered behind a turn."""
        if isinstance(result, Hung):
            talk.hung = True
            talk.end(finished=False)
            return
        if isinstance(result, Exception):
            raise ended_by(result, talk.prompt)
        if self.environments.is_text_game:
            text, reward, done = result
            talk.turn_rewards.append(reward)
            talk.observations = [self.observer.observation(text)]
        else:
            done = False
            talk.failed_calls += sum(call.failed for call in result)
            talk.observations = [call.message for call in result]
        if done or len(talk.turn_ends) == self.args.max_turns:
            talk.end(finished=True)
            return
        room = self.args.max_gen_len - len(talk.ids)
        ids = self.observer.ids(
            talk.ids[-1],
            talk.observations,
            talk.prompt.tools,
            room,
            **self._switches(talk.prompt),
        )
        if len(ids) >= room:  # no token would be left for the next turn
            talk.no_room = True
            talk.end(finished=False)
            return
        talk.add_observation(ids)
        talk.messages += talk.observations

    # ------------------------------------------------------------ the end

    def close(self) -> None:
        """Close the environments of all conversations so far."""
        close_all(self.open, self.args.reward_timeout)
        self.open = []

    def scores(self, talks: Sequence[Conversation]) -> list[float | None]:
        """The environment's score of each response, None where it says nothing: ``get_reward``, or the sum of
        a text game's rewards. Raises InputError if get_reward raises an exception."""
        if self.environments.is_text_game:
            return [None if talk.hung else sum(talk.turn_rewards) for talk in talks]
        scored = [talk for talk in talks if self.environments.has_reward and not talk.hung]
        episodes = [talk.episode for talk in scored]
        jobs = [episode.get_reward for episode in episodes]
        rewards = run_jobs(episodes, jobs, self.args.reward_timeout)
        scores = {}
        for talk, reward in zip(scored, rewards, strict=True):
            if isinstance(reward, Hung):
                talk.hung = True
                talk.end(finished=False)
            elif isinstance(reward, Exception):
                raise ended_by(reward, talk.prompt)
            else:
                scores[id(talk)] = reward
        return [scores.get(id(talk)) for talk in talks]

    def as_batch(self, talks: Sequence[Conversation], device: Device) -> Batch:
        """Conversations that are over -> a ``Batch`` with the fields of ``sample``, scored by their
        environments."""
        scores = self.scores(talks)
        tokens, lengths = pad_right([talk.ids for talk in talks], device)
        batch = new_batch(
            [talk.prompt.prompt_ids for talk in talks],
            tokens,
            padded([talk.logprobs for talk in talks], device),
            lengths,
            send(torch.tensor([talk.finished for talk in talks]), device),
        )
        batch.is_action = padded([talk.is_action for talk in talks], device)
        if self.environments.is_text_game:
            batch.turn_rewards = padded([rewards_by_token(talk) for talk in talks], device)
        batch.prompts = [talk.prompt for talk in talks]
        batch.texts = [talk.text for talk in talks]
        batch.dialogues = [
            Dialogue(
                messages=talk.messages,
                environment=talk.episode.environment,
                score=score,
                turns=len(talk.turn_ends),
                calls=talk.calls,
                failed_calls=talk.failed_calls,
                observation_tokens=talk.is_action.count(False),
                hung=talk.hung,
                no_room=talk.no_room,
            )
            for talk, score in zip(talks, scores, strict=True)
        ]
        return batch


def reset_all(
    environments: Environments, prompts: Sequence[Prompt], seeds: Sequence[int], seconds: float
) -> list[tuple[Episode, str | Hung | None]]:
    """The episode of each prompt, reset, with the text for the prompt. seconds: time limit, 0 for none.
    Raises InputError if reset raises an exception."""
    pairs = zip(prompts, seeds, strict=True)
    episodes = [Episode(environments, record_of(prompt), seed) for prompt, seed in pairs]
    begun: list[tuple[Episode, str | Hung | None]] = []
    texts = run_jobs(episodes, [episode.reset for episode in episodes], seconds)
    for prompt, episode, text in zip(prompts, episodes, texts, strict=True):
        if isinstance(text, Exception) and not isinstance(text, Hung):
            raise ended_by(text, prompt)
        begun.append((episode, text))
    return begun


def record_of(prompt: Prompt) -> Record:
    """What reset may ask for: the record, and its answer where no field has this name."""
    return prompt.record if prompt.answer is None else {"answer": prompt.answer, **prompt.record}


def run_jobs(episodes: list[Episode], jobs: list[Callable[[], T]], seconds: float) -> list[T | Exception]:
    """Run a job of each episode in its thread, as ``run_all``."""
    return run_all(jobs, seconds, [episode.worker for episode in episodes])


def close_all(episodes: Sequence[Episode], seconds: float) -> None:
    """Call ``close`` of each environment that has it. What goes wrong is a note: the scores are there."""
    some = [episode for episode in episodes if episode.can_close]
    results = run_jobs(some, [episode.close for episode in some], seconds)
    for text in {f"note: {result}" for result in results if isinstance(result, Exception)}:
        tqdm.write(text, file=sys.stderr)


def with_added(prompt: AnyPrompt, text: str) -> AnyPrompt:
    """The prompt with a text at the end of its last user turn, or with a user turn of this text if it has
    none."""
    if isinstance(prompt, str) and not is_transcript(prompt):
        return prompt + text
    messages = [*to_messages(prompt)]
    places = [place for place, message in enumerate(messages) if message["role"] == "user"]
    if not places:
        return [*messages, {"role": "user", "content": text}]
    last = messages[places[-1]]
    messages[places[-1]] = {**last, "content": str(last["content"]) + text}
    return messages


def assistant(content: str, thought: str = "", calls: Sequence[Call] = ()) -> dict[str, str]:
    """A turn of the policy's as a message."""
    called = [
        {"type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in calls
    ]
    return {"role": "assistant", "content": TurnText(content, thought, called)}


def check_calls(tokenizer: PreTrainedTokenizerBase, ends: Iterable[int], tools: Tools) -> None:
    """Raise InputError where the chat template writes calls in a form that ``read_turn`` does not know: what
    the policy has learned to write would never be run. ends: ids of which one ends a turn."""
    call = Call("f", {"x": "1"})
    question = to_messages("question")
    before = unmark(render(tokenizer, question, generate=True, tools=tools))
    turn = unmark(render(tokenizer, [*question, assistant("", calls=[call])], tools=tools))
    turn = turn.removeprefix(TEMPLATE_THOUGHT.sub("", before))  # turns of the past may not open one
    for end in tokenizer.convert_ids_to_tokens([*ends]):
        turn, _, _ = turn.partition(end)
    if call not in read_turn(tokenizer, turn).calls:
        raise InputError(
            "--tools, --env: the chat template writes calls in a form that is not read, as <tool_call>{json}"
            "</tool_call> is; give another --prompt_template, or a tokenizer with a response_template"
        )


def run_calls(episode: Episode, calls: Sequence[Call | BadCall]) -> list[Result]:
    """Run the calls of a turn, one after the other -> what each came to."""
    results = []
    for call in calls:
        if isinstance(call, BadCall):
            results.append(Result(tool_message(error_result(call)), failed=True))
            continue
        try:
            message = tool_message(episode.call(call.name, call.arguments), call.name)
            results.append(Result(message, failed=False))
        except Exception as error:
            results.append(Result(tool_message(error_result(error), call.name), failed=True))
    return results


def ended_by(error: Exception, prompt: Prompt) -> InputError:
    """-> the error that ends a run where reset, step or get_reward has raised one."""
    return InputError(f"record {prompt.index + 1}: {error}")


def rewards_by_token(talk: Conversation) -> list[float]:
    """A text game's rewards, one for each id: that of a turn on its last token. A turn that the game has not
    answered has none, and a game that hangs says nothing of any turn."""
    rewards = [0.0] * len(talk.ids)
    if talk.hung:
        return rewards
    for place, reward in zip(talk.turn_ends, talk.turn_rewards, strict=False):
        rewards[place] = reward
    return rewards


def padded(rows: Sequence[Sequence[float]], device: Device) -> Tensor:
    """Lists of numbers, or of bools, -> [B, columns], padded with 0."""
    return send(pad_sequence([torch.tensor(row) for row in rows], batch_first=True), device)
