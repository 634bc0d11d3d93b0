"""What a run keeps of itself: where it begins or goes on, what is written down, what is saved.

Only the main process writes; the others learn at once whether it could.
"""

import time

from files import writing
from model.saving import save_policy
from trainer import checkpoints
from trainer.run_folder import RunFolder
from trainer.tracking import NullTracker, Tracker


def begin(run, held_out, argv):
    """Take a folder, fill the run from its checkpoint if it has one -> the tracker that writes it down."""
    args, world = run.args, run.world
    with world.all_or_none():
        folder = RunFolder(args.out_dir, args.run_name, args.resume) if world.is_main else None
        if folder:
            folder.begin(run, argv)
    checkpoint = world.gather(folder and folder.checkpoint)[0]
    with world.all_or_none():
        if checkpoint:
            checkpoints.load(checkpoint, run)
        if folder:
            checkpoints.tidy(folder.path, run.progress.step)
        tracker = Tracker(folder, args, run.progress.step, run.total_steps) if folder else NullTracker()
    tracker.introduce(run, held_out)
    return tracker


def record(run, tracker, step, metrics, rows=()):
    """Write a step down, and remember the best evaluation."""
    score = metrics.get("eval/score")
    if score is not None and (run.progress.best_score is None or score > run.progress.best_score):
        run.progress.best_score, run.progress.best_step = score, step
    with run.world.all_or_none():
        tracker.log(step, metrics, rows)


def save(run, tracker):
    """A checkpoint to resume from, unless this step has one, and the actor as the .pth that users load."""
    with run.world.all_or_none():
        if run.world.is_main:
            start, folder = time.perf_counter(), tracker.folder
            if tracker.saved_step != run.progress.step:
                tracker.flush()
                checkpoints.save(folder.path, run, folder.config, keep=run.args.keep_checkpoints)
            with writing(run.pth_path):
                save_policy(run.actor, run.tokenizer, run.pth_path)
            tracker.saved_step = run.progress.step
            tracker.saving_seconds += time.perf_counter() - start
