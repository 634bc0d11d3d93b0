"""Rewards of responses in several turns: the environment's part; what functions, models and servers get."""

import re
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from test_reward_server import send, server
from tiny import (
    assistant,
    dialogue,
    flags,
    read_jsonl,
    refused,
    request_of,
    train,
    turn_files,
    user,
    word_tokenizer,
    write_jsonl,
)

from dataset.chat_template import conversation_ids
from dataset.formats import TurnText, plain_messages
from dataset.lm_dataset import RLAIFDataset
from trainer import train_ppo
from trainer.compute.batch import Batch
from trainer.inputs import complete_flags
from trainer.rewards import reward_function
from trainer.rewards.combine import EvalReward, Reward, make_reward
from trainer.rewards.reward_server import RewardServer
from trainer.run import PpoRun
from trainer.runs.distributed import World

ALONE = World(0, 1, torch.device("cpu"))
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
ADDS = assistant(TurnText("I add.", calls=[CALL]))
RESULT = {"role": "tool", "content": "3"}
WHOLE = 'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


class Game:
    """An environment that cannot be copied, as one with a socket."""

    def __init__(self, points=0):
        self.points = points
        self.lock = threading.Lock()


def talks(environments=True, **more):
    """Three responses: a call with its result and an answer, a single turn, a game of two turns."""
    games = [Game(n) if environments else None for n in range(3)]
    dialogues = [
        dialogue(ADDS, RESULT, "It is 3.", environment=games[0], score=7.0),
        dialogue("No.", environment=games[1]),
        dialogue("4", user("higher"), "6", environment=games[2], score=-0.5),
    ]
    request = request_of(
        ["What is 1 + 2?", [user("Hm?")], [{"role": "system", "content": "s"}, user("Guess")]],
        ["It is 3.", "No.", "6"],
        ["3", None, "5"],
        finished=[True, True, False],
        records=[{"level": 1}, {}, {}],
        lengths=[9, 2, 4],
        texts=["Q1 ", "Q2 ", "Q3 "],
    )
    request.ids = [[1] * 12, [2] * 2, [3] * 7]
    request.dialogues = dialogues
    request.whole_texts = [f"{WHOLE}\n3\nIt is 3.", "No.", "4 higher 6"]
    request.run_values = reward_function.run_values(3, 12, of_turns=["messages", "environments"])
    for name, value in more.items():
        setattr(request, name, value)
    return request


def scored(function, request):
    return reward_function.call_reward_function(function, request, 0)[0]


NAN = pytest.approx(float("nan"), nan_ok=True)


def test_the_environments_score_is_a_part_as_it_is_and_none_says_nothing():
    reward = Reward(environment=True, missing_eos_penalty=1.0)
    wanted = {"environment": [7.0, NAN, -0.5], "missing_eos": [0, 0, -1], "score": [7.0, NAN, -1.5]}
    assert {name: x.tolist() for name, x in reward(talks()).items()} == wanted
    assert reward.names == [*wanted]
    functions = {"function": (lambda *_: [1.0, 2.0, 3.0], 1.0)}
    normalised = Reward(
        environment=True, normalize_reward=True, models={"m": (zeros, 1.0)}, functions=functions
    )
    parts = normalised.combine(normalised.score_parts(talks()), ALONE)
    assert [*parts][:3] == ["environment", "m", "function"]
    assert parts["environment"].tolist() == [7.0, NAN, -0.5]
    assert parts["score"].tolist() == parts["score_raw"].tolist() == [8.0, 2.0, 2.5]
    wrong = talks(dialogues=[dialogue("a", score=float("inf"))] * 3)
    refused(r'^--env: the score inf for the response "It is 3\."', reward, wrong)


def zeros(conversations):
    return torch.zeros(len(conversations))


def test_an_environment_without_a_reward_needs_another_one():
    def given(*more):
        return complete_flags(train_ppo.flag_parser().parse_args(["--model", "m", "--data_path", "d", *more]))

    env = ["--env", "game.py:Game"]
    with_reward = make_reward(given(*env), {}, environment=True)
    assert with_reward.environment
    says = (
        "^--env game.py:Game: its class has no get_reward, so nothing scores a response; write one, or give"
    )
    refused(says, make_reward, given(*env), {})
    assert not make_reward(given(*env, "--reward_model", "r"), {}).environment
    assert make_reward(given("--tools", "a.py:f", "--reward_fn", "f.py:f"), {"function": (zeros, 1.0)})
    refused("^--reward_model: name one, .* or an environment with --env", given, "--tools", "a.py:f")


CONVERSATIONS = [
    [user("What is 1 + 2?"), assistant("I add.", tool_calls=[CALL]), RESULT, assistant("It is 3.")],
    [user("Hm?"), assistant("No.")],
    [{"role": "system", "content": "s"}, user("Guess"), assistant("4"), user("higher"), assistant("6")],
]


