"""The user's reward function: which fields of the records it gets, and what is said of its mistakes."""

import functools
import json
import shutil
import signal
from functools import partial
from types import SimpleNamespace

import numpy
import pytest
import torch
from tiny import flags, read_jsonl, refused, request_of, run_files, write_jsonl

from trainer import train_ppo
from trainer.rewards import reward_function
from trainer.rewards.combine import Reward

RECORDS = [{"prompt": "p", "tests": [1, 2], "level": 3}]
RECORDS += [{"prompt": "q", "level": 4, "prompts": "x", "a b": 5}]


OF_RUN = {"step": 3, "total_steps": 12}


def called(function):
    request = request_of(["p", "q"], ["r", "s"], [None, "a"], records=RECORDS)
    request.of_run = OF_RUN
    return reward_function.call_reward_function(function, request, 0)[0]


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
    assert reward_function.names_of_run(*data[:2]) == ["step", "total_steps"]
    assert reward_function.names_of_run(*data) == ["total_steps"]
    request = request_of(["p", "q"], ["r", "s"], records=[{"step": 1}, {}])
    request.of_run = {"total_steps": 12}
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
    ):
        path.write_text(f"def f({names}):\n    return []\n")
        assert refused(says, load).endswith(f"this one takes ({names.replace(' /,', '')})")
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
    path.write_text("def f(p, r, a):\n    return r[9]\n")
    refused(r"IndexError: .* at .*f\.py:2; correct the function", called, load())


def test_a_field_that_no_record_has_is_refused_unless_there_is_a_default(tmp_path):
    """A name of the run too, where the records trained on have a "step" and those of the judge have none."""
    path = tmp_path / "f.py"

    def load(*given):
        [(function, _)] = reward_function.load_reward_functions([f"{path}:f"]).values()
        reward_function.check_fields(function, *given)

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
    argv = flags(**files, **sizes, **more, epochs=3, num_workers=1)

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
    assert {name for name in known if " " in name} == {"data_path level", "data_path hint"}
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
