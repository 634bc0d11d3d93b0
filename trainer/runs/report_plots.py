"""The plots of report.html: curves and distributions as SVG that takes its colours from the page.

matplotlib draws with placeholders for colours, which are then replaced by the variables of the page's style
(``--c1`` and so on in report.html.jinja2). So a plot follows the page into dark mode. Text stays text, in the
page's font, and the legends are the page's own: ``Plot.labels``.
"""

import io
import math
import re
from functools import partial
from typing import NamedTuple

import numpy as np

from trainer.runs.displays import metric_names

SIZE = 4.6, 2.5  # inches; the page scales it
COLOURS = 8  # --c1 to --c8 of the page
MOST_POINTS = 500  # of a curve; with more steps a point is the mean of several
MOST_COLUMNS = 250  # of a distribution, as above
ROWS = 48  # of a distribution, at most
LABEL_WIDTH = 0.05  # of a plot's width: labels that are closer are joined
# The placeholders. No other colour may be used.
TEXT, GRID, WRONG, LOOK = "#fe0101", "#fe0102", "#fe0103", "#fe0104"
VARIABLES = {TEXT: "--text", GRID: "--grid", WRONG: "--wrong", LOOK: "--look"}
VARIABLES |= {f"#fe02{n:02x}": f"--c{n + 1}" for n in range(COLOURS)}
HEAT_RGB = 0.23, 0.51, 0.84  # of the picture of a distribution, for light and dark: only its opacity varies
SETTINGS = {
    "svg.fonttype": "none",
    "svg.hashsalt": "report",
    "font.size": 8,
    "text.parse_math": False,
    "axes.edgecolor": GRID,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": TEXT,
    "ytick.labelcolor": TEXT,
    "text.color": TEXT,
    "axes.labelcolor": TEXT,
}


class Plot(NamedTuple):
    """A drawn plot. labels: [(label, number of its colour)]; per_point: steps that a point is the mean of."""

    title: str
    look_for: str
    svg: str
    labels: list
    per_point: int


