"""The runs that benchmarks/health.py has made: broken ones are named, healthy ones are left alone."""

import importlib
import json
import re
import sys
from functools import cache

import pytest
from tiny import ROOT, health_of

from trainer.runs.health import RULES

RESULTS = ROOT / "benchmarks" / "results" / "health.json"
RUNS = json.loads(RESULTS.read_text(encoding="utf-8"))["runs"]


@pytest.fixture(scope="module")
def health():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        module = importlib.import_module("health")
        judged = cache(lambda name, judge=module.judge: judge(name, RUNS[name]))
        patch.setattr(module, "judge", lambda name, run: judged(name))
        yield module
        del sys.modules["health"]


@pytest.fixture(scope="module")
def found(health):
    """{name of a kept run: its findings}"""
    return {name: health_of(*health.records_of(run)).sorted for name, run in RUNS.items()}


def named(health, kind):
    """{name of a kept run of this kind: what ``judge`` says}"""
    return {name: health.judge(name, run)["named"] for name, run in RUNS.items() if run["kind"] == kind}


def test_broken_runs_are_named_each_rule_is_seen_and_healthy_and_remedied_runs_are_left_alone(health, found):
    """By the first or second finding. Hardly a healthy run has one of level "look"."""
    broken, healthy, remedied = (named(health, kind) for kind in ("broken", "healthy", "remedied"))
    assert len(broken) >= 30
    assert sum(word != "yes" for word in broken.values()) <= len(broken) * 2 // 30
    assert {rule.name for rule in RULES} <= {f.name for name in broken for f in found[name]}
    assert len(healthy) >= 20
    assert sum(word != "0 look" for word in healthy.values()) <= 2
    assert "**wrong**" not in {*healthy.values(), *remedied.values()}
    assert [*remedied.values()].count("0 look") >= 10
    assert health.tables(RUNS) in health.PAGE.read_text(encoding="utf-8")


def test_a_rate_too_high_is_told_to_fall_whatever_else_is_found(found):
    """A larger --target_kl would let the policy go further away."""
    (starves,) = (f for f in found["rate x10, target_kl 0.05"] if f.name == "early_stop_starves")
    assert starves.remedy == "--learning_rate 0.0005"
    first, *others = found["rate x100"]
    assert (first.name, first.remedy) == ("unusual_flags", "--learning_rate 0.0005")
    rates = [f.remedy for f in others if "--learning_rate" in f.remedy]
    assert len(rates) > 4
    assert all("--learning_rate 0.0005" in remedy for remedy in rates)


def test_hardly_a_run_is_told_to_move_a_flag_both_ways(found):
    """One that breaks altogether has answers that do not end, and later ones that are empty."""
    moved = {}
    for name, findings in found.items():
        for flag, value in (pair for f in findings for pair in re.findall(r"--(\w+) (\d[\d.e-]*)", f.remedy)):
            now = RUNS[name]["args"].get(flag)
            if now is not None and float(value) != now:
                moved.setdefault((name, flag), set()).add(float(value) > now)
    assert [key for key, ways in moved.items() if len(ways) > 1] == [("rate x30", "missing_eos_penalty")]
    assert len(moved) > 70
