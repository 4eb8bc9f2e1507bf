"""A figure before it becomes a file: what is drawn, what it says, and the numbers in it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from matplotlib.figure import Figure as Drawing
from matplotlib.lines import Line2D

from preproj.report.records import Run
from preproj.report.style import Style, styles


@dataclass(frozen=True)
class Drawn:
    """A drawing with its caption, its numbers and the entries of the run's protocol that made them.

    `title` names the figure in a few words; the caption says what is drawn and what the marks mean.
    """

    title: str
    caption: str
    drawing: Drawing
    columns: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]
    protocol: tuple[str, ...]


def mark(style: Style) -> Line2D:
    """A method's line and marker, for a legend."""
    return Line2D([], [], color=style.colour, linestyle=style.line, marker=style.marker, linewidth=1.8, markersize=5)


def add_legend(drawing: Drawing, run: Run, methods: list[str], more: dict[str, Line2D]) -> None:
    """Names methods below a drawing.

    Args:
        drawing: The drawing.
        run: Its run.
        methods: The methods in it.
        more: Further marks by their names.
    """
    look = styles(run.methods)
    add_marks(drawing, {method: mark(look[method]) for method in methods} | more)


def add_marks(drawing: Drawing, marks: dict[str, Line2D]) -> None:
    """Explains marks below a drawing, in as many columns as fit.

    Args:
        drawing: The drawing.
        marks: The marks by their names.
    """
    width = drawing.get_size_inches()[0]
    longest = max(map(len, marks)) * 0.085 + 0.65
    columns = max(1, min(len(marks), math.floor(width / longest)))
    drawing.legend(list(marks.values()), list(marks), loc="outside lower center", ncols=columns, handlelength=3.2)
