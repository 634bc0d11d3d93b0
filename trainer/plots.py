"""The learning curves of a run as one picture. Text colours and grids are light; data carries the ink."""

PANELS = (  # title, [(metric, label)]
    ("reward (rollouts)", (("reward/score", "score"), ("reward/model", "reward model"))),
    (
        "form (rollouts)",
        (("reward/format", "format"), ("reward/marks", "marks"), ("rollout/finished", "ended")),
    ),
    (
        "held-out problems, never rewarded",
        (("eval/accuracy", "sampled accuracy"), ("eval/accuracy_greedy", "greedy accuracy")),
    ),
    ("KL to the reference (nats a token)", (("kl/k1", "k1"), ("kl/k3", "k3"))),
    ("response length (tokens)", (("rollout/length", "mean length"),)),
    (
        "update",
        (("policy/clip_fraction", "clip fraction"), ("value/explained_variance", "explained variance")),
    ),
)


def plot_curves(records, path):
    """Draw the records of a metrics.jsonl (a list of dicts) as a PNG at ``path``."""
    # Only needed once, at the end of a run. Not pyplot, nor a layout that is computed: both take longer than
    # the drawing itself, which every short run would wait for.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 6.2))
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 3)
    figure.subplots_adjust(left=0.06, right=0.99, top=0.95, bottom=0.08, wspace=0.22, hspace=0.32)
    for axis, (title, series) in zip(axes.flat, PANELS, strict=True):
        for name, label in series:
            points = [(r["step"], r[name]) for r in records if name in r]
            if points:
                marker = "o" if name.startswith("eval/") else None
                axis.plot(*zip(*points, strict=True), label=label, linewidth=1.6, marker=marker, markersize=4)
        axis.set_title(title, fontsize=10, loc="left")
        axis.set_xlabel("step", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        if axis.lines:
            axis.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=110)
