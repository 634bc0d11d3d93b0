"""Trackers: programs that show a run's metrics and texts, besides the files in its folder.

``--tracker`` names them: SwanLab, TensorBoard, Weights & Biases, or several. Each works without network and
without an account: it then writes into the run folder. To add one, write a class here with

    __init__(args, folder)     start it; folder: the ``RunFolder`` (its ``path`` and ``config``)
    fresh                      True if it has nothing of this run yet
    about                      a command that shows or uploads what it has, "" if it says so itself
    log(step, values)          take {name: number or text} of one step
    finish()                   end it, also when a run stops early

and add it to ``TRACKERS`` under the name of the Python package that it needs. ``RunLogger`` (run_logger.py)
has them as one ``Trackers``, in the main process only.

A resumed run keeps its id (``run_id`` in config.json). What a tracker wrote into the run folder is removed,
and the metrics are written again from the run's own file, up to the step from which the run goes on. So no
step is there twice, and a tracker that is new has all steps, but online: there SwanLab and Weights & Biases
go on with the same run, from the checkpoint on.

A tracker that cannot start ends the run in one line, before anything is learned. One that fails later gets
nothing more, which one line says, and the run goes on: its own files have everything.
"""

import html
import importlib.util
import os
import shutil
import textwrap
from contextlib import suppress
from pathlib import Path

from errors import InputError, first_line
from trainer.runs.base import quoted


class OwnFormat:
    """A tracker that takes numbers and texts alike, in its own format. ``_run``: its run."""

    def log(self, step, values):
        shown = {name: self._text(x) if isinstance(x, str) else x for name, x in values.items()}
        self._run.log(shown, step=step)

    def finish(self):
        self._run.finish()


class SwanLab(OwnFormat):
    """SwanLab, in ``swanlog/`` of the run folder; online too if the user is logged in."""

    about = ""

    def __init__(self, args, folder):
        import swanlab  # here, because importing it takes a second or more; the same below

        self._text = swanlab.Text
        self.fresh = not swanlab.Settings().api_key
        path = folder.path / "swanlog"
        if self.fresh:
            shutil.rmtree(path, ignore_errors=True)
        mode = "offline" if self.fresh else "online"
        self._run = swanlab.init(**named(args, folder), log_dir=str(path), mode=mode)


class TensorBoard:
    """TensorBoard's event files, in ``tensorboard/`` of the run folder. It needs no TensorFlow."""

    fresh = True

    def __init__(self, args, folder):
        from torch.utils.tensorboard import SummaryWriter

        path = folder.path / "tensorboard"
        shutil.rmtree(path, ignore_errors=True)
        self.about = quoted(["tensorboard", "--logdir", path])
        self._writer = SummaryWriter(str(path))
        self.log(0, {"config": "\n".join(f"{name}: {value}" for name, value in vars(args).items())})

    def log(self, step, values):
        for name, x in values.items():
            if isinstance(x, str):
                x = textwrap.indent(x, "    ")  # Markdown's form of text as it is
                self._writer.add_text(name, x, step)
            else:
                self._writer.add_scalar(name, x, step)
        self._writer.flush()  # else it would be two minutes behind

    def finish(self):
        self._writer.close()


class WandB(OwnFormat):
    """Weights & Biases, in ``wandb/`` of the run folder; online too if the user is logged in and WANDB_MODE
    does not say otherwise."""

    def __init__(self, args, folder):
        import wandb

        self._text = lambda text: wandb.Html(f"<pre>{html.escape(text)}</pre>", inject=False)
        mode = os.environ.get("WANDB_MODE") or ("online" if wandb.login(prompt=False) else "offline")
        self.fresh = mode != "online"
        if self.fresh:
            for path in (folder.path / "wandb").glob(f"offline-run-*-{folder.config['run_id']}"):
                shutil.rmtree(path)
        settings = wandb.Settings(console="off", silent=self.fresh)  # the output is the run's own
        self._run = wandb.init(**named(args, folder), dir=str(folder.path), mode=mode, settings=settings)
        self.about = quoted(["wandb", "sync", Path(self._run.dir).parent]) if self.fresh else ""


def named(args, folder) -> dict:
    """What SwanLab and Weights & Biases call a run, and its flags."""
    return {
        "project": args.wandb_project,
        "name": folder.path.name,
        "id": folder.config["run_id"],
        "resume": "allow",
        "config": vars(args),
    }


TRACKERS = {"swanlab": SwanLab, "tensorboard": TensorBoard, "wandb": WandB}


class Trackers:
    """The trackers of a run, which all get the same. say(line): prints a line.

    Raises InputError if one of them cannot start."""

    def __init__(self, args, folder, say):
        self._say = say
        self._live = {}
        for name in wanted(args):
            try:
                tracker = self._live[name] = TRACKERS[name](args, folder)
            except Exception as error:  # anything that the package raises
                raise InputError(
                    f"--tracker {name}: cannot start ({first_line(error)[:200]}); mend that, or leave it out"
                ) from error
            if tracker.about:
                say(f"tracker  {name}: {tracker.about}")

    def log(self, step, values, fresh=False):
        """Give all of them the values {name: number or text} of a step; fresh: those only that have nothing
        of the run yet. One that fails is left out from then on."""
        for name, tracker in list(self._live.items()):
            if fresh and not tracker.fresh:
                continue
            try:
                tracker.log(step, values)
            except Exception as error:  # full disk, no network, a process of its own that has ended
                del self._live[name]
                self._say(
                    f"note: --tracker {name}: it failed ({first_line(error)[:200]}) and gets nothing more; "
                    "the run goes on, its own files have everything"
                )

    def finish(self):
        for tracker in self._live.values():
            with suppress(Exception):  # as above
                tracker.finish()


def add_flags(add):
    """Declare the flags of trackers, as in trainer/flags.py."""
    choices = ["none", *TRACKERS]
    add("--tracker", [], "also log there; several work", nargs="*", choices=choices, may_change=True)
    add("--use_wandb", bool, "MiniMind's name for --tracker swanlab", may_change=True)
    add("--wandb_project", "small-lm-ppo", "project in SwanLab and wandb", may_change=True)


def wanted(args) -> list[str]:
    """The names of the trackers that the flags ask for, each once. InputError if a package is missing."""
    names = dict.fromkeys([*args.tracker, *(["swanlab"] if args.use_wandb else [])])
    names.pop("none", None)
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise InputError(f"--tracker {name}: needs {name}; pip install {name}")
    return list(names)