def test_ours_gets_the_last_turn_and_by_name_the_conversation_and_the_environments():
    request = talks()
    seen = {}

    def ours(prompts, responses, answers, messages, environments, level, step=0):
        seen.update(locals())
        environments[0].points = 5  # its own object: it holds a lock, which cannot be copied
        messages[0].clear()
        return [game.points for game in environments]

    assert scored(ours, request) == [5, 1, 2]
    assert seen["responses"] == ["It is 3.", "No.", "6"]
    assert [*map(id, seen["environments"])] == [id(talk.environment) for talk in request.dialogues]
    assert seen["level"] == [1, None, None]
    assert scored(lambda p, r, a, messages: [messages == CONVERSATIONS] * 3, request) == [1] * 3
    assert scored(lambda p, r, a, **columns: [len(columns)] * 3, request) == [1] * 3  # only fields
    steps = lambda p, responses, a: [[(len(text), 1.0)] for text in responses]  # noqa: E731
    assert reward_function.call_reward_function(steps, request, 0)[1] == [[(8, 1.0)], [(3, 1.0)], [(1, 1.0)]]
    # A field of this name is the conversation that the prompt was taken from.
    request.prompts[0].record["messages"] = "field"
    assert scored(lambda p, r, a, messages: [messages == CONVERSATIONS] * 3, request) == [1] * 3
    assert scored(lambda p, r, a, **columns: [columns["messages"] == CONVERSATIONS] * 3, request) == [1] * 3
    data = SimpleNamespace(columns={"messages": None, "step": None})
    known = reward_function.run_values(0, 9, data, of_turns=["messages"])
    assert known.keys() == {"messages", "total_steps", "trainer_state"}
    request.run_values = {}  # responses of one turn
    assert scored(lambda p, r, a, messages: [m == "field" for m in messages], request) == [1, 0, 0]


def test_trls_gets_whole_completions_all_ids_and_the_environments():
    request = talks()
    seen = {}

    def trls(prompts, completions, completion_ids, environments=None, **kwargs):
        seen.update(kwargs, prompts=prompts, completions=completions, ids=completion_ids)
        return [game.points for game in environments]

    assert scored(trls, request) == [0, 1, 2]
    assert [[*p, *c] for p, c in zip(seen["prompts"], seen["completions"], strict=True)] == CONVERSATIONS
    assert [len(messages) for messages in seen["completions"]] == [3, 1, 3]
    assert [*map(len, seen["ids"])] == [12, 2, 7]
    assert scored(lambda **kwargs: [game.points for game in kwargs["environments"]], request) == [0, 1, 2]
    tools = talks(environments=False, run_values={})
    assert scored(lambda completions, **kwargs: ["environments" in kwargs] * 3, tools) == [0] * 3


def test_verls_gets_the_whole_response_as_a_text():
    assert scored(lambda solution_str, ground_truth: len(solution_str), talks()) == [len(WHOLE) + 11, 3, 10]


def test_the_beginning_of_an_answer_belongs_to_the_first_turn():
    """Rules look at the last turn, which has none, unless it is the first one."""
    question = [{"role": "system", "content": "s"}, user("q")]
    begun = [*question, assistant(TurnText("<think>\n", is_begun=True))]
    request = request_of([begun, begun], ["5", "x</think>7"])
    calls = assistant(TurnText("a</think>b", calls=[CALL]))
    request.dialogues = [dialogue(calls, RESULT, "5"), dialogue("x</think>7")]
    assert request.beginnings == ["", "<think>\n"]
    assert request.questions == [question, begun]
    seen = []
    scored(lambda prompts, responses, answers: seen.extend(prompts) or [1, 1], request)
    assert seen == [question, begun]
    first = TurnText("<think>\na</think>b", calls=[CALL])
    assert request.exchanges == [
        ([*question, assistant(first), RESULT], "5"),
        (question, "<think>\nx</think>7"),
    ]
    completions = []
    scored(lambda **kwargs: completions.extend(kwargs["completions"]) or [1, 1], request)
    assert completions == [
        [assistant("<think>\na</think>b", tool_calls=[CALL]), RESULT, assistant("5")],
        [assistant("<think>\nx</think>7")],
    ]
    asked = []
    model = lambda conversations: asked.extend(conversations) or zeros(conversations)  # noqa: E731
    Reward({"model": (model, 1.0)})(request)
    assert [answer for _, answer in asked] == ["5", "7"]  # without the thought
    closed = [*question, assistant(TurnText("<think>a</think>", is_begun=True))]
    thinks = f"{'t' * 30}</think>5"
    request = request_of([closed, closed], [thinks, thinks], texts=["s q <think>a</think>"] * 2)
    request.dialogues = [dialogue(calls, RESULT, thinks), dialogue(thinks)]
    assert Reward(thinking_reward=1.0)(request)["thinking"].tolist() == [1.25, 0.0]


