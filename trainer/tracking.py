"""What one sees of a run: exact averages, a progress bar, a line a step, sample texts, the end table.

What is shown differs from script to script: that is its ``Look``.

A run folder holds ``config.json``, ``metrics.jsonl`` (one object a step; step 0 is the evaluation before any
update), ``samples.jsonl`` (prompt, response, score parts) and ``curves.png``. SwanLab gets the same metrics
with ``--use_wandb``. Only the main process has a ``Tracker``; the others have a ``NullTracker``.
"""

import contextlib
import json
import math
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from files import write_whole, writing
from trainer import kernels
from trainer.checkpoints import list_checkpoints
from trainer.plots import plot_curves


@dataclass(frozen=True)
class Look:
    """How the runs of one script are shown, in names of metrics."""

    title: str  # of the progress bar
    folder: str  # run folders without a name are <folder>_<n>
    unit: str  # of a batch, for ``run     20 steps of 32 pairs``
    line: tuple  # (metric, how the line of a step shows it), …
    bar: tuple  # words of those that the bar shows
    panels: tuple  # of curves.png: (title, ((metric, label), …)), three a row
    best: str  # what evaluations are compared by
    evaluation: Callable  # metrics -> how the last evaluation reads, '' where there was none
    table: Callable  # all records -> the first evaluation beside the last one, in Markdown
    lower_is_better: bool = False
    samples: bool = False  # is there a samples.jsonl?


class Metrics:
    """Sums and their counts by name. Averaged once, over all micro-batches and processes: exact means."""

    def __init__(self):
        self._totals = {}

    def add(self, name, total, count):
        """Add a sum (tensor or number) over ``count`` tokens or sequences."""
        old_total, old_count = self._totals.get(name, (0.0, 0.0))
        total = total.detach().double() if isinstance(total, torch.Tensor) else total
        self._totals[name] = (old_total + total, old_count + count)

    def add_all(self, totals, count):
        for name, total in totals.items():
            self.add(name, total, count)

    def merge(self, other):
        for name, (total, count) in other._totals.items():
            self.add(name, total, count)

    def total(self, name):
        """The sum added so far under a name on this process, 0 if none."""
        return float(self._totals.get(name, (0.0, 0.0))[0])

    def means(self, world):
        """{name: mean over all that was added on all processes}; all must have added the same names."""
        flat = [float(x) for pair in self._totals.values() for x in pair]
        flat = world.sum(torch.tensor(flat, dtype=torch.float64, device=world.device)).view(-1, 2).tolist()
        return {
            name: total / max(count, 1.0) for name, (total, count) in zip(self._totals, flat, strict=True)
        }


class NullTracker:
    """What a process other than the first sees: nothing."""

    def log(self, step, metrics, rows=()):
        pass

    def say(self, text):
        pass

    def introduce(self, run, about):
        pass

    def summary(self, run):
        pass

    def stopped(self):
        pass

    def finish(self):
        pass


