"""Command lines to copy, quoted for the shell: of this Python, with the script's full path."""

import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def command_line(script: str, *words: str | Path) -> str:
    """``<this python> <script> <words>`` as one line that can be pasted into a shell in any directory.

    script: its path in the repository; words: flags and values.
    """
    return quoted([sys.executable, ROOT / script, *words])


def full_path(name: str) -> str:
    """The whole path of a file or folder that is there; anything else, such as a hub name, as it is."""
    return str(Path(name).resolve()) if Path(name).exists() else name


def quoted(words):
    """Words, text or Path -> one line that this system's shell reads as these words."""
    words = [str(word) for word in words]
    return subprocess.list2cmdline(words) if sys.platform == "win32" else shlex.join(words)
