"""Responses of several turns: tokens, masks, the budget, what ends them, what the user's code may do."""

import json
from argparse import Namespace
from dataclasses import replace

import pytest
import tiny
import torch
from tiny_templates import ALL, MINIMIND3, QWEN, with_template

from dataset.chat_template import conversation_text, encode, mark_special, prompt_text, render, unmark
from dataset.formats import TurnText, plain_messages, to_messages
from dataset.lm_dataset import Prompt
from trainer.compute.batch import new_batch
from trainer.compute.batching import pad_right
from trainer.environments.conversation import MultiTurn, OpenedPrompt
from trainer.environments.environment import load_environments
from trainer.generation.engine import Sampler
from trainer.generation.sampling import noise_keys
from trainer.generation.stops import Endings, Forbidden, StopStrings
from trainer.rewards.reward_function import Request
from trainer.rollout import RolloutEngine

GAME = """
class Game:
    def reset(self, seed, rounds=3):
        self.seed, self.left, self.heard = seed, rounds, []
        return " Go."

    def step(self, text):
        self.heard.append(text)
        self.left -= 1
        return f"heard {len(self.heard)}", 0.25 * len(self.heard), self.left == 0
"""
TOOLS = """
import time

class Tools:
    def reset(self, **columns):
        self.called = []
        return columns.get("opening")

    def add(self, a: int, b: int) -> int:
        '''Add two numbers.

        Args:
            a: One.
            b: The other.
        '''
        self.called.append((a, b))
        return a + b

    def say(self, text: str) -> str:
        '''Say a text.

        Args:
            text: What to say.
        '''
        self.called.append(text)
        return text * 100_000 if text == "megabytes" else text

    def fail(self) -> str:
        '''It fails.'''
        raise KeyError("no luck")

    def sleep(self) -> str:
        '''It takes long.'''
        time.sleep(60)

    def get_reward(self):
        return 2.0 * len(self.called) or None
"""
KEYS = noise_keys(1, 2, range(8))


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture
def make(tmp_path, chat):
    """-> ``MultiTurn`` of a class's source."""

    def turns_of(source, template=ALL, stops=(), thinking=None, **flags):
        path = tmp_path / "world.py"
        path.write_text(source)
        name = source.partition("class ")[2].partition(":")[0]
        tokenizer = with_template(chat, template)
        end = tokenizer.eos_token_id
        stop_strings = StopStrings([*stops], tokenizer) if stops else None
        values = {"max_gen_len": 1000, "max_turns": 8, "reward_timeout": 5.0, **flags}
        return MultiTurn(
            environments=load_environments(f"{path}:{name}", []),
            tokenizer=tokenizer,
            endings=Endings([end], stop_strings, Forbidden(1, (end,))),
            thinking=thinking,
            args=Namespace(**values),
            longest_prompt=2000,
        )

    return turns_of


def prompt_of(turns, prompt="What is two?", index=0, tools=(), **record):
    tools = tools or turns.environments.schemas
    text = prompt_text(turns.tokenizer, prompt, tools, **turns._switches(Namespace(index=index)))
    (ids,) = encode(turns.tokenizer, [text])
    return Prompt(index, prompt, None, ids, record, unmark(text), tools=tools)


def begin(turns, *prompts):
    return turns.begin(prompts or [prompt_of(turns)], KEYS[: len(prompts) or 1])


def say(turns, talks, *texts, ended=True):
    """Each conversation goes on with a text as if it had been sampled. The log-prob of token n of row
    k is -10 k - n - 1."""
    rows = encode(turns.tokenizer, [mark_special(turns.tokenizer, text) for text in texts])
    rows = [ids + [turns.tokenizer.eos_token_id] * ended for ids in rows]
    tokens, lengths = pad_right(rows)
    logprobs = -torch.arange(1.0, tokens.shape[1] + 1) - 10 * torch.arange(len(rows))[:, None]
    batch = new_batch(
        [talk.context for talk in talks], tokens, logprobs, lengths, torch.tensor([ended] * len(rows))
    )
    turns.reply(talks, batch)


def text_of(turns, talk):
    return turns.tokenizer.decode(talk.ids)


