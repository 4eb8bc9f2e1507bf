"""The figures of a report, as SVG. Which figures there are depends on what the run measured."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure as Drawing
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter

from preproj.report.headline_figure import draw_headline
from preproj.report.records import Layer, Run, Step
from preproj.report.style import INK, Style, house_style, styles, to_svg

NAMES = ("headline", "learning-curves", "skip-norm", "skip-to-attention", "pre-to-input")
"""Every figure a report can have, in reading order; each becomes `figures/<name>.svg`."""

WINDOW_SHARE = 20
"""The running mean spans the steps of a twentieth of the training."""


@dataclass(frozen=True)
class Figure:
    """A figure with its caption; the caption also says what the marks mean."""

    name: str
    caption: str
    svg: str


def figures(run: Run) -> tuple[Figure, ...]:
    """Draws the figures of a run.

    Args:
        run: The run.

    Returns:
        The figures that the run has numbers for, in reading order.
    """
    with house_style():
        drawn = (
            draw_headline(run),
            _learning_curves(run),
            _layer_bars(
                run,
                "Size of the content skip: Frobenius norm ‖W_skip‖ of each layer. "
                "The line across a bar is the norm before training.",
                "‖W_skip‖",
                lambda layer: layer.skip_norm,
                lambda layer: layer.initial_skip_norm,
            ),
            _layer_bars(
                run,
                "Share of the content skip: ‖W_skip·x̃‖ / ‖attention output‖ of each layer, "
                "mean over the tokens of held-out text.",
                "skip / attention",
                lambda layer: layer.skip_to_attention,
            ),
            _layer_bars(
                run,
                "Reach of the pre-projection: ‖x̃ − x̂‖ / ‖x̂‖ of each layer, mean over the tokens of held-out text.",
                "change of the input",
                lambda layer: layer.pre_to_input,
            ),
        )
        return tuple(
            Figure(name, pair[1], to_svg(pair[0], name, f"{pair[1]} Methods: {', '.join(run.methods)}."))
            for name, pair in zip(NAMES, drawn, strict=True)
            if pair is not None
        )


def running_mean(values: list[float], window: int) -> list[float]:
    """A centred running mean; near the ends it averages the part of the window that exists.

    Args:
        values: The values.
        window: How many values the full window spans.

    Returns:
        As many values.
    """
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    means = []
    for index in range(len(values)):
        first, end = max(0, index - window // 2), min(len(values), index + window // 2 + 1)
        means.append((sums[end] - sums[first]) / (end - first))
    return means


def _learning_curves(run: Run) -> tuple[Drawing, str] | None:
    trained = [(row.method, result.training) for row, result in run.finished if result.training]
    if not trained:
        return None
    look = styles(run.methods)
    drawing = Drawing(figsize=(6.6, 3.7), layout="constrained")
    axes = drawing.add_subplot()
    for method, steps in trained:
        _curve(axes.plot, look[method], steps, several=run.several_seeds)
    axes.set_xlabel("training tokens")
    axes.set_ylabel("training loss (nats per token)")
    axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
    axes.margins(x=0.01)
    methods = list(dict.fromkeys(method for method, _ in trained))
    handles = [
        Line2D([], [], color=look[m].colour, linestyle=look[m].line, marker=look[m].marker, linewidth=1.8)
        for m in methods
    ]
    drawing.legend(handles, methods, loc="outside lower center", ncols=min(5, len(methods)), handlelength=4)
    marks = (
        "One line per seed: a centred running mean."
        if run.several_seeds
        else "Thin: each step. Bold: a centred running mean."
    )
    return drawing, f"Learning curves: training loss against tokens seen. {marks}"


def _curve(plot: Callable[..., object], style: Style, steps: tuple[Step, ...], *, several: bool) -> None:
    tokens, losses = [step.tokens for step in steps], [step.loss for step in steps]
    if not several:
        plot(tokens, losses, color=style.colour, linewidth=0.6, alpha=0.25)
    plot(
        tokens,
        running_mean(losses, max(3, len(losses) // WINDOW_SHARE)),
        color=style.colour,
        linestyle=style.line,
        linewidth=1.0 if several else 2.0,
        marker=style.marker,
        markersize=4.5,
        markevery=max(1, len(losses) // 8),
    )


def _layer_bars(
    run: Run,
    caption: str,
    label: str,
    measure: Callable[[Layer], float | None],
    initial: Callable[[Layer], float | None] = lambda _: None,
) -> tuple[Drawing, str] | None:
    """Bars by layer: the mean over the seeds, with a dot for each seed where there are several."""
    values: dict[str, dict[tuple[int, str], list[float]]] = {}
    starts: dict[str, dict[tuple[int, str], list[float]]] = {}
    for row, result in run.finished:
        for layer in result.layers:
            for pick, into in ((measure, values), (initial, starts)):
                value = pick(layer)
                if value is not None and math.isfinite(value):
                    into.setdefault(row.method, {}).setdefault((layer.layer, layer.site), []).append(value)
    if not values:
        return None
    look = styles(run.methods)
    sites = sorted({site for of_method in values.values() for site in of_method})
    width = 0.8 / len(values)
    drawing = Drawing(figsize=(6.6, 2.9), layout="constrained")
    axes = drawing.add_subplot()
    for index, (method, of_method) in enumerate(values.items()):
        shift = (index - (len(values) - 1) / 2) * width
        places = [sites.index(site) + shift for site in of_method]
        means = [sum(found) / len(found) for found in of_method.values()]
        axes.bar(places, means, 0.92 * width, **_bar(look[method]))
        for place, (site, found) in zip(places, of_method.items(), strict=True):
            if len(found) > 1:
                axes.plot([place] * len(found), found, ".", color=INK, markersize=3)
            begun = starts.get(method, {}).get(site, [])
            axes.hlines(begun, place - width / 2, place + width / 2, color=INK, linewidth=1.4)
    every = math.ceil(len(sites) / 24)
    axes.set_xticks(range(0, len(sites), every), [str(layer) for layer, _ in sites[::every]])
    axes.grid(visible=False, axis="x")
    axes.set_xlabel("layer, from the input up")
    axes.set_ylabel(label)
    handles: list[Patch | Line2D] = [Patch(**_bar(look[method])) for method in values]
    labels = list(values)
    if starts:
        handles.append(Line2D([], [], color=INK, linewidth=1.4))
        labels.append("before training")
    drawing.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    seeds = " Bars are means over seeds, dots are the seeds." if run.several_seeds else ""
    return drawing, caption + seeds


def _bar(style: Style) -> dict[str, Any]:
    # SVG hatches share one opacity with their ground, so a hatched bar has no ground at all.
    ground = "none" if style.hatch else style.colour
    return {"facecolor": ground, "edgecolor": style.colour, "hatch": style.hatch, "linewidth": 0.9}
