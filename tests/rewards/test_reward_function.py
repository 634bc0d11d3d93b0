"""The user's reward function: which fields of the records it gets, and what is said of its mistakes."""

import asyncio
import functools
import io
import json
import math
import os
import shutil
import signal
import sys
import threading
from functools import partial
from types import SimpleNamespace

import numpy
import pytest
import torch
from tiny import (
    assistant,
    flags,
    load_weights,
    read_jsonl,
    refused,
    request_of,
    run_files,
    user,
    word_tokenizer,
    write_jsonl,
)

from dataset.formats import Keys, TurnText
from dataset.lm_dataset import RLAIFDataset
from trainer import train_ppo, user_code
from trainer.environments.running import awaited
from trainer.rewards import reward_function, rules
from trainer.rewards.combine import EvalReward, Reward
from trainer.runs.distributed import World

ALONE = World(0, 1, torch.device("cpu"))
RECORDS = [{"prompt": "p", "tests": [1, 2], "level": 3}]
RECORDS += [{"prompt": "q", "level": 4, "prompts": "x", "a b": 5}]


OF_RUN = {"step": 3, "total_steps": 12}


def called(function):
    request = request_of(["p", "q"], ["r", "s"], [None, "a"], records=RECORDS)
    request.run_values = OF_RUN
    return reward_function.call_reward_function(function, request, 0)[0]


def check_fields(function, *given):
    reward_function.check_fields({"function": (function, 1.0)}, *given)


TESTS = [[1, 2], None]
COLUMNS = {"prompt": ["p", "q"], "tests": TESTS, "level": [3, 4], "a b": [None, 5]}
FUNCTIONS = [  # (function, what it is given by name)
    (lambda a, b, c: 0, {}),
    (lambda prompts, *rest: 0, {}),
    (lambda prompts, answers, references: 0, {}),  # any names that cannot be in the wrong place
    (lambda p, r, a, *, level: 0, {"level": [3, 4]}),
    (lambda p, r, a, tests, level=0: 0, {"tests": TESTS, "level": [3, 4]}),
    (lambda p, r, a, scale=2.0: 0, {}),  # no such field: its default
    (lambda p, r, a, rare: 0, {"rare": [None, None]}),  # in none of this batch
    (lambda p, r, a, step, total_steps=0: 0, OF_RUN),
    (lambda p, r, a, level, step=0: 0, {"level": [3, 4], "step": 3}),
    (lambda prompts, responses, answers, **columns: 0, COLUMNS),  # "prompts" is taken
    (lambda p, r, a, **columns: 0, COLUMNS | {"prompts": [None, "x"]}),
]


@pytest.mark.parametrize(("function", "given"), FUNCTIONS, ids=range(len(FUNCTIONS)))
def test_a_function_gets_what_it_asks_for_by_name(function, given):
    @functools.wraps(function)
    def wrapped(*batch, **more):
        function(*batch, **more)
        assert batch == (["p", "q"], ["r", "s"], [None, "a"])
        assert more == given
        return [0.0, 0.0]

    called(wrapped)
    columns = {**RECORDS[0], **RECORDS[1]}
    found = reward_function.fields_read(wrapped, columns)
    assert {*found} - {"prompts"} == (columns.keys() & given.keys()) - {"prompts"}


def test_a_field_of_the_records_comes_before_the_step_of_the_run():
    data = [SimpleNamespace(columns={"prompt": None}), None, SimpleNamespace(columns={"step": None})]
    assert [*reward_function.run_values(3, 12, *data[:2])] == ["step", "total_steps", "trainer_state"]
    assert [*reward_function.run_values(3, 12, *data)] == ["total_steps", "trainer_state"]
    request = request_of(["p", "q"], ["r", "s"], records=[{"step": 1}, {}])
    request.run_values = {"total_steps": 12}
    given = reward_function.arguments(lambda p, r, a, step, total_steps: 0, request)
    assert given == {"step": [1, None], "total_steps": 12}


def test_a_function_may_change_what_it_gets_and_not_say_its_parameters():
    def change(prompts, responses, answers, tests):
        tests[0].clear()
        return [1, 2]

    assert called(change) == [1, 2]
    assert RECORDS[0]["tests"] == [1, 2]

    class Scorer:
        def __call__(self, prompts, responses, answers, level):
            return level

    assert called(Scorer()) == [3, 4]
    assert called(partial(lambda bonus, p, r, a, level: [bonus + x for x in level], 1)) == [4, 5]


