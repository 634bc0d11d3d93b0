"""The plots of a run: curves.png, and those of report.html as SVG that takes its colours from the page.

The SVGs are drawn with placeholders for colours, which are then replaced by the variables of the page's style
(``--c1`` and so on in report.html.jinja2). So a plot follows the page into dark mode. Text stays text, in the
page's font, and the legends are the page's own: ``Plot.labels``.

matplotlib is imported where something is drawn: a run needs it only now and then. pyplot and computed layouts
are avoided: each takes longer than the drawing, and every short run would wait for them.
"""

import html
import io
import math
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from trainer.runs.displays import DISTRIBUTIONS, Panel, Records

HERE = Path(__file__).parent  # of the style sheets
MOST_POINTS = 500  # of a curve; with more steps a point is the mean of several
MOST_COLUMNS = 250  # of a distribution, as above
ROWS = 48  # of a distribution, at most
LABEL_WIDTH = 0.05  # of a plot's width: labels that are closer are joined
# The variables of the page and their placeholders, also in report.mplstyle. No other colour may be used.
VARIABLES = ["text", "grid", "wrong", "look", *(f"c{n}" for n in range(1, 9))]
COLOURS = {name: f"#fe01{n:02x}" for n, name in enumerate(VARIABLES)}
HEAT_RGB = 0.23, 0.51, 0.84  # of the picture of a distribution, for light and dark: only its opacity varies


class Plot(NamedTuple):
    """A plot of report.html. labels: of its curves; per_point: steps that a point is the mean of."""

    panel: Panel
    svg: str
    labels: list[str]
    per_point: int


def draw_png(records: Records, panels: tuple[Panel, ...], path: Path) -> None:
    """Draw the records of a metrics.jsonl as a PNG at ``path``: the panels, three in a row."""
    import matplotlib
    from matplotlib.figure import Figure

    rows = math.ceil(len(panels) / 3)
    height = 3.1 * rows  # inches
    with matplotlib.rc_context(fname=HERE / "curves.mplstyle"):
        figure = Figure(figsize=(12, height))
        axes = figure.subplots(rows, 3)
        figure.subplots_adjust(top=1 - 0.3 / height, bottom=0.5 / height)
        for axis, panel in zip(axes.flat, panels, strict=True):
            draw_curves(axis, panel, records)
            axis.set_title(panel.title)
            axis.set_xlabel("step")
            if axis.lines:
                axis.legend()
        figure.savefig(path)


def draw_report(
    records: Records, findings: list, panels: tuple[Panel, ...], histograms: list[dict]
) -> tuple[list[Plot], list[Plot]]:
    """-> (curves, distributions) of report.html: those that the run has numbers for.

    findings: [(number, ``Finding``)], which are marked at their steps; histograms: rows of histograms.jsonl.
    """
    import matplotlib
    from matplotlib.figure import Figure

    def plot(panel, labels, draw, drawn):
        axis = Figure().subplots()
        axis.locator_params(axis="x", integer=True, nbins=7)
        axis.locator_params(axis="y", nbins=6)
        per_point = draw(axis, panel, drawn)
        return Plot(panel, _as_svg(axis, panel.title, records, findings), labels, per_point)

    curves = []
    distributions = []
    with matplotlib.rc_context(fname=HERE / "report.mplstyle"):
        for panel in panels:
            if labels := list(panel.curves(records).values()):
                curves.append(plot(panel, labels, draw_curves, records))
        for panel in DISTRIBUTIONS:
            (name,) = panel.series
            if found := [row for row in histograms if row.get(name)]:
                distributions.append(plot(panel, [], draw_distribution, found))
    return curves, distributions


def draw_curves(axis, panel: Panel, records: Records) -> int:
    """Draw a panel's curves; evaluations get markers -> how many steps a point of a curve is the mean of: in
    a long run several, and a band goes from the least to the most of them."""
    per_point = math.ceil(len(records) / MOST_POINTS)
    for name, label in panel.curves(records).items():
        points = np.array([(r["step"], r[name]) for r in records if name in r], dtype=float)
        evaluated = name.startswith("eval/")
        if evaluated or len(points) <= MOST_POINTS:
            axis.plot(*points.T, label=label, marker="o" if evaluated or len(points) == 1 else None)
            continue
        finite = points[np.isfinite(points[:, 1])]
        blocks = [finite[i : i + per_point] for i in range(0, len(finite), per_point)]
        band = [(*block.mean(0), block[:, 1].min(), block[:, 1].max()) for block in blocks]
        steps, means, least, most = np.array(band).reshape(-1, 4).T
        (line,) = axis.plot(steps, means, label=label)
        axis.fill_between(steps, least, most, color=line.get_color(), alpha=0.2, linewidth=0)
    return per_point


