"""Logging of a run: log files, progress bar, printed lines, sample texts, and the summary at the end.

The ``Display`` of each script says what is shown (displays.py). Trackers such as TensorBoard get the same
metrics (trackers.py). Only the main process has a ``RunLogger``; the others have a ``NullLogger``.
"""

import contextlib
import json
import math
import os
import sys
import textwrap
import time
from collections.abc import Iterable, Mapping

import torch
from tqdm import tqdm

from atomic_files import sync, write_whole, writing
from errors import InputError, first_line
from progress_bar import process_seconds
from trainer.compute.kernels import kernels_of
from trainer.compute.memory import peak_memory
from trainer.runs.base import Run
from trainer.runs.checkpoints import list_checkpoints
from trainer.runs.displays import Row, Rows, as_line, call_text, read_rows
from trainer.runs.health import Health, one_line
from trainer.runs.report import write_report
from trainer.runs.resume import RunFolder
from trainer.runs.trackers import Trackers

MIN_LINES = 100  # that a run prints at least, if it has so many steps, where --log_interval is 0
LONGEST_LINE = 400  # characters of a turn in a printed sample
REPORT_PAUSE = 100  # times what writing report.html took: so it takes at most 1 % of a run


class NullLogger:
    """The logger of all processes but the main one: it does nothing."""

    def log(self, *given: object) -> None:
        """Do nothing."""

    show = say = introduce = keep_choice = flush = summary = stopped = finish = log


