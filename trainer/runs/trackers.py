"""Trackers: programs that show a run's metrics, texts and pictures, besides the files in its folder.

``--tracker`` names them: SwanLab, TensorBoard, Weights & Biases, or several. Each works without network and
without an account: it then writes into the run folder. To add one, write a class here with

    __init__(args, folder)     start it; folder: the ``RunFolder`` (its ``path`` and ``config``)
    fresh                      True if it has nothing of this run yet
    about                      a command that shows or uploads what it has, "" if it says so itself
    log(step, metrics)         take the metrics {name: number} of one step
    text(step, name, text)     take a text
    picture(step, name, path)  take a PNG file
    finish()                   end it, also when a run stops early

and add it to ``TRACKERS`` under the name of the Python package that it needs. ``RunLogger`` (run_logger.py)
has them as one ``Trackers``, in the main process only.

A resumed run keeps its id (``run_id`` in config.json). What a tracker wrote into the run folder is removed
and written again from the run's own files, up to the step from which the run goes on. So no step is there
twice, and a tracker that is new has all steps. Online, SwanLab and Weights & Biases go on with the same run,
and pass over steps that they have.

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


class OwnFormat:
    """A tracker that takes numbers, texts and pictures alike, in its own format. ``_run``: its run."""

    def log(self, step, metrics):
        self._run.log(metrics, step=step)

    def text(self, step, name, text):
        self.log(step, {name: self._text(text)})

    def picture(self, step, name, path):
        self.log(step, {name: self._image(str(path))})

    def finish(self):
        self._run.finish()


class SwanLab(OwnFormat):
    """SwanLab, in ``swanlog/`` of the run folder; online too if the user is logged in."""

    about = ""

    def __init__(self, args, folder):
        import swanlab  # here, because importing it takes a second or more; the same below

        self._text = swanlab.Text
        self._image = swanlab.Image
        self.fresh = not swanlab.Settings().api_key
        path = folder.path / "swanlog"
        if self.fresh:
            remove([path])
        self._run = swanlab.init(
            **named(args, folder), log_dir=str(path), mode="offline" if self.fresh else "online"
        )


class TensorBoard:
    """TensorBoard's event files, in ``tensorboard/`` of the run folder. It needs no TensorFlow."""

    fresh = True

    def __init__(self, args, folder):
        from torch.utils.tensorboard import SummaryWriter

        path = folder.path / "tensorboard"
        remove([path])
        self.about = quoted(["tensorboard", "--logdir", path])
        self._writer = SummaryWriter(str(path))
        self.text(0, "config", "\n".join(f"{name}: {value}" for name, value in vars(args).items()))

    def log(self, step, metrics):
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # else it would be two minutes behind

    def text(self, step, name, text):
        code = "\n".join("    " + line for line in text.splitlines())  # Markdown's form of text as it is
        self._writer.add_text(name, code, step)

    def picture(self, step, name, path):
        from matplotlib.image import imread

        self._writer.add_image(name, imread(path), step, dataformats="HWC")

    def finish(self):
        self._writer.close()


class WandB(OwnFormat):
    """Weights & Biases, in ``wandb/`` of the run folder; online too if the user is logged in and WANDB_MODE
    does not say otherwise."""

    def __init__(self, args, folder):
        import wandb

        self._text = lambda text: wandb.Html(f"<pre>{html.escape(text)}</pre>", inject=False)
        self._image = wandb.Image
        mode = os.environ.get("WANDB_MODE") or ("online" if wandb.login(prompt=False) else "offline")
        self.fresh = mode != "online"
        if self.fresh:
            remove((folder.path / "wandb").glob(f"offline-run-*-{folder.config['run_id']}"))
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
        self._pictured = None  # the step of the last picture
        for name in wanted(args):
            try:
                self._live[name] = TRACKERS[name](args, folder)
            except Exception as error:  # anything that the package raises
                self.give("finish")
                raise InputError(
                    f"--tracker {name}: it cannot start ({reason(error)}); mend that, or leave it out"
                ) from error

    def __bool__(self):
        return bool(self._live)

    def about(self):
        """Lines that say how what the trackers have can be seen."""
        return [f"tracker  {name}: {tracker.about}" for name, tracker in self._live.items() if tracker.about]

    def log(self, step, metrics, texts, fresh=False):
        """Give all of them the metrics {name: number} of a step, and texts {name: text}.

        fresh: give them to those only that have nothing of the run yet."""
        self.give("log", step, metrics, fresh=fresh)
        for name, text in texts.items():
            self.give("text", step, name, text, fresh=fresh)

    def picture(self, step, name, path):
        """Give all of them a picture, a PNG file; the second one of a step is left out."""
        if step != self._pictured:
            self.give("picture", step, name, path)
        self._pictured = step

    def give(self, method, *values, fresh=False):
        """Call a method of all of them, or of the fresh ones. One that fails is left out from then on."""
        for name, tracker in list(self._live.items()):
            if fresh and not tracker.fresh:
                continue
            try:
                getattr(tracker, method)(*values)
            except Exception as error:  # full disk, no network, a process of its own that has ended
                del self._live[name]
                self._say(
                    f"note: --tracker {name}: it failed ({reason(error)}) and gets nothing more; "
                    "the run goes on, its own files have everything"
                )


def reason(error: Exception) -> str:
    """Why a tracker failed, in one line."""
    return " ".join(first_line(error).split())[:200]


def add_flags(add):
    """Declare the flags of trackers, as in trainer/flags.py."""
    choices = ["none", *TRACKERS]
    add("--tracker", [], "also log there; several work", nargs="*", choices=choices, may_change=True)
    add("--use_wandb", bool, "MiniMind's name for --tracker swanlab", may_change=True)
    add("--wandb_project", "small-lm-ppo", "project in SwanLab and wandb", may_change=True)


def wanted(args):
    """The names of the trackers that the flags ask for, each once. InputError for "none" beside another."""
    names = dict.fromkeys([*args.tracker, *(["swanlab"] if args.use_wandb else [])])
    if "none" in names and len(names) > 1:
        raise InputError("--tracker none: another tracker is asked for as well; name only one of them")
    return [name for name in names if name != "none"]


def check_packages(args):
    """Raises InputError if a wanted tracker's package is not installed. Called before the folder is made."""
    for name in wanted(args):
        if importlib.util.find_spec(name) is None:
            raise InputError(f"--tracker {name}: needs {name}; pip install {name}")


def remove(folders):
    """Remove folders that may be there. InputError if one cannot be removed."""
    for folder in folders:
        if folder.exists():
            with writing(folder):
                shutil.rmtree(folder)