class Drawing:
    """Draws plots one after the other, with the same figure: making one takes longer than drawing into it.

    records: the run's metrics (list of dicts); findings: [(number, ``Finding``)], marked at their steps.
    """

    def __init__(self, records, findings):
        # imported here because a run needs it only now and then; pyplot would take longer than the drawing
        import matplotlib
        from matplotlib.figure import Figure

        self.records, self.findings = records, findings
        self._settings = partial(matplotlib.rc_context, SETTINGS)
        with self._settings():
            self._figure = Figure(figsize=SIZE)
            self._axis = axis = self._figure.add_axes((0.11, 0.11, 0.87, 0.8))
            axis.grid(axis="y", color=GRID, linewidth=0.6)
            axis.set_axisbelow(True)
            axis.spines[["top", "right", "left"]].set_visible(False)
            axis.tick_params(length=0)
            axis.locator_params(axis="x", integer=True, nbins=7)
            axis.locator_params(axis="y", nbins=6)
            for patch in (self._figure.patch, axis.patch):
                patch.set_visible(False)

    def curves(self, panel):
        """A ``Panel`` (panels.py) -> ``Plot``, None if the run has none of its metrics."""
        series = [
            (name, label) for known, label in panel.series for name in metric_names(known, self.records)
        ]
        if not series:
            return None
        per_point, labels = math.ceil(len(self.records) / MOST_POINTS), []
        for n, (name, label) in enumerate(series):
            points = np.array([(r["step"], r[name]) for r in self.records if name in r], dtype=float)
            points[~np.isfinite(points)] = np.nan
            colour = f"#fe02{n % COLOURS:02x}"
            _draw_curve(self._axis, points, colour, per_point, evaluated=name.startswith("eval/"))
            labels.append((label or name.split("/", 1)[1], n % COLOURS + 1))
        return Plot(panel.title, panel.look_for, self._finished(panel.title), labels, per_point)

    def distribution(self, title, look_for, rows, name):
        """The histograms ``name`` of these rows of histograms.jsonl -> ``Plot``, None if there are none: a
        column a step, the stronger the more responses, the median as a line."""
        found = [(row["step"], row[name]) for row in rows if row.get(name)]
        if not found:
            return None
        per_column = math.ceil(len(found) / MOST_COLUMNS)
        edges = _common_edges([histogram for _, histogram in found], whole=name == "length")
        columns, medians, steps = [], [], []
        for start in range(0, len(found), per_column):
            group = found[start : start + per_column]
            counts = sum(_counted(histogram, edges) for _, histogram in group)
            columns.append(counts / counts.sum())
            medians.append(_median(counts, edges))
            steps.append(group[len(group) // 2][0])
        shares = np.array(columns).T
        picture = np.empty((*shares.shape, 4))
        picture[..., :3], picture[..., 3] = HEAT_RGB, np.sqrt(shares / shares.max())
        extent = found[0][0] - 0.5, found[-1][0] + 0.5, edges[0], edges[-1]
        how = {"origin": "lower", "aspect": "auto", "interpolation": "none"}
        self._axis.imshow(picture, extent=extent, **how)
        self._axis.plot(steps, medians, color=TEXT, linewidth=1.2)
        return Plot(title, look_for, self._finished(title), [], per_column)

    def _finished(self, title):
        """What was drawn, as the text of an ``svg`` element that fills the width it is given. The axis is
        empty again afterwards."""
        axis, file = self._axis, io.StringIO()
        steps = [r["step"] for r in self.records] or [0]
        room = 0.02 * (steps[-1] - steps[0]) or 1
        axis.set_xlim(steps[0] - room, steps[-1] + room)  # of all plots the same
        _mark_findings(axis, self.findings)
        with self._settings():
            self._figure.savefig(
                file, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
            )
        for artist in (*axis.lines, *axis.collections, *axis.images, *axis.texts):
            artist.remove()
        axis.relim()
        axis.autoscale(True)
        return _svg(file.getvalue(), title)


def _draw_curve(axis, points, colour, per_point, evaluated):
    """Draw [(step, value)] [n, 2]. With several steps a point, their mean, and from least to most a band."""
    if evaluated or len(points) <= MOST_POINTS:
        dots = {"marker": "o", "markersize": 3} if evaluated or len(points) == 1 else {}
        axis.plot(*points.T, color=colour, linewidth=1.5, **dots)
        return
    blocks = [points[i : i + per_point] for i in range(0, len(points), per_point)]
    blocks = [block[np.isfinite(block[:, 1])] for block in blocks]
    steps, mean, least, most = np.array(
        [(*block.mean(0), block[:, 1].min(), block[:, 1].max()) for block in blocks if len(block)]
    ).T.reshape(4, -1)
    axis.fill_between(steps, least, most, color=colour, alpha=0.2, linewidth=0)
    axis.plot(steps, mean, color=colour, linewidth=1.5)


def _mark_findings(axis, findings):
    """A vertical line at each step at which a finding begins, and the number of the first of them where there
    is room: with a + if others begin there or close by."""
    left, right = axis.get_xlim()
    wrong, labels = {}, []  # {step: is one of its findings wrong}; [(step, numbers)]
    for number, finding in sorted(findings, key=lambda pair: pair[1].step):
        wrong[finding.step] = wrong.get(finding.step, False) or finding.level == "wrong"
        if not labels or finding.step - labels[-1][0] > LABEL_WIDTH * (right - left):
            labels.append((finding.step, []))
        labels[-1][1].append(number)
    colours = {step: WRONG if is_wrong else LOOK for step, is_wrong in wrong.items()}
    for step, colour in colours.items():
        axis.axvline(step, color=colour, linewidth=1, linestyle=(0, (4, 2)))
    place = {"transform": axis.get_xaxis_transform(), "ha": "center", "va": "bottom", "weight": "bold"}
    for step, numbers in labels:
        axis.text(step, 1.01, f"{min(numbers)}{'+' * (len(numbers) > 1)}", color=colours[step], **place)


def _svg(text, title):
    """What matplotlib has written -> an ``svg`` element with the page's colours and this title."""
    text = text[text.index("<svg") :]
    text = re.sub(r' id="[a-zA-Z0-9]+_\d+"', "", text)  # each plot would have the same
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    size = re.search(r'viewBox="[^"]*"', text)[0]
    names = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    return f'<svg {size} role="img" {names}><title>{_escaped(title)}</title>{text[text.index(">") + 1 :]}'


def _escaped(text):
    return text.replace("&", "&amp;").replace("<", "&lt;")


def _common_edges(histograms, whole):
    """The edges of the rows of a distribution. A few steps with values far outside do not stretch them:
    what is beyond lies in the row at the edge."""
    low = float(np.quantile([h["low"] for h in histograms], 0.02))
    high = float(np.quantile([h["high"] for h in histograms], 0.98))
    if whole:
        low, high = math.floor(low - 0.5) + 0.5, math.ceil(high - 0.5) + 0.5
        width = math.ceil((high - low) / ROWS)
        return np.arange(low, high + width, width)
    if low == high:
        low, high = low - 0.5, high + 0.5
    return np.linspace(low, high, ROWS + 1)


def _counted(histogram, edges):
    """A histogram's counts between other edges; those of a bin are spread over it evenly."""
    low, high, counts = histogram["low"], histogram["high"], histogram["counts"]
    if low == high:
        places = np.searchsorted(edges, [low], side="right") - 1
        found = np.zeros(len(edges) - 1)
        found[places.clip(0, len(found) - 1)] = counts[0]
        return found
    below = np.interp(edges, np.linspace(low, high, len(counts) + 1), np.cumsum([0, *counts]))
    below[0], below[-1] = 0, sum(counts)
    return np.diff(below)


def _median(counts, edges):
    """The middle of the row that holds the median."""
    row = int(np.searchsorted(np.cumsum(counts), counts.sum() / 2))
    return (edges[row] + edges[row + 1]) / 2
