"""The headline figure: each method's distance from the untouched model, with its 95 % interval."""

from __future__ import annotations

import math

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing

from preproj.report import units
from preproj.report.records import LAST_WORD, PERPLEXITY, Interval, Result, Run
from preproj.report.style import INK, Style, styles

BETTER = {PERPLEXITY: "left", LAST_WORD: "right"}


def draw_headline(run: Run) -> tuple[Drawing, str] | None:
    """Draws perplexity and last-word accuracy of every method as dots with whiskers.

    Args:
        run: The run.

    Returns:
        The drawing and its caption, or None if there are no two cells to set side by side. Without an
        untouched model to compare with, the dots are the values themselves and have no whiskers.
    """
    cells = run.finished
    if len(cells) < 2:
        return None
    baseline = run.baseline if any(run.baseline in result.versus for _, result in cells) else None
    methods = list(dict.fromkeys(row.method for row, _ in cells))
    look = styles(run.methods)
    drawing = Drawing(figsize=(7.4, 1.35 + 0.42 * len(methods)), layout="constrained")
    panels = drawing.subplots(1, len(run.measures), sharey=True, squeeze=False)[0]
    for axes, measure in zip(panels, run.measures, strict=True):
        for row, result in cells:
            of_method = [other.seed for other, _ in cells if other.method == row.method]
            offset = 0.22 * (of_method.index(row.seed) - (len(of_method) - 1) / 2)
            interval = _interval(result, measure, baseline, untouched=row.method == baseline)
            if interval is not None:
                value = units.measured(measure, result.value(measure))
                _dot(axes, interval, value, look[row.method], methods.index(row.method) + offset)
        _dress(axes, measure, baseline is not None)
    panels[0].set_yticks(range(len(methods)), methods)
    panels[0].set_ylim(len(methods) - 0.4, -0.6)
    reading = " and ".join(f"{measure} ({BETTER[measure]} is better)" for measure in run.measures)
    seeds = " One dot per seed." if run.several_seeds else ""
    if baseline is None:
        return drawing, f"Each method's {reading}.{seeds}"
    return drawing, (
        f"Difference from the untouched model in {reading}, with its 95 % interval over test documents. "
        f"The number beside a dot is the value itself.{seeds}"
    )


def _interval(result: Result, measure: str, baseline: str | None, *, untouched: bool) -> Interval | None:
    """What to draw, in units of the axis: a difference, or the value itself where nothing was compared."""
    value, comparison = result.value(measure), result.versus.get(baseline or "")
    interval: Interval | None
    if baseline is None:
        interval = Interval(value, value, value) if value is not None else None
    elif untouched:
        interval = Interval(0, 0, 0)
    else:
        interval = comparison.interval(measure) if comparison else None
    if interval is None or not all(map(math.isfinite, (interval.difference, interval.low, interval.high))):
        return None
    scale = 100.0 if measure == LAST_WORD else 1.0
    return Interval(scale * interval.difference, scale * interval.low, scale * interval.high)


def _dot(axes: Axes, interval: Interval, value: str, style: Style, y: float) -> None:
    axes.plot([interval.low, interval.high], [y, y], color=style.colour, linewidth=1.8)
    axes.plot(interval.difference, y, marker=style.marker, color=style.colour, markersize=6.5)
    axes.annotate(value, (interval.high, y), (7, 0), textcoords="offset points", va="center", fontsize=8)


def _dress(axes: Axes, measure: str, compared: bool) -> None:
    better = "higher is better →" if measure == LAST_WORD else "← lower is better"
    unit = "" if measure != LAST_WORD else "percentage points; " if compared else "%; "
    if compared:
        axes.axvline(0, color=INK, linewidth=0.8)
    axes.set_xlabel(f"{f'Δ {measure} vs untouched' if compared else measure}\n({unit}{better})")
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    # Room on the right for the number beside the last whisker.
    left, right = axes.dataLim.intervalx
    if not math.isfinite(right - left):
        return
    span = (right - left) or 1.0
    axes.set_xlim(left - 0.08 * span, right + 0.25 * span)