def test_what_cannot_be_called_is_refused_when_it_is_loaded_and_a_mistake_inside_has_its_place(tmp_path):
    path = tmp_path / "f.py"

    def load(spec=f"{path}:f"):
        return reward_function.load_reward_functions([spec])["function"][0]

    says = (
        r"a function takes \(prompts, responses, answers, \.\.\.\), TRL's \(prompts, completions, \.\.\., "
        r"\*\*kwargs\) or verl's \(data_source, solution_str, ground_truth, extra_info\); this one takes \("
    )
    for names in (
        "",
        "prompts, responses",
        "prompts, **kwargs",
        "responses, prompts, answers",
        "prompts, answers, responses",
        "queries, prompts, labels",  # OpenRLHF's
        "data_source, response, ground_truth",
        "data_sources, solution_strs, ground_truths, extra_infos",  # verl's, of whole batches
        "solution_str, ground_truth, judge",
        "completions, /, **kwargs",
        "*, prompts, responses, answers",
    ):
        path.write_text(f"def f({names}):\n    return []\n")
        assert refused(says, load).endswith(f"this one takes ({names})")
    path.write_text("def deco(g):\n    return lambda *a, **k: g(*a, **k)\n@deco\ndef f(p, r, a): return r\n")
    refused(r"\(\*a, \*\*k\) does not say what the function takes; put @functools\.wraps", load)
    path.write_text("x = 1\n")
    for wrong in (f"{path}:other", f"{path}:x", f"{path}", f"{tmp_path}/none.py:score"):
        refused("--reward_fn", load, wrong)
    path.write_text("import nowhere_to_be_found\n")
    refused("nowhere_to_be_found", load)
    path.write_text("f = max\n")
    refused("the parameters of a compiled function are not known", load)
    off = "torch.set_grad_enabled(False)\n"
    path.write_text(f"import torch\n{off}def f(p, r, a):\n    {off}    return [1, 2]\n")
    assert called(load()) == [1, 2]
    assert torch.is_grad_enabled()
    scorer = "from dataclasses import dataclass\n@dataclass\nclass Scorer:\n    x: float\n"
    path.write_text(scorer + "    def __call__(self, p, r, a):\n        return [self.x] * 2\nf = Scorer(3)\n")
    assert called(load()) == [3, 3]  # it has no hash
    path.write_text("def f(p, r, a):\n    return r[9]\n")
    refused(r"IndexError: .* at .*f\.py:2; correct the function", called, load())


def test_a_field_that_no_record_has_is_refused_unless_there_is_a_default(tmp_path):
    """A name of the run too, where the records trained on have a "step" and those of the judge have none."""
    path = tmp_path / "f.py"

    def load(*given):
        [(function, _)] = reward_function.load_reward_functions([f"{path}:f"]).values()
        check_fields(function, *given)

    data = SimpleNamespace(columns={"prompt": None, "tests": None}, path="a.jsonl")
    of_run = ["step", "total_steps"]
    for names in ("p, r, a, tests, level=1", "a, b, c, **columns", "a, b, c, step"):
        path.write_text(f"def f({names}):\n    return []\n")
        load(of_run, data)
    wanted = '--reward_fn: its parameter \'step\' is no key of .* a.jsonl; keys found: "prompt", "tests": ren'
    refused(wanted, load, ["total_steps"], data)


WANTED = r"; it must be a number, or a list of pairs \(character offset, score\) with offsets from 0 to 1, or"
MISTAKES = [  # (what is returned, what is said)
    (None, r"returned 0 scores for 2 responses: None \(NoneType\); return a list of one number for each"),
    ("12", r"returned 0 scores for 2 responses: '12' \(str\); return a list"),
    ({0.5, 0.25}, r"returned 0 scores for 2 responses: .* \(set\); return a list"),
    ([1.0], r"returned 1 scores for 2 responses: \[1\.0\] \(list\); return a list"),
    (torch.tensor(1.0), r"returned 0 scores for 2 responses: tensor\(1\.\) \(Tensor\); return a list"),
    (numpy.float32(1), r"returned 0 scores for 2 responses: .*\(float32\); return a list"),
    (numpy.array(1), r"returned 0 scores for 2 responses: array\(1\) \(ndarray\); return a list"),
    ([1, "x"], r"score 2 is 'x' \(str\)" + WANTED),
    ([[1.0], [2.0]], r"score 1 is \[1\.0\] \(list\)" + WANTED),
    ([1, [(0, 1, 2)]], r"score 2 is \[\(0, 1, 2\)\] \(list\)" + WANTED),
    ([[(0, 1), (2, 1)], 1], r"score 1 is \[\(0, 1\), \(2, 1\)\] \(list\)" + WANTED),
    ([[(-1, 1)], 1], r"score 1 is \[\(-1, 1\)\] \(list\)" + WANTED),
    ([[(0.5, 1)], 1], r"score 1 is \[\(0\.5, 1\)\] \(list\)" + WANTED),
    ([1, 10**400], r"score 2 is 10+ \(int\)" + WANTED),
    ([1, float("nan")], 'the score nan for the response "s" to record 2; scores must be finite'),
]


