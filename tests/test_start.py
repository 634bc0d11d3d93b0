"""The start of a run: mistakes that need no model are found before it is loaded, and nothing is written."""

import json
from argparse import Namespace
from contextlib import contextmanager
from pathlib import Path

import pytest
import tiny
from filelock import FileLock

from errors import InputError
from progress_bar import Start
from trainer import session, train_ppo, train_reward, train_sft

RUN = {"max_gen_len": 4, "batch_size": 4, "mini_batch_size": 4, "max_steps": 2, "eval_interval": 0}
RUN |= {"reasoning": 0, "device": "cpu", "dtype": "float32", "run_name": "r"}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Those of a run, whose policy has no weights."""
    folder = tmp_path_factory.mktemp("files")
    found = tiny.run_files(folder)
    (folder / "policy" / "model.safetensors").write_bytes(b"x")
    return found


FUNCTIONS = {  # of --reward_fn, and what is said
    "def f(p, r, a, level):\n    return [0, 0]": "--reward_fn: its parameter 'level' is no key",
    "def g(p, r, a):\n    return [0, 0]": "--reward_fn .*: has no function or class 'f'",
    "def f(p, r, a):\n    return r[9]": r"--reward_fn: IndexError: .* at .*f\.py:2",
    "def f(p, r, a):\n    return [1]": "--reward_fn: returned 1 scores for 2 responses",
    "def f(p, r, a):\n    return ['x', 1]": "--reward_fn: score 1 is 'x'",
    "def f(p, r, a):\n    while True: pass": "--reward_fn: no answer after 0.5 s",
}
HELD_OUT = {"eval_data_path": "HERE"}
FLAGS = [  # (flags, what is said)
    ({"reward_fn": "nowhere.py:f"}, "--reward_fn nowhere.py:f: no such file"),
    ({"reward_model": "nowhere"}, "--reward_model nowhere: no such folder"),
    ({"eval_data_path": "nowhere.jsonl"}, "nowhere.jsonl: cannot be read"),
    ({"ptx_data_path": "nowhere.jsonl"}, "nowhere.jsonl: cannot be read"),
    ({**HELD_OUT, "eval_reward_fn": "nowhere.py:f"}, "--eval_reward_fn nowhere.py:f: no such file"),
    ({**HELD_OUT, "eval_reward_model": "nowhere"}, "--eval_reward_model nowhere: no such folder"),
    ({**HELD_OUT, "best_metric": "x"}, "--best_metric eval/x: no evaluation has it; .*eval/model,"),
    ({"critic_warmup_steps": 2}, "--critic_warmup_steps 2: the run has only 2 steps"),
    ({"critic_init": "reward", "reward_model": ""}, "--critic_init reward: starts from a --reward_model"),
]


@pytest.mark.parametrize(("given", "says"), FLAGS, ids=range(len(FLAGS)))
def test_a_wrong_flag_or_file_is_found_before_the_model_is_loaded(files, tmp_path, given, says):
    given = {name: files["data_path"] if value == "HERE" else value for name, value in given.items()}
    argv = tiny.flags(**{**files, **RUN, **given}, out_dir=tmp_path / "out")
    tiny.refused(says, train_ppo.main, argv)
    assert not (tmp_path / "out").exists()


def test_the_model_comes_last(files, tmp_path):
    argv = tiny.flags(**files, **RUN, out_dir=tmp_path / "out")
    tiny.refused("no causal language model could be loaded", train_ppo.main, argv)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("code", FUNCTIONS, ids=range(len(FUNCTIONS)))
def test_a_wrong_reward_function_is_found_before_the_model_is_loaded(files, tmp_path, code):
    (tmp_path / "f.py").write_text(code)
    more = {"reward_fn": f"{tmp_path / 'f.py'}:f", "reward_timeout": 0.5}
    says = FUNCTIONS[code]
    argv = tiny.flags(**files | RUN | more, out_dir=tmp_path / "out")
    tiny.refused(says, train_ppo.main, argv)
    if "its parameter" not in says:  # it is called for the judge too
        more = {**HELD_OUT, "eval_reward_fn": more["reward_fn"], "reward_timeout": 0.5}
        more["eval_data_path"] = files["data_path"]
        argv = tiny.flags(**files | RUN | more, out_dir=tmp_path / "out")
        tiny.refused(says.replace("--reward", "--eval_reward"), train_ppo.main, argv)
    assert not (tmp_path / "out").exists()


def test_scores_that_are_not_finite_are_no_mistake_of_made_up_responses(files, tmp_path):
    (tmp_path / "f.py").write_text("def f(p, r, a):\n    return [float('nan')] * 2")
    argv = tiny.flags(**files | RUN | {"reward_fn": f"{tmp_path / 'f.py'}:f"}, out_dir=tmp_path / "out")
    tiny.refused("no causal language model", train_ppo.main, argv)


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """-> (flags of a run that has begun and whose policy has lost its weights, its folder)."""
    folder = tmp_path_factory.mktemp("begun")
    found = tiny.run_files(folder)
    argv = tiny.flags(**found, **RUN, out_dir=folder / "out")
    train_ppo.main(argv)
    (folder / "policy" / "model.safetensors").write_bytes(b"x")
    return argv, folder / "out" / "r"


def contents(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_what_resume_refuses_comes_before_the_model_is_loaded_and_the_folder_stays(begun):
    argv, folder = begun
    before = contents(folder)
    resume = [*argv, "--resume", "auto"]
    tiny.refused("--run_name r: .* holds a run", train_ppo.main, argv)
    tiny.refused(r"--kl_coef was 0\.02 and is now 0\.5", train_ppo.main, [*resume, "--kl_coef", "0.5"])
    tiny.refused("--reasoning was 0 and is now 1", train_ppo.main, [*resume, "--reasoning", "1"])
    prompts = Path(argv[argv.index("--data_path") + 1])
    text = prompts.read_text()
    other = tiny.write_jsonl(prompts.with_name("other.jsonl"), [{"prompt": "a b"}] * 40)
    tiny.refused("--data_path .* does not hold what", train_ppo.main, [*resume, "--data_path", other])
    assert prompts.read_text() == text
    with FileLock(folder / ".lock.held"):
        tiny.refused("is in use by", train_ppo.main, resume)
    tiny.refused("no causal language model", train_ppo.main, resume)  # nothing else is wrong
    assert contents(folder) == before


@pytest.mark.parametrize("main", [train_sft.main, train_reward.main], ids=["stage 1", "stage 2"])
def test_a_wrong_file_of_a_stage_is_found_before_the_model_is_loaded(files, tmp_path, main):
    given = {"model": files["model"], "device": "cpu", "out_dir": tmp_path / "out", "run_name": "r"}
    records = [{"prompt": "a", "answer": "b", "chosen": "b", "rejected": "c"}] * 20
    data = tiny.write_jsonl(tmp_path / "data.jsonl", records)
    argv = tiny.flags(**given, data_path=data)
    tiny.refused("no causal language model", main, argv)
    tiny.refused("nowhere.jsonl: cannot be read", main, [*argv, "--eval_data_path", "nowhere.jsonl"])
    assert not (tmp_path / "out").exists()
    folder = tmp_path / "out" / "r"
    folder.mkdir(parents=True)
    script = "train_sft.py" if main is train_sft.main else "train_reward.py"
    config = {"script": script, "epochs": 4, "batch_size": 32, "processes": 1, "fingerprints": {}}
    config["system_prompt"] = ""
    (folder / "config.json").write_text(json.dumps(config))
    tiny.refused("--epochs was 4 and is now 3", main, [*argv, "--resume", "auto"])


def test_threads_are_watched_before_anything_is_built(monkeypatch):
    order = []

    @contextmanager
    def watch(device_type):
        order.append(device_type)
        yield

    def build(*_):
        order.append("build")
        raise InputError("enough")

    monkeypatch.setattr(session, "sleep_when_busy", watch)
    tiny.refused("enough", session.open_session(build, Namespace(device="cpu", ddp=False)).__enter__)
    assert order == ["cpu", "build"]


def test_the_line_of_the_start_says_how_long_each_part_took(monkeypatch):
    now = iter([103.0, 104.4, 109.0])
    monkeypatch.setattr("progress_bar.psutil.Process", lambda: Namespace(create_time=lambda: 100.0))
    monkeypatch.setattr("progress_bar.time.time", lambda: next(now))
    with Start() as start:
        start.part("data")
        start.part("models")
        assert start.end() == "start    9 s: imports 3, data 1, models 5"
    assert start.total == pytest.approx(9.0)


def test_a_reward_model_whose_template_refuses_several_turns_is_found_before_anything_is_sampled(tmp_path):
    files = tiny.run_files(tmp_path)
    (tmp_path / "game.py").write_text(
        "class Game:\n    def step(self, text):\n        return '', 0.0, False\n"
    )
    flags = {**files, **RUN, "env": f"{tmp_path / 'game.py'}:Game", "out_dir": tmp_path / "out"}
    once = "{% if messages[2:] %}{{ raise_exception('one question') }}{% endif %}" + tiny.CHAT
    (tmp_path / "reward" / "chat_template.jinja").write_text(once)
    says = "reward model .*reward: it cannot read several turns: .*one question"
    tiny.refused(says, train_ppo.main, tiny.flags(**flags))
    assert not (tmp_path / "out").exists()
    train_ppo.main(tiny.flags(**flags, merge_history=1))  # they are one message
    flags["out_dir"] = tmp_path / "other"
    plain = {name: value for name, value in flags.items() if name != "env"}
    train_ppo.main(tiny.flags(**plain))  # one turn can be read


def test_other_tools_are_named_and_not_the_data_and_other_code_is_a_note(tmp_path, capsys):
    files = tiny.turn_files(tmp_path)
    code = Path(files.pop("code"))
    flags = {**files, **RUN, "batch_size": 8, "max_gen_len": 8, "save_interval": 1, "max_steps": 1}
    flags |= {"lr_schedule": "constant", "critic_warmup_steps": 0, "out_dir": tmp_path / "out"}
    flags |= {"reward_fn": f"{tmp_path / 'score.py'}:score"}
    (tmp_path / "score.py").write_text(
        "def score(p, responses, a):\n    return [len(r) for r in responses]\n"
    )
    train_ppo.main(tiny.flags(**flags, tools=f"{code}:add"))
    more = code.with_name("more.py")
    more.write_text(
        code.read_text() + "\ndef sub(a: int) -> str:\n    '''Sub.\n\n    Args:\n        a: x\n    '''\n"
    )
    again = flags | {"resume": "auto", "max_steps": 2}
    says = r"--tools .*more.py:add,sub does not hold what the run began with \(tools add \w+, now add sub"
    tiny.refused(says, train_ppo.main, tiny.flags(**again, tools=f"{more}:add,sub"))
    code.write_text(code.read_text().replace('return "b"', 'return "c"', 1))
    train_ppo.main(tiny.flags(**again, tools=f"{code}:add"))
    assert "note: the code of --tools" in capsys.readouterr().out
