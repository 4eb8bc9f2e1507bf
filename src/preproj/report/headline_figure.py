"""The headline figure: each method's distance from the untouched model, with its 95 % interval."""

from __future__ import annotations

import math

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing

from preproj.report import units
from preproj.report.records import Interval, Result, Row, Run
from preproj.report.style import INK, Style, styles
from preproj.report.tables import interval_of

MEASURES = ("perplexity", "last-word accuracy")


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
    compared = any(run.baseline in result.versus for _, result in cells)
    methods = list(dict.fromkeys(row.method for row, _ in cells))
    look = styles(run.methods)
    drawing = Drawing(figsize=(7.4, 1.35 + 0.42 * len(methods)), layout="constrained")
    panels = drawing.subplots(1, 2, sharey=True)
    for axes, measure in zip(panels, MEASURES, strict=True):
        for row, result in cells:
            seeds = [other.seed for other, _ in cells if other.method == row.method]
            offset = 0.22 * (seeds.index(row.seed) - (len(seeds) - 1) / 2)
            _dot(axes, run, (row, result), look[row.method], measure, methods.index(row.method) + offset, compared)
        _dress(axes, measure, compared)
    panels[0].set_yticks(range(len(methods)), methods)
    panels[0].set_ylim(len(methods) - 0.4, -0.6)
    if not compared:
        return drawing, "Perplexity (lower is better) and last-word accuracy (higher is better) of each method."
    return drawing, (
        "Difference from the untouched model in perplexity (left is better) and in last-word accuracy "
        "(right is better), with its 95 % interval over test documents. The number beside a dot is the value itself."
        + (" One dot per seed." if run.several_seeds else "")
    )


def _dot(axes: Axes, run: Run, cell: tuple[Row, Result], style: Style, measure: str, y: float, compared: bool) -> None:
    row, result = cell
    points = measure != "perplexity"
    scale = 100.0 if points else 1.0
    value = result.last_word_accuracy if points else result.perplexity
    interval = Interval(value, value, value)
    if compared:
        comparison = result.versus.get(run.baseline or "")
        if comparison is None and row.method != run.baseline:
            return
        interval = interval_of(comparison, measure) if comparison else Interval(0, 0, 0)
    if not all(map(math.isfinite, (interval.difference, interval.low, interval.high))):
        return
    axes.plot([scale * interval.low, scale * interval.high], [y, y], color=style.colour, linewidth=1.8)
    axes.plot(scale * interval.difference, y, marker=style.marker, color=style.colour, markersize=6.5)
    text = units.accuracy(value) if points else units.perplexity(value)
    axes.annotate(text, (scale * interval.high, y), (7, 0), textcoords="offset points", va="center", fontsize=8)


def _dress(axes: Axes, measure: str, compared: bool) -> None:
    better = "← lower is better" if measure == "perplexity" else "higher is better →"
    unit = "" if measure == "perplexity" else "percentage points; " if compared else "%; "
    if compared:
        axes.axvline(0, color=INK, linewidth=0.8)
    axes.set_xlabel(f"{f'Δ {measure} vs untouched' if compared else measure}\n({unit}{better})")
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    # Room on the right for the number beside the last whisker.
    left, right = axes.dataLim.intervalx
    span = (right - left) or 1.0
    axes.set_xlim(left - 0.08 * span, right + 0.25 * span)
