"""Learning curves: training loss against tokens seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from matplotlib.ticker import EngFormatter

from preproj.report.drawn import Drawn, add_legend
from preproj.report.records import Run, Step
from preproj.report.style import Medium, Style, styles

WINDOW_SHARE = 20
"""The running mean spans the steps of a twentieth of the training."""

POINTS = 200
"""As many steps of a cell are drawn, evenly spaced; `training.jsonl` holds them all."""


def draw_curves(run: Run, medium: Medium) -> Drawn | None:
    """Draws the training loss of every trained cell.

    Args:
        run: The run.
        medium: Where the figure is read.

    Returns:
        The figure, or None where nothing was trained.
    """
    trained = [(row, result.training) for row, result in run.finished if result.training]
    if not trained:
        return None
    look = styles(run.methods)
    drawing = medium.drawing(3.7)
    axes = drawing.add_subplot()
    rows = []
    for row, steps in trained:
        means = running_mean([step.loss for step in steps], max(3, len(steps) // WINDOW_SHARE))
        kept = range(0, len(steps), -(-len(steps) // POINTS))
        _curve(axes.plot, look[row.method], [steps[i] for i in kept], [means[i] for i in kept], run.several_seeds)
        rows += [(row.method, row.seed, steps[i].tokens, steps[i].loss, means[i]) for i in kept]
    axes.set_xlabel("training tokens")
    axes.set_ylabel("training loss (nats per token)")
    axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
    axes.margins(x=0.01)
    add_legend(drawing, run, list(dict.fromkeys(row.method for row, _ in trained)), {})
    every = max(-(-len(steps) // POINTS) for _, steps in trained)
    marks = (
        "One line per seed: a centred running mean."
        if run.several_seeds
        else f"Thin: each{f' {every}th' if every > 1 else ''} step. Bold: a centred running mean."
    )
    return Drawn(
        "Learning curves",
        f"Learning curves: training loss against tokens seen. {marks}",
        drawing,
        ("method", "seed", "tokens", "loss", "running mean"),
        tuple(rows),
        ("training",),
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


def _curve(
    plot: Callable[..., object], style: Style, steps: Sequence[Step], means: Sequence[float], several: bool
) -> None:
    tokens = [step.tokens for step in steps]
    if not several:
        plot(tokens, [step.loss for step in steps], color=style.colour, linewidth=0.6, alpha=0.25)
    plot(
        tokens,
        means,
        color=style.colour,
        linestyle=style.line,
        linewidth=1.0 if several else 2.0,
        marker=style.marker,
        markersize=4.5,
        markevery=max(1, len(steps) // 8),
    )
