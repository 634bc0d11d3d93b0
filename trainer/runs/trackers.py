"""Trackers: programs that show a run's metrics, texts and pictures, besides the files in its folder.

``--tracker`` names them: SwanLab, TensorBoard, Weights & Biases, or several. Each works without network and
without an account: it then writes into the run folder. To add one, write a class here with

    package                    the Python package that it needs
    __init__(args, folder)     start it; folder: the ``RunFolder`` (its ``path`` and ``config``)
    fresh                      True if it has nothing of this run yet
    about                      a command that shows or uploads what it has, "" if it says so itself
    log(step, metrics)         take the metrics {name: number} of one step
    text(step, name, text)     take a text
    picture(step, name, path)  take a PNG file
    finish()                   end it, also when a run stops early

and add it to ``TRACKERS``. ``RunLogger`` (run_logger.py) has them as one ``Trackers``, in the main process
only.

A resumed run keeps its id (``run_id`` in config.json). What a tracker wrote into the run folder is removed
and written again from the run's own files, up to the step from which the run goes on (``Trackers.catch_up``).
So no step is there twice, and a tracker that is new has all steps. Online, SwanLab and Weights & Biases go on
with the same run, and pass over steps that they have.

A tracker that cannot start ends the run in one line, before anything is learned. One that fails later gets
nothing more, which one line says, and the run goes on: its own files have everything.
"""

import html
import importlib.util
import os
import shutil
from pathlib import Path

from atomic_files import writing
from errors import InputError, first_line
from trainer.runs.commands import quoted


class SwanLab:
    """SwanLab, in ``swanlog/`` of the run folder; online too if the user is logged in."""

    package = "swanlab"

    def __init__(self, args, folder):
        import swanlab  # here, because importing it takes a second or more; the same below

        self._text, self._image = swanlab.Text, swanlab.Image
        self.fresh, self.about = not swanlab.Settings().api_key, ""
        if self.fresh:
            remove([folder.path / "swanlog"])
        self._run = swanlab.init(
            project=args.wandb_project,
            name=folder.path.name,
            id=folder.config["run_id"],
            resume="allow",
            config=vars(args),
            log_dir=str(folder.path / "swanlog"),
            mode="offline" if self.fresh else "online",
        )

    def log(self, step, metrics):
        self._run.log(metrics, step=step)

    def text(self, step, name, text):
        self._run.log({name: self._text(text)}, step=step)

    def picture(self, step, name, path):
        self._run.log({name: self._image(str(path))}, step=step)

    def finish(self):
        self._run.finish()


class TensorBoard:
    """TensorBoard's event files, in ``tensorboard/`` of the run folder. It needs no TensorFlow."""

    package, fresh = "tensorboard", True

    def __init__(self, args, folder):
        from torch.utils.tensorboard import SummaryWriter

        path = folder.path / "tensorboard"
        remove([path])
        self._writer, self.about = SummaryWriter(str(path)), quoted(["tensorboard", "--logdir", path])
        self.text(0, "config", "\n".join(f"{name}: {value}" for name, value in vars(args).items()))

    def log(self, step, metrics):
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # else it would be two minutes behind

    def text(self, step, name, text):
        code = "\n".join("    " + line for line in text.splitlines())  # Markdown's form of text as it is
        self._writer.add_text(name, code, step)

    def picture(self, step, name, path):
        import numpy
        from PIL import Image

        with Image.open(path) as image:
            self._writer.add_image(name, numpy.asarray(image.convert("RGB")), step, dataformats="HWC")

    def finish(self):
        self._writer.close()


class WandB:
    """Weights & Biases, in ``wandb/`` of the run folder; online too if the user is logged in and WANDB_MODE
    does not say otherwise."""

    package = "wandb"

    def __init__(self, args, folder):
        import wandb

        self._html, self._image = wandb.Html, wandb.Image
        mode = os.environ.get("WANDB_MODE") or ("online" if wandb.login(prompt=False) else "offline")
        self.fresh, name = mode != "online", folder.config["run_id"]
        if self.fresh:
            remove((folder.path / "wandb").glob(f"offline-run-*-{name}"))
        self._run = wandb.init(
            project=args.wandb_project,
            name=folder.path.name,
            id=name,
            resume="allow",
            config=vars(args),
            dir=str(folder.path),
            mode=mode,
            settings=wandb.Settings(console="off", silent=self.fresh),  # the output is the run's own
        )
        self.about = quoted(["wandb", "sync", Path(self._run.dir).parent]) if self.fresh else ""

    def log(self, step, metrics):
        self._run.log(metrics, step=step)

    def text(self, step, name, text):
        self._run.log({name: self._html(f"<pre>{html.escape(text)}</pre>", inject=False)}, step=step)

    def picture(self, step, name, path):
        self._run.log({name: self._image(str(path))}, step=step)

    def finish(self):
        self._run.finish()