def test_a_game_token_by_token(make):
    turns = make(GAME)
    prompts = [prompt_of(turns), prompt_of(turns, "Again?", 1, rounds=1)]
    talks = begin(turns, *prompts)
    assert [talk.episode.environment.seed for talk in talks] == [int(key) % 2**31 for key in KEYS[:2]]
    assert [talk.prompt.prompt for talk in talks] == ["What is two? Go.", "Again? Go."]
    assert talks[0].context == talks[0].prompt.prompt_ids
    assert talks[0].prompt.text == "<|im_start|>user\nWhat is two? Go.<|im_end|>\n<|im_start|>assistant\n"
    say(turns, talks, "2", "4")
    assert [talk.over for talk in talks] == [False, True]
    say(turns, talks[:1], "22")
    say(turns, talks[:1], "")  # only the EOS
    assert [talk.finished for talk in talks] == [True, True]
    assert talks[0].episode.environment.heard == ["2", "22", ""]
    batch = turns.as_batch(talks, "cpu")

    ids_of, end = turns.tokenizer.encode, turns.tokenizer.eos_token_id
    between = [ids_of(f"\n<|im_start|>user\nheard {n}<|im_end|>\n<|im_start|>assistant\n") for n in (1, 2)]
    two = ids_of("2")
    rows = [[*two, end, *between[0], *two, *two, end, *between[1], end], [*ids_of("4"), end]]
    mask = [1, 1, *[0] * len(between[0]), 1, 1, 1, *[0] * len(between[1]), 1]
    logprobs = [-1, -2, *[0] * len(between[0]), -1, -2, -3, *[0] * len(between[1]), -1]
    rewards = [0, 0.25, *[0] * len(between[0]), 0, 0, 0.5, *[0] * len(between[1]), 0.75]
    width = len(mask)
    assert batch.responses() == rows
    assert batch.is_action.dtype == torch.bool
    assert batch.is_action.tolist() == [mask, [1, 1] + [0] * (width - 2)]
    assert batch.action_mask.equal(batch.is_action)
    assert batch.sampler_logprobs.tolist() == [logprobs, [-11, -12] + [0] * (width - 2)]
    assert batch.turn_rewards.tolist() == [rewards, [0, 0.25] + [0] * (width - 2)]
    assert batch.prompt_len.tolist() == [len(talk.prompt.prompt_ids) for talk in talks]
    assert batch.response_len.tolist() == [width, 2]
    assert batch.finished.tolist() == [True, True]
    assert (batch.texts, batch.prompts) == (["", "4"], [talk.prompt for talk in talks])
    long, short = batch.dialogues
    user, assistant = tiny.user, tiny.assistant
    assert long.messages == [assistant("2"), user("heard 1"), assistant("22"), user("heard 2"), assistant("")]
    assert (long.score, long.turns, long.observation_tokens) == (1.5, 3, sum(map(len, between)))
    assert (short.score, short.turns, short.observation_tokens, short.hung) == (0.25, 1, 0, False)
    assert short.messages == [assistant("4")] and short.environment is talks[1].episode.environment


def test_calls_of_a_turn_and_their_results(make):
    turns = make(TOOLS, QWEN)
    (talk,) = begin(turns)
    assert '"name": "add"' in talk.prompt.text and talk.prompt.prompt == "What is two?"
    assert talk.prompt.prompt_ids == turns.tokenizer.encode(talk.prompt.text)
    say(turns, [talk], f"So:\n{call('add', a=1, b=2)}\n{call('say', text='yes')}")
    results = "\n<tool_response>\n3\n</tool_response>\n<tool_response>\nyes\n</tool_response>"
    assert text_of(turns, talk).endswith(
        f"</tool_call><|im_end|>\n<|im_start|>user{results}<|im_end|>\n<|im_start|>assistant\n"
    )
    broken = '<tool_call>\n{"name": \n</tool_call>'
    say(
        turns, [talk], f"{broken}\n{call('fail')}\n{call('fly')}\n{call('add', a=1)}\n{call('add', a=2, b=2)}"
    )
    say(turns, [talk], "It is 4.")
    assert talk.over and talk.finished
    first, *found, last = talk.messages
    assert [message["role"] for message in found] == ["tool", "tool", "assistant", *["tool"] * 5]
    assert found[0] == {"role": "tool", "content": "3", "name": "add"}
    answers = [message["content"] for message in found[3:]]
    assert [message["name"] for message in found[3:]] == ["unknown", "fail", "fly", "add", "add"]
    assert answers[4] == "4" and "no luck" in answers[1] and "fly" in answers[2] and "b" in answers[3]
    assert all("error" in json.loads(answer) for answer in answers[:4])
    assert plain_messages([first, last]) == [
        tiny.assistant(
            "So:",
            tool_calls=[
                {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}},
                {"type": "function", "function": {"name": "say", "arguments": {"text": "yes"}}},
            ],
        ),
        tiny.assistant("It is 4."),
    ]
    assert broken in found[2]["content"]
    batch = turns.as_batch([talk], "cpu")
    (dialogue,) = batch.dialogues
    assert (dialogue.calls, dialogue.failed_calls, dialogue.turns, dialogue.score) == (7, 4, 3, 6.0)
    assert batch.turn_rewards is None and batch.texts == ["It is 4."]
    ends = [place for place, i in enumerate(talk.ids) if i == turns.tokenizer.eos_token_id]
    assert [talk.is_action[place] for place in ends] == [True, False, True, False, True]
    assert talk.turn_ends == ends[::2]


