"""The plots of a run: curves.png, and those of report.html as SVG that takes its colours from the page.

The SVGs are drawn with placeholders for colours, #fe01c1 and so on (report.mplstyle), which are then replaced
by the variables of the page's style: ``--c1`` and so on in report.html.jinja2. So a plot follows the page
into dark mode. Text stays text, and the legends are the page's own.

This module is imported where something is drawn: matplotlib takes long to load. pyplot and computed layouts
are avoided: each takes longer than the drawing, and every short run would wait for them.
"""

import io
import math
import re
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from trainer.runs.displays import Panel, Records

HERE = Path(__file__).parent  # of the style sheets
MOST_POINTS = 500  # of a curve; with more steps a point is the mean of several
ROOM = 0.05  # of a plot's width: of findings that begin closer together only the first one is marked
LEVELS = {"wrong": "#fe01ca", "look": "#fe01cb"}  # colours of findings


def draw_panel(axis, panel: Panel, rows: list[dict]) -> None:
    """Draw a panel's curves. Each has at most ``MOST_POINTS`` points: in a long run a point is the mean of
    several steps, and a band goes from the least to the most of them. Deciles of a step (samples.py) are
    drawn as the median with a band around it for each pair of them. Evaluations get markers.
    """
    for name, label in panel.curves(rows).items():
        points = [row for row in rows if name in row]
        size = math.ceil(len(points) / MOST_POINTS)
        steps = []
        fans = []
        for start in range(0, len(points), size):
            block = points[start : start + size]
            values = np.array([row[name] for row in block])
            steps.append(np.mean([row["step"] for row in block]))
            one_each = values.ndim == 1
            fans.append([values.min(), values.mean(), values.max()] if one_each else values.mean(0))
        fans = np.array(fans).T
        middle = len(fans) // 2
        marker = "o" if name.startswith("eval/") or len(steps) == 1 else None
        (line,) = axis.plot(steps, fans[middle], label=label, marker=marker)
        for k in range(middle):
            axis.fill_between(steps, fans[k], fans[-1 - k], color=line.get_color(), alpha=0.2, linewidth=0)


def draw_png(records: Records, panels: tuple[Panel, ...], path: Path) -> None:
    """Draw the records of a metrics.jsonl as a PNG at ``path``: the panels, three in a row."""
    rows = math.ceil(len(panels) / 3)
    with matplotlib.rc_context(fname=HERE / "curves.mplstyle"):
        figure = Figure(figsize=(12, 3.1 * rows))
        for axis, panel in zip(figure.subplots(rows, 3).flat, panels, strict=True):
            draw_panel(axis, panel, records)
            axis.set(title=panel.title, xlabel="step")
            if axis.lines:
                axis.legend()
        figure.savefig(path)


def draw_svgs(rows: list[dict], panels: tuple[Panel, ...], findings: list) -> list[dict]:
    """The plots of report.html -> {"panel", "labels", "svg"} of each panel that these rows have numbers for.

    rows: of metrics.jsonl or deciles.jsonl; findings: [(number, ``Finding``)], marked at their steps.
    """
    plots = []
    with matplotlib.rc_context(fname=HERE / "report.mplstyle"):
        for panel in panels:
            curves = panel.curves(rows)
            if curves:
                axis = Figure().subplots()
                draw_panel(axis, panel, rows)
                mark_findings(axis, findings)
                plots.append({"panel": panel, "labels": list(curves.values()), "svg": svg_of(axis.figure)})
    return plots


def mark_findings(axis, findings: list) -> None:
    """A vertical line and a number at each step at which a finding begins: the most important one first."""
    left, right = axis.get_xlim()
    marked = []
    for number, finding in findings:
        step = finding.step
        if all(abs(step - other) > ROOM * (right - left) for other in marked):
            marked.append(step)
            colour = LEVELS[finding.level]
            above = axis.get_xaxis_transform()
            axis.axvline(step, color=colour, linewidth=1, linestyle="--")
            axis.text(step, 1.01, number, transform=above, ha="center", weight="bold", color=colour)


def svg_of(figure: Figure) -> str:
    """A figure as the text of an ``svg`` element with the page's colours."""
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    svg = re.sub("#fe01(c.)", r"var(--\1)", file.getvalue())
    return svg[svg.index("<svg") :]
