"""One measure of layers over relative depth, for several methods, runs and models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.lines import Line2D

from preproj.report.drawn import Drawn, add_marks, mark
from preproj.report.layer_curves import Curves
from preproj.report.style import INK, Medium, distinct_styles


@dataclass(frozen=True)
class Shown:
    """A measure that is compared: the figure's title, the axis, and what it is in words."""

    title: str
    label: str
    words: str


SHOWN = {
    "skip_norm": Shown("Size of the skip", "‖W_skip‖", "Frobenius norm of W_skip"),
    "skip_change_norm": Shown(
        "Change of the skip", "‖W_skip − W_skip⁰‖", "Frobenius norm of W_skip less its start W_skip⁰"
    ),
    "skip_to_attention": Shown("Skip beside attention", "‖s‖ / ‖a‖", "mean of ‖s‖ / ‖a‖ over tokens"),
    "skip_cosine": Shown("Direction of the skip", "cos(s, a)", "mean cosine of s and a over tokens"),
    "skip_share": Shown("Share of the skip", "⟨s, u⟩ / ⟨u, u⟩", "share of s in the update u = a + s"),
    "pre_norm": Shown("Size of the pre-projection", "‖pre‖", "Frobenius norm of the linearised pre-projection"),
    "pre_to_input": Shown("Reach of the pre-projection", "‖x̃ − x̂‖ / ‖x̂‖", "mean of ‖x̃ − x̂‖ / ‖x̂‖ over tokens"),
}
"""What is drawn and listed, in this order; docs/analysis.md defines the measures."""

CURVE_COLUMNS = ("measure", "run", "model", "method", "seeds", "layer", "relative_depth", "mean", "low", "high")


def draw_compared(medium: Medium, name: str, curves: Sequence[Curves]) -> Drawn:
    """Draws one measure over relative depth, each curve with its band; call it inside the medium's context.

    Args:
        medium: Where the figure is read.
        name: The measure.
        curves: Everything that is compared, so that each looks the same in every figure; drawn are those that have it.

    Returns:
        The figure.
    """
    shown, having = SHOWN[name], [one for one in curves if one.has(name)]
    drawing = medium.drawing(3.2)
    axes = drawing.add_subplot()
    marks: dict[str, Line2D] = {}
    rows: list[tuple[object, ...]] = []
    lowest = 0.0
    for one, label, style in zip(curves, labels(curves), distinct_styles([c.method for c in curves]), strict=True):
        if one not in having:
            continue
        curve, xs = one.curve(name), [(layer + 0.5) / one.count for layer in range(one.count)]
        means, lows, highs = zip(*((at.value, at.low, at.high) for at in curve), strict=True)
        if len(one.seeds) > 1:
            axes.fill_between(xs, lows, highs, color=style.colour, alpha=0.18, linewidth=0)
        axes.plot(xs, means, color=style.colour, linestyle=style.line, marker=style.marker, markersize=4.5)
        marks[label] = mark(style)
        lowest = min(lowest, *lows)
        rows += [
            (name, one.name, one.model, one.method, len(one.seeds), layer, *numbers)
            for layer, numbers in enumerate(zip(xs, means, lows, highs, strict=True))
        ]
    if lowest < 0:
        axes.axhline(0, color=INK, linewidth=0.8)
    else:
        axes.set_ylim(bottom=0)
    axes.set_xlim(0, 1)
    axes.set_xlabel("relative depth, from the input up")
    axes.set_ylabel(shown.label)
    add_marks(drawing, marks)
    caption = f"{shown.title}: {shown.words}, of each layer at (layer + ½) / layers.{_bands(having)}"
    return Drawn(shown.title, caption, drawing, CURVE_COLUMNS, tuple(rows), ())


def labels(curves: Sequence[Curves]) -> list[str]:
    """Names curves by method, and by run where there are several.

    Args:
        curves: The curves.

    Returns:
        A name for each.
    """
    several = len({one.name for one in curves}) > 1
    return [f"{one.method} ({one.name})" if several else one.method for one in curves]


def _bands(having: Sequence[Curves]) -> str:
    seeds = {len(one.seeds) for one in having}
    said = []
    if max(seeds) > 2:
        said.append("95 % intervals over seeds (Student's t)")
    if 2 in seeds:
        said.append("from the lower to the higher of two seeds")
    return f" Lines are means over seeds, bands {', or '.join(said)}." if said else ""
