"""What each layer learned: one figure a measure, lines over depth."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from preproj.report.drawn import Drawn, add_legend
from preproj.report.records import Layer, Run
from preproj.report.style import INK, Medium, styles

Site = tuple[int, str]


@dataclass(frozen=True)
class LayerFigure:
    """One measure of a layer, what to say about it, and the same before training where that is known."""

    title: str
    caption: str
    label: str
    pick: Callable[[Layer], float | None]
    start: Callable[[Layer], float | None] = lambda _: None


SKIP_NORM = LayerFigure(
    "Size of the content skip",
    "Size of the content skip: Frobenius norm ‖W_skip‖ of each layer. The dotted line is the norm before training.",
    "‖W_skip‖",
    lambda layer: layer.skip_norm,
    lambda layer: layer.initial_skip_norm,
)
SKIP_TO_ATTENTION = LayerFigure(
    "Share of the content skip",
    "Share of the content skip: ‖W_skip·x̃‖ / ‖attention output‖ of each layer, mean over the tokens of held-out text.",
    "skip / attention",
    lambda layer: layer.skip_to_attention,
)
PRE_TO_INPUT = LayerFigure(
    "Reach of the pre-projection",
    "Reach of the pre-projection: ‖x̃ − x̂‖ / ‖x̂‖ of each layer, mean over the tokens of held-out text.",
    "change of the input",
    lambda layer: layer.pre_to_input,
)


def draw_layers(run: Run, medium: Medium, figure: LayerFigure) -> Drawn | None:
    """Draws one measure over depth: the mean over the seeds, with a faint line for each seed where there are several.

    Args:
        run: The run.
        medium: Where the figure is read.
        figure: Which measure.

    Returns:
        The figure, or None where no method has the measure.
    """
    rows = [
        (row.method, row.seed, layer.layer, layer.site, value, figure.start(layer))
        for row, result in run.finished
        for layer in result.layers
        if (value := figure.pick(layer)) is not None and math.isfinite(value)
    ]
    if not rows:
        return None
    look = styles(run.methods)
    sites = sorted({(layer, site) for _, _, layer, site, _, _ in rows})
    methods = list(dict.fromkeys(row[0] for row in rows))
    drawing = medium.drawing(2.9)
    axes = drawing.add_subplot()
    for method in methods:
        seeds: dict[int, dict[Site, float]] = {}
        for _, seed, layer, site, value, _ in (row for row in rows if row[0] == method):
            seeds.setdefault(seed, {})[layer, site] = value
        places = [site for site in sites if all(site in of_seed for of_seed in seeds.values())]
        xs, style = [sites.index(place) for place in places], look[method]
        if len(seeds) > 1:
            for of_seed in seeds.values():
                axes.plot(xs, [of_seed[place] for place in places], color=style.colour, linewidth=0.6, alpha=0.5)
        means = [sum(of_seed[place] for of_seed in seeds.values()) / len(seeds) for place in places]
        axes.plot(
            xs, means, color=style.colour, linestyle=style.line, linewidth=1.5, marker=style.marker, markersize=4.5
        )
    starts = {(layer, site): start for _, _, layer, site, _, start in rows if start is not None}
    more = {}
    if starts:
        (more["before training"],) = axes.plot([*map(sites.index, starts)], [*starts.values()], ":", color=INK)
    every = math.ceil(len(sites) / 12)
    axes.set_xticks(range(0, len(sites), every), [str(layer) for layer, _ in sites[::every]])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("layer, from the input up")
    axes.set_ylabel(figure.label)
    add_legend(drawing, run, methods, more)
    seeds_said = " Bold lines are means over seeds, faint lines the seeds." if run.several_seeds else ""
    return Drawn(
        figure.title,
        figure.caption + seeds_said,
        drawing,
        ("method", "seed", "layer", "site", figure.label, "before training"),
        tuple(rows),
        ("training", "layers"),
    )