@pytest.mark.parametrize("kind", [Reward, EvalReward])
def test_a_reward_model_reads_all_turns_and_the_last_one_as_the_answer(kind):
    asked = []
    model = lambda conversations: asked.extend(conversations) or zeros(conversations)  # noqa: E731
    kind(models={"model": (model, 1.0)})(talks())
    assert [plain_messages([*before, assistant(last)]) for before, last in asked] == CONVERSATIONS
    texts = [message["content"] for messages in CONVERSATIONS for message in messages]
    words = {"user", "assistant", "tool", "system", *f"{' '.join(texts)} {WHOLE}".split()}
    tokenizer = word_tokenizer(sorted(words), chat=True)
    ids = conversation_ids(tokenizer, asked)  # as a model that has a template without tools reads it
    read = tokenizer.decode(ids[0]).split(" </s> ")
    assert read == [
        "user What is 1 + 2?",
        f"assistant {' '.join(WHOLE.split())}",
        "tool 3",
        "assistant It is 3. </s>",
    ]


def test_rules_look_at_the_last_turn_and_the_sampled_tokens():
    reward = Reward(
        repetition_penalty=0.5, length_reward=1.0, max_gen_len=12, overlong_buffer=6, missing_eos_penalty=2.0
    )
    request = talks(responses=["a " * 20, "No.", "6"])
    parts = {name: x.tolist() for name, x in reward(request).items()}
    assert parts["repetition"] == [-0.5, 0, 0]
    assert parts["length_reward"] == [1, -1, -1]
    assert parts["overlong"] == [-0.5, 0, 0]  # 9 of 12; all ids are 12
    assert parts["missing_eos"] == [0, 0, -2]


def test_a_server_gets_the_whole_response_and_its_messages():
    counts = lambda handler, request: send(handler, {"rewards": [0, 1, 2]})  # noqa: E731
    with server(counts) as (url, requests):
        assert RewardServer(url, 9)(talks(environments=False)) == [0.0, 1.0, 2.0]
    (sent,) = requests
    assert sent["responses"][2] == "4 higher 6"
    assert sent["query"][2] == "Q3 4 higher 6"
    assert sent["completions"][0] == CONVERSATIONS[0][1:]


def test_a_function_is_tried_with_environments_in_which_nothing_has_happened(tmp_path):
    data = RLAIFDataset(
        write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a", "answer": "b"}]),
        word_tokenizer("ab", chat=True),
        64,
    )
    made, calls = [], []

    def make(prompts):
        made.append([Game(n + 8) for n, _ in enumerate(prompts)])
        return made[-1]

    def judged(prompts, completions, environments, **kwargs):
        calls.append((completions, [game.points for game in environments]))
        return [0.0, 0.0]

    def named(prompts, responses, answers, messages):
        calls.append(messages)
        return [0.0, 0.0]

    functions = {"function_a": (judged, 1.0), "function_b": (named, 1.0)}
    known = reward_function.run_values(0, 9, data, of_turns=["messages", "environments"])
    reward_function.check_fields(functions, known, data)
    reward_function.try_reward_functions(functions, known, 9, data, environments=make)
    texts = reward_function.MADE_UP
    assert calls[0] == ([[assistant(text)] for text in texts], [8, 9])
    assert calls[1] == [[user("a"), assistant(text)] for text in texts]
    assert len(made) == 2  # each function has its own
    known = reward_function.run_values(0, 9, data, of_turns=["messages"])  # with --tools there are none
    says = "^--reward_fn a: its parameter 'environments' is no key of the records"
    refused(says, reward_function.check_fields, functions, known, data)
    del functions["function_a"]
    reward_function.try_reward_functions(functions, known, 9, data, environments=lambda prompts: [None] * 2)
    assert calls[2] == calls[1]


def test_a_run_asks_with_sampled_lengths_whole_texts_and_what_functions_may_ask_for():
    tokenizer = word_tokenizer(["a", "b", "c", "d"])
    request = talks(environments=False)
    batch = Batch(
        tokens=torch.tensor([[2, 3, 4, 5, 0], [2, 3, 0, 0, 0], [2, 5, 4, 3, 0]]),
        prompt_len=torch.tensor([1, 1, 1]),
        response_len=torch.tensor([4, 2, 4]),
        finished=torch.tensor([True, True, False]),
        sampler_logprobs=torch.zeros(3, 4),
        prompts=request.prompts,
        texts=request.responses,
        is_action=torch.tensor(
            [[True, False, True, True], [True, True, False, False], [True, False, False, True]]
        ),
        dialogues=request.dialogues,
    )
    asked = []
    run = SimpleNamespace(
        tokenizer=tokenizer,
        args=SimpleNamespace(env=""),
        environments="some tools",
        progress=SimpleNamespace(step=3),
        total_steps=12,
        data=SimpleNamespace(columns={}),
        held_out=None,
        models=SimpleNamespace(host=SimpleNamespace(on_device=lambda *modules: nullcontext())),
    )
    run.run_values = lambda step: PpoRun.run_values(run, step)
    reward = SimpleNamespace(server=None, models={}, score_parts=asked.append)
    PpoRun.request_scores(run, reward, batch)
    (given,) = asked
    assert given.lengths == [3, 2, 2]
    assert given.ids == [[3, 4, 5, 0], [3, 0], [5, 4, 3, 0]]
    assert given.whole_texts == ["b c d", "b", "d c b"]
    assert given.dialogues == request.dialogues
    assert {"step", "messages"} <= given.run_values.keys()
    assert "environments" not in given.run_values


