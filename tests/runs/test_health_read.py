"""Reading a run folder for the checks: what no run writes is named in one line, and never a traceback."""

import json
import re
import subprocess

import pytest
from tiny import PYTHON, ROOT

from errors import InputError
from trainer.runs.health import findings
from trainer.runs.health_read import read_run

JUDGE = {"weight": 1.0, "template": True, "sees_answer": True}
JUNK = ("x", "auto", "", [], [1], {}, {"a": 1}, {"a": {}}, True, -1, 0, 0.5, 1e308, 10**400, float("nan"))


@pytest.fixture(scope="module")
def runs():
    """The runs that benchmarks/health.py has kept."""
    path = ROOT / "benchmarks" / "results" / "health.json"
    return json.loads(path.read_text(encoding="utf-8"))["runs"]


def folder_of(tmp_path, config, *lines):
    """A run folder with this config.json and these lines of metrics.jsonl -> its path."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


@pytest.mark.parametrize(
    ("config", "line", "words"),
    [
        ({"temperature": "warm"}, {"step": 1}, "config.json: temperature is no number"),
        ({"lam": "auto"}, {"step": 1}, "config.json: lam is no number"),
        ({"critic_warmup_steps": "long"}, {"step": 1}, "config.json: critic_warmup_steps is no number"),
        ({"reward_model": [1]}, {"step": 1}, "reward_model is no list of paths"),
        ({"facts": None}, {"step": 1}, "facts is no object"),
        ({"facts": {"reward_models": [JUDGE]}}, {"step": 1}, "facts, reward_models: has no weight"),
        ({"facts": {"reward_models": {"a": {"weight": 1, "template": True}}}}, {"step": 1}, "reward_models"),
        ({"facts": {"reward_models": {"a": {**JUDGE, "weight": 0}}}}, {"step": 1}, "reward_models"),
        ({"facts": {"positions": 64}}, {"step": 1}, "facts: has positions, but not longest"),
        ({"facts": {"held_out": -1}}, {"step": 1}, "facts, held_out: is no number from 0 on"),
        ({"facts": {"suited": {"learning_rate": "low"}}}, {"step": 1}, "facts, suited: is no object of num"),
        ({"facts": {"fewer_ids": 3}}, {"step": 1}, "facts, fewer_ids: is not two numbers"),
        ({}, {"step": 1, "kl/k1": 10**400}, "line 2: is no line of metrics (kl/k1 is too large)"),
        ({}, {"step": -3}, "line 2: is no line of metrics (its step is no whole number from 0 on)"),
        ({}, {"step": 10**400}, "line 2: is no line of metrics (step is too large)"),
    ],
)
def test_a_folder_that_was_changed_by_hand_is_named_in_one_line(tmp_path, config, line, words):
    with pytest.raises(InputError, match=re.escape(words)):
        read_run(folder_of(tmp_path, config, {"step": 0}, line, {"step": 2}))


def test_the_command_ends_with_code_2_and_one_line(tmp_path):
    folder = folder_of(tmp_path, {"temperature": "warm"}, {"step": 1})
    command = [PYTHON, "-m", "trainer.runs.health", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"error: {folder}/config.json: temperature is no number; restore it, or name another run folder\n"
    )


def test_whatever_a_flag_or_a_fact_that_the_checks_ask_for_holds_there_is_no_traceback(tmp_path, runs):
    """Names from the checks' own code, so a new one is tried too; steps that begin many findings."""
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "trainer/runs").glob("health*.py"))
    flags = {*re.findall(r'flag\("(\w+)"', code), "learning_rate", "critic_learning_rate"}
    facts = set(re.findall(r'facts(?:\.get\(|\[)"(\w+)"', code))
    assert len(flags) > 20 and len(facts) > 15
    config, bad = runs["rate x30"]["args"], runs["rate x30"]
    config["facts"] |= {"positions": 128, "longest": 20}
    columns = {**bad["metrics"], "rollout/finished": [0.0] * 3 + [0.5] * 21, "value/bias": [9.0] * 24}
    steps = [
        {"step": step, **{name: x[n] for name, x in columns.items() if n < len(x)}}
        for n, step in enumerate(bad["step"])
    ]
    folder_of(tmp_path, config, *steps)
    read, kept = 0, json.dumps(config)
    for name in sorted(flags | facts):
        for junk in JUNK:
            changed = json.loads(kept)
            (changed["facts"] if name in facts else changed)[name] = junk
            if name in flags:
                changed[name] = junk
            (tmp_path / "config.json").write_text(json.dumps(changed))
            try:
                lines, args = read_run(tmp_path)
            except InputError as error:
                assert name in str(error) and "\n" not in str(error)
                continue
            assert findings(lines, args)
            read += 1
    assert read > 100
    (tmp_path / "config.json").write_text(kept)
    for name in sorted(columns):
        for junk in ("x", [1], 2**63, -1e308, 10**400):
            folder_of(tmp_path, config, *[{**step, name: junk} for step in steps])
            try:
                lines, args = read_run(tmp_path)
            except InputError as error:
                assert name in str(error)
                continue
            assert findings(lines, args)


def test_every_kept_run_can_be_read(tmp_path, runs):
    for run in runs.values():
        assert read_run(folder_of(tmp_path, run["args"], {"step": 0}))[1] == run["args"]
    assert read_run(folder_of(tmp_path, {"critic_warmup_steps": "auto"}, {"step": 0}))


def test_a_damaged_folder_is_named_with_its_line(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n[1]\n{"step": 2}\n')
    with pytest.raises(InputError, match=r"metrics\.jsonl, line 2"):
        read_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(InputError, match="holds no flags"):
        read_run(tmp_path)
    (tmp_path / "config.json").write_text('{"facts": [1]}')
    with pytest.raises(InputError, match="facts is no object"):
        read_run(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="is no run folder"):
        read_run(tmp_path)
