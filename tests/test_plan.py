"""benchmarks/plan.py: its first table is that of docs/scale.md, its figures follow from its formulas, and the
plan was near what was measured."""

import importlib
import json
from argparse import Namespace
from functools import partial

import pytest
import torch
from tiny import ROOT

WHOLE = Namespace(token_budget=1 << 16, slots=64)  # what matters of a plan of the memory


@pytest.fixture
def plan(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("plan")


def test_the_page_has_the_table_of_the_script(plan):
    page = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    assert plan.table(plan.fewest()) in page


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


def test_seconds_of_a_step_by_hand(plan):
    """A card with round figures. 0.5B: 494M numbers, tied, so all of them multiply every token."""
    case = partial(plan.case_of, "Qwen2.5-0.5B", "critic", torch.bfloat16)
    card = plan.Card(1e12, operations=1e15, memory=1e12, within=1e11, between=1e10)
    numbers, tokens = 494e6, 64 * 768
    alone = plan.step_seconds(case(), card, WHOLE)
    assert alone["update"] == pytest.approx(2 * 8 * numbers * tokens / 0.4e15, rel=1e-2)
    assert alone["score"] == pytest.approx(3 * 2 * numbers * tokens / 0.4e15, rel=1e-2)
    cache = 64 * (256 + 256) * (2 * 24 * 2 * 64 * 2)
    prompts = 2 * numbers * 64 * 256 / 0.4e15
    assert alone["rollout"] == pytest.approx(512 * (2 * numbers + cache) / 0.5e12 + prompts, rel=1e-2)
    assert alone["between GPUs"] == 0
    two, nine = (plan.step_seconds(case(count=n), card, WHOLE)["between GPUs"] for n in (2, 9))
    assert two == pytest.approx(2 * 4 * 2 * 4 * numbers / 2 / 1e11, rel=1e-2)  # four steps of two models
    assert nine == pytest.approx(two * 2 * 8 / 9 * 10, rel=1e-2)
    adapters = plan.case_of("Qwen2.5-0.5B", "no critic, LoRA", torch.bfloat16)
    without = plan.step_seconds(adapters, card, WHOLE)
    assert without["update"] == pytest.approx(alone["update"] / 2 * 6 / 8)
    assert without["score"] == pytest.approx(alone["score"] * 2 / 3)


def test_what_sharded_gpus_send_by_hand(plan):
    """Each pass gathers a model: layers in bf16, the embeddings in fp32."""
    case = plan.case_of("Qwen2.5-0.5B", "critic", torch.bfloat16, shard=1, count=2)
    numbers, table = case.models["actor"].all, case.models["actor"].table
    model = (2 * (numbers - table) + 4 * table) / 2
    scored = 3 * 64 * 768 / 8192  # old actor, reference and critic, 8,192 tokens a pass
    sums, sampler = 2 * 4 * 4 * numbers / 2, 4 * numbers / 2
    wanted = model * (2 * 2 * 4 + scored) + sums + sampler
    assert plan.sent(case, 2, passes=4, updates=4) == pytest.approx(wanted)


def test_more_gpus_never_need_more_memory_each(plan):
    for row in plan.each_gpu():
        found = [float(row[f"{count}, sharded"]) for count in plan.SHARDED]
        assert found == sorted(found, reverse=True), row
        assert found[0] < float(row["2 or more"]), row


def test_a_wrong_flag_is_said_in_one_line(plan):
    with pytest.raises(SystemExit, match="error: no flag: --table or --check"):
        plan.main([])
