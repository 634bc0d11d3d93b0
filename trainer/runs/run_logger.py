"""Logging of a run: log files, progress bar, printed lines, sample texts, and the summary at the end.

The ``Display`` of each script says what is shown (displays.py). Trackers such as TensorBoard get the same
metrics (trackers.py). Only the main process has a ``RunLogger``; the others have a ``NullLogger``.
"""

import contextlib
import json
import math
import os
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm

from atomic_files import last_written, write_whole, writing
from errors import InputError
from trainer.compute.kernels import kernels_of
from trainer.compute.memory import peak_memory
from trainer.runs.checkpoints import list_checkpoints
from trainer.runs.displays import shown
from trainer.runs.health import Health, one_line
from trainer.runs.health_past import WRONG
from trainer.runs.plots import plot_curves
from trainer.runs.report import Report, last_step, read_rows
from trainer.runs.samples import sample_text
from trainer.runs.summary import summarise
from trainer.runs.trackers import Trackers


class NullLogger:
    """The logger of all processes but the main one: it does nothing."""

    broken = None
    ended_by = None

    def log(self, step, metrics, rows=()):
        pass

    def say(self, text):
        pass

    def introduce(self, run, about):
        pass

    def keep_choice(self, name, value):
        pass

    def summary(self, run):
        pass

    def stopped(self, run):
        pass

    def finish(self):
        pass