@pytest.mark.parametrize(("returned", "says"), MISTAKES, ids=range(len(MISTAKES)))
def test_what_is_wrong_with_what_a_function_returned(returned, says):
    reward = Reward(functions={"function": (lambda *_: returned, 1.0)}, reasoning=False)
    refused(f"^--reward_fn: {says}", reward, request_of(["p", "q"], ["r", "s"]))


NUMBERS = [(1, 2), range(1, 3), iter([1.0, 2.0]), torch.tensor([1, 2]), numpy.array([1, 2]), ["1", 2]]


@pytest.mark.parametrize("returned", [*NUMBERS, [torch.tensor(1), 2]], ids=range(7))
def test_what_counts_as_numbers(returned):
    assert called(lambda *_: returned) == [1, 2]


# It writes down what it is given; a judge has no rows.
NOTING = """
import json, os
def score(prompts, responses, answers, step, total_steps, level, hint=None):
    rows = zip(prompts, answers, level, hint or [None] * len(prompts), strict=True)
    with open(f"{__file__}.{os.environ['NOTES']}", "a") as file:
        file.write(json.dumps({"step": step, "total": total_steps, "rows": list(rows)}) + "\\n")
    return [float(x + 100 * step) for x in level]
"""


def test_a_run_gives_each_response_its_own_record_and_the_step_also_when_resumed(tmp_path, monkeypatch):
    """Of a file that mixes forms, in training and in evaluation, read by a worker. A step is the number of
    batches learned from; an evaluation asks the reward and the judge, for sampled and greedy answers."""
    files = run_files(tmp_path)
    records = [
        {"prompt": "a b", "level": 0},
        {"question": "b c", "answer": "so\n#### 1", "level": 1},
        {"instruction": "c", "input": "d", "output": "e", "level": 2, "hint": "f"},
        {"messages": [{"role": "user", "content": "d e"}], "level": 3},
        {"prompt": [{"role": "user", "content": "e f"}], "reward_model": {"ground_truth": "4"}, "level": 4},
        {"text": "f g", "level": 5},
    ]
    held_out = [{**record, "level": record["level"] + 10} for record in records]
    for name in ("reward_fn", "eval_reward_fn"):
        (tmp_path / f"{name}.py").write_text(NOTING)
        files[name] = f"{tmp_path / name}.py:score"
    files |= {"data_path": write_jsonl(tmp_path / "mixed.jsonl", records), "out_dir": tmp_path / "out"}
    files |= {"eval_data_path": write_jsonl(tmp_path / "held_out.jsonl", held_out), "run_name": "r"}
    sizes = {"batch_size": 6, "mini_batch_size": 3, "max_gen_len": 4, "max_steps": 3, "eval_interval": 2}
    more = {"critic_warmup_steps": 0, "reasoning": 0, "save_interval": 1, "device": "cpu", "dtype": "float32"}
    for name in ("data_path", "eval_data_path"):  # before it samples anything
        other = files | {name: write_jsonl(tmp_path / "other.jsonl", [{"prompt": "a", "levels": 1}])}
        says = r"'level' is no key .*other\.jsonl; keys found: .*\"levels\""
        refused(says, train_ppo.main, flags(**other, **sizes, **more))
    assert not (tmp_path / "out").exists()
    argv = flags(**files, **sizes, **more, epochs=3)

    def noted(name, notes):
        monkeypatch.setenv("NOTES", notes)
        return [note for note in read_jsonl(f"{tmp_path / name}.py.{notes}") if note["total"] == 3]

    monkeypatch.setenv("NOTES", "whole")
    train_ppo.main(argv)
    tried, *calls = noted("reward_fn", "whole")
    assert (tried["step"], [row[2] for row in tried["rows"]]) == (0, [0, 1])  # made-up responses
    assert [call["step"] for call in calls] == [0, 0, 0, 1, 2, 2, 2, 3, 3]  # evaluations at 0, 2 and 3
    assert [call["step"] for call in noted("eval_reward_fn", "whole")] == [0, 0, 0, 2, 2, 3, 3]
    prompts = ["a b", "b c", "c\n\nd", "d e", "e f", "f g"]
    answers = [None, "1", "e", None, "4", None]
    for call, levels in zip(calls, (10, 10, 0, 0, 10, 10, 0, 10, 10), strict=True):
        assert sorted(row[2] for row in call["rows"]) == list(range(levels, levels + 6))
        for prompt, answer, level, hint in call["rows"]:
            number = level % 10
            assert (prompt if isinstance(prompt, str) else prompt[0]["content"]) == prompts[number]
            assert (answer, hint) == (answers[number], records[number].get("hint"))
    shutil.rmtree(tmp_path / "out/r/checkpoints/step_3")
    monkeypatch.setenv("NOTES", "resumed")
    train_ppo.main([*argv, "--resume", "auto"])
    assert [call["step"] for call in noted("reward_fn", "resumed")] == [0, 2, 3, 3]
    assert [call["step"] for call in noted("eval_reward_fn", "resumed")] == [0, 3, 3]
    known = json.loads((tmp_path / "out/r/config.json").read_text())["fingerprints"]
    assert {name for name in known if "data_path " in name} == {"data_path level", "data_path hint"}
    assert known["reward_fn weights"] == "function=1"
    write_jsonl(tmp_path / "mixed.jsonl", [records[0], records[1] | {"level": 9}, *records[2:]])
    says = r"--data_path .*mixed\.jsonl does not hold what the run began with \(level "
    refused(says, train_ppo.main, [*argv, "--resume", "auto"])


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="Windows has no SIGALRM")
def test_an_alarm_that_comes_while_it_is_turned_off_leaves_nothing_behind(monkeypatch):
    """It comes right before each of the two calls that turn it off."""
    before, came = signal.getsignal(signal.SIGALRM), []

    def late(call, which, value, *more):
        if value in (0, before):
            came.append(call.__name__)
            signal.raise_signal(signal.SIGALRM)
        return call(which, value, *more)

    for name in ("setitimer", "signal"):
        monkeypatch.setattr(signal, name, partial(late, getattr(signal, name)))
    with reward_function.time_limit(60):
        pass
    assert came == ["setitimer", "signal"]
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) is before


