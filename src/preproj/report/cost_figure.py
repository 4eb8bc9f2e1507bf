"""What quality costs: the first measure against trainable parameters and against time."""

from __future__ import annotations

import math

from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter

from preproj.report.drawn import Drawn, add_legend
from preproj.report.records import Interval, Run
from preproj.report.style import Medium, Style, styles


def draw_cost(run: Run, medium: Medium) -> Drawn | None:
    """Draws the first measure of every method against its parameters and against its time.

    Args:
        run: The run.
        medium: Where the figure is read.

    Returns:
        The figure, or None where no two methods have a score.
    """
    if not run.measures:
        return None
    measure = run.measures[0]
    scored = {method: scores[measure.name] for method, scores in run.scores.items() if measure.name in scores}
    scores = {method: score for method, score in scored.items() if math.isfinite(score.value)}
    if len(scores) < 2:
        return None
    look, scale = styles(run.methods), 100.0 if measure.kind == "accuracy" else 1.0
    drawing = medium.drawing(3.5, wide=True)
    parameters, time = drawing.subplots(1, 2, sharey=True)
    rows = []
    for method, score in scores.items():
        seconds = run.seconds(method)
        shown = Interval(scale * score.value, scale * score.low, scale * score.high)
        _point(parameters, run.size(method), shown, look[method])
        _point(time, seconds, shown, look[method])
        rows.append((method, run.size(method), seconds, score.value, score.low, score.high))
    parameters.set_xlabel("trainable parameters")
    parameters.xaxis.set_major_formatter(EngFormatter(sep=" "))
    time.set_xlabel("training + evaluation (s)")
    better = "higher is better" if measure.higher_is_better else "lower is better"
    parameters.set_ylabel(f"{measure.label}{' (%)' if measure.kind == 'accuracy' else ''}\n{better}")
    add_legend(drawing, run, list(scores), {})
    seeds = " Means over seeds." if run.several_seeds else ""
    return Drawn(
        "Cost against quality",
        f"Cost against quality: {measure.label} ({better}) of each method against its trainable parameters and "
        f"the seconds of one cell, with its 95 % interval over test items.{seeds}",
        drawing,
        ("method", "trainable parameters", "seconds", measure.label, "low", "high"),
        tuple(rows),
        ("training", measure.task, "intervals"),
    )


def _point(axes: Axes, x: float, score: Interval, style: Style) -> None:
    axes.plot([x, x], [score.low, score.high], color=style.colour, linewidth=1.2, alpha=0.7)
    axes.plot(x, score.value, marker=style.marker, color=style.colour, markersize=7)
    axes.margins(x=0.08)