class RunLogger:
    """Writes to the run folder's log files, the terminal and the trackers.

    A resumed run continues its files, after cutting them back to the step of its checkpoint. Methods that
    write raise InputError if the disk cannot be written.
    """

    def __init__(self, folder: RunFolder, run: Run) -> None:
        first_step = run.progress.step
        self.run = run
        self.folder = folder
        self.log_interval = run.args.log_interval or max(1, run.total_steps // MIN_LINES)
        self._files = [folder.path / name for name in ("metrics.jsonl", *run.display.samples)]
        for path in self._files:
            # So a resumed run does not repeat a step, and an incomplete last line is removed.
            kept = [row for row in read_rows(path) if first_step and row["step"] <= first_step]
            with writing(path):
                write_whole(path, as_lines(kept))
        self.health = Health(folder.config)
        self._bar = tqdm(
            total=run.total_steps, initial=first_step, desc=run.display.title, unit="step", disable=None
        )
        self._trackers = Trackers(run.args, folder.path, folder.config["run_id"], first_step, self.say)
        for record in read_rows(self._files[0]):  # of a resumed run, whose findings were said
            self.health.add(record)
        self._report_due = time.perf_counter() + REPORT_PAUSE  # as if writing it took a second

    def show(self, step: int, metrics: Mapping[str, float], rows: Rows) -> None:
        """Show what a step has learned, before it is evaluated and logged: in the progress bar and, every
        --log_interval steps and at the last one, as a line, every fourth time with a sample."""
        line = as_line(self.run.display.line, metrics)
        self._bar.set_postfix_str(line, refresh=False)
        self._bar.update(step - self._bar.n)
        if self._is_shown(step):
            self.say(f"step {step}/{self.run.total_steps} | {line}")
            samples = rows.get("samples.jsonl")
            if samples and step % (4 * self.log_interval) == 0:
                self.say(sample_text(step, samples[0]))
        if metrics.get("perf/out_of_memory"):
            self.say(f"note: memory ran out in step {step}; updates take fewer tokens at a time from now on")

    def _is_shown(self, step: int) -> bool:
        return step == self.run.total_steps or step % self.log_interval == 0

    def log(self, step: int, metrics: Mapping[str, float], rows: Rows) -> None:
        """Log one step's metrics {name: mean}, with those of its evaluation, and {file: rows}: to files and
        trackers. Print the evaluation and the findings (health.py) that begin with this step."""
        # JSON has no NaN, so a number that is not finite (the loss of a skipped step) becomes null.
        numbers = {name: x if math.isfinite(x) else None for name, x in metrics.items()}
        for name, records in {"metrics.jsonl": [numbers], **rows}.items():
            path = self.folder.path / name
            with writing(path), open(path, "a", encoding="utf-8") as file:
                file.write(as_lines({"step": step, **record} for record in records))
        values: dict[str, float | str] = dict(metrics)  # what the trackers get
        if self._is_shown(step) and rows.get("samples.jsonl"):
            values["samples"] = "\n\n".join(sample_text(step, row) for row in rows["samples.jsonl"])
        held_out = as_line(self.run.display.evaluation, metrics)
        if held_out:
            self.say(f"  held out at step {step}: {held_out}")
        for finding in self.health.add({"step": step, **metrics}):
            self.say(f"health: {one_line(finding)}")
        self._trackers.log(step, values)
        if time.perf_counter() >= self._report_due:
            self._report("running")

    def say(self, text: str) -> None:
        """Print above the progress bar."""
        try:
            tqdm.write(text)
            sys.stdout.flush()
        except OSError:  # the reader has ended (| head), or a disk is full; the run continues without output
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def introduce(self, about: str) -> None:
        """Print the folder's notes, what the run is made of (``about``), its size and where it starts."""
        run = self.run
        world = run.world
        for note in self.folder.notes:
            self.say(note)
        if world.device.type == "cpu" and kernels_of("cpu") is None:
            self.say(
                "note: no C compiler (CC, or cc) compiles trainer/compute/cpu: all works, but slower; get gcc"
            )
        self.say(
            f"{about}\nrun      {run.total_steps} steps of {run.args.batch_size * world.size} "
            f"{run.display.unit}, {world.size} x {world.device.type} in {run.dtype}, in {self.folder.path}"
        )
        if run.args.max_steps > run.total_steps:
            self.say(
                f"note: --max_steps {run.args.max_steps}: --epochs {run.args.epochs} ends after "
                f"{run.total_steps} steps; raise it too"
            )
        if self.folder.checkpoint:
            self.say(f"resumed  after step {run.progress.step}")

    def keep_choice(self, name: str, value: float) -> None:
        """Write what the run has chosen for a flag, or has done, into config.json, unless it is there."""
        if self.folder.config.get(name) != value:
            self.folder.config[name] = value
            self.folder.write_config()

    def flush(self) -> None:
        """Force the log files to the disk. Call it before a checkpoint, which must not be ahead of them."""
        for path in self._files:
            with writing(path):
                sync(path)

    def stopped(self) -> None:
        """Say where a run that stopped before its end can be seen, and the command that resumes it.

        A run that has learned nothing leaves no folder, unless there was one or it holds an evaluation."""
        self._bar.close()
        saved = list_checkpoints(self.folder.path)
        if saved:
            self.say(f"saved: {saved[-1]}\nto go on: {self.folder.config['resume_command']}")
        if self.run.progress.step:
            with contextlib.suppress(ValueError):  # a full disk: the error that ended the run says so
                self._conclude("stopped")
        elif self.folder.remove_if_unused():
            self.say(f"nothing was learned, so {self.folder.path} was removed: start again without --resume")

    def summary(self) -> None:
        """Write summary.md, report.html and curves.png; print the summary, files, time, memory."""
        self._bar.close()
        self._conclude("ended")
        memory = torch.cuda.max_memory_allocated() or peak_memory()
        run = self.run
        times = spent(process_seconds(), run.start_seconds, run.evaluation_seconds)
        self.say(f"{times}; at most {memory / 2**30:.1f} GiB of memory\n{run.results()}")

    def _conclude(self, state: str) -> None:
        """Write summary.md, report.html and curves.png for the last time, print the first."""
        text = self._report(state)
        self._trackers.log(self.run.progress.step, {"summary": text})
        self.say(f"\n{text}\nreport   {self.folder.path / 'report.html'}, summary.md and curves.png")

    def _report(self, state: str) -> str:
        """Write them -> the text of summary.md. If that fails, a line says so: a fault in it must not end a
        run."""
        start = time.perf_counter()
        text = ""
        try:
            text = write_report(self.run, self.health, state)
        except InputError:
            raise
        except Exception as error:
            self.say(
                f"note: report.html cannot be made ({type(error).__name__}: {first_line(error)}); report it "
                "on the project's issue page"
            )
        end = time.perf_counter()
        self._report_due = end + REPORT_PAUSE * (end - start)
        return text

    def finish(self) -> None:
        """Close all that is open, and unlock the folder."""
        self._bar.close()
        self._trackers.finish()
        self.folder.close()


def spent(total: float, start: float, evaluation: float) -> str:
    """What the seconds of a process went into: the start, evaluations, and the rest, which is training."""
    total, start, evaluation = (round(x) for x in (total, start, evaluation))
    training = max(0, total - start - evaluation)
    return f"{total} s: start {start}, training {training}, evaluation {evaluation}"


def sample_text(step: int, row: Row) -> str:
    """A row of samples.jsonl as text: a header with the parts of the score, then prompt and response; of a
    response in several turns each in a line of its own."""
    parts = "  ".join(f"{name} {value:+z.2f}" for name, value in row["parts"].items())
    prompt = row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][-1]["content"]
    response = "\n".join(map(turn_line, row["messages"])) if "messages" in row else row["response"]
    body = textwrap.indent(f"{prompt}\n{response}", "    ")
    return f"  sample at step {step}: {parts}\n{body}"


def turn_line(message: Row) -> str:
    """A turn as a line: who speaks, what is said, which tools are called with what."""
    said = textwrap.shorten(message["content"], LONGEST_LINE, placeholder=" …")
    calls = map(call_text, message.get("tool_calls", ()))
    return " ".join(filter(None, [f"{message['role']}:", said, *calls]))


def as_lines(rows: Iterable[Row]) -> str:
    """Rows as JSONL."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