# ---------------------------------------------------------------- functions of TRL's and verl's kind


def as_request(prompts=("p", "q"), records=RECORDS):
    request = request_of(list(prompts), ["r", "s"], [None, "a"], records=records)
    request.ids = [[7, 0], [8]]
    request.run_values = reward_function.run_values(3, 12)
    return request


def scored(function, request=None):
    return reward_function.call_reward_function(function, request or as_request(), 0)[0]


def test_trls_functions_are_called_by_name():
    request = as_request([[user("p")], "q"])  # a conversation and a text
    seen = {}

    def everything(completions, trainer_state, log_metric, log_extra, tests, level=0, answers=None, **kwargs):
        seen.update(kwargs, completions=completions, tests=tests, level=level, answers=answers)
        log_extra("length", [1, 1])
        log_metric("used", trainer_state.global_step / trainer_state.max_steps)
        log_metric("used", torch.tensor(0.75))
        return [numpy.float32(0.5), float("nan")]

    assert scored(everything, request) == [0.5, None]  # there NaN is None
    of_a_step = scored(lambda completions, **k: [[(0, float("nan"))], 1.0])[0]
    assert math.isnan(of_a_step)  # but not of a step: it is refused where scores must be finite
    assert seen.pop("completions") == [[assistant("r")], "s"]
    assert seen.pop("prompts") == [[user("p")], "q"]
    assert seen.pop("completion_ids") == [[7, 0], [8]]
    assert (seen.pop("tests"), seen.pop("level"), seen.pop("answers")) == (TESTS, [3, 4], [None, "a"])
    assert seen == {"prompt": ["p", "q"], "a b": [None, 5]}
    assert request.logged == {"used": [0.25, 0.75]}
    for function, score in (
        (lambda prompts, completions, level, **kwargs: level, [3, 4]),
        (lambda level, completions: level, [3, 4]),
        (lambda *, completion_ids, **kwargs: [len(ids) for ids in completion_ids], [2, 1]),
        (lambda **kwargs: [x[0] == "s" for x in kwargs["completions"]], [0, 1]),
        (lambda prompts, completions, answers, **k: [x == "a" for x in answers], [0, 1]),
        # TRL gives more than these three: it is ours, which gets texts
        (lambda prompts, completions, answers: [x in ("r", "s") for x in completions], [1, 1]),
        (partial(lambda bonus, completions, **k: [bonus] * 2, 1), [1, 1]),
    ):
        assert scored(function) == score
    assert reward_function.fields_read(lambda completions, level, **k: 0, ["level", "x"]) == ["level", "x"]
    assert reward_function.fields_read(lambda completions, level: 0, ["level", "prompts"]) == ["level"]