TRACKERS = {"swanlab": SwanLab, "tensorboard": TensorBoard, "wandb": WandB}


class Trackers:
    """The trackers of a run, which all get the same. say(line): prints a line.

    Raises InputError if one of them cannot start."""

    def __init__(self, args, folder, say):
        self._say, self._live, self._given = say, {}, set()
        for name in wanted(args):
            try:
                self._live[name] = TRACKERS[name](args, folder)
            except Exception as error:  # anything that the package raises
                self.finish()
                reason = " ".join(first_line(error).split())[:200]
                raise InputError(
                    f"--tracker {name}: it cannot start ({reason}); mend that, or leave it out"
                ) from error

    def __bool__(self):
        return bool(self._live)

    def about(self):
        """Lines that say how what the trackers have can be seen."""
        return [f"tracker  {name}: {tracker.about}" for name, tracker in self._live.items() if tracker.about]

    def log(self, step, metrics, texts=(), fresh=False):
        """Give all of them the metrics {name: number} of a step, and texts [(name, text), …].

        fresh: give them to those only that have nothing of the run yet."""
        self._give("log", step, metrics, fresh=fresh)
        for name, text in texts:
            self._give("text", step, name, text, fresh=fresh)

    def text(self, step, name, text):
        """Give all of them a text."""
        self._give("text", step, name, text)

    def picture(self, step, name, path):
        """Give all of them a picture, a PNG file; the second one of a step and name is left out."""
        if (step, name) not in self._given:
            self._given.add((step, name))
            self._give("picture", step, name, path)

    def catch_up(self, steps):
        """Give the steps of a run that is resumed to those that have nothing of it. steps: an iterator of
        (step, metrics, texts), as of ``log``."""
        for step in steps if any(tracker.fresh for tracker in self._live.values()) else ():
            self.log(*step, fresh=True)

    def finish(self):
        """End all of them."""
        self._give("finish")

    def _give(self, method, *values, fresh=False):
        """Call a method of all of them, or of the fresh ones. One that fails is left out from then on."""
        for name, tracker in list(self._live.items()):
            if fresh and not tracker.fresh:
                continue
            try:
                getattr(tracker, method)(*values)
            except Exception as error:  # full disk, no network, a process of its own that has ended
                del self._live[name]
                reason = " ".join(first_line(error).split())[:200]
                self._say(
                    f"note: --tracker {name}: it failed ({reason}) and gets nothing more; the run goes on, "
                    "its own files have everything"
                )


def add_flags(add):
    """Declare the flags of trackers, as in trainer/flags.py."""
    choices = ["none", *TRACKERS]
    add(
        "--tracker",
        nargs="*",
        default=[],
        choices=choices,
        may_change=True,
        help="also log there; several work",
    )
    add("--use_wandb", action="store_true", may_change=True, help="MiniMind's name for --tracker swanlab")
    add("--wandb_project", default="small-lm-ppo", may_change=True, help="project in SwanLab and wandb")


def wanted(args):
    """The names of the trackers that the flags ask for, each once. InputError for "none" beside another."""
    names = dict.fromkeys([*args.tracker, *(["swanlab"] if args.use_wandb else [])])
    if "none" in names and len(names) > 1:
        raise InputError("--tracker none: another tracker is asked for as well; name only one of them")
    return [name for name in names if name != "none"]


def check_packages(args):
    """Raises InputError if a wanted tracker's package is not installed. Called before the folder is made."""
    for name in wanted(args):
        package = TRACKERS[name].package
        if importlib.util.find_spec(package) is None:
            raise InputError(f"--tracker {name}: needs {package}; pip install {package}")


def remove(folders):
    """Remove folders that may be there. InputError if one cannot be removed."""
    for folder in folders:
        if folder.exists():
            with writing(folder):
                shutil.rmtree(folder)
