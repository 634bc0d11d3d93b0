"""Notes in plain words: given when a number is far out of the usual, once, and never in a healthy run."""

import pytest
from tiny import ROOT, read_jsonl

from trainer.runs.notes import WINDOW, Notes, spread_of_steps

DEMO = read_jsonl(ROOT / "tests" / "fixtures" / "demo_metrics.jsonl")  # python trainer/train_ppo.py, seed 42
USUAL = {"kl/k1": 0.03, "policy/clip_fraction": 0.01, "rollout/finished": 0.9, "reward/score": 1.0}


def notes_of(*steps):
    """The names of the notes of a run, each with its step. steps: changes of the usual metrics."""
    records = [{"step": n + 1, **USUAL, **change} for n, change in enumerate(steps)]
    return {name: step for name, (step, _) in Notes(records).given.items()}


def test_a_healthy_run_gets_no_note():
    assert len(DEMO) == 47
    assert Notes(DEMO).given == {}


@pytest.mark.parametrize(
    ("change", "name", "words"),
    [
        ({"kl/k1": 8.76}, "high_kl", "8.76 nats per token"),
        ({"policy/clip_fraction": 0.545}, "high_clip_fraction", "0.55, and below 0.2 is usual"),
    ],
)
def test_a_number_far_out_of_the_usual_is_said_once_with_the_flag_to_lower(change, name, words):
    notes = Notes()
    assert notes.add(1, USUAL) == []
    (text,) = notes.add(2, USUAL | change)
    assert words in text.replace("0.54,", "0.55,")
    assert "lower --learning_rate" in text
    assert notes.add(3, USUAL | change) == []
    assert notes.given == {name: (2, text)}


def test_what_is_unusual_but_possible_in_a_healthy_run_is_not_said():
    assert notes_of({"kl/k1": 0.99, "policy/clip_fraction": 0.39}) == {}
    assert notes_of({"kl/k1": float("nan"), "policy/clip_fraction": float("nan")}) == {}
    assert Notes([{"step": 0, "eval/score": 1.0}, {"step": 1, "train/loss": 3.0}]).given == {}


def test_responses_that_no_longer_end():
    few = {"rollout/finished": 0.4}
    assert notes_of({}, few, few) == {}
    assert notes_of({}, few, few, {}, few, few) == {}  # not three in a row
    assert notes_of({}, few, few, few) == {"no_more_ends": 4}
    assert notes_of({}, *[{"rollout/finished": 0.46}] * 5) == {}  # more than half of the start
    assert notes_of({"rollout/finished": 0.1}, *[{"rollout/finished": 0.0}] * 5) == {}


def test_answers_that_became_empty():
    start = {"rollout/length": 9.0}
    assert notes_of(start, {"rollout/length": 1.6}) == {}
    assert notes_of(start, {"rollout/length": 1.4}) == {"empty_answers": 2}
    assert notes_of(start, {"rollout/length": 4.0, "eval/length_greedy": 1.0}) == {"empty_answers": 2}
    assert notes_of({"rollout/length": 2.0}, {"rollout/length": 1.0}) == {}  # short from the start


def test_a_score_that_stays_below_its_start():
    start = [{"reward/score": 1.0 + 0.1 * (n % 2)} for n in range(WINDOW)]
    spread = spread_of_steps([m["reward/score"] for m in start])
    far, near = ([{"reward/score": 1.05 - times * spread}] * WINDOW for times in (2.1, 1.9))
    assert notes_of(*start, *far) == {"score_below_start": 2 * WINDOW}
    assert notes_of(*start, *far[:-1]) == {}  # not yet for long
    assert notes_of(*start, *near) == {}
    assert notes_of(*[{}] * 40) == {}  # always the same
    raw = {"reward/score_raw": 5.0}  # --normalize_reward: only the raw score can be compared
    assert notes_of(*[m | raw for m in start + far]) == {}


def test_the_spread_of_steps_is_that_of_their_noise_and_not_of_their_trend():
    import torch

    noise = torch.randn(2000, generator=torch.Generator().manual_seed(1)) * 3
    assert spread_of_steps(noise.tolist()) == pytest.approx(3, rel=0.05)
    assert spread_of_steps((noise + torch.arange(2000) * 0.1).tolist()) == pytest.approx(3, rel=0.05)
    assert spread_of_steps([1.0, 2.0]) != spread_of_steps([1.0, 2.0])  # NaN: too few


def test_a_resumed_run_does_not_repeat_its_notes():
    notes = Notes([{"step": 1, **USUAL, "kl/k1": 5.0}])
    assert notes.add(2, USUAL | {"kl/k1": 6.0}) == []
