"""The plots of a run: curves.png, and those of report.html as SVG that takes its colours from the page.

The SVGs are drawn with placeholders for colours, #fe01c1 and so on (report.mplstyle), which are then replaced
by the variables of the page's style: ``--c1`` and so on in report.html.jinja2. So a plot follows the page
into dark mode. Text stays text, and the legends are the page's own.

pyplot and computed layouts are avoided: each takes longer than the drawing, and every short run would wait.
"""

import io
import re
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from trainer.runs.displays import Panel
from trainer.runs.health import Finding, History

HERE = Path(__file__).parent  # of the style sheets


def draw_panel(axis: Axes, panel: Panel, history: History) -> None:
    """Draw a panel's curves. Evaluations get markers, and so does a single step."""
    for name, label in panel.curves(history.values).items():
        values = history.values[name]
        marker = "o" if name.startswith("eval/") or len(values) == 1 else None
        axis.plot(history.steps[name], values, label=label, marker=marker)


def draw_png(history: History, panels: tuple[Panel, ...], path: Path) -> None:
    """Draw a run as a PNG at ``path``: the panels, three in a row, no row with less."""
    rows = len(panels) // 3
    with matplotlib.rc_context(fname=HERE / "curves.mplstyle"):
        figure = Figure(figsize=(12, 3.1 * rows))
        for axis, panel in zip(figure.subplots(rows, 3).flat, panels, strict=True):
            draw_panel(axis, panel, history)
            axis.set(title=panel.title, xlabel="step")
            if axis.lines:
                axis.legend()
        figure.savefig(path)


def draw_svgs(history: History, panels: tuple[Panel, ...], findings: list[Finding]) -> dict[str, str]:
    """The plots of report.html -> {title: SVG} of those panels that this run has numbers for. A dashed
    line is the step at which a finding begins."""
    svgs = {}
    with matplotlib.rc_context(fname=HERE / "report.mplstyle"):
        for panel in panels:
            figure = Figure()
            axis = figure.subplots()
            draw_panel(axis, panel, history)
            if not axis.lines:
                continue
            for finding in findings:
                colour = "#fe01ca" if finding.level == "wrong" else "#fe01cb"
                axis.axvline(finding.step, color=colour, linewidth=1, linestyle="--")
            file = io.StringIO()
            figure.savefig(file, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
            svg = re.sub("#fe01(c.)", r"var(--\1)", file.getvalue())
            svgs[panel.title] = svg[svg.index("<svg") :]
    return svgs