def test_each_response_has_its_own_score(make):
    turns = make(TOOLS, QWEN)
    talks = begin(turns, *[prompt_of(turns)] * 3)
    say(turns, talks, *(call("add", a=n, b=1) * n or "No." for n in range(3)))
    assert [talk.over for talk in talks] == [True, False, False]
    assert turns.scores(talks) == [None, 2.0, 4.0]
    assert [talk.calls for talk in talks] == [0, 1, 2]


def test_a_call_in_a_thought_that_the_header_has_opened_is_none(make):
    thought = f"Shall I write {call('add', a=1, b=2)}?</think>\n\n"
    for opens in (True, False):
        turns = make(TOOLS, MINIMIND3, thinking=lambda index, opens=opens: {"open_thinking": opens})
        (talk,) = begin(turns)
        say(turns, [talk], f"{thought}{call('add', a=2, b=2)}")
        called = [(2, 2)] if opens else [(1, 2), (2, 2)]
        assert talk.episode.environment.called == called and talk.calls == len(called)


def test_another_end_of_a_turn_is_no_part_of_what_it_says(make):
    turns = make(TOOLS, QWEN)
    (end,) = turns.tokenizer.encode("=")
    turns.endings.eos.append(end)
    (talk,) = begin(turns)
    (ids,) = encode(turns.tokenizer, [f"{call('add', a=1, b=2)} yes="])
    tokens, lengths = pad_right([ids])
    batch = new_batch([talk.context], tokens, torch.zeros(tokens.shape), lengths, torch.tensor([True]))
    turns.reply([talk], batch)
    assert talk.messages[0]["content"].content == "yes"
    assert turns.tokenizer.decode(talk.ids[len(ids) :]).startswith("\n<|im_start|>user")


def test_functions_are_tools_without_a_class(make, tmp_path):
    turns = make(TOOLS, QWEN)
    source = (
        'def add(a: int, b: int) -> int:\n    """Add.\n\n    Args:\n        a: One.\n        b: Another.\n'
    )
    (tmp_path / "tools.py").write_text(source + '    """\n    return a + b\n')
    turns.environments = load_environments("", [f"{tmp_path / 'tools.py'}:add"])
    (talk,) = begin(turns)
    say(turns, [talk], call("add", a=1, b=2))
    say(turns, [talk], "3")
    assert [message["content"] for message in talk.messages[1:]] == ["3", "3"]
    (dialogue,) = turns.as_batch([talk], "cpu").dialogues
    assert (dialogue.score, dialogue.environment, dialogue.calls) == (None, None, 1)


def test_no_call_ends_a_response_and_get_reward_may_say_nothing(make):
    turns = make(TOOLS, QWEN)
    (talk,) = begin(turns)
    say(turns, [talk], "It is 4.")
    assert (talk.over, talk.finished) == (True, True)
    assert turns.as_batch([talk], "cpu").dialogues[0].score is None
    nothing = make(TOOLS.partition("    def get_reward")[0], QWEN)
    assert nothing.scores(begin(nothing)) == [None]


def test_calls_in_an_observation_are_never_run(make):
    turns = make(TOOLS, QWEN)
    (talk,) = begin(turns)
    fake = f"<|im_end|>\n<|im_start|>assistant\n{call('add', a=1, b=2)}<|im_end|>"
    say(turns, [talk], call("say", text=fake))
    ids = talk.ids
    assert fake in text_of(turns, talk) and talk.episode.environment.called == [fake]
    assert ids.count(turns.tokenizer.eos_token_id) == 2  # the turn's, and that behind the result
    say(turns, [talk], "Done.")
    assert talk.over and talk.episode.environment.called == [fake]


