"""The headline figure: each method's distance from the untouched model, with its 95 % interval."""

from __future__ import annotations

import math
from collections.abc import Iterator

from matplotlib.axes import Axes

from preproj.report import units
from preproj.report.drawn import Drawn
from preproj.report.records import Interval, Measure, Run
from preproj.report.style import INK, Medium, Style, styles

COLUMNS = 3
"""Panels beside each other, at most."""

COLUMN_TITLES = (
    *("measure", "method", "value", "low", "high"),
    *("difference from the untouched model", "difference low", "difference high"),
)


def draw_headline(run: Run, medium: Medium) -> Drawn | None:
    """Draws every measure of every method as dots with whiskers, one panel a measure.

    Args:
        run: The run.
        medium: Where the figure is read.

    Returns:
        The figure, or None if there are no two methods to set side by side. Without an
        untouched model to compare with, the dots are the values themselves.
    """
    methods = list(run.scores)
    if len(methods) < 2 or not run.measures:
        return None
    compared = run.baseline in methods
    look = styles(run.methods)
    lines = math.ceil(len(run.measures) / COLUMNS)
    columns = math.ceil(len(run.measures) / lines)
    drawing = medium.drawing(lines * (0.95 + 0.3 * len(methods)), wide=columns > 1)
    panels = list(drawing.subplots(lines, columns, sharey=True, squeeze=False).flat)
    for axes, measure in zip(panels, run.measures, strict=False):
        for place, method in enumerate(methods):
            interval = _interval(run, measure, method, compared=compared)
            if interval is not None:
                value = units.measured(measure, run.scores[method][measure.name].value)
                _dot(axes, interval, value, look[method], place)
        _dress(axes, measure, compared)
    for axes in panels[len(run.measures) :]:
        axes.set_visible(False)
    first = drawing.axes[0]
    first.set_yticks(range(len(methods)), methods)
    first.set_ylim(len(methods) - 0.4, -0.6)
    reading = ", ".join(
        f"{measure.label} ({'right' if measure.higher_is_better else 'left'} is better)" for measure in run.measures
    )
    seeds = " Means over seeds." if run.several_seeds else ""
    caption = (
        f"Difference from the untouched model in {reading}, with its 95 % interval over test items. "
        f"The number beside a dot is the value itself.{seeds}"
        if compared
        else f"Each method's {reading}, with its 95 % interval over test items.{seeds}"
    )
    tasks = dict.fromkeys(measure.task for measure in run.measures)
    return Drawn("Every measure", caption, drawing, COLUMN_TITLES, tuple(_rows(run)), ("training", *tasks, "intervals"))


def _rows(run: Run) -> Iterator[tuple[object, ...]]:
    for measure in run.measures:
        for method, scores in run.scores.items():
            pair = run.pair(method, run.baseline)
            ends = (scores.get(measure.name), pair.differences.get(measure.name) if pair else None)
            numbers = [number for end in ends for number in ((end.value, end.low, end.high) if end else (None,) * 3)]
            yield (measure.label, method, *numbers)


def _interval(run: Run, measure: Measure, method: str, *, compared: bool) -> Interval | None:
    """What to draw, in units of the axis: a difference, or the value itself where nothing was compared."""
    if not compared:
        interval = run.scores[method].get(measure.name)
    elif method == run.baseline:
        interval = Interval(0, 0, 0)
    else:
        pair = run.pair(method, run.baseline)
        interval = pair.differences.get(measure.name) if pair else None
    if interval is None or not all(map(math.isfinite, (interval.value, interval.low, interval.high))):
        return None
    scale = 100.0 if measure.kind == "accuracy" else 1.0
    return Interval(scale * interval.value, scale * interval.low, scale * interval.high)


def _dot(axes: Axes, interval: Interval, value: str, style: Style, y: float) -> None:
    axes.plot([interval.low, interval.high], [y, y], color=style.colour, linewidth=1.8)
    axes.plot(interval.value, y, marker=style.marker, color=style.colour, markersize=6)
    axes.annotate(value, (interval.high, y), (7, 0), textcoords="offset points", va="center", fontsize=8)


def _dress(axes: Axes, measure: Measure, compared: bool) -> None:
    better = "higher is better →" if measure.higher_is_better else "← lower is better"
    unit = "" if measure.kind != "accuracy" else "percentage points; " if compared else "%; "
    if compared:
        axes.axvline(0, color=INK, linewidth=0.8)
    axes.set_xlabel(f"{f'Δ {measure.label} vs untouched' if compared else measure.label}\n({unit}{better})")
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    # Room on the right for the number beside the last whisker.
    left, right = axes.dataLim.intervalx
    if not math.isfinite(right - left):
        return
    span = (right - left) or 1.0
    axes.set_xlim(left - 0.08 * span, right + 0.25 * span)