class Tracker:
    """Writes a run folder, the terminal and, if asked, SwanLab. A run that has made steps is continued."""

    def __init__(self, folder, run):
        self.folder, self.look, args, first_step = folder, run.look, run.args, run.progress.step
        self.total_steps, self.log_interval = run.total_steps, args.log_interval
        self.saved_step, self.saving_seconds = first_step, 0.0
        self._files = []
        for name in ("metrics.jsonl", *(["samples.jsonl"] if self.look.samples else [])):
            path = folder.path / name
            with writing(path):
                kept = cut_lines(path, first_step)
                self._files.append(open(path, "a", encoding="utf-8"))  # noqa: SIM115
            if first_step and name == "metrics.jsonl" and kept != list(range(first_step + 1)):
                folder.notes.append(f"note: {path} does not have every step up to {first_step}")
        shown = {"desc": self.look.title, "unit": "step", "disable": None}
        self._bar = tqdm(total=self.total_steps, initial=first_step, **shown)
        self._swanlab = start_swanlab(args, folder) if args.use_wandb else None
        self._start = time.perf_counter()

    def log(self, step, metrics, rows=()):
        """One step's averaged metrics and sample rows: to files and bar; a line every log_interval."""
        # JSON has no NaN: what was not finite, the loss of a step that was skipped, becomes null.
        numbers = {name: x if math.isfinite(x) else None for name, x in metrics.items()}
        for file, records in zip(self._files, ([numbers], rows), strict=False):
            with writing(file.name):
                for record in records:
                    file.write(json.dumps({"step": step, **record}, ensure_ascii=False) + "\n")
                file.flush()
        if self._swanlab:
            self._swanlab.log(metrics, step=step)
        self._bar.set_postfix_str(describe(metrics, self.look.line, self.look.bar), refresh=False)
        self._bar.update(step - self._bar.n)
        last = step == self.total_steps
        if step and (last or step % self.log_interval == 0):
            self.say(f"step {step}/{self.total_steps} | {describe(metrics, self.look.line)}")
        if metrics.get("perf/out_of_memory"):
            self.say(f"note: memory ran out in step {step}; updates take fewer tokens at a time from now on")
        if held_out := self.look.evaluation(metrics):
            self.say(f"  held out at step {step}: {held_out}")
        if rows and (last or step % (4 * self.log_interval) == 0):
            self.say(sample_text(step, rows[0]))

    def say(self, text):
        """Print above the progress bar."""
        try:
            tqdm.write(text)
            sys.stdout.flush()
        except BrokenPipeError:  # who read it has gone (| head): no reason to stop
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def introduce(self, run, about):
        """What is about to happen, and what the user should know about the run folder."""
        for note in self.folder.notes:
            self.say(note)
        world, dtype = run.world, str(run.dtype).removeprefix("torch.")
        if world.device.type == "cpu" and not kernels.serve(world.device):
            self.say(
                "note: no C compiler (CC, or cc) compiles trainer/native; all works, but slower: get gcc"
            )
        self.say(
            f"{about}\nrun      {run.total_steps} steps of {run.args.batch_size * world.size} "
            f"{self.look.unit}, {world.size} x {world.device.type} in {dtype}, in {self.folder.path}"
            + (f"\nresumed  after step {run.progress.step}" if self.folder.checkpoint else "")
        )

    def flush(self):
        """Force what has been logged to the disk: no checkpoint may know of a step that its files do not."""
        for file in self._files:
            with writing(file.name):
                os.fsync(file.fileno())

    def stopped(self):
        """Say how to go on with a run that did not reach its end."""
        self._bar.close()
        if saved := list_checkpoints(self.folder.path):
            self.say(f"saved: {saved[-1]}\nto go on: {self.folder.config['resume_command']}")

    def summary(self, run):
        """What the run achieved: before and after, time, memory, and where everything is."""
        self._bar.close()
        folder, progress = self.folder.path, run.progress
        records = read_metrics(folder)
        table = self.look.table(records)
        with writing(folder):
            plot_curves(records, self.look.panels, folder / "curves.png")
            write_whole(folder / "summary.md", table + "\n")
        seconds, host = time.perf_counter() - self._start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        rates = sorted(r["perf/samples_per_second"] for r in records if "perf/samples_per_second" in r)
        best = self.look.best.removeprefix("eval/")
        memory = f"{host / 2**20:.1f} GiB of memory"
        if torch.cuda.is_available():
            memory += f", {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB of GPU memory"
        self.say(
            f"\n{table}\n\n{seconds:.0f} s, of which checkpoints {self.saving_seconds:.1f} s; "
            f"{rates[len(rates) // 2] if rates else 0:.0f} samples/s, at most {memory}"
            + (f"\nbest     {best} {progress.best_score:.3f} at step {progress.best_step}" if table else "")
            + (f"\nskipped  {progress.skipped_steps} updates, not finite" if progress.skipped_steps else "")
            + f"\ncurves   {folder / 'curves.png'}\n{run.results()}"
        )

    def finish(self):
        self._bar.close()
        if self._swanlab:
            self._swanlab.finish()
        for file in self._files:
            with contextlib.suppress(OSError):  # a full disk has been reported, and leaves nothing to save
                file.close()
        self.folder.close()


def sample_rows(batch, texts, parts, count=2):
    """The first ``count`` samples of a batch as rows for samples.jsonl: prompt, response, score parts."""
    return [
        {"prompt": p.prompt, "response": text, "parts": {n: round(x[i].item(), 4) for n, x in parts.items()}}
        for i, (p, text) in enumerate(zip(batch[:count], texts, strict=False))
    ]


def describe(metrics, line, only=None):
    """``score 2.31 | kl 0.0210 | …`` of what ``metrics`` has, in the order of a look's line."""
    texts = [text.format(metrics[name]) for name, text in line if name in metrics]
    return " | ".join(t for t in texts if only is None or any(word in t for word in only))


def sample_text(step, row):
    """A prompt and its response with the parts of its score, indented under one header line."""
    prompt = row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][-1]["content"]
    parts = "  ".join(f"{name} {value:+.2f}" for name, value in row["parts"].items())
    body = "\n".join("    " + line for line in f"{prompt}\n{row['response']}".splitlines())
    return f"  sample at step {step}: {parts}\n{body}"


def cut_lines(path, last_step):
    """Keep the lines of a JSONL file up to a step, none for step 0 -> their steps.

    A resumed run neither repeats a step nor leaves a torn line.
    """
    kept, steps = [], []
    if path.exists() and last_step:
        for line in path.read_bytes().split(b"\n"):  # bytes: text may hold what splitlines takes for an end
            try:
                step = json.loads(line)["step"]
            except (ValueError, KeyError, TypeError):  # what was being written when the run was killed
                continue
            if step <= last_step:
                kept.append(line + b"\n")
                steps.append(step)
    write_whole(path, b"".join(kept))
    return steps


def read_metrics(folder):
    """The run's metrics.jsonl as a list of dicts."""
    lines = (Path(folder) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    return [{name: math.nan if x is None else x for name, x in r.items()} for r in records]


def start_swanlab(args, folder):
    """The SwanLab run: online when logged in, else offline in the run folder, for ``swanlab sync --id ID``.

    A resumed run has the same id (config.json has it): it goes on in the same place.
    """
    import swanlab  # only needed with --use_wandb

    return swanlab.init(
        project=args.wandb_project,
        name=folder.path.name,
        id=folder.config["swanlab_id"],
        resume="allow",
        config=vars(args),
        log_dir=str(folder.path / "swanlog"),
        mode="online" if swanlab.Settings().api_key else "offline",
    )