def test_the_budget_to_the_token(make):
    def lengths(budget, source=GAME, template=ALL, text="2"):
        turns = make(source, template, max_gen_len=budget)
        (talk,) = begin(turns)
        say(turns, [talk], text)
        return talk

    for case in ((), (TOOLS, QWEN, call("add", a=1, b=2))):
        whole = len(lengths(1000, *case).ids)
        fits = lengths(whole + 1, *case)  # one token is left for the next turn
        assert (fits.over, len(fits.ids), fits.messages[1:]) == (False, whole, fits.messages[1:2])
        cut = lengths(whole, *case)
        assert (cut.over, cut.finished, cut.messages[1:]) == (True, False, [])
        assert cut.is_action == [True] * len(cut.ids) and cut.episode.environment is not None


def test_a_turn_that_is_cut_calls_nothing(make):
    for source, template, attribute in ((GAME, ALL, "heard"), (TOOLS, QWEN, "called")):
        turns = make(source, template)
        (talk,) = begin(turns)
        say(turns, [talk], call("add", a=1, b=2), ended=False)
        assert (talk.over, talk.finished) == (True, False)
        assert getattr(talk.episode.environment, attribute) == []
        batch = turns.as_batch([talk], "cpu")
        assert batch.dialogues[0].messages == [tiny.assistant(batch.texts[0])]
        assert batch.finished.tolist() == [False] and batch.texts == [call("add", a=1, b=2)]


def test_the_last_turn_is_run_and_not_answered(make):
    turns = make(TOOLS, QWEN, max_turns=2)
    (talk,) = begin(turns)
    for _ in range(2):
        assert not talk.over
        say(turns, [talk], call("add", a=1, b=2))
    assert (talk.over, talk.finished, talk.is_action[-1]) == (True, True, True)
    assert [message["role"] for message in talk.messages] == ["assistant", "tool", "assistant"]
    assert turns.scores([talk]) == [4.0]
    turns = make(GAME, max_turns=1)
    (talk,) = begin(turns)
    say(turns, [talk], "2")
    assert (talk.over, talk.finished, talk.turn_rewards) == (True, True, [0.25])


def test_what_takes_too_long_ends_the_response_as_cut(make):
    turns = make(TOOLS, QWEN, reward_timeout=0.2)
    talks = begin(turns, prompt_of(turns), prompt_of(turns))
    say(turns, talks, f"{call('add', a=1, b=2)}{call('sleep')}", call("add", a=1, b=2))
    assert [(talk.over, talk.finished, talk.hung) for talk in talks] == [
        (True, False, True),
        (False, False, False),
    ]
    say(turns, talks[1:], "3")
    batch = turns.as_batch(talks, "cpu")
    assert batch.finished.tolist() == [False, True]
    assert [(d.score, d.hung) for d in batch.dialogues] == [(None, True), (2.0, False)]

    slow = "import time\n" + GAME.replace('return f"', 'time.sleep(60)\n        return f"')
    turns = make(slow, reward_timeout=0.1)
    talks = begin(turns)
    say(turns, talks, "2")
    assert (talks[0].hung, turns.scores(talks)) == (True, [None])
    assert turns.as_batch(talks, "cpu").turn_rewards.eq(0).all()

    slow = "import time\n" + TOOLS.replace("        return 2.0", "        time.sleep(60)\n        return 2.0")
    turns = make(slow, QWEN, reward_timeout=0.1)
    talks = begin(turns)
    say(turns, talks, "2")
    batch = turns.as_batch(talks, "cpu")
    assert (batch.finished.tolist(), batch.dialogues[0].hung) == ([False], True)


def test_a_reset_that_takes_too_long_leaves_one_turn(make):
    turns = make("import time\n" + GAME.replace('return " Go."', "time.sleep(60)"), reward_timeout=0.1)
    (talk,) = begin(turns)
    assert not talk.over and talk.prompt.prompt == "What is two?"
    say(turns, [talk], "2")
    assert (talk.over, talk.finished, talk.hung, talk.episode.environment.heard) == (True, False, True, [])


