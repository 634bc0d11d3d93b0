"""Critic warm-up: how many of the first batches train only the critic."""

from types import SimpleNamespace

import pytest
import torch
from test_invariants import files, filled_rollout, make_run
from tiny import read_jsonl, train

from errors import InputError
from trainer import train_ppo
from trainer.flags import AUTO, steps_or_auto
from trainer.options.critic_warmup import CriticWarmup
from trainer.runs.base import Learner

assert files  # the fixture
OPEN = float("inf")


def warmup(steps, most=10):
    learner = Learner(None, None, peak=1.0, total_steps=400)
    return CriticWarmup(learner, steps, most)


def note(it, errors, first=0):
    """Batches whose values are off by these numbers -> the first batch of the actor after each. The
    returns' variance is 1."""
    mask, returns, found = torch.ones(1, 2, dtype=torch.bool), torch.tensor([[-1.0, 1.0]]), []
    for batch, error in enumerate(errors, first):
        rollout = SimpleNamespace(values=returns + error, mask=mask, outcomes=returns)
        it.follow(batch, rollout, lambda x: x)
        found.append(it.learner.first_batch)
    return found


def test_the_error_is_measured_in_units_of_the_returns_variance():
    """The same error, in a batch whose returns vary twice as much, has fallen."""
    it, mask = warmup(AUTO), torch.ones(1, 2, dtype=torch.bool)
    for batch, size in enumerate((1.0, 2.0)):
        returns = size * torch.tensor([[-1.0, 1.0]])
        rollout = SimpleNamespace(values=returns + 0.5, mask=mask, outcomes=returns)
        it.follow(batch, rollout, lambda x: x)
    assert it.begins is None
    assert it.error == pytest.approx(0.25 / 4)


def test_a_number_is_a_number_of_batches():
    assert note(warmup(2), [3.0, 2.0, 1.0]) == [2, 2, 2]
    assert note(warmup(0), [3.0]) == [0]


def test_auto_ends_when_the_error_no_longer_falls_by_a_tenth():
    """Squared errors 9, 4, 3.8: the third is not a tenth below 4, so the actor begins with batch 2."""
    assert note(warmup(AUTO), [3.0, 2.0, 3.8**0.5, 0.1]) == [OPEN, OPEN, 2, 2]
    assert note(warmup(AUTO), [3.0, 2.0, 3.5**0.5, 3.0]) == [OPEN, OPEN, OPEN, 3]
    assert note(warmup(AUTO), [3.0, float("nan")]) == [OPEN, 1]  # no number: it has not fallen


def test_auto_ends_after_a_quarter_of_the_run():
    assert note(warmup(AUTO, most=2), [4.0, 2.0, 1.0]) == [OPEN, OPEN, 2]
    assert note(warmup(AUTO, most=0), [4.0]) == [0]


def test_what_a_checkpoint_keeps_restores_it():
    one, other = warmup(AUTO), warmup(AUTO)
    note(one, [3.0, 2.0])
    other.load_state_dict(one.state_dict())
    assert note(other, [1.9], first=2) == note(one, [1.9], first=2) == [2]
    third = warmup(AUTO)
    third.load_state_dict(one.state_dict())
    assert third.learner.first_batch == 2


def test_the_actor_begins_with_its_own_schedule_when_the_critic_is_fitted(files, tmp_path):
    """In a run: the actor's rate is at its peak in the first batch in which it trains."""
    sizes = {"batch_size": 16, "mini_batch_size": 16, "max_gen_len": 6, "epochs": 99, "max_steps": 16}
    rates = {"learning_rate": 1e-3, "critic_learning_rate": 1e-2, "critic_init": "actor"}
    files = {k: v for k, v in files.items() if k != "reward_model"}
    train(**files, **sizes, **rates, critic_warmup_steps=AUTO, out_dir=tmp_path, run_name="r")
    steps = read_jsonl(tmp_path / "r" / "metrics.jsonl")[1:]
    begins = next(i for i, step in enumerate(steps) if "policy/loss" in step)
    assert 1 <= begins <= 4
    errors = [step["value/error"] for step in steps]
    assert all(errors[i] < errors[i - 1] for i in range(1, begins - 1))
    assert steps[begins]["policy/learning_rate"] == pytest.approx(1e-3)
    assert all("policy/loss" in step for step in steps[begins:])


def test_what_is_logged_does_not_decide_when_the_actor_begins(files, monkeypatch):
    """Four batches: after a quarter of them the actor begins at the latest."""
    monkeypatch.setattr(train_ppo, "note_rollout", lambda *nothing: None)
    run, prompts = make_run(files, critic_warmup_steps=AUTO, epochs=9)
    filled_rollout(run, prompts, step=0)
    assert run.critic_warmup.begins is None
    filled_rollout(run, prompts, step=1)
    assert run.critic_warmup.begins == 1


def test_words_other_than_auto_are_refused(files):
    assert steps_or_auto("auto") == AUTO
    assert steps_or_auto("3") == 3
    with pytest.raises(InputError, match="--critic_warmup_steps"):
        make_run(files, critic_warmup_steps="some")
    with pytest.raises(InputError, match="--critic_warmup_steps -1"):
        make_run(files, critic_warmup_steps=-1)


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
def test_learning_rates_rise_in_the_first_batches_of_each_model(files, schedule):
    """Two batches of two optimizer steps: fifths of the peak; the actor's begin after critic warm-up."""
    more = {"lr_schedule": schedule, "lr_warmup_steps": 2, "critic_warmup_steps": 1, "max_steps": 40}
    run, _ = make_run(files, **more, epochs=99, learning_rate=0.5, critic_learning_rate=1.0)
    critic, actor = (run.learners[name] for name in ("critic", "actor"))
    assert [critic.learning_rate(n) for n in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert [actor.learning_rate(n) for n in range(2, 7)] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    last = {"cosine": 0.1, "constant": 1.0}[schedule]
    assert critic.learning_rate(79) == pytest.approx(last)
    assert actor.learning_rate(79) == pytest.approx(last / 2)
