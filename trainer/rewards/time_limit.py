"""The time limit of the user's reward function (``--reward_timeout``)."""

import signal
import time
from contextlib import contextmanager


class TimeUp(BaseException):
    """The time is up. Not an Exception, so that ``except Exception`` in the user's code does not catch it."""


@contextmanager
def time_limit(seconds):
    """Raise TimeUp in this block after ``seconds``, and again every second after that; 0 means no limit.

    It uses SIGALRM, so it works in the main thread only. Windows has none: there TimeUp is raised where the
    block ends by itself.
    """
    start = time.monotonic()
    on = [True]

    def end(number, frame):
        if on:
            raise TimeUp

    alarm = hasattr(signal, "SIGALRM")
    if alarm:
        old = signal.signal(signal.SIGALRM, end)
    try:
        if alarm:  # a very short time is up before the next line
            signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
        yield
    finally:
        on.clear()  # first, and in one instruction: the time may be up in each of the following lines
        if alarm:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, old)
    if 0 < seconds < time.monotonic() - start:  # also if the block caught TimeUp or turned the alarm off
        raise TimeUp
