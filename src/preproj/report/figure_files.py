"""The figures of a run as files for papers and slides, with captions that say how they were made."""

from __future__ import annotations

from pathlib import Path

import matplotlib

from preproj.report.drawn import Drawn
from preproj.report.fields import ReportError
from preproj.report.figures import draw
from preproj.report.load import load
from preproj.report.records import Run
from preproj.report.style import PAPER, REPORT, Medium, to_svg
from preproj.whole import whole_file

FORMATS = ("pdf", "svg", "png")
STYLES = {"report": REPORT, "paper": PAPER}
CAPTIONS = "captions.md"
DOTS_PER_INCH = 300
UNDATED: dict[str, dict[str, str | None]] = {
    ".pdf": {"CreationDate": None},
    ".svg": {"Date": None},
    ".png": {"Software": None},
}


def write_figures(run_dir: Path, out: Path, file_format: str = "svg", style: str = "report") -> list[Path]:
    """Writes every figure of a run, and `captions.md`.

    Args:
        run_dir: The folder that `preproj probe` wrote.
        out: The folder to write into; it is made if it is missing.
        file_format: `pdf`, `svg` or `png`.
        style: `report`, or `paper` for print: column widths of 3.25 and 6.75 inches, 8 points, no background.

    Returns:
        The files, captions last.

    Raises:
        ReportError: If a file of the run is missing, wrong, or of a newer format; if format or style are unknown; if
            the run has no figure yet.
    """
    check_target(file_format, out)
    if style not in STYLES:
        raise ReportError(f"--style is {style!r}: expected one of {', '.join(STYLES)}.")
    run, medium = load(run_dir), STYLES[style]
    with medium.context():
        drawn = dict(draw(run, medium))
        if not drawn:
            raise ReportError(f"{run_dir} has no figures yet: fewer than two cells have finished; repeat its command.")
        out.mkdir(parents=True, exist_ok=True)
        written = [save(out / f"{name}.{file_format}", name, figure, medium) for name, figure in drawn.items()]
    captions = out / CAPTIONS
    text = "\n\n".join(f"## {name}\n\n{caption(run, figure)}" for name, figure in drawn.items())
    with whole_file(captions) as temporary:
        temporary.write_text(f"{text}\n", encoding="utf-8", newline="\n")
    return [*written, captions]


def caption(run: Run, figure: Drawn) -> str:
    """What a paper must say below a figure: what is drawn, on how many items and seeds, by which protocol.

    Args:
        run: The run.
        figure: One of its figures.

    Returns:
        A paragraph.
    """
    counts = {measure.task: measure.items for measure in run.measures if measure.task in figure.protocol}
    seeds = sorted({row.seed for row, _ in run.finished if row.method != run.baseline})
    said = [figure.caption, f"Base model {run.base.name} in {run.base.dtype}."]
    if counts:
        said.append(f"n = {', '.join(f'{items:,} ({task})' for task, items in counts.items())}.")
    said.append(f"{len(seeds)} seed{'' if len(seeds) == 1 else 's'} ({', '.join(map(str, seeds))}).")
    said += [run.protocol[name] for name in figure.protocol if name in run.protocol]
    tasks = any(task not in run.protocol for task in counts)
    return " ".join([*said, *([run.protocol["tasks"]] if tasks and "tasks" in run.protocol else [])])


def check_target(file_format: str, out: Path) -> None:
    """Checks where figures are to be written.

    Args:
        file_format: Should be `pdf`, `svg` or `png`.
        out: Should be a folder, or nothing yet.

    Raises:
        ReportError: If one of them is not.
    """
    if file_format not in FORMATS:
        raise ReportError(f"--format is {file_format!r}: expected one of {', '.join(FORMATS)}.")
    if out.exists() and not out.is_dir():
        raise ReportError(f"--out is {str(out)!r}, which is a file: expected a folder.")


def save(path: Path, name: str, figure: Drawn, medium: Medium) -> Path:
    """Writes one figure; call it inside the medium's context.

    Args:
        path: The file; its ending is the format.
        name: A short name of the figure.
        figure: The figure.
        medium: Where it is read.

    Returns:
        The file.
    """
    with whole_file(path) as temporary:
        if path.suffix == ".svg" and medium is REPORT:
            temporary.write_text(to_svg(figure.drawing, name, figure.caption), encoding="utf-8", newline="\n")
            return path
        # Nothing of today in the file: the same run gives the same bytes.
        with matplotlib.rc_context({"savefig.dpi": DOTS_PER_INCH, "svg.hashsalt": name}):
            figure.drawing.savefig(temporary, format=path.suffix[1:], metadata=UNDATED[path.suffix])
    return path