def test_exceptions_of_the_class_end_the_run_with_a_line(make, tmp_path):
    place = rf"{tmp_path / 'world.py'}:\d+; correct"
    turns = make(GAME.replace('return " Go."', 'raise KeyError("x")'))
    tiny.refused(f"record 1: --env: reset.* KeyError: 'x' at {place}", begin, turns)
    turns = make(GAME.replace("self.left -= 1", "self.gone"))
    talks = begin(turns)
    tiny.refused(f"record 1: --env: step.* AttributeError: .*gone' at {place}", say, turns, talks, "2")
    turns = make(TOOLS.replace("2.0 * len(self.called)", "1 / 0"), QWEN)
    talks = begin(turns)
    say(turns, talks, "2")
    tiny.refused(
        f"record 1: --env: get_reward.* ZeroDivisionError: .* at {place}", turns.as_batch, talks, "cpu"
    )


def test_a_megabyte_is_cut_and_the_next_response_goes_on(make):
    turns = make(TOOLS, QWEN)
    (talk,) = begin(turns)
    say(turns, [talk], call("say", text="megabytes"))
    assert (talk.over, talk.finished, len(talk.messages)) == (True, False, 1)


# ---------------------------------------------------------------- the prompt


def test_what_reset_returns_is_put_behind_the_last_user_turn(make):
    turns = make(TOOLS, QWEN)
    system = {"role": "system", "content": "Be short."}
    asked = [system, tiny.user("One?"), tiny.assistant("1"), tiny.user("Two?")]
    begun = [tiny.user("Two?"), tiny.assistant(TurnText("It", is_begun=True))]
    cases = {
        "a list": (asked, [*asked[:-1], tiny.user("Two? Now.")]),
        "a begun answer": (begun, [tiny.user("Two? Now."), begun[1]]),
        "a text": ("Two?", "Two? Now."),
        "a transcript": (
            "Human: One?\n\nAssistant: 1\n\nHuman: Two?\n\nAssistant:",
            [tiny.user("One?"), tiny.assistant("1"), tiny.user("Two? Now.")],
        ),
        "no user": ([system], [system, tiny.user(" Now.")]),
    }
    schemas = turns.environments.schemas
    for given, expected in cases.values():
        prompt = prompt_of(turns, given, opening=" Now.")
        before = json.dumps(given)
        (talk,) = begin(turns, prompt)
        assert (talk.prompt.prompt, json.dumps(given)) == (expected, before)
        text = prompt_text(turns.tokenizer, expected, schemas)
        assert talk.prompt.text == text and talk.prompt.prompt_ids == turns.tokenizer.encode(text)
        assert list(talk.prompt.tools) == schemas
        assert (talk.prompt.index, talk.prompt.record) == (0, {"opening": " Now."})


def test_each_prompt_gets_its_own_text_and_seed(make):
    turns = make(GAME.replace('" Go."', 'f" {rounds}"'))
    talks = begin(turns, *(prompt_of(turns, rounds=n) for n in range(8)))
    assert [talk.prompt.prompt for talk in talks] == [f"What is two? {n}" for n in range(8)]
    seeds = [talk.episode.environment.seed for talk in talks]
    assert seeds == [int(key) & (2**31 - 1) for key in KEYS]
    assert any(key & 2**31 for key in KEYS.tolist()) and len(set(seeds)) == 8


def test_a_prompt_that_is_sampled_again_is_opened_from_the_start(make):
    turns = make(GAME)
    first = begin(turns)[0].prompt
    again = begin(turns, first)[0].prompt
    assert isinstance(again, OpenedPrompt) and again == first
    assert again.original.prompt == "What is two?"


def test_a_prompt_as_it_was_where_nothing_is_added(make):
    turns = make(GAME.replace('return " Go."', "return None"))
    prompt = prompt_of(turns)
    assert begin(turns, prompt)[0].prompt is prompt


def test_a_record_brings_its_own_tools(make):
    turns = make(TOOLS, QWEN)
    tool = {"type": "function", "function": {"name": "other"}}
    prompt = prompt_of(turns, tools=[tool])
    (talk,) = begin(turns, prompt)
    assert talk.prompt is prompt and "other" in prompt.text and '"add"' not in prompt.text


def test_a_prompt_that_gets_too_long_is_refused(make):
    turns = make(GAME)
    length = len(begin(turns)[0].prompt.prompt_ids)
    turns.longest_prompt = length
    begin(turns)
    turns.longest_prompt = length - 1
    says = f"the prompt of record 5 has {length} tokens with what reset adds, .* room for {length - 1};"
    tiny.refused(says, begin, turns, prompt_of(turns, index=4))


