"""Hides what Windows does not have. Python runs this file at its start if the folder is in PYTHONPATH.

The platform itself keeps its name: torch and Python's own library go by that, and they stay as they are.
"""

import ctypes
import os
import signal
import sys
import warnings

import psutil  # noqa: F401  (before anything is hidden: for these two libraries, this is still Linux)
import torch  # noqa: F401

for name in ("fcntl", "resource", "readline"):
    sys.modules[name] = None
for module, names in (
    (os, ("O_DIRECTORY", "fork", "pread", "register_at_fork")),
    (signal, ("ITIMER_REAL", "SIGALRM", "alarm", "setitimer")),
):
    for name in names:
        delattr(module, name)


class Library(ctypes.CDLL):
    """A C library without mallopt."""

    def __getattr__(self, name):
        if name == "mallopt":
            raise AttributeError(name)
        return super().__getattr__(name)


ctypes.CDLL = Library
os.environ["CC"] = "no-such-compiler"
warnings.filterwarnings("ignore", "only soft file lock")  # on Windows, filelock has locks of another kind
