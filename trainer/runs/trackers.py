"""Trackers: programs that show a run's metrics and texts, besides the files in its folder.

``--tracker`` names them: SwanLab, TensorBoard, Weights & Biases, or several. Each works without network and
without an account: it then writes into the run folder. docs/trackers.md says how to look at it, and what
happens when a run is resumed. To add one, write a function here that starts it, and add it to ``TRACKERS``
under the name of the Python package that it needs. One that cannot start ends the run in one line, before
anything is learned; one that fails later gets nothing more, which one line says.
"""

import html
import importlib.util
import os
import textwrap
from argparse import Namespace
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from errors import InputError, first_line

Values = Mapping[str, float | str]  # metrics and texts
Started = tuple[Any, Callable[[str], Any]]  # a run as the package has it; a text -> the package's form of it


def start_swanlab(folder: Path, known: dict[str, Any], step: int) -> Started:
    """SwanLab, in ``swanlog/`` of the run folder; online too if the user is logged in. known: what it and
    Weights & Biases call a run, its flags among it; step: after which the run goes on."""
    import swanlab  # here, because importing it takes a second or more; the same below

    mode = "online" if swanlab.Settings().api_key else "offline"
    return swanlab.init(**known, log_dir=str(folder / "swanlog"), mode=mode), swanlab.Text


def start_tensorboard(folder: Path, known: dict[str, Any], step: int) -> Started:
    """TensorBoard, in ``tensorboard/`` of the run folder. It needs no TensorFlow, and hides what is there of
    steps done again."""
    from torch.utils.tensorboard import SummaryWriter

    class TensorBoard(SummaryWriter):
        """Its event files, written as the runs of the others are."""

        finish = SummaryWriter.close

        def log(self, values: Values, step: int) -> None:
            """Take the values of one step."""
            for name, x in values.items():
                add = self.add_text if isinstance(x, str) else self.add_scalar
                add(name, x, step)
            self.flush()  # else it would be two minutes behind

    writer = TensorBoard(str(folder / "tensorboard"), purge_step=step and step + 1)
    return writer, lambda text: textwrap.indent(text, "    ")  # as it is, in Markdown


def start_wandb(folder: Path, known: dict[str, Any], step: int) -> Started:
    """Weights & Biases, in ``wandb/`` of the run folder; online too if the user is logged in and WANDB_MODE
    does not say otherwise."""
    import wandb

    known["mode"] = os.environ.get("WANDB_MODE") or ("online" if wandb.login(prompt=False) else "offline")
    # The output is the run's own.
    run = wandb.init(**known, dir=str(folder), settings=wandb.Settings(console="off"))
    return run, lambda text: wandb.Html(f"<pre>{html.escape(text)}</pre>")


TRACKERS = {"swanlab": start_swanlab, "tensorboard": start_tensorboard, "wandb": start_wandb}


class Trackers:
    """The trackers of a run, which all get the same. step: after which the run goes on; say(line): prints a
    line.

    Raises InputError if one of them cannot start."""

    def __init__(
        self, args: Namespace, folder: Path, run_id: str, step: int, say: Callable[[str], None]
    ) -> None:
        self._say = say
        self._live: dict[str, Started] = {}
        for name in wanted(args):
            known = {
                "project": args.wandb_project,
                "name": folder.name,
                "id": run_id,
                "resume": "allow",
                "config": vars(args),
            }
            try:
                self._live[name] = TRACKERS[name](folder, known, step)
            except Exception as error:  # anything that the package raises
                raise InputError(
                    f"--tracker {name}: cannot start ({first_line(error)[:200]}); mend that, or leave it out"
                ) from error

    def log(self, step: int, values: Values) -> None:
        """Give all of them the values of a step. One that fails is left out from then on."""
        for name, (run, form) in list(self._live.items()):
            try:
                run.log({key: form(x) if isinstance(x, str) else x for key, x in values.items()}, step)
            except Exception as error:  # full disk, no network, a process of its own that has ended
                del self._live[name]
                self._say(
                    f"note: --tracker {name}: it failed ({first_line(error)[:200]}) and gets nothing more; "
                    "the run goes on, its own files have everything"
                )

    def finish(self) -> None:
        """End all of them."""
        for run, _ in self._live.values():
            with suppress(Exception):  # as above
                run.finish()


def wanted(args: Namespace) -> list[str]:
    """The names of the trackers that the flags ask for. InputError if a package is missing."""
    names = set(args.tracker) - {"none"}
    if args.use_wandb:
        names.add("swanlab")
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise InputError(f"--tracker {name}: needs {name}; pip install {name}")
    return sorted(names)
