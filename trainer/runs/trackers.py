"""Trackers: services such as SwanLab that get a run's metrics, besides the files in its folder.

To add a tracker, write a class here with

    package, flag              the Python package that it needs, and the flag that switches it on
    add_flags(add)             (static) declare its flags, as in trainer/flags.py
    wanted(args)               (static) is the flag set?
    __init__(args, folder)     start it; folder: the ``RunFolder`` (its ``path`` and ``config``)
    log(step, metrics)         take the metrics {name: number} of one step
    finish()                   end it, also when a run stops early

and add the class to ``TRACKERS`` below. ``RunLogger`` (run_logger.py) calls the trackers, in the main process
only.
"""

import importlib.util

from errors import InputError


class SwanLab:
    """SwanLab, switched on by ``--use_wandb`` (MiniMind's name for it).

    Online if the user is logged in; else offline, in ``swanlog/`` of the run folder, from where ``swanlab
    sync --id ID`` uploads it. A resumed run keeps its id (``run_id`` in config.json), so it continues the
    same SwanLab run.
    """

    package, flag = "swanlab", "--use_wandb"

    @staticmethod
    def add_flags(add):
        add("--use_wandb", action="store_true", may_change=True, help="log to SwanLab as well")
        add("--wandb_project", default="small-lm-ppo", may_change=True, help="SwanLab project")

    @staticmethod
    def wanted(args):
        return args.use_wandb

    def __init__(self, args, folder):
        import swanlab  # here, because importing it takes a second or more

        self.run = swanlab.init(
            project=args.wandb_project,
            name=folder.path.name,
            id=folder.config["run_id"],
            resume="allow",
            config=vars(args),
            log_dir=str(folder.path / "swanlog"),
            mode="online" if swanlab.Settings().api_key else "offline",
        )

    def log(self, step, metrics):
        self.run.log(metrics, step=step)

    def finish(self):
        self.run.finish()


TRACKERS = (SwanLab,)


def check_packages(args):
    """Raises InputError if a wanted tracker's package is not installed. Called before the folder is made."""
    for tracker in TRACKERS:
        if tracker.wanted(args) and importlib.util.find_spec(tracker.package) is None:
            raise InputError(f"{tracker.flag}: needs {tracker.package}; pip install {tracker.package}")


def start(args, folder):
    """Start the trackers that the flags ask for -> list of trackers."""
    return [tracker(args, folder) for tracker in TRACKERS if tracker.wanted(args)]
