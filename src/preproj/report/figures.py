"""The figures of a run. Which figures there are depends on what the run measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from preproj.report.cost_figure import draw_cost
from preproj.report.curves_figure import draw_curves
from preproj.report.drawn import Drawn
from preproj.report.headline_figure import draw_headline
from preproj.report.layer_figures import (
    PRE_TO_INPUT,
    SKIP_NORM,
    SKIP_TO_ATTENTION,
    WITHOUT_PRE,
    WITHOUT_SKIP,
    draw_layers,
)
from preproj.report.records import Run
from preproj.report.style import REPORT, Medium, to_svg
from preproj.report.table import to_csv

FIGURES = {
    "headline": draw_headline,
    "learning-curves": draw_curves,
    "cost-quality": draw_cost,
    "skip-norm": lambda run, medium: draw_layers(run, medium, SKIP_NORM),
    "skip-to-attention": lambda run, medium: draw_layers(run, medium, SKIP_TO_ATTENTION),
    "without-skip": lambda run, medium: draw_layers(run, medium, WITHOUT_SKIP),
    "pre-to-input": lambda run, medium: draw_layers(run, medium, PRE_TO_INPUT),
    "without-pre": lambda run, medium: draw_layers(run, medium, WITHOUT_PRE),
}
"""Every figure a report can have, in reading order; each becomes `figures/<name>.svg`."""


@dataclass(frozen=True)
class Figure:
    """A figure of the report with its caption, and its numbers as comma-separated values."""

    name: str
    title: str
    caption: str
    svg: str
    csv: str


def draw(run: Run, medium: Medium) -> Iterator[tuple[str, Drawn]]:
    """Draws the figures of a run, each with its name; call it inside the medium's context.

    Args:
        run: The run.
        medium: Where the figures are read.

    Yields:
        The figures that the run has numbers for, in reading order.
    """
    for name, drawer in FIGURES.items():
        if (drawn := drawer(run, medium)) is not None:
            yield name, drawn


def figures(run: Run) -> tuple[Figure, ...]:
    """Draws the figures of the report.

    Args:
        run: The run.

    Returns:
        The figures that the run has numbers for, in reading order.
    """
    methods = ", ".join(run.methods)
    with REPORT.context():
        return tuple(
            Figure(
                name,
                drawn.title,
                drawn.caption,
                to_svg(drawn.drawing, name, f"{drawn.caption} Methods: {methods}."),
                to_csv(drawn.columns, drawn.rows),
            )
            for name, drawn in draw(run, REPORT)
        )