def test_trls_completions_have_the_beginning_that_the_prompt_has():
    turns = [user("p"), assistant(TurnText("So: ", is_begun=True))]
    given = [([user("p")], [assistant("So: r")]), ("q", "s")]
    assert scored(
        lambda prompts, completions, **k: [*zip(prompts, completions, strict=True)] == given and [1, 2],
        as_request([turns, "q"]),
    ) == [1, 2]
    assert scored(
        lambda prompts, responses, answers: [prompts[0] == turns, responses == ["r", "s"]],
        as_request([turns, "q"]),
    ) == [1, 1]


def test_verls_functions_are_called_once_a_response_with_the_truth_of_its_record():
    records = [
        {"data_source": "gsm8k", "reward_model": {"ground_truth": ["4"]}, "extra_info": {"i": 1}, "x": 1},
        {"ground_truth": 5, "extra_info": None},
    ]
    request = as_request(records=records)
    seen = []

    def compute_score(data_source, solution_str, ground_truth, extra_info=None, method="strict", step=0):
        seen.append((data_source, solution_str, ground_truth, extra_info, method))
        assert step == 0  # a name of its own, not the run's
        return {"score": torch.tensor(0.5), "acc": True} if data_source else numpy.bool_(True)

    assert scored(compute_score, request) == [0.5, 1.0]
    assert seen == [("gsm8k", "r", ["4"], {"i": 1}, "strict"), (None, "s", 5, {}, "strict")]
    short = lambda solution_str, ground_truth, **kwargs: len(kwargs)  # noqa: E731
    assert scored(short, request) == [2, 2]
    assert scored(lambda ground_truth, solution_str: ground_truth == "a") == [0, 1]  # the record's answer
    read = {*records[0], *records[1]} - {"x"}
    assert {*reward_function.fields_read(compute_score, [*records[0], *records[1]])} == read
    refused(r"score 1 is \{'acc': 1\} \(dict\); it must be", scored, lambda solution_str: {"acc": 1})
    data = SimpleNamespace(columns={"prompt": None}, path="a.jsonl")
    refused("'data_source' is no key of", check_fields, compute_score, [], data)
    check_fields(short, [], data)


async def meet(barrier, score):
    await asyncio.wait_for(barrier.wait(), 5)
    return score


def test_async_functions_of_each_kind_are_awaited_verls_all_at_once_and_in_one_loop():
    loops = []

    async def ours(prompts, responses, answers):
        loops.append(asyncio.get_running_loop())
        return [1, 2]

    class TRLs:
        async def __call__(self, completions, **kwargs):
            loops.append(asyncio.get_running_loop())
            return [2, None]

    barrier = asyncio.Barrier(2)

    async def verls(solution_str, ground_truth):
        return await meet(barrier, {"score": len(solution_str)})

    def plain(*_):
        return ours(*_)

    assert [scored(function) for function in (ours, TRLs(), verls, plain)] == [
        [1, 2],
        [2, None],
        [1, 1],
        [1, 2],
    ]
    assert loops[0] is loops[1] is loops[2]

    async def wrong(solution_str):
        raise KeyError("x")

    assert refused("KeyError: 'x' at ", scored, wrong).count(__file__) == 1
    assert scored(ours) == [1, 2]

    async def its_loop():
        return asyncio.get_running_loop()

    assert loops[-1] is loops[0] is awaited(its_loop())  # that of tools and environments


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="Windows has no SIGALRM")
def test_the_time_limit_ends_an_async_function():
    async def slow(prompts, responses, answers):
        await asyncio.sleep(60)

    refused("no answer after 0.05 s", reward_function.call_reward_function, slow, as_request(), 0.05)


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="Windows has no SIGALRM")
def test_an_async_function_that_blocks_its_loop_keeps_no_other_from_running(monkeypatch):
    monkeypatch.setattr(user_code, "LOOP_ANSWERS", 0.1)
    release = threading.Event()

    async def blocking(prompts, responses, answers):
        release.wait(60)

    async def quick(prompts, responses, answers):
        return [1, 2]

    refused("no answer after 0.05 s", reward_function.call_reward_function, blocking, as_request(), 0.05)
    assert scored(quick) == [1, 2]
    release.set()