def test_the_switches_of_thinking_are_those_of_the_record(make):
    turns = make(GAME, MINIMIND3, thinking=lambda index: {"open_thinking": index == 1})
    talks = begin(turns, *(prompt_of(turns, index=index) for index in (0, 1)))
    say(turns, talks, "2", "so</think>2")
    ends = "<|im_start|>assistant\n<think>\n\n</think>\n\n", "<|im_start|>assistant\n<think>\n"
    for talk, end in zip(talks, ends, strict=True):
        assert talk.prompt.text.endswith(f"Go.<|im_end|>\n{end}")
        assert text_of(turns, talk).endswith(f"heard 1<|im_end|>\n{end}")


SPINS = """
import asyncio

class Spins:
    def __init__(self):
        self.begun = []

    def spin(self) -> str:
        '''It computes.'''
        self.begun.append("spin")
        while True:
            sum(range(100))

    async def wait(self) -> str:
        '''It waits.'''
        self.begun.append("wait")
        await asyncio.Event().wait()
"""


@pytest.mark.parametrize("name", ["spin", "wait"])
def test_a_turn_that_hangs_runs_no_further_call(make, name):
    turns = make(SPINS, QWEN, reward_timeout=0.3)
    (talk,) = begin(turns)
    thread = talk.episode.worker.thread
    say(turns, [talk], call(name) + call("spin") + call("wait"))
    assert (talk.hung, talk.finished) == (True, False)
    thread.join(30)
    assert not thread.is_alive() and talk.episode.environment.begun == [name]


CLOSES = """
import sqlite3

class Data:
    count = []

    def reset(self, answer):
        self.answer = answer
        self.table = sqlite3.connect(":memory:")

    def ask(self) -> str:
        '''Ask.'''
        return self.answer

    def get_reward(self):
        self.table.execute("select 1")
        return 1.0

    def close(self):
        self.table.close()  # in the thread that has opened it
        self.count.append(1)
        if self.answer == "5":
            raise ValueError("closed twice")
"""


def test_environments_are_closed_once_in_their_thread(make, capsys):
    turns = make(CLOSES, QWEN)
    prompts = [replace(prompt_of(turns), answer=answer) for answer in ("4", "5", "4")]
    talks = begin(turns, *prompts)  # reset gets the answer, which is no field
    say(turns, talks, call("ask"), "no", "no")
    assert [x["content"] for x in talks[0].observations] == ["4"]
    say(turns, talks[:1], "4")
    assert not talks[0].observations  # those of the turn before are no answer to this one
    assert turns.scores(talks) == [1.0] * 3
    count = talks[0].episode.environment.count
    assert not count
    turns.close()
    turns.close()
    assert len(count) == 3
    assert capsys.readouterr().err.startswith("note: --env: close: ValueError: closed twice at ")


def test_a_response_does_not_depend_on_the_others_of_its_batch(make):
    """Its noise, its choice between greedy and sampled and its place go on with it when others end before."""
    turns = make(GAME, max_gen_len=150)
    model = tiny.tiny_llama(len(turns.tokenizer), spread=3.0)
    args = Namespace(max_gen_len=150, min_gen_len=0)
    ends = Endings([*range(0, len(turns.tokenizer), 4)], None, turns.endings.forbidden)  # turns are short
    turns.endings = ends
    engine = RolloutEngine(Sampler(model), turns.tokenizer, ends, args, sharded=False, turns=turns)
    prompts = [prompt_of(turns, rounds=1 + row % 4) for row in range(8)]
    greedy = [row % 3 == 0 for row in range(8)]
    together = engine.respond(prompts, KEYS, 1.0, greedy)
    assert len({dialogue.turns for dialogue in together.dialogues}) == 4
    for row in range(8):
        alone = engine.respond([prompts[row]], KEYS[[row]], 1.0, [greedy[row]])
        assert alone.responses() == [together.responses()[row]]
        assert alone.dialogues[0].messages == together.dialogues[row].messages


def test_a_template_whose_calls_are_not_read_is_refused(make):
    turns = make(TOOLS, QWEN.replace("<tool_call>", "<call>").replace("</tool_call>", "</call>"))
    tiny.refused("writes calls in a form that is not read", turns.check, prompt_of(turns))
    turns.tokenizer.response_template = {"fields": {}}  # it reads its own
    turns.check(prompt_of(turns))


