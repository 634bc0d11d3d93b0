"""Offline PPO: logged answers are learned from as if the reference had written them (options/offline.py)."""

import pytest
import torch
from steps import collected, take_step
from test_invariants import make_run
from tiny import WORDS, run_files, write_jsonl


@torch.no_grad()
def plain_logprobs(model, item):
    ids = torch.tensor([item.prompt_ids + item.response_ids])
    log_p = torch.log_softmax(model(ids).logits[0], -1)
    return torch.stack([log_p[t - 1, ids[0, t]] for t in range(len(item.prompt_ids), ids.shape[1])])


@torch.no_grad()
def moved(model, seed):
    for p in model.parameters():
        p.add_(0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)))


def pair(n):
    """The chosen answer begins with an a and has no b, the rejected one the other way round."""
    words = [w for w in WORDS if w not in "ab"]
    rest = " ".join(words[(n + i) % 6] for i in range(1 + n % 4))
    return {"asked": f"{words[n % 6]} {words[n // 6 % 6]}", "chosen": f"a {rest}", "rejected": f"b {rest}"}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    return {
        "model": run_files(folder)["model"],
        "prompt_key": "asked",
        "offline_data_path": write_jsonl(folder / "pairs.jsonl", map(pair, range(60))),
        "eval_data_path": write_jsonl(folder / "held_out.jsonl", map(pair, range(60, 81))),
    }


def one_batch(run, step=0):
    size = run.args.batch_size
    items = [run.data[(step * size + i) % len(run.data)] for i in range(size)]
    return collected(run, step, items), items


def test_without_an_evaluation_there_is_no_sampler(files):
    run, _ = make_run(files, epochs=9, eval_data_path="")
    assert not hasattr(run, "engine") and run.held_out_pairs is None
    assert not run.reward.names and not run.best.metric
    assert not any(parts.get("sampler") for parts in run.plan.phases.values())
    batch, items = one_batch(run)
    assert batch.texts == [item.response for item in items] and batch.prompts == items
    assert batch.finished.tolist() == [True] * len(items) and batch.finished.dtype == torch.bool
    metrics, _ = take_step(run, 0, items)
    assert metrics["reward/score"] == 0 and metrics["rollout/finished"] == 1
    assert 0 <= metrics["perf/reward_seconds"] < 1e-3 and metrics["perf/rollout_seconds"] > 0
    assert run.evaluate() == ({}, {})
    assert hasattr(make_run(files, epochs=9)[0], "engine")


def test_what_an_evaluation_says_of_pairs_by_hand(files):
    run, _ = make_run(files, epochs=9)
    assert run.evaluation.of_pairs(run.held_out_pairs) == {"eval/chosen_preferred": 0.5}
    moved(run.models.actor, 1)
    preferred = 0.0
    for both in run.held_out_pairs:
        now, ref = (
            [plain_logprobs(model, item) for item in both]
            for model in (run.models.actor, run.models.reference)
        )
        chosen, rejected = ((x - y).sum() for x, y in zip(now, ref, strict=True))
        preferred += (chosen > rejected).float() / 21
    found = run.evaluation.of_pairs(run.held_out_pairs)
    assert found["eval/chosen_preferred"] == pytest.approx(preferred.item())


def test_the_reference_counts_as_the_old_actor_with_a_single_update_too(files):
    run, _ = make_run(files, epochs=9, batch_size=8, mini_batch_size=8)
    assert run.models.updates_per_batch == 1 and not run.models.single_update


def test_held_out_pairs_may_be_transcripts(files, tmp_path):
    both = {side: f"\n\nHuman: c\n\nAssistant: {side[0]}" for side in ("chosen", "rejected")}
    path = write_jsonl(tmp_path / "transcripts.jsonl", [both])
    run, _ = make_run(files | {"prompt_key": None}, offline_data_path=path, eval_data_path=path, epochs=9)
    assert len(run.held_out_pairs) == 1


def test_pairs_may_have_other_keys(files, tmp_path):
    path = write_jsonl(tmp_path / "pairs.jsonl", [{"asked": "c", "good": "a", "bad": "b"}])
    keys = {"chosen_key": "good", "rejected_key": "bad"}
    run, _ = make_run(files, offline_data_path=path, eval_data_path=path, epochs=99, **keys)
    assert [(item.response, item.score) for item in run.data] == [("a", 1), ("b", -1)]
    assert len(run.held_out_pairs) == 1


def test_held_out_pairs_are_preferred_after_training(files):
    run, _ = make_run(files, epochs=9, learning_rate=1e-3, max_steps=14, kl_coef=0.05)
    for step in range(12):
        take_step(run, step, one_batch(run, step)[1])
    after, _ = run.evaluate()
    assert run.best.beaten_by(after, 1).metric == "eval/chosen_preferred"
    assert after["eval/chosen_preferred"] > 0.9
    assert "eval/score" not in after


def test_other_prompts_are_evaluated_by_a_judge_or_by_answers(files, tmp_path):
    judge = "def score(prompts, responses, answers):\n    return [1.0] * len(responses)"
    (tmp_path / "judge.py").write_text(judge)
    path = write_jsonl(tmp_path / "held_out.jsonl", [{"asked": "c", "answer": "a"}] * 3)
    run, _ = make_run(files, epochs=9, eval_data_path=path, eval_reward_fn=f"{tmp_path / 'judge.py'}:score")
    metrics, _ = run.evaluate()
    assert run.held_out_pairs is None and run.best.beaten_by(metrics, 1).metric == "eval/judge"
    assert run.display.best == "judge"
    assert metrics["eval/judge"] == 1 and metrics["eval/accuracy"] <= 1
    plain, _ = make_run(files, epochs=9, eval_data_path=write_jsonl(tmp_path / "p.jsonl", [{"asked": "c"}]))
    metrics, _ = plain.evaluate()
    assert metrics and plain.best.beaten_by(metrics, 1) is None
