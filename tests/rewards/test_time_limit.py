"""The time limit of a reward leaves nothing behind."""

import signal
from contextlib import suppress
from types import SimpleNamespace

import pytest

from trainer.rewards.reward_function import TimeUp, time_limit


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="Windows has no SIGALRM")
def test_no_alarm_goes_on_after_a_time_that_is_up_at_once():
    before = signal.getsignal(signal.SIGALRM)
    for _ in range(2000):
        with suppress(TimeUp), time_limit(1e-6):
            pass
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
        assert signal.getsignal(signal.SIGALRM) is before


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="Windows has no SIGALRM")
def test_an_alarm_that_comes_while_it_is_turned_off_leaves_nothing_behind(monkeypatch):
    """It comes right before each of the two calls that turn it off."""
    before, came = signal.getsignal(signal.SIGALRM), []

    def after_an_alarm(call):
        def called(which, value, *more):
            if value in (0, before):
                came.append(call.__name__)
                signal.raise_signal(signal.SIGALRM)
            return call(which, value, *more)

        return called

    late = {name: after_an_alarm(getattr(signal, name)) for name in ("setitimer", "signal")}
    kinds = {"SIGALRM": signal.SIGALRM, "ITIMER_REAL": signal.ITIMER_REAL}
    monkeypatch.setattr("trainer.rewards.reward_function.signal", SimpleNamespace(**kinds, **late))
    with time_limit(60):
        pass
    assert came == ["setitimer", "signal"]
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) is before
