"""What each layer learned: one figure a measure, lines over depth."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from preproj.report.drawn import Drawn, add_legend
from preproj.report.records import Interval, Layer, Run
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
    interval: Callable[[Layer], Interval | None] = lambda _: None
    protocol: tuple[str, ...] = ("training", "layers")


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


def _worth(title: str, part: str, label: str, interval: Callable[[Layer], Interval | None]) -> LayerFigure:
    return LayerFigure(
        title,
        f"{title}: what perplexity rises by when {part} of one layer is switched off. Bars are 95 % intervals over the "
        "text, where there is one seed.",
        label,
        lambda layer: rise.value if (rise := interval(layer)) else None,
        interval=interval,
        protocol=("training", "ablations"),
    )


WITHOUT_SKIP = _worth("Worth of the content skip", "the skip", "Δ perplexity without it", lambda one: one.without_skip)
WITHOUT_PRE = _worth(
    "Worth of the pre-projection", "the pre-projection", "Δ perplexity without it", lambda one: one.without_pre
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
    found = [
        (row.method, row.seed, layer, value)
        for row, result in run.finished
        for layer in result.layers
        if (value := figure.pick(layer)) is not None and math.isfinite(value)
    ]
    if not found:
        return None
    look = styles(run.methods)
    sites = sorted({(layer.layer, layer.site) for _, _, layer, _ in found})
    methods = list(dict.fromkeys(method for method, *_ in found))
    drawing = medium.drawing(2.9)
    axes = drawing.add_subplot()
    for method in methods:
        seeds: dict[int, dict[Site, float]] = {}
        for _, seed, layer, value in (one for one in found if one[0] == method):
            seeds.setdefault(seed, {})[layer.layer, layer.site] = value
        places = [site for site in sites if all(site in of_seed for of_seed in seeds.values())]
        xs, style = [sites.index(place) for place in places], look[method]
        if len(seeds) > 1:
            for of_seed in seeds.values():
                axes.plot(xs, [of_seed[place] for place in places], color=style.colour, linewidth=0.6, alpha=0.5)
        else:
            for layer, rise in ((one[2], figure.interval(one[2])) for one in found if one[0] == method):
                if rise is not None:
                    x = sites.index((layer.layer, layer.site))
                    axes.plot([x, x], [rise.low, rise.high], color=style.colour, linewidth=1)
        means = [sum(of_seed[place] for of_seed in seeds.values()) / len(seeds) for place in places]
        axes.plot(
            xs, means, color=style.colour, linestyle=style.line, linewidth=1.5, marker=style.marker, markersize=4.5
        )
    starts = {(one.layer, one.site): start for _, _, one, _ in found if (start := figure.start(one)) is not None}
    more = {}
    if starts:
        (more["before training"],) = axes.plot([*map(sites.index, starts)], [*starts.values()], ":", color=INK)
    every = math.ceil(len(sites) / 12)
    axes.set_xticks(range(0, len(sites), every), [str(layer) for layer, _ in sites[::every]])
    if any(value < 0 for *_, value in found):
        axes.axhline(0, color=INK, linewidth=0.8)
    else:
        axes.set_ylim(bottom=0)
    axes.set_xlabel("layer, from the input up")
    axes.set_ylabel(figure.label)
    add_legend(drawing, run, methods, more)
    seeds_said = " Bold lines are means over seeds, faint lines the seeds." if run.several_seeds else ""
    return Drawn(
        figure.title,
        figure.caption + seeds_said,
        drawing,
        ("method", "seed", "layer", "site", figure.label, "before training", "low", "high"),
        tuple((method, seed, one.layer, one.site, value, *_beside(figure, one)) for method, seed, one, value in found),
        figure.protocol,
    )


def _beside(figure: LayerFigure, layer: Layer) -> tuple[float | None, float | None, float | None]:
    """The value before training, and the ends of the interval."""
    rise = figure.interval(layer)
    return figure.start(layer), *((rise.low, rise.high) if rise else (None, None))
