"""What a run keeps of itself: where it begins or goes on, what is written down, what is saved.

Only the main process writes; the others learn at once whether it could. A run, whatever its script, has

    args, world, total_steps, progress      what was asked for, of whom, how far it has come
    script, look, judged_by_name            its file; how it is shown; flags that are compared all the same
    modules, optimizers                     {file name: …}, what a checkpoint holds
    fingerprints()                          {flag: a hash of what it names}, what resuming compares
    save_result(), results()                the files that users load, and where they are, in lines of text
"""

import time

from trainer import checkpoints
from trainer.run_folder import RunFolder
from trainer.tracking import NullTracker, Tracker


def begin(run, about, argv):
    """Take a folder, fill the run from its checkpoint if it has one -> the tracker that writes it down.

    about: lines that say what the run is made of; argv: its command line.
    """
    args, world, folder = run.args, run.world, None
    with world.all_or_none():
        if world.is_main:
            folder = RunFolder(args.out_dir, args.run_name, args.resume, run.look.folder)
            folder.begin(run, argv)
    checkpoint = world.gather(folder and folder.checkpoint)[0]
    with world.all_or_none():
        if checkpoint:
            checkpoints.load(checkpoint, run)
        if folder:
            checkpoints.tidy(folder.path, run.progress.step)
        tracker = Tracker(folder, run) if folder else NullTracker()
    tracker.introduce(run, about)
    return tracker


def record(run, tracker, step, metrics, rows=()):
    """Write a step down, and remember the best evaluation."""
    score, progress, sign = metrics.get(run.look.best), run.progress, -1 if run.look.lower_is_better else 1
    if score is not None and (progress.best_score is None or sign * score > sign * progress.best_score):
        progress.best_score, progress.best_step = score, step
    with run.world.all_or_none():
        tracker.log(step, metrics, rows)


def save(run, tracker):
    """A checkpoint to resume from, unless this step has one, and the result, which users load."""
    with run.world.all_or_none():
        if run.world.is_main:
            start, folder = time.perf_counter(), tracker.folder
            if tracker.saved_step != run.progress.step:
                tracker.flush()
                checkpoints.save(folder.path, run, folder.config, keep=run.args.keep_checkpoints)
            run.save_result()
            tracker.saved_step = run.progress.step
            tracker.saving_seconds += time.perf_counter() - start