def draw_distribution(axis, panel: Panel, found: list[dict]) -> int:
    """Draw the histograms of these rows of histograms.jsonl: a column a step, the stronger the more
    responses, the median as a line -> how many steps a column has.

    All columns have the same rows. A few steps with values far outside do not stretch them: what is beyond
    lies in the row at the edge."""
    (name,) = panel.series
    per_column = math.ceil(len(found) / MOST_COLUMNS)
    low = np.quantile([row[name]["low"] for row in found], 0.02)
    high = np.quantile([row[name]["high"] for row in found], 0.98)
    room = 0.5 * (low == high)
    edges = np.linspace(low - room, high + room, ROWS + 1)
    columns = []
    points = []  # (step, median) of each column
    for start in range(0, len(found), per_column):
        group = found[start : start + per_column]
        counts = sum(counted(row[name], edges) for row in group)
        columns.append(counts / counts.sum())
        middle = np.searchsorted(np.cumsum(counts), counts.sum() / 2)
        points.append((group[len(group) // 2]["step"], edges[middle : middle + 2].mean()))
    shares = np.array(columns).T
    picture = np.empty((*shares.shape, 4))
    picture[..., :3] = HEAT_RGB
    picture[..., 3] = np.sqrt(shares / shares.max())
    axis.imshow(picture, extent=(found[0]["step"] - 0.5, found[-1]["step"] + 0.5, edges[0], edges[-1]))
    axis.plot(*zip(*points, strict=True), color=COLOURS["text"])
    return per_column


def counted(histogram: dict, edges: np.ndarray) -> np.ndarray:
    """A histogram's counts between other edges; those of a bin are spread over it evenly."""
    low = histogram["low"]
    high = max(histogram["high"], low + 1e-6 * (edges[1] - edges[0]))  # of equal numbers the bin has no width
    so_far = np.cumsum([0, *histogram["counts"]])
    below = np.interp(edges, np.linspace(low, high, len(so_far)), so_far)
    below[0] = 0
    below[-1] = so_far[-1]
    return np.diff(below)


def _as_svg(axis, title: str, records: Records, findings: list) -> str:
    """What was drawn, as the text of an ``svg`` element with the page's colours that fills the width it is
    given. The steps are those of the whole run in all plots."""
    first, last = (records[0]["step"], records[-1]["step"]) if records else (0, 0)
    room = 0.02 * (last - first) or 1
    axis.set_xlim(first - room, last + room)
    _mark_findings(axis, findings, LABEL_WIDTH * (last - first + 2 * room))
    file = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    axis.figure.savefig(file, format="svg", metadata=nothing)
    text = re.sub(r' id="[a-zA-Z0-9]+_\d+"', "", file.getvalue())  # each plot would have the same
    for name, colour in COLOURS.items():
        text = text.replace(colour, f"var(--{name})")
    head, _, body = text[text.index("<svg") :].partition(">")
    head = re.sub(r' (width|height)="[^"]*"', "", head)
    return f'{head} role="img"><title>{html.escape(title)}</title>{body}'


def _mark_findings(axis, findings: list, width: float) -> None:
    """A vertical line at each step at which a finding begins, and the number of the first of them where there
    is room: with a + if others begin there or less than ``width`` behind it."""
    by_level = sorted(findings, key=lambda pair: pair[1].level)  # "wrong" is the last one
    colours = {finding.step: COLOURS[finding.level] for _, finding in by_level}
    for step, colour in colours.items():
        axis.axvline(step, color=colour, linewidth=1, linestyle=(0, (4, 2)))
    labels = {}  # {step: numbers}
    place = -math.inf
    for number, finding in sorted(findings, key=lambda pair: pair[1].step):
        if finding.step - place > width:
            place = finding.step
        labels.setdefault(place, []).append(number)
    for step, numbers in labels.items():
        text = f"{min(numbers)}{'+' * (len(numbers) > 1)}"
        height = axis.get_xaxis_transform()
        axis.text(step, 1.01, text, transform=height, ha="center", weight="bold", color=colours[step])
