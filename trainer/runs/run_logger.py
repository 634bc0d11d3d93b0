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
from statistics import median_high

import torch
from tqdm import tqdm

from atomic_files import last_written, sync, write_whole, writing
from trainer.compute.kernels import kernels_of
from trainer.compute.memory import peak_memory
from trainer.runs.checkpoints import list_checkpoints
from trainer.runs.displays import only_critic
from trainer.runs.health import WRONG, Health, as_markdown, one_line
from trainer.runs.report import Report, read_metrics, read_rows
from trainer.runs.samples import sample_text
from trainer.runs.summary import filled, in_words, tables, values_of
from trainer.runs.trackers import Trackers


class NullLogger:
    """The logger of all processes but the main one: it does nothing."""

    broken = None

    def log(self, *given):
        """Do nothing."""

    say = introduce = keep_choice = summary = stopped = finish = log


class RunLogger:
    """Writes to the run folder's log files, the terminal and the trackers.

    A resumed run continues its files, after cutting them back to the step of its checkpoint. Methods that
    write raise InputError if the disk cannot be written.
    """

    def __init__(self, folder, run):
        first_step = run.progress.step
        self.folder = folder
        self.display = run.display
        self.total_steps = run.total_steps
        shortest = max(1, self.total_steps // 20)  # so that a run prints 20 lines or more, if it has 20 steps
        self.log_interval = run.args.log_interval or min(self.display.log_interval, shortest)
        self.saved_step = first_step
        self.saving_seconds = 0.0
        self.result_time = last_written(run.result_file)  # or when this run has written it
        self._files = [folder.path / name for name in ("metrics.jsonl", *self.display.samples)]
        for path in self._files:
            with writing(path):
                cut_lines(path, first_step)
        self.health = Health(folder.config)
        self.broken = None  # the first finding of level "wrong" that has begun in this process
        self.ended_by = None  # the finding by which --strict_health 1 has ended the run
        self._bar = tqdm(
            total=self.total_steps, initial=first_step, desc=self.display.title, unit="step", disable=None
        )
        self._trackers = Trackers(run.args, folder, self.say)
        for record in read_metrics(folder.path):  # of a resumed run
            self.health.add(record)
            self._trackers.log(record.pop("step"), record, fresh=True)
        self._report = Report(run, folder, self.say)
        self._start = time.perf_counter()

    def log(self, step: int, metrics: dict, rows=()) -> None:
        """Log one step's metrics {name: mean} and {file: rows}: to files, trackers and progress bar.

        Every --log_interval steps a line is printed, and every fourth time a sample; both at the last step.
        Findings (health.py) are printed at any step.
        """
        # JSON has no NaN, so a number that is not finite (the loss of a skipped step) becomes null.
        numbers = {name: x if math.isfinite(x) else None for name, x in metrics.items()}
        rows = {"metrics.jsonl": [numbers], **dict(rows)}
        for name, records in rows.items():
            path = self.folder.path / name
            with writing(path), open(path, "a", encoding="utf-8") as file:
                file.write(as_lines({"step": step, **record} for record in records))
        line = self.display.step_line(metrics)
        self._bar.set_postfix_str(line, refresh=False)
        self._bar.update(step - self._bar.n)
        values = dict(metrics)  # and texts: what the trackers get
        samples = [sample_text(step, row) for row in rows.get("samples.jsonl", ())]
        last = step == self.total_steps
        if step and (last or step % self.log_interval == 0):
            mark = "only the critic trains | " if only_critic(metrics) else ""
            self.say(f"step {step}/{self.total_steps} | {mark}{line}")
            if samples:
                values["samples"] = "\n\n".join(samples)
                if last or step % (4 * self.log_interval) == 0:
                    self.say(samples[0])
        begun = self.health.add({"step": step, **metrics})
        for finding in begun:
            self.say(f"health: {one_line(finding)}")
            if finding.level == WRONG and not self.broken:
                self.broken = finding
        if begun:
            values["findings"] = "\n".join(map(one_line, begun))
        if metrics.get("perf/out_of_memory"):
            self.say(f"note: memory ran out in step {step}; updates take fewer tokens at a time from now on")
        held_out = self.display.evaluation_line(metrics)
        if held_out:
            self.say(f"  held out at step {step}: {held_out}")
        self._trackers.log(step, values)
        if self._report.is_due():
            self._report.write(self.health.sorted, "running")

    def say(self, text: str) -> None:
        """Print above the progress bar."""
        try:
            tqdm.write(text)
            sys.stdout.flush()
        except BrokenPipeError:  # the reader has ended (| head); the run continues without output
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def introduce(self, run, about: str) -> None:
        """Print the folder's notes, what the run is made of (``about``), its size and where it starts."""
        world = run.world
        lines = list(self.folder.notes)
        if world.device.type == "cpu" and kernels_of("cpu") is None:
            lines.append(
                "note: no C compiler (CC, or cc) compiles trainer/compute/cpu: all works, but slower; get gcc"
            )
        size = getattr(run.args, "mini_batch_size", 0) * world.size
        minibatches = f" in minibatches of {size}" if size else ""
        dtype = str(run.dtype).removeprefix("torch.")
        lines += [
            about,
            f"run      {run.total_steps} steps of {run.args.batch_size * world.size} "
            f"{self.display.unit}{minibatches}, {world.size} x {world.device.type} in {dtype}, "
            f"in {self.folder.path}",
        ]
        if self.folder.checkpoint:
            lines.append(f"resumed  after step {run.progress.step}")
        self.say("\n".join(lines))

    def keep_choice(self, name: str, value: float) -> None:
        """Write what the run has chosen for a flag into config.json, where health.py reads it."""
        self.folder.config[name] = value
        self.folder.write_config()

    def flush(self) -> None:
        """Force the log files to the disk. Call it before a checkpoint, which must not be ahead of them."""
        for path in self._files:
            with writing(path):
                sync(path)

    def stopped(self, run) -> None:
        """Say where a run that stopped before its end can be seen, and the command that resumes it.

        A run that has learned nothing leaves no folder, unless there was one or it holds an evaluation."""
        self._bar.close()
        step = run.progress.step
        saved = list_checkpoints(self.folder.path)
        lines = [f"saved: {saved[-1]}"] if saved else []
        state = "stopped"
        how = "to go on"
        if self.ended_by:
            state = f"ended by --strict_health 1: {self.ended_by.name}"
            how = "to go on all the same"
            lines.append(f"start a new run with the remedy: {self.ended_by.remedy}")
        if saved and step < self.total_steps:
            lines.append(f"{how}: {self.folder.config['resume_command']}")
        if not step and self.folder.remove_if_unused():
            lines.append(
                f"nothing was learned, so {self.folder.path} was removed: start again without --resume"
            )
        if lines:  # first: torchrun may end this process while it plots
            self.say("\n".join(lines))
        if step:
            with contextlib.suppress(ValueError):  # a full disk: the error that ended the run says so
                self._conclude(run, state)

    def summary(self, run) -> None:
        """Write summary.md, report.html and curves.png; print the summary, files, time, memory."""
        self._bar.close()
        records = self._conclude(run, "ended")
        seconds = time.perf_counter() - self._start
        rates = values_of(records, "perf/samples_per_second")
        memory = f"{peak_memory() / 2**30:.1f} GiB of memory"
        if torch.cuda.is_available():
            memory += f", {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB of GPU memory"
        self.say(
            f"{seconds:.0f} s, of which checkpoints {self.saving_seconds:.1f} s; "
            f"{median_high(rates or [0]):.1f} samples/s, at most {memory}\n{run.results()}"
        )

    def _conclude(self, run, state):
        """Write summary.md, report.html and curves.png, print the first -> the lines of metrics.jsonl. state:
        see ``in_words``."""
        folder = self.folder.path
        records = read_metrics(folder)
        findings = self.health.sorted
        text = filled(
            "summary.md.jinja2",
            run=run,
            words=in_words(run, records, state),
            findings=as_markdown(findings),
            tables=tables(run, records),
            saved_step=self.saved_step,
        )
        with writing(folder):
            write_whole(folder / "summary.md", text)
        self._trackers.log(run.progress.step, {"summary": text})
        self._report.write(findings, state)
        self.say(f"\n{text}\nreport   {folder / 'report.html'}, summary.md and curves.png")
        return records

    def finish(self) -> None:
        """Close all that is open, and unlock the folder."""
        self._bar.close()
        self._trackers.finish()
        self.folder.close()


def as_lines(rows) -> str:
    """Rows as JSONL."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def cut_lines(path: Path, last_step: int) -> None:
    """Cut a JSONL file back to the lines of steps up to ``last_step``, to none for 0.

    So a resumed run does not repeat a step, and an incomplete last line is removed.
    """
    kept = [row for row in read_rows(path) if row["step"] <= last_step] if last_step else ()
    write_whole(path, as_lines(kept))