JUDGES = """
def ours(prompts, responses, answers, messages, environments):
    assert all(said[-1]["role"] == "assistant" for said in messages)
    return [game.calls / 4 for game in environments]

def trls(completions, completion_ids, environments, **kwargs):
    return [float(len(messages)) for messages in completions]
"""


def test_a_run_with_an_environment_and_functions_that_ask_for_it(tmp_path, capsys):
    """Its functions see the objects that were played with, in training and in evaluation."""
    files = turn_files(tmp_path, count=8)
    (tmp_path / "judges.py").write_text(JUDGES)
    files |= {"env": f"{files.pop('code')}:Env", "eval_data_path": files["data_path"], "out_dir": tmp_path}
    files |= {"reward_fn": f"{tmp_path}/judges.py:ours", "eval_reward_fn": f"{tmp_path}/judges.py:trls"}
    sizes = {"batch_size": 8, "mini_batch_size": 4, "max_gen_len": 24, "max_steps": 2, "max_turns": 4}
    more = {"critic_warmup_steps": 0, "eval_interval": 2, "device": "cpu", "dtype": "float32", "reasoning": 0}
    train_ppo.main(flags(**files, **sizes, **more, epochs=2, run_name="r", log_interval=1))
    metrics = read_jsonl(tmp_path / "r" / "metrics.jsonl")
    for step in metrics:
        for of in ("eval", "reward") if step["step"] else ("eval",):
            if f"{of}/environment" in step:
                assert step[f"{of}/environment"] == pytest.approx(step[f"{of}/function"])
    assert metrics[0]["eval/environment"] > 0
    assert metrics[0]["eval/judge"] >= 1
    rows = read_jsonl(tmp_path / "r" / "samples.jsonl")
    said = [turn for row in rows for turn in row["messages"]]
    assert any("tool_calls" in turn for turn in said)
    assert {"role": "tool", "content": "b", "name": "add"} in said
    assert all(row["response"] == row["messages"][-1]["content"] for row in rows if not row["finished"])
    printed = capsys.readouterr().out
    assert "reward   environment + function + missing_eos" in printed
    assert re.search(r"\nstep 2/2 \|.* turns \d.\d\d \| calls \d.\d\d \|", printed)
    assert "best by eval/judge" in printed or "eval/judge was never above" in printed


def test_a_run_closes_each_environment_once_it_is_scored_and_keeps_none(tmp_path):
    """Of training, of evaluation, of groups that are sampled again."""
    files = turn_files(tmp_path)
    path = tmp_path / "log.txt"
    (tmp_path / "closing.py").write_text(
        f"class Game:\n    def reset(self):\n        self.say('reset')\n"
        f"    def say(self, what):\n        open({str(path)!r}, 'a').write(what + ' ')\n"
        "    def step(self, text):\n        return 'a', 0.0, True\n"
        "    def close(self):\n        self.say('close')\n"
        "def score(prompts, responses, environments):\n"
        f"    open({str(path)!r}, 'a').write('score ')\n    return [float('b' in r) for r in responses]\n"
    )
    del files["code"]
    files |= {"env": f"{tmp_path / 'closing.py'}:Game", "reward_fn": f"{tmp_path / 'closing.py'}:score"}
    files |= {"eval_data_path": write_jsonl(tmp_path / "held.jsonl", [{"prompt": "a b"}] * 3)}
    sizes = {"batch_size": 8, "mini_batch_size": 8, "max_gen_len": 12, "max_steps": 2, "num_generations": 2}
    train(**files, **sizes, advantage="rloo", filter_groups=1, out_dir=tmp_path / "out")
    said = path.read_text().split()
    assert said[:5] == ["reset", "reset", "score", "close", "close"]  # those of the trial
    assert said.count("reset") == said.count("close") > 2 * 8 + 2 * 3 * 3  # two steps, two evaluations
    for place, what in enumerate(said):
        if what == "close":
            assert "score" in said[:place]