def test_a_field_of_the_third_parameters_name_is_not_replaced_by_the_answers(tmp_path):
    def check(function, **record):
        path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a", **record}])
        check_fields(function, [], RLAIFDataset(path, word_tokenizer("ab", chat=True), 64))

    target = lambda prompts, responses, target: 0  # noqa: E731
    says = (
        r"its third parameter 'target' gets the answers, but records of .*a\.jsonl have a field of that name"
    )
    refused(says, check, target, answer="4", target="5")
    check(target, answer="4", target="4")
    check(lambda prompts, responses, answer: 0, answer="so\n#### 4")  # its number
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a", "target": "so\n#### 4"}])
    keys = Keys(answer="target")
    data = RLAIFDataset(path, word_tokenizer("ab", chat=True), 64, keys=keys)
    check_fields(target, [], data)  # the field is named as the answers
    check(lambda prompts, completions, target, **kwargs: 0, answer="4", target="5")


def test_what_a_function_needs_beside_it_and_what_it_does_to_the_process(tmp_path):
    """A file beside it is imported; what it sets for the whole process has no effect on it."""
    (tmp_path / "beside_it.py").write_text("def length(text):\n    return len(text)\n")
    path = tmp_path / "f.py"
    path.write_text(
        "import os, sys, torch\nfrom beside_it import length\ntorch.set_default_dtype(torch.float64)\n"
        "def f(p, r, a):\n    torch.set_default_dtype(torch.float64)\n    torch.set_num_threads(3)\n"
        "    torch.set_default_device('meta')\n    sys.stdout.close()\n    sys.stderr = None\n"
        "    os.chdir('/')\n    return [length(x) for x in r]\n"
    )
    folder = os.getcwd()
    threads = torch.get_num_threads()
    before = sys.path[:]
    stdout, stderr = sys.stdout, sys.stderr
    try:
        [(function, _)] = reward_function.load_reward_functions([f"{path}:f"]).values()
        assert torch.get_default_dtype() == torch.float32
        sys.stdout = io.StringIO()
        assert called(function) == [1, 1]
        assert not sys.stdout.closed
        assert sys.stderr is stderr
    finally:
        sys.path[:] = before
        sys.stdout = stdout
    assert torch.get_default_dtype() == torch.float32
    assert torch.get_num_threads() == threads
    assert torch.zeros(1).device.type == "cpu"
    assert os.getcwd() == folder


# ---------------------------------------------------------------- several functions


