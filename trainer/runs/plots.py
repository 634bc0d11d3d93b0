"""The learning curves of a run as one picture (curves.png)."""

import math

from trainer.runs.displays import metric_names


def plot_curves(records, panels, path):
    """Draw the records of a metrics.jsonl (a list of dicts) as a PNG at ``path``.

    panels: list of ``Panel`` (displays.py), three in a row. Evaluations get markers. Without a label a metric
    is called by its name.
    """
    # matplotlib is imported here because only the end of a run needs it. pyplot and computed layouts are
    # avoided: each takes longer than the drawing, and every short run would wait for them.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = math.ceil(len(panels) / 3)
    height = 3.1 * rows  # inches
    figure = Figure(figsize=(12, height))
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, 3)
    edges = {"left": 0.06, "right": 0.99, "top": 1 - 0.3 / height, "bottom": 0.5 / height}
    figure.subplots_adjust(**edges, wspace=0.22, hspace=0.32)
    for axis, (title, series, _) in zip(axes.flat, panels, strict=True):
        for name, label in (
            (name, label) for known, label in series for name in metric_names(known, records)
        ):
            points = [(r["step"], r[name]) for r in records if name in r]
            label = label or name.split("/")[1]
            marker = "o" if name.startswith("eval/") or len(points) == 1 else None
            axis.plot(*zip(*points, strict=True), label=label, linewidth=1.6, marker=marker, markersize=4)
        axis.set_title(title, fontsize=10, loc="left")
        axis.set_xlabel("step", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        if axis.lines:
            axis.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=110)
