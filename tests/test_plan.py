"""benchmarks/plan.py: its first table is that of docs/scale.md, its figures follow from its formulas, and the
plan was near what was measured."""

import importlib
import json
from argparse import Namespace

import pytest
from tiny import ROOT

WHOLE = Namespace(token_budget=1 << 16, slots=64)  # what matters of a plan of the memory


@pytest.fixture
def plan(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("plan")


def test_the_page_has_the_table_of_the_script_and_a_wrong_flag_is_one_line(plan):
    page = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    assert plan.table(plan.fewest()) in page
    with pytest.raises(SystemExit, match="error: no flag: --table or --check"):
        plan.main([])


def test_the_plan_was_within_a_tenth_of_every_measured_run(plan):
    runs = json.loads((ROOT / "benchmarks/results/plan.json").read_text(encoding="utf-8"))["runs"]
    assert [run["run"] for run in runs] == list(plan.CASES)
    for run in runs:
        assert run["ratio"] == pytest.approx(run["plan"] / run["measured"], abs=2e-3)
        assert run["measured"] == max(run["peaks"][phase] for phase in ("building", "rollout", "update"))
        assert abs(run["ratio"] - 1) <= 0.1, run["run"]
        assert run["plan"] == pytest.approx(sum(run["parts"].values()), abs=len(run["parts"]))
        # The check of loading is a limit that is always enough: sometimes gaps are used again, sometimes not.
        assert 1 <= run["loading plan"] / run["peaks"]["loading"] <= 1.45, run["run"]


def test_more_gpus_never_need_more_memory_each(plan):
    for row in plan.each_gpu():
        found = [float(row[f"{count}, sharded"]) for count in plan.SHARDED]
        assert found == sorted(found, reverse=True), row
        assert found[0] < float(row["2 or more"]), row
