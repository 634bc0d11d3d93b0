"""Hides what Windows does not have. Python runs this file at its start if the folder is in PYTHONPATH.

The platform itself keeps its name: torch and Python's own library go by that, and they stay as they are.
"""

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

os.environ["CC"] = "no-such-compiler"
warnings.filterwarnings("ignore", "only soft file lock")  # on Windows, filelock has locks of another kind
