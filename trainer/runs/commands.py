"""Command lines to copy, quoted for the shell, with the script's full path where that is needed."""

import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def command_line(script, *words):
    """``python <script> <words>`` as one line that can be pasted into a shell in the working directory.

    script: its path in the repository; words: flags and values, as text or Path.
    """
    place = script if Path.cwd() == ROOT else ROOT / script
    return quoted(["python", place, *words])


def quoted(words):
    """Words, text or Path -> one line that this system's shell reads as these words."""
    words = [str(word) for word in words]
    return subprocess.list2cmdline(words) if sys.platform == "win32" else shlex.join(words)