class RunLogger:
    """Writes to the run folder's log files, the terminal and the trackers.

    A resumed run continues its files, after cutting them back to the step of its checkpoint. Methods that
    write raise InputError if the disk cannot be written.
    """

    def __init__(self, folder, run):
        self.folder, self.display, args, first_step = folder, run.display, run.args, run.progress.step
        self.total_steps = run.total_steps
        shortest = max(1, self.total_steps // 20)  # so that a run prints 20 lines or more, if it has 20 steps
        self.log_interval = args.log_interval or min(self.display.log_interval, shortest)
        self.saved_step, self.saving_seconds = first_step, 0.0
        self.result_time = last_written(run.result_file)  # or when this run has written it
        self._files = {}
        for name in ("metrics.jsonl", *self.display.samples):
            path = folder.path / name
            with writing(path):
                kept = cut_lines(path, first_step)
                self._files[name] = open(path, "a", encoding="utf-8")  # noqa: SIM115
            if first_step and name == "metrics.jsonl" and kept != list(range(first_step + 1)):
                folder.notes.append(f"note: {path} does not have every step up to {first_step}")
        self.health = Health(folder.config, read_metrics(folder.path))  # a resumed run has given some
        self.broken = None  # the first finding of level "wrong" that has begun in this process
        self.ended_by = None  # the finding by which --strict_health 1 has ended the run
        shown = {"desc": self.display.title, "unit": "step", "disable": None}
        self._bar = tqdm(total=self.total_steps, initial=first_step, **shown)
        self._trackers = Trackers(run.args, folder, self.say)
        self._trackers.catch_up(self._steps_so_far())
        self._report = Report(run, folder)
        self._start = time.perf_counter()

    def log(self, step, metrics, rows=()):
        """Log one step's metrics {name: mean} and {file: rows}: to files, trackers and progress bar.

        Every --log_interval steps a line is printed, and every fourth time a sample; both at the last step.
        Findings (health.py) are printed at any step.
        """
        if not self.folder.path.exists():  # Unix writes into deleted files without a word
            raise InputError(
                f"{self.folder.path}: the run folder was removed or renamed while the run goes on, so "
                "nothing can be saved there; start the run again, and leave its folder where it is"
            )
        # JSON has no NaN, so a number that is not finite (the loss of a skipped step) becomes null.
        numbers = {name: x if math.isfinite(x) else None for name, x in metrics.items()}
        rows = dict(rows)
        for name, records in {"metrics.jsonl": [numbers], **rows}.items():
            file = self._files[name]
            with writing(file.name):
                for record in records:
                    file.write(json.dumps({"step": step, **record}, ensure_ascii=False) + "\n")
                file.flush()
        self._bar.set_postfix_str(describe(metrics, self.display.line, self.display.bar), refresh=False)
        self._bar.update(step - self._bar.n)
        last = step == self.total_steps
        if self._is_shown(step):
            mark = self.display.mark(metrics)
            line = describe(metrics, self.display.line)
            self.say(f"step {step}/{self.total_steps} | {mark + ' | ' if mark else ''}{line}")
        for finding in (begun := self.health.add({"step": step, **metrics})):
            self.say(f"health: {one_line(finding)}")
            if finding.level == WRONG:
                self.broken = self.broken or finding
        if metrics.get("perf/out_of_memory"):
            self.say(f"note: memory ran out in step {step}; updates take fewer tokens at a time from now on")
        if held_out := self.display.evaluation(metrics):
            self.say(f"  held out at step {step}: {held_out}")
        if (samples := rows.get("samples.jsonl")) and (last or step % (4 * self.log_interval) == 0):
            self.say(sample_text(step, samples[0]))
        self._trackers.log(step, metrics, self._texts(step, samples or (), begun))
        if held_out and step and self._trackers:
            self._draw_curves(read_metrics(self.folder.path))
        if self._report.is_due():
            self._write_report(read_metrics(self.folder.path), "running")

    def _is_shown(self, step):
        """Whether this step has a printed line."""
        return step and (step == self.total_steps or step % self.log_interval == 0)

    def _texts(self, step, rows, begun):
        """The texts of a step for the trackers, [(name, text), …]: its samples where it has a printed line,
        and the findings that began with it."""
        samples = "\n\n".join(sample_text(step, row) for row in rows) if self._is_shown(step) else ""
        texts = ("samples", samples), ("findings", "\n".join(map(one_line, begun)))
        return [(name, text) for name, text in texts if text]

    def _steps_so_far(self):
        """The steps of a resumed run from its files, one by one -> (step, metrics, texts), for trackers."""
        rows, health = {}, Health(self.folder.config)
        if self.display.samples:
            for row in read_rows(self.folder.path / "samples.jsonl"):
                rows.setdefault(row["step"], []).append(row)
        for record in read_metrics(self.folder.path):
            begun, step = health.add(record), record.pop("step")
            yield step, record, self._texts(step, rows.get(step, ()), begun)

    def _draw_curves(self, records):
        """Write curves.png and give it to the trackers."""
        path = self.folder.path / "curves.png"
        try:
            with writing(path):
                plot_curves(records, self.display.panels, path)
        except ImportError:
            self.say("note: no curves.png and no report.html without matplotlib; pip install matplotlib")
            return
        self._trackers.picture(last_step(records), "curves", path)

    def say(self, text):
        """Print above the progress bar."""
        try:
            tqdm.write(text)
            sys.stdout.flush()
        except BrokenPipeError:  # the reader has ended (| head); the run continues without output
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def introduce(self, run, about):
        """Print the folder's notes, what the run is made of (``about``), its size and where it starts."""
        for note in self.folder.notes:
            self.say(note)
        world, dtype = run.world, str(run.dtype).removeprefix("torch.")
        if world.device.type == "cpu" and kernels_of("cpu") is None:
            self.say(
                "note: no C compiler (CC, or cc) compiles trainer/compute/cpu: all works, but slower; get gcc"
            )
        size = getattr(run.args, "mini_batch_size", 0) * world.size
        minibatches = f" in minibatches of {size}" if size else ""
        self.say(
            f"{about}\nrun      {run.total_steps} steps of {run.args.batch_size * world.size} "
            f"{self.display.unit}{minibatches}, {world.size} x {world.device.type} in {dtype}, "
            f"in {self.folder.path}"
            + (f"\nresumed  after step {run.progress.step}" if self.folder.checkpoint else "")
            + "".join(f"\n{line}" for line in self._trackers.about())
        )

    def keep_choice(self, name: str, value: float):
        """Write what the run has chosen for a flag into config.json, where health.py reads it."""
        self.folder.config[name] = value
        self.folder.write_config()

    def flush(self):
        """Force the log files to the disk. Call it before a checkpoint, which must not be ahead of them."""
        for file in self._files.values():
            with writing(file.name):
                os.fsync(file.fileno())

    def stopped(self, run):
        """Say where a run that stopped before its end can be seen, and the command that resumes it.

        A run that has learned nothing leaves no folder, unless there was one or it holds an evaluation."""
        self._bar.close()
        broken = self.ended_by
        remedy = f"start a new run with the remedy: {broken.remedy}" if broken else ""
        if not run.progress.step:
            self._close_files()
            if remedy:
                self.say(remedy)
            if self.folder.remove_if_unused():
                self.say(
                    f"nothing was learned, so {self.folder.path} was removed: start again without --resume"
                )
            return
        if saved := list_checkpoints(self.folder.path):  # first: torchrun may end this process while it plots
            more = run.progress.step < self.total_steps
            how = "to go on all the same" if broken else "to go on"
            go_on = f"{how}: {self.folder.config['resume_command']}" if more else ""
            self.say("\n".join(filter(None, (f"saved: {saved[-1]}", remedy, go_on))))
        # A full disk, or half a line: the error that ended the run says so.
        with contextlib.suppress(ValueError):
            self._write_summary(run, f"ended by --strict_health 1: {broken.name}" if broken else "stopped")
            self.say(f"so far: {self.folder.path / 'summary.md'}, report.html and curves.png")

    def summary(self, run):
        """Write curves.png, summary.md and report.html; print the summary, time, memory, files."""
        self._bar.close()
        (text, records), folder = self._write_summary(run, "ended"), self.folder.path
        seconds = time.perf_counter() - self._start
        rates = sorted(r["perf/samples_per_second"] for r in records if "perf/samples_per_second" in r)
        memory = f"{peak_memory() / 2**30:.1f} GiB of memory"
        if torch.cuda.is_available():
            memory += f", {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB of GPU memory"
        self.say(
            f"\n{text}\n{seconds:.0f} s, of which checkpoints {self.saving_seconds:.1f} s; "
            f"{rates[len(rates) // 2] if rates else 0:.1f} samples/s, at most {memory}"
            + (
                f"\nskipped  {run.progress.skipped_steps} updates, not finite"
                if run.progress.skipped_steps
                else ""
            )
            + f"\nsummary  {folder / 'summary.md'}\nreport   {folder / 'report.html'}"
            f"\ncurves   {folder / 'curves.png'}\n{run.results()}"
        )

    def _write_summary(self, run, state):
        """Write curves.png, summary.md and report.html (see ``Report.write``) -> the text of summary.md,
        and the lines of metrics.jsonl."""
        folder, records = self.folder.path, read_metrics(self.folder.path)
        text = summarise(run, records, self.saved_step, self.health.sorted, state)
        self._draw_curves(records)
        with writing(folder):
            write_whole(folder / "summary.md", text)
        self._trackers.text(last_step(records), "summary", text)
        self._write_report(records, state)
        return text, records

    def _write_report(self, records, state):
        if note := self._report.write(records, self.health.sorted, state):
            self.say(note)

    def _close_files(self):
        for file in self._files.values():
            with contextlib.suppress(OSError):  # a full disk was reported already
                file.close()

    def finish(self):
        self._bar.close()
        self._trackers.finish()
        self._close_files()
        self.folder.close()


def describe(metrics, line, only=None):
    """Metrics -> ``score 2.31 | kl 0.0210 | …``, in the order of a display's ``line``.

    only: words; parts of the line that contain none of them are left out.
    """
    texts = [shown(name, text, metrics[name]) for name, text in line if name in metrics]
    return " | ".join(t for t in texts if only is None or any(word in t for word in only))


def cut_lines(path, last_step):
    """Cut a JSONL file back to the lines of steps up to ``last_step``, to none for 0 -> the steps kept.

    So a resumed run does not repeat a step, and an incomplete last line is removed.
    """
    kept, steps = [], []
    if path.exists() and last_step:
        for line in path.read_bytes().split(b"\n"):  # str.splitlines would split texts too
            try:
                step = json.loads(line)["step"]
            except (ValueError, KeyError, TypeError):  # an incomplete line: the run was killed
                continue
            if step <= last_step:
                kept.append(line + b"\n")
                steps.append(step)
    write_whole(path, b"".join(kept))
    return steps


def read_metrics(folder):
    """The run's metrics.jsonl as a list of dicts; null becomes NaN."""
    records = read_rows(Path(folder) / "metrics.jsonl")
    return [{name: math.nan if x is None else x for name, x in r.items()} for r in records]