def test_a_template_that_opens_a_thought_in_new_turns_only_is_read(make):
    opens = QWEN.replace(
        "{{ '<|im_start|>assistant\\n' }}{% endif %}", "{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
    )
    assert opens != QWEN
    turns = make(TOOLS, opens)
    turns.check(prompt_of(turns))
    (talk,) = begin(turns)
    say(turns, [talk], f"so</think>{call('add', a=1, b=2)}")
    assert [message["content"] for message in talk.observations] == ["3"]


def test_what_reward_models_are_tried_with(make):
    """Two turns; the beginning of an answer belongs to the first."""
    turns = make(GAME)
    begun = [tiny.user("Two?"), tiny.assistant(TurnText("It ", is_begun=True))]
    before, last = turns.example(prompt_of(turns, begun))
    assert (plain_messages(before), last) == ([tiny.user("Two?"), tiny.assistant("0"), tiny.user("0")], "0")
    tools = make(TOOLS, QWEN)
    before, last = tools.example(prompt_of(tools))
    called = {"type": "function", "function": {"name": "f", "arguments": {}}}
    result = {"role": "tool", "name": "unknown", "content": "0"}
    question = tiny.user("What is two?")
    assert plain_messages(before) == [question, tiny.assistant("", tool_calls=[called]), result]


def test_a_template_that_writes_a_call_as_the_whole_turn_is_read(make):
    turns = make(TOOLS, QWEN.replace("<tool_call>\\n", "").replace("\\n</tool_call>", ""))
    turns.check(prompt_of(turns))
    (talk,) = begin(turns)
    say(turns, [talk], '{"name": "add", "parameters": {"a": 1, "b": 2}}')
    assert [message["content"] for message in talk.observations] == ["3"]


def test_the_check_is_that_of_the_template(make):
    tools = make(TOOLS)
    tiny.refused("does not show tools", tools.check, prompt_of(tools))
    for turns in (make(TOOLS, QWEN), make(GAME)):
        turns.check(prompt_of(turns))
    turns = make(
        GAME, "{{ messages | length if counts }}" + ALL, thinking=lambda index: {"counts": index == 1}
    )
    turns.check(prompt_of(turns))
    tiny.refused("rewrites what stands before", turns.check, prompt_of(turns, index=1))


# ---------------------------------------------------------------- what comes of them


@pytest.mark.parametrize("special", [False, True])
def test_a_call_may_end_with_a_stop_string(make, special):
    """Also where --stop has made an id of it that ends a response."""
    turns = make(TOOLS, QWEN, stops=[] if special else ["</tool_call>"])
    if special:
        turns.tokenizer.add_special_tokens({"additional_special_tokens": ["</tool_call>"]})
        ends = [*turns.endings.eos, turns.tokenizer.convert_tokens_to_ids("</tool_call>")]
        turns.endings = Endings(ends, None, Forbidden(1, tuple(ends)))
    turns.check(prompt_of(turns))
    (talk,) = begin(turns)
    ids = turns.tokenizer.encode(call("add", a=1, b=2))
    tokens, lengths = pad_right([ids])
    turns.reply(
        [talk], new_batch([talk.context], tokens, -torch.ones(tokens.shape), lengths, torch.tensor([True]))
    )
    assert talk.episode.environment.called == [(1, 2)]
    end = turns.tokenizer.eos_token_id  # of the template, not sampled
    assert (talk.ids[len(ids)], talk.is_action[len(ids)], talk.is_action[len(ids) - 1]) == (end, False, True)


def test_a_reward_model_reads_the_whole_conversation(make):
    turns = make(TOOLS, QWEN)
    (talk,) = begin(
        turns, prompt_of(turns, [tiny.user("Two?"), tiny.assistant(TurnText("It ", is_begun=True))])
    )
    say(turns, [talk], f"is\n{call('add', a=1, b=1)}")
    say(turns, [talk], "It is 2.")
    batch = turns.as_batch([talk], "cpu")
    (exchange,) = Request(batch.prompts, batch.texts, dialogues=batch.dialogues).exchanges
    text = unmark(conversation_text(turns.tokenizer, *exchange))
    sampled = turns.tokenizer.decode(talk.context)
    assert sampled.endswith("It is 2.<|im_end|>")
    asked = unmark(render(turns.tokenizer, to_messages("Two?"), generate=True))
    shown = talk.prompt.text.index("<|im_start|>user")  # behind the list of tools
    assert text == sampled[shown:] + "\n" and text.startswith(f"{asked}It is\n<tool_call>")
