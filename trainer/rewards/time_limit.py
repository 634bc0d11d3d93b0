"""The time limit of a reward (``--reward_timeout``): for the user's function and for a server's reply."""

import signal
import time
from contextlib import contextmanager


class TimeUp(BaseException):
    """The time is up. Not an Exception, so that ``except Exception`` in the user's code does not catch it."""


@contextmanager
def time_limit(seconds):
    """Raise TimeUp in this block after ``seconds``, and again every second after that; 0 means no limit.

    It uses SIGALRM, so it works in the main thread only.
    """

    def end(number, frame):
        raise TimeUp

    old, start = signal.signal(signal.SIGALRM, end), time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    if 0 < seconds < time.monotonic() - start:  # also if the block caught TimeUp or turned the alarm off
        raise TimeUp