def test_names_and_weights_of_several_functions(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.py").write_text("def f(p, r, a): ...\ndef g(p, r, a): ...\n")
    a, b = tmp_path / "a.py", tmp_path / "b.py"

    def found(*specs):
        functions = reward_function.load_reward_functions([*specs])
        return {name: weight for name, (_, weight) in functions.items()}

    assert found(f"{a}:f") == {"function": 1.0}
    assert found(f"{a}:f=0.5") == {"function": 0.5}
    assert found(f"{a}:f", f"{b}:g=-0.5") == {"function_f": 1.0, "function_g": -0.5}
    assert found(f"{a}:f", f"{b}:f", f"{a}:g") == {"function_a": 1.0, "function_b": 1.0, "function_g": 1.0}
    assert found(f"{a}:f", f"{a}:f") == {"function_a": 1.0, "function_a_": 1.0}
    assert found() == {}
    refused("--reward_fn .*:f=0: the weight must be a number other than 0", found, f"{a}:f=0")
    one, other, weighted = (reward_function.code_hash([x]) for x in (f"{a}:f", f"{a}:g", f"{a}:f=2"))
    assert len({one, other, weighted}) == 3
    assert reward_function.code_hash([]) == ""
    (tmp_path / "c.py").write_text("def f(prompts, responses): ...\ndef g(solution_str, x): ...\n")
    refused("^--reward_fn: a function takes", found, f"{tmp_path}/c.py:g")
    refused("^--reward_fn g: a function takes", found, f"{a}:f=2", f"{tmp_path}/c.py:g=2")
    refused("^--reward_fn c: a function takes", found, f"{a}:f", f"{tmp_path}/c.py:f")


def test_the_hash_of_a_function_has_the_files_beside_it_that_it_imports(tmp_path):
    texts = {
        "f.py": "import json\ndef f(p, r, a):\n    from package import helper\n    return helper.f(r)\n",
        "package/__init__.py": "",
        "package/helper.py": "import torch, deep\n",
        "deep.py": "x = 1\n",
        "other.py": "x = 1\n",
    }
    (tmp_path / "package").mkdir()
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    hashes = [reward_function.code_hash([f"{tmp_path}/f.py:f"])]
    for name, text in texts.items():
        (tmp_path / name).write_text(text + "# changed\n")
        hashes.append(reward_function.code_hash([f"{tmp_path}/f.py:f"]))
    *changed, other = hashes
    assert len({*changed}) == 5 and other == changed[-1]  # nobody imports other.py


def several(normalize=False):
    functions = {
        "function_right": (lambda completions, **kwargs: [1.0, 0.0, None, None], 2.0),
        "function_short": (lambda p, r, a: [-1.0, None, -3.0, None], 0.5),
    }
    return Reward(functions=functions, missing_eos_penalty=1.0, normalize_reward=normalize)


def test_parts_that_say_nothing_leave_the_sum_and_a_response_of_which_none_says_anything_has_no_score():
    request = request_of(list("pqrs"), list("abcd"), finished=[True, False, True, False])
    reward = several()
    parts = {name: x.tolist() for name, x in reward(request).items()}
    nan = pytest.approx(float("nan"), nan_ok=True)
    assert parts == {
        "function_right": [2.0, 0.0, nan, nan],
        "function_short": [-0.5, nan, -1.5, nan],
        "missing_eos": [0.0, -1.0, 0.0, -1.0],
        "score": [1.5, -1.0, -1.5, nan],
        "function": [1.5, 0.0, -1.5, nan],
    }
    assert [*parts] == reward.names
    reward = several(normalize=True)  # each part by its own mean and deviation, then its weight
    parts = {name: x.tolist() for name, x in reward.combine(reward.score_parts(request), ALONE).items()}
    assert parts["function_right"] == [2.0, -2.0, nan, nan]
    assert parts["function_short"] == [0.5, nan, -0.5, nan]
    assert parts["score"] == [2.5, -3.0, -0.5, nan]
    assert parts["score_raw"] == [1.5, -1.0, -1.5, nan]
    assert reward.state_dict()["function_short"] == {"count": 2, "mean": -2.0, "squares": 2.0}
    judge = EvalReward(functions=several().functions)
    found = {name: x.tolist() for name, x in judge.combine(judge.score_parts(request)).items()}
    assert found["judge"] == [1.5, 0.0, -1.5, nan]
    assert found["judge_function_right"] == [2.0, 0.0, nan, nan]


def test_errors_of_several_functions_say_of_which():
    functions = {"function_f": (lambda *_: [1.0], 1.0), "function_g": (lambda *_: [[(0, 1.0)]], 2.0)}
    reward = Reward(functions=functions)
    request = request_of(["p"], ["r"], records=[{}])
    assert reward.score_parts(request).steps == [[(0, 2.0)]]
    reward.normalize_reward = True
    refused(r"^--reward_fn g: with several functions --normalize_reward 1 needs numbers", reward, request)
    functions["function_f"] = (lambda *_: [], 1.0)
    refused(r"^--reward_fn f: returned 0 scores for 1", reward, request)
    refused(r"^--eval_reward_fn f: returned 0 scores for 1", EvalReward(functions=functions), request)


# One of each kind; none of them says anything of the prompt "a".
THREE = """
def right(prompts, completions, level, trainer_state, log_metric, **kwargs):
    log_metric("level", sum(level) / len(level))
    bonus = 0.1 * trainer_state.global_step
    rows = zip(level, completions)
    return [None if x == 0 else completion[0]["content"].count("b") + bonus for x, completion in rows]

async def short(prompts, responses, answers, level):
    return [None if x < 2 else -float(len(r.split())) for x, r in zip(level, responses)]

def truth(solution_str, ground_truth):
    return None if ground_truth == "none" else {"score": ground_truth in solution_str}
"""


@pytest.mark.parametrize("advantage", ["gae", "group"])
def test_a_run_with_several_functions_of_which_some_say_nothing_resumes_to_the_same_bits(tmp_path, advantage):
    words = ["a", "b", "b c", "c"]
    records = [
        {"prompt": [user(text)], "level": n, "reward_model": {"ground_truth": "bcd"[n - 1] if n else "none"}}
        for n, text in enumerate(words)
    ]
    (tmp_path / "three.py").write_text(THREE)
    functions = [f"{tmp_path}/three.py:{name}" for name in ("right", "short=0.5", "truth=2")]
    files = run_files(tmp_path) | {"reward_model": "", "missing_eos_penalty": ""}
    files |= {"data_path": write_jsonl(tmp_path / "data.jsonl", records), "reward_fn": functions[0]}
    files |= {"eval_data_path": files["data_path"], "eval_reward_fn": functions[2]}
    more = {"advantage": advantage, "out_dir": tmp_path / "out", "run_name": "r", "epochs": 9, "max_steps": 3}
    more |= {"num_generations": 2 if advantage == "group" else 1, "batch_size": 4, "mini_batch_size": 2}
    more |= {"max_gen_len": 4, "reasoning": 0, "save_interval": 1, "eval_interval": 2, "normalize_reward": 1}
    more |= {"critic_warmup_steps": 0 if advantage == "gae" else "", "device": "cpu", "dtype": "float32"}
    argv = [*flags(**files, **more), "--reward_fn", *functions[1:]]
    train_ppo.main(argv)
    run = tmp_path / "out/r"
    first = [read_jsonl(run / name) for name in ("metrics.jsonl", "samples.jsonl")]
    weights = load_weights(run, 3)
    for step in first[0]:
        parts = [
            step.get(f"reward/{name}") for name in ("function_right", "function_short", "function_truth")
        ]
        if step["step"]:
            assert any(isinstance(x, float) for x in parts)  # null: it said nothing in the whole batch
            if advantage == "gae":  # each batch has all prompts
                assert all(isinstance(x, float) for x in parts)
                assert (step["function/level"], step["reward/unscored"]) == (1.5, 0.25)
        else:
            assert {"eval/function", "eval/function_right", "eval/judge"} <= step.keys()
    assert any("score" not in row["parts"] for row in first[1]) or advantage == "group"
    shutil.rmtree(run / "checkpoints/step_3")
    changed = [word.replace("short=0.5", "short=0.25") for word in argv]
    says = (
        r"--reward_fn .* does not hold what the run began with \(weights function_right=1 function_short=0\.5"
    )
    refused(says, train_ppo.main, [*changed, "--resume", "auto"])
    train_ppo.main([*argv, "--resume", "auto"])
    assert all(x.equal(load_weights(run, 3)[name]) for name, x in weights.items())
    again = [read_jsonl(run / name) for name in ("metrics.jsonl", "samples.jsonl")]
    for rows in (*first, *again):
        for row in rows:
            for name in [name for name in row if name.startswith("perf")]:
                del row[name]
    assert again == first


def test_the_trial_says_of_which_function(tmp_path):
    files = run_files(tmp_path) | {"reward_model": "", "device": "cpu", "out_dir": tmp_path / "out"}
    (tmp_path / "f.py").write_text(
        "def g(p, r, a):\n    return []\ndef h(p, r, a):\n    return [x.strip() for x in a]"
    )
    both = ["--reward_fn", f"{tmp_path}/f.py:g"]
    refused(r"^--reward_fn g: returned 0 scores", train_ppo.main, [*flags(**files), *both])
    files["reward_fn"] = f"{tmp_path}/f.py:h"
    says = r"^--reward_fn: AttributeError: .*; no record has an answer: --answer_key names its field"
    refused(says, train_ppo.main, flags(**files))
    files["reward_fn"] = f"{rules.__file__}:exact_answer"  # it answers None
    says = r"^--reward_fn: it says nothing of any response; no record has an answer: --answer_key names"
    refused(says, train_ppo.main, flags(**files))


def test_the_trial_asks_about_held_out_prompts_with_other_fields(tmp_path):
    words = word_tokenizer("ab", chat=True)
    records = {"train": {"answer": "b", "x": 1}, "same": {"x": 2, "answer": "a"}, "other": {"answer": "b"}}
    train, same, other, none = (
        RLAIFDataset(write_jsonl(tmp_path / name, [{"prompt": "a", **record}]), words, 64)
        for name, record in {**records, "none": {"x": 1}}.items()
    )
    calls = []

    def kwargs_only(completions, **columns):
        calls.append(columns["x"])
        return [None] * len(completions)

    def plain(prompts, responses, answers):
        calls.append(answers)
        return [float(len(answer)) for answer in answers]

    functions = {"function_one": (kwargs_only, 1.0), "function_two": (plain, 1.0)}
    reward_function.try_reward_functions(functions, {}, 9, train, same)
    assert calls == [[1, 1], ["b", "b"]]  # once each
    says = r"^--reward_fn one: KeyError: 'x' at .*; correct the function; it was called for .*other"
    refused(says, reward_function.try_reward_functions, functions, {}, 9, train, other)
    says = r"^--reward_fn two: TypeError: .*; it was called for .*none; no record has an answer"
    refused(says, reward_function.try_reward_functions, functions, {}, 9, train, none)
