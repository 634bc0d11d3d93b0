"""The runs that benchmarks/health.py has made: broken ones are named, healthy ones are left alone."""

import json
import re

import pytest
from tiny import ROOT

from trainer.runs.health import RULES

RESULTS = ROOT / "benchmarks" / "results" / "health.json"
RUNS = json.loads(RESULTS.read_text(encoding="utf-8"))["runs"]


@pytest.fixture
def health(monkeypatch):
    import importlib

    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    found = importlib.import_module("health")
    monkeypatch.delitem(__import__("sys").modules, "health")
    return found


def rows_of(health, kind):
    return [health.judge(name, run) for name, run in RUNS.items() if run["kind"] == kind]


def test_at_least_28_of_30_broken_runs_are_named_by_the_first_or_second_finding(health):
    rows = rows_of(health, "broken")
    unnamed = [row["run"] for row in rows if row["named"] != "yes"]
    assert len(rows) >= 30
    assert len(unnamed) <= len(rows) * 2 // 30, unnamed


def test_healthy_runs_have_no_finding_of_level_wrong_and_hardly_one_of_level_look(health):
    rows = rows_of(health, "healthy")
    assert len(rows) >= 20
    assert [row["run"] for row in rows if row["named"] == "**wrong**"] == []
    assert len([row["run"] for row in rows if row["named"] != "0 look"]) <= 2


def test_the_remedies_that_were_told_made_ten_runs_healthy_or_more(health):
    rows = rows_of(health, "remedied")
    assert [row["run"] for row in rows if row["named"] == "**wrong**"] == []
    assert len([row["run"] for row in rows if row["named"] == "0 look"]) >= 10


def test_the_page_has_the_table_of_the_kept_runs(health):
    page = health.PAGE.read_text(encoding="utf-8")
    assert health.tables(RUNS) in page


def test_what_is_kept_is_what_the_checks_see_in_the_run(health, tmp_path):
    """Four digits, no times, no texts of the user's machine."""
    records = [{"step": 1, "kl/k1": 0.0123456, "perf/rollout_seconds": 1.0, "value/loss": None}]
    args = {"kl_coef": 0.02, "reward_fn": "/a/b/rewards.py:noise", "out_dir": "/a", "reward_model": ["/a/c"]}
    kept = health.kept_of(records, args)
    assert health.records_of(kept) == ([{"step": 1, "kl/k1": 0.01235}], kept["args"])
    assert kept["args"] == {"kl_coef": 0.02, "reward_fn": "rewards.py:noise", "reward_model": ["c"]}
    assert RESULTS.stat().st_size < 1_000_000


def test_the_flags_of_a_remedy_can_be_told_from_its_words(health):
    told = health.remedy_flags("--kl_coef 0.06 --lam 1, or another reward")
    assert told == {"kl_coef": "0.06", "lam": "1"}
    assert health.remedy_flags("--dtype float32; if it stays, report it") == {"dtype": "float32"}
    normal = {"normalize_reward": "1", "critic_init": "actor"}
    assert health.remedy_flags("--normalize_reward 1 --critic_init actor") == normal
    assert health.remedy_flags("--learning_rate 3.3e-05") == {"learning_rate": "3.3e-05"}
    assert health.remedy_flags("--learning_rate at a third") == {}
    assert health.remedy_flags("more prompts in --data_path, or --epochs 1") == {}


def test_a_run_with_a_usual_target_kl_is_told_to_lower_its_rate(health):
    """The rate was ten times too high: a larger --target_kl would let the policy go further away."""
    found = health.findings(*health.records_of(RUNS["rate x10, target_kl 0.05"]))
    (starves,) = (f for f in found if f.name == "early_stop_starves")
    assert starves.remedy == "--learning_rate 0.0005"


def test_hardly_a_run_is_told_to_move_a_flag_both_ways(health):
    """One that breaks altogether has answers that do not end, and later ones that are empty."""
    moved = 0
    both = []
    for name, run in RUNS.items():
        ways = {}
        for finding in health.findings(*health.records_of(run)):
            for flag, value in re.findall(r"--(\w+) (\d[\d.e-]*)", finding.remedy):
                now = run["args"].get(flag)
                if now is not None and float(value) != now:
                    ways.setdefault(flag, set()).add(float(value) > now)
        moved += len(ways)
        both += [(name, flag) for flag, way in ways.items() if len(way) > 1]
    assert both == [("rate x30", "missing_eos_penalty")]
    assert moved > 70


def test_a_rate_far_too_high_is_the_first_finding_and_its_value_is_in_all_remedies(health):
    found = health.findings(*health.records_of(RUNS["rate x100"]))
    assert (found[0].name, found[0].remedy) == ("unusual_flags", "--learning_rate 0.0005")
    rates = [f.remedy for f in found if "--learning_rate" in f.remedy]
    assert len(rates) > 5
    assert all("--learning_rate 0.0005" in remedy for remedy in rates)


def test_each_check_is_seen_in_a_broken_run(health):
    runs = [run for run in RUNS.values() if run["kind"] == "broken"]
    seen = {f.name for run in runs for f in health.findings(*health.records_of(run))}
    assert {rule.name for rule in RULES} <= seen
