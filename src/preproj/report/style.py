"""The look of the figures: one colour, marker and line per method, in every figure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from html import escape
from io import StringIO
from itertools import cycle
from typing import Any

import matplotlib
import matplotlib.style
from matplotlib.figure import Figure as Drawing

INK = "#101010"
"""Stands for the colour of the page's text; becomes `currentColor`, which follows light and dark."""

SETTINGS = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.family": ["sans-serif"],
    "font.sans-serif": ["DejaVu Sans", "Verdana"],
    "font.size": 9,
    "axes.labelsize": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.linewidth": 0.5,
    "grid.alpha": 0.2,
    "legend.frameon": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color"), INK
    ),
}


@dataclass(frozen=True)
class Medium:
    """Where figures are read: matplotlib's settings, and the widths of a narrow and a wide figure in inches.

    `flat` is the height of a narrow figure over that of the same figure in the report.
    """

    settings: Mapping[str, Any]
    narrow: float
    wide: float
    flat: float = 1.0

    def drawing(self, height: float, *, wide: bool = False) -> Drawing:
        """An empty figure of a height in inches, as the report has it."""
        size = (self.wide, height) if wide else (self.narrow, self.flat * height)
        return Drawing(figsize=size, layout="constrained")

    def context(self) -> AbstractContextManager[None]:
        """A context in which drawing follows this medium, not the reader's own matplotlib settings."""
        return matplotlib.style.context(["default", dict(self.settings)])


REPORT = Medium(SETTINGS, narrow=7.0, wide=9.6)
"""The report's page."""

PAPER = Medium(
    SETTINGS
    | dict.fromkeys(("font.size", "axes.labelsize", "axes.titlesize", "legend.fontsize"), 8)
    | dict.fromkeys(("xtick.labelsize", "ytick.labelsize"), 7)
    | dict.fromkeys(("pdf.fonttype", "ps.fonttype"), 42),
    narrow=3.25,
    wide=6.75,
    flat=0.75,
)
"""Print: one column, or both; 8 points; no background; fonts embedded as TrueType (type 42), as publishers ask."""


@dataclass(frozen=True)
class Style:
    """How one method is drawn; each of the three alone tells methods apart."""

    colour: str
    marker: str
    line: tuple[float, Sequence[float]]


# Colours of Okabe and Ito, which colour-blind readers can tell apart; each is legible on white and on near-black.
KNOWN = {
    "none": Style(INK, "o", (0, (1, 2))),
    "pre": Style("#56B4E9", "s", (0, (5, 1.5))),
    "skip": Style("#009E73", "^", (0, (6, 1.5, 1, 1.5))),
    "pre+skip": Style("#0072B2", "D", (0, ())),
    "lora": Style("#D55E00", "v", (0, (2, 1))),
    "lora-qkv": Style("#E69F00", "P", (0, (4, 1, 1, 1, 1, 1))),
}
SPARE = (
    Style("#CC79A7", "X", (0, (9, 2))),
    Style("#888888", "*", (0, (3, 3))),
    Style("#A6761D", "h", (0, (9, 2, 3, 2))),
    Style("#AA4499", "<", (0, (1, 1))),
    Style("#7A8B00", "p", (0, (7, 1, 1, 1, 1, 1))),
    Style("#8C7AE6", ">", (0, (4, 4))),
    Style("#44AA99", "d", (0, (12, 2))),
)


def styles(methods: Sequence[str]) -> dict[str, Style]:
    """Gives every method its look.

    Args:
        methods: The methods of the run in recipe order.

    Returns:
        The fixed look of a known method; the next spare one for any other.
    """
    spare = cycle(SPARE)
    return {method: KNOWN.get(method) or next(spare) for method in methods}


def distinct_styles(methods: Sequence[str]) -> list[Style]:
    """Gives every curve a look of its own, where a method may come more than once.

    Args:
        methods: The method of each curve.

    Returns:
        The fixed look of a known method where it comes first; the next free one for any other.
    """
    known: dict[str, Style | None] = {method: KNOWN[method] for method in methods if method in KNOWN}
    every = [style for method, style in KNOWN.items() if method != "none"] + [*SPARE]
    free = cycle([style for style in every if style not in known.values()] or every)
    return [known.pop(method, None) or next(free) for method in methods]


def to_svg(drawing: Drawing, name: str, title: str) -> str:
    """Renders a figure as SVG that reads aloud, follows light and dark, and repeats byte for byte.

    Args:
        drawing: The figure.
        name: A short name; every id in the SVG starts with it, so that figures can share a page.
        title: What the figure shows, for those who do not see it.

    Returns:
        The `<svg>` element.
    """
    stream = StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        drawing.savefig(stream, format="svg", metadata=nothing)
    svg = stream.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"(fill|stroke): " + INK, r"\1: currentColor", svg)
    svg = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    opening = f'<svg class="figure" role="img" aria-label="{escape(title)}"'
    head, body = svg.removeprefix("<svg").split(">", 1)
    scheme = (
        "svg.figure{color:#1b1f24;background:#fff}"
        "@media screen and (prefers-color-scheme:dark){svg.figure{color:#e6e8ea;background:#15181c}}"
    )
    return f"{opening}{head}>\n <title>{escape(title)}</title>\n <style>{scheme}</style>{body}"
