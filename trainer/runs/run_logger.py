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
from collections import defaultdict
from pathlib import Path
from statistics import median_high

import torch
from tqdm import tqdm

from atomic_files import last_written, sync, write_whole, writing
from errors import InputError
from trainer.compute.kernels import kernels_of
from trainer.compute.memory import peak_memory
from trainer.runs.checkpoints import list_checkpoints
from trainer.runs.displays import Records, only_critic
from trainer.runs.health import Health, one_line
from trainer.runs.health_rules import WRONG
from trainer.runs.plots import draw_png
from trainer.runs.report import Report, last_step, read_rows
from trainer.runs.samples import sample_text
from trainer.runs.summary import summarise
from trainer.runs.trackers import Trackers

DRAWN = 6  # panels of curves.png; report.html has all


class NullLogger:
    """The logger of all processes but the main one: it does nothing."""

    broken = None
    ended_by = None

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
        records = read_metrics(folder.path)  # of a resumed run
        if first_step and [record["step"] for record in records] != list(range(first_step + 1)):
            folder.notes.append(f"note: {self._files[0]} does not have every step up to {first_step}")
        self.health = Health(folder.config)
        self.broken = None  # the first finding of level "wrong" that has begun in this process
        self.ended_by = None  # the finding by which --strict_health 1 has ended the run
        self._bar = tqdm(
            total=self.total_steps, initial=first_step, desc=self.display.title, unit="step", disable=None
        )
        self._trackers = Trackers(run.args, folder, self.say)
        self._take_up(records)
        self._report = Report(run, folder, self.say)
        self._start = time.perf_counter()

    def log(self, step: int, metrics: dict, rows=()) -> None:
        """Log one step's metrics {name: mean} and {file: rows}: to files, trackers and progress bar.

        Every --log_interval steps a line is printed, and every fourth time a sample; both at the last step.
        Findings (health.py) are printed at any step.
        """
        if not self.folder.path.exists():
            raise InputError(
                f"{self.folder.path}: the run folder was removed or renamed while the run goes on, so "
                "nothing can be saved there; start the run again, and leave its folder where it is"
            )
        # JSON has no NaN, so a number that is not finite (the loss of a skipped step) becomes null.
        numbers = {name: x if math.isfinite(x) else None for name, x in metrics.items()}
        rows = {"metrics.jsonl": [numbers], **dict(rows)}
        for name, records in rows.items():
            path = self.folder.path / name
            with writing(path), open(path, "a", encoding="utf-8") as file:
                for record in records:
                    file.write(json.dumps({"step": step, **record}, ensure_ascii=False) + "\n")
        self._bar.set_postfix_str(self.display.step_line(metrics, in_bar=True), refresh=False)
        self._bar.update(step - self._bar.n)
        if self._is_shown(step):
            mark = "only the critic trains | " if only_critic(metrics) else ""
            self.say(f"step {step}/{self.total_steps} | {mark}{self.display.step_line(metrics)}")
        begun = self.health.add({"step": step, **metrics})
        for finding in begun:
            self.say(f"health: {one_line(finding)}")
            if finding.level == WRONG and not self.broken:
                self.broken = finding
        if metrics.get("perf/out_of_memory"):
            self.say(f"note: memory ran out in step {step}; updates take fewer tokens at a time from now on")
        held_out = self.display.evaluation_line(metrics)
        if held_out:
            self.say(f"  held out at step {step}: {held_out}")
        samples = rows.get("samples.jsonl", ())
        if samples and self._is_shown(step, 4):
            self.say(sample_text(step, samples[0]))
        self._trackers.log(step, metrics, self._texts(step, samples, begun))
        if held_out and step and self._trackers:
            self._draw_curves(read_metrics(self.folder.path))
        if self._report.is_due():
            self._report.write(read_metrics(self.folder.path), self.health.sorted, "running")

    def _is_shown(self, step, every=1):
        """Whether this step has a printed line; every 4: only of every fourth line."""
        return step and (step == self.total_steps or step % (every * self.log_interval) == 0)

    def _texts(self, step, rows, begun):
        """The texts of a step for the trackers, {name: text}: its samples where it has a printed line, and
        the findings that began with it."""
        texts = {}
        if rows and self._is_shown(step):
            texts["samples"] = "\n\n".join(sample_text(step, row) for row in rows)
        if begun:
            texts["findings"] = "\n".join(map(one_line, begun))
        return texts

    def _take_up(self, records):
        """Give the steps of a resumed run to the health, which has found some of its findings, and to the
        trackers that have nothing of them."""
        samples = defaultdict(list)
        for row in read_rows(self.folder.path / "samples.jsonl") if self._trackers else ():
            samples[row["step"]].append(row)
        for record in records:
            begun = self.health.add(record)
            step = record.pop("step")
            self._trackers.log(step, record, self._texts(step, samples[step], begun), fresh=True)

    def _draw_curves(self, records):
        """Write curves.png and give it to the trackers."""
        path = self.folder.path / "curves.png"
        try:
            with writing(path):
                draw_png(records, self.display.panels[:DRAWN], path)
        except ImportError:
            self.say("note: no curves.png and no report.html without matplotlib; pip install matplotlib")
        else:
            self._trackers.picture(last_step(records), "curves", path)

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
        self.say("\n".join([*lines, *self._trackers.about()]))

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
        state = "stopped"
        how = "to go on"
        remedy = ""
        if self.ended_by:
            state = f"ended by --strict_health 1: {self.ended_by.name}"
            how = "to go on all the same"
            remedy = f"start a new run with the remedy: {self.ended_by.remedy}\n"
        if not run.progress.step:
            if self.folder.remove_if_unused():
                remedy += (
                    f"nothing was learned, so {self.folder.path} was removed: start again without --resume"
                )
            if remedy:
                self.say(remedy.strip())
            return
        if saved := list_checkpoints(self.folder.path):  # first: torchrun may end this process while it plots
            go_on = f"{how}: {self.folder.config['resume_command']}"
            more = run.progress.step < self.total_steps
            self.say(f"saved: {saved[-1]}\n{remedy}{go_on if more else ''}".strip())
        # A full disk, or half a line: the error that ended the run says so.
        with contextlib.suppress(ValueError):
            self._write_summary(run, state)
            self.say(f"so far: {self.folder.path / 'summary.md'}, report.html and curves.png")

    def summary(self, run) -> None:
        """Write curves.png, summary.md and report.html; print the summary, time, memory, files."""
        self._bar.close()
        text, records = self._write_summary(run, "ended")
        folder = self.folder.path
        seconds = time.perf_counter() - self._start
        rates = [r["perf/samples_per_second"] for r in records if "perf/samples_per_second" in r]
        memory = f"{peak_memory() / 2**30:.1f} GiB of memory"
        if torch.cuda.is_available():
            memory += f", {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB of GPU memory"
        lines = [
            f"\n{text}",
            f"{seconds:.0f} s, of which checkpoints {self.saving_seconds:.1f} s; "
            f"{median_high(rates or [0]):.1f} samples/s, at most {memory}",
        ]
        if run.progress.skipped_steps:
            lines.append(f"skipped  {run.progress.skipped_steps} updates, not finite")
        lines += [
            f"summary  {folder / 'summary.md'}",
            f"report   {folder / 'report.html'}",
            f"curves   {folder / 'curves.png'}",
            run.results(),
        ]
        self.say("\n".join(lines))

    def _write_summary(self, run, state):
        """Write curves.png, summary.md and report.html (see ``Report.write``) -> the text of summary.md,
        and the lines of metrics.jsonl."""
        records = read_metrics(self.folder.path)
        text = summarise(run, records, self.saved_step, self.health.sorted, state)
        self._draw_curves(records)
        with writing(self.folder.path):
            write_whole(self.folder.path / "summary.md", text)
        self._trackers.give("text", last_step(records), "summary", text)
        self._report.write(records, self.health.sorted, state)
        return text, records

    def finish(self) -> None:
        """Close all that is open, and unlock the folder."""
        self._bar.close()
        self._trackers.give("finish")
        self.folder.close()


def cut_lines(path: Path, last_step: int) -> None:
    """Cut a JSONL file back to the lines of steps up to ``last_step``, to none for 0.

    So a resumed run does not repeat a step, and an incomplete last line is removed.
    """
    kept = []
    # str.splitlines would split texts too
    for line in path.read_bytes().splitlines() if last_step and path.exists() else ():
        with contextlib.suppress(ValueError, KeyError, TypeError):  # an incomplete line: the run was killed
            if json.loads(line)["step"] <= last_step:
                kept.append(line + b"\n")
    write_whole(path, b"".join(kept))


def read_metrics(folder: Path) -> Records:
    """The run's metrics.jsonl; null becomes NaN."""
    records = read_rows(Path(folder) / "metrics.jsonl")
    return [{name: math.nan if x is None else x for name, x in r.items()} for r in records]
