"""Results of a run as HTML, Markdown, figures and terminal tables. Reads result files only, never models."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from rich.console import Console

from preproj.report.comparison import write_comparison
from preproj.report.examples import examples
from preproj.report.fields import ReportError
from preproj.report.figure_files import write_figures
from preproj.report.figures import FIGURES
from preproj.report.html import render_html
from preproj.report.load import load
from preproj.report.markdown import render_markdown
from preproj.report.page import build_page
from preproj.report.terminal import print_run

__all__ = ["ReportError", "print_table", "write_comparison", "write_figures", "write_report"]


def write_report(run_dir: Path) -> Path:
    """Writes `report.html`, `report.md` and `figures/*.svg` into a run folder.

    Args:
        run_dir: The folder that `preproj probe` wrote.

    Returns:
        The path of the HTML report.

    Raises:
        ReportError: If a file of the run is missing, wrong, or of a newer format.
    """
    run = load(run_dir)
    page = build_page(run, examples(run, run_dir))
    folder = run_dir / "figures"
    folder.mkdir(exist_ok=True)
    drawn = {figure.name: figure.svg for section in page.sections for figure in section.figures}
    for name in FIGURES:
        path = folder / f"{name}.svg"
        if name in drawn:
            _write(path, drawn[name])
        else:
            # A figure of an earlier report, which this run has no numbers for any more.
            path.unlink(missing_ok=True)
    _write(run_dir / "report.md", render_markdown(page))
    html = run_dir / "report.html"
    _write(html, render_html(page))
    return html


def print_table(run_dir: Path, console: Console) -> None:
    """Prints the headline and the tables of a run.

    Args:
        run_dir: The folder that `preproj probe` wrote.
        console: Where to print.

    Raises:
        ReportError: If a file of the run is missing, wrong, or of a newer format.
    """
    print_run(load(run_dir), console)


def _write(path: Path, text: str) -> None:
    """Writes a whole file or none."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")  # two workers may finish at once
    temporary.write_text(text, encoding="utf-8", newline="\n")
    os.replace(temporary, path)
