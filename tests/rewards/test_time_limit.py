"""The time limit of a reward leaves nothing behind."""

import signal
from contextlib import suppress

import pytest

from trainer.rewards.time_limit import TimeUp, time_limit


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="Windows has no SIGALRM")
def test_no_alarm_goes_on_after_a_time_that_is_up_at_once():
    before = signal.getsignal(signal.SIGALRM)
    for _ in range(2000):
        with suppress(TimeUp), time_limit(1e-6):
            pass
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
        assert signal.getsignal(signal.SIGALRM) is before
