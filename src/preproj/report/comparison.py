"""`preproj compare`: the layers of several methods, runs and models over each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from preproj.report import units
from preproj.report.compared_figure import CURVE_COLUMNS, SHOWN, draw_compared
from preproj.report.drawn import Drawn
from preproj.report.fields import ReportError
from preproj.report.figure_files import check_target, save
from preproj.report.layer_curves import Curves, read_curves
from preproj.report.markdown import escape, table_lines
from preproj.report.style import REPORT
from preproj.report.table import Cell, Table, to_csv
from preproj.report.terminal import print_parts

LEGEND = "s = W_skip·x̃ is what the skip adds, a what attention adds; x̃ is x̂ after the pre-projection."
DEPTH_LINES = (
    "Late/early is the last layer over the mean of the early ones (the paper's ranges for Pythia-160M and -410M, else "
    "the first two thirds); ρ is Spearman's rank correlation of layer and measure. Both are means over seeds, with "
    "95 % intervals (Student's t) from three seeds on."
)


def write_comparison(sources: Sequence[Path], out: Path, file_format: str, console: Console) -> list[Path]:
    """Draws the layers of several methods over each other, prints the table of ratios, and writes both.

    Args:
        sources: Runs, cells and adapters that were analysed, see `read_curves`.
        out: The folder to write into; it is made if it is missing.
        file_format: Of the figures: `pdf`, `svg` or `png`.
        console: Where to print the table.

    Returns:
        The files: a figure for each measure that two of them have, `compare.md`, `compare.csv` (the table with
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
    table = ratios(found)
    with REPORT.context():
        drawn = {name.replace("_", "-"): draw_compared(REPORT, name, curves) for name in found}
        out.mkdir(parents=True, exist_ok=True)
        written = [save(out / f"{name}.{file_format}", name, figure, REPORT) for name, figure in drawn.items()]
    texts = {
        "compare.md": _markdown(curves, table, drawn, file_format),
        "compare.csv": table.csv,
        "curves.csv": to_csv(CURVE_COLUMNS, [row for figure in drawn.values() for row in figure.rows]),
    }
    for file, text in texts.items():
        (out / file).write_text(text, encoding="utf-8", newline="\n")
    print_parts(table, console)
    return [*written, *(out / file for file in texts)]


def ratios(found: Mapping[str, Sequence[Curves]]) -> Table:
    """Lists how each measure changes with depth.

    Args:
        found: The curves that have each measure.

    Returns:
        A row for each measure and curve: late/early and Spearman's ρ, with intervals over seeds from three on.
    """
    rows = []
    for name, having in found.items():
        for one in having:
            row = one.depth[name]
            head = (name, one.name, one.method)
            seeds = Cell(units.whole(len(one.seeds)), values=(len(one.seeds),))
            rows.append((*map(Cell, head), seeds, _over_seeds(row["late_over_early"]), _over_seeds(row["spearman"])))
    titles = ("measure", "run", "method", "seeds", "late/early", "Spearman’s ρ")
    return Table("compare", "Change with depth: late/early, and Spearman’s ρ", titles, tuple(rows), heads=3)


def _over_seeds(found: Mapping[str, float | None] | None) -> Cell:
    if found is None or (mean := found["mean"]) is None:
        return Cell(units.NOTHING)
    low, high = found["low"], found["high"]
    if low is None or high is None:
        return Cell(units.decimal(mean), values=(mean,))
    return Cell(units.decimal(mean), (f"[{units.decimal(low)}, {units.decimal(high)}]",), (mean, low, high))


def _markdown(curves: Sequence[Curves], table: Table, drawn: Mapping[str, Drawn], file_format: str) -> str:
    parts = ["# Layers compared", "\n".join(map(_source, curves)), f"{LEGEND} {DEPTH_LINES}"]
    parts += [f"**{escape(table.caption)}**", table_lines(table)]
    for name, figure in drawn.items():
        file = f"{name}.{file_format}"
        shown = f"[{file}]({file})" if file_format == "pdf" else f"![{escape(figure.caption)}]({file})"
        parts += [f"## {escape(figure.title)}", shown, escape(figure.caption)]
    return "\n\n".join(parts) + "\n"


def _source(one: Curves) -> str:
    seeds = f"{len(one.seeds)} seed{'' if len(one.seeds) == 1 else 's'} ({', '.join(map(str, one.seeds))})"
    said = f"{one.method} on {one.model}, {one.count} layers, {seeds}; function measured on {one.text}"
    return f"- **{escape(one.name)}**: {escape(said)}."
