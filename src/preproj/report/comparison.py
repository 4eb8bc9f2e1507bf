"""`preproj compare`: the layers of several methods, runs and models over each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from preproj.report import units
from preproj.report.compared_figure import CURVE_COLUMNS, SHOWN, draw_compared, labels
from preproj.report.drawn import Drawn
from preproj.report.fields import ReportError
from preproj.report.figure_files import check_target, save
from preproj.report.layer_curves import Curves, OverSeeds, read_curves
from preproj.report.markdown import escape, table_lines
from preproj.report.style import REPORT
from preproj.report.table import Cell, Table, to_csv
from preproj.report.terminal import print_parts
from preproj.whole import whole_file

LEGEND = "s = W_skip·x̃ is what the skip adds, a what attention adds; x̃ is x̂ after the pre-projection."
DEPTH_LINES = (
    "Late/early is the last layer over the mean of the early ones (the paper's ranges for Pythia-160M and -410M, else "
    "the first two thirds); ρ is Spearman's rank correlation of layer and measure. Both are means over seeds, with "
    "95 % intervals (Student's t) from three seeds on."
)
STATISTICS = ("late_over_early", "spearman")
RATIO_COLUMNS = (
    *("measure", "run", "model", "method", "seeds"),
    *(f"{statistic}{end}" for statistic in STATISTICS for end in ("", "_low", "_high")),
)


def write_comparison(sources: Sequence[Path], out: Path, file_format: str, console: Console) -> list[Path]:
    """Draws the layers of several methods over each other, prints their late/early ratios, and writes both.

    Args:
        sources: Runs, cells and adapters that were analysed, see `read_curves`.
        out: The folder to write into; it is made if it is missing.
        file_format: Of the figures: `pdf`, `svg` or `png`.
        console: Where to print the tables.

    Returns:
        The files: a figure for each measure that two of them have, `compare.md`, `compare.csv` (the tables with
        unrounded numbers) and `curves.csv` (what is drawn).

    Raises:
        ReportError: If an argument is wrong, or nothing can be compared.
    """
    check_target(file_format, out)
    curves = read_curves(sources)
    if len(curves) < 2:
        raise ReportError(f"{sources[0]} has the layers of {curves[0].method} alone; name another run or adapter too.")
    found = {name: having for name in SHOWN if len(having := [one for one in curves if one.has(name)]) > 1}
    if not found:
        raise ReportError(f"no two of {', '.join(one.method for one in curves)} have a measure in common to compare.")
    with REPORT.context():
        drawn = {name: draw_compared(REPORT, name, curves) for name in found}
        out.mkdir(parents=True, exist_ok=True)
        files = {name: f"{name.replace('_', '-')}.{file_format}" for name in found}
        written = [save(out / files[name], name, figure, REPORT) for name, figure in drawn.items()]
    tables = {name: ratios(name, curves) for name in found}
    texts = {
        "compare.md": _markdown(curves, drawn, tables, files),
        "compare.csv": to_csv(RATIO_COLUMNS, [_numbers(name, one) for name, having in found.items() for one in having]),
        "curves.csv": to_csv(CURVE_COLUMNS, [row for figure in drawn.values() for row in figure.rows]),
    }
    for file, text in texts.items():
        with whole_file(out / file) as temporary:
            temporary.write_text(text, encoding="utf-8", newline="\n")
    for table in tables.values():
        print_parts(table, console)
    return [*written, *(out / file for file in texts)]


def ratios(name: str, curves: Sequence[Curves]) -> Table:
    """Lists how one measure changes with depth.

    Args:
        name: The measure.
        curves: Everything that is compared; listed are those that have it.

    Returns:
        A row for each curve: late/early and Spearman's ρ, with intervals over seeds from three on.
    """
    rows = [
        (
            Cell(label),
            Cell(units.whole(len(one.seeds))),
            *(_cell(one.depth[name][statistic]) for statistic in STATISTICS),
        )
        for one, label in zip(curves, labels(curves), strict=True)
        if one.has(name)
    ]
    shown = SHOWN[name]
    titles = ("method", "seeds", "late/early", "Spearman’s ρ")
    return Table(name, f"{shown.title}: {shown.words}", titles, tuple(rows))


def _cell(found: OverSeeds | None) -> Cell:
    if found is None:
        return Cell(units.NOTHING)
    low, high = found["low"], found["high"]
    interval = () if low is None else (f"[{units.decimal(low)}, {units.decimal(high)}]",)
    return Cell(units.decimal(found["mean"]), interval)


def _numbers(name: str, one: Curves) -> list[object]:
    """The unrounded numbers of a row."""
    statistics = (one.depth[name][statistic] or {} for statistic in STATISTICS)
    numbers = [found.get(key) for found in statistics for key in ("mean", "low", "high")]
    return [name, one.name, one.model, one.method, len(one.seeds), *numbers]


def _markdown(
    curves: Sequence[Curves], drawn: Mapping[str, Drawn], tables: Mapping[str, Table], files: Mapping[str, str]
) -> str:
    parts = ["# Layers compared", "\n".join(map(_source, curves)), escape(f"{LEGEND} {DEPTH_LINES}")]
    for name, figure in drawn.items():
        caption, file = escape(figure.caption), files[name]
        shown = f"[{file}]({file})" if file.endswith(".pdf") else f"![{caption}]({file})"
        parts += [f"## {escape(figure.title)}", shown, caption, table_lines(tables[name])]
    return "\n\n".join(parts) + "\n"


def _source(one: Curves) -> str:
    seeds = f"{len(one.seeds)} seed{'' if len(one.seeds) == 1 else 's'} ({', '.join(map(str, one.seeds))})"
    said = f"{one.method} on {one.model}, {one.count} layers, {seeds}; function measured on {one.text}"
    return f"- **{escape(one.name)}**: {escape(said)}."
