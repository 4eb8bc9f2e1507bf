"""The command line: parses, calls, prints."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from transformers.utils import logging as transformers_logging

import preproj
from preproj.probe.errors import RecipeError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Pre-projection and content skip for transformer attention: count what they cost, measure what they bring.",
)


@app.callback(invoke_without_command=True)
def main(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Answer what goes without a command."""
    if version:
        typer.echo(f"preproj {preproj.__version__}")
        raise typer.Exit


@app.command()
def params(
    model: Annotated[str, typer.Argument(help="A model's folder, a Hub name, or smollm2-135m-instruct.")],
    expansion: Annotated[float, typer.Option(help="Inner width of the pre-projection over the hidden size.")] = 1.25,
    pre_projection: Annotated[bool, typer.Option("--pre-projection/--no-pre-projection")] = True,
    content_skip: Annotated[bool, typer.Option("--content-skip/--no-content-skip")] = True,
    skip_rank: Annotated[int | None, typer.Option(help="Rank of the skip; without it the skip is dense.")] = None,
    target_modules: Annotated[str | None, typer.Option(help="Names of attention modules, with commas.")] = None,
    exclude_modules: Annotated[str | None, typer.Option(help="Names of attention modules to leave out.")] = None,
    layers_to_transform: Annotated[str | None, typer.Option(help="Indices of layers, with commas: 0,1,2.")] = None,
    tokens: Annotated[int, typer.Option(help="Length of the sequence that FLOPs are a mean over.")] = 1024,
) -> None:
    """Print what an adapter adds to MODEL: parameters, FLOPs, memory, and LoRA of the same size. Loads no weights."""
    from preproj.probe.base import load_config, resolve_base

    _quiet()
    try:
        config = preproj.PreProjConfig(
            expansion=expansion,
            pre_projection=pre_projection,
            content_skip=content_skip,
            skip_rank=skip_rank,
            target_modules=target_modules.split(",") if target_modules else None,
            exclude_modules=exclude_modules.split(",") if exclude_modules else None,
            layers_to_transform=_indices(layers_to_transform),
        )
        counted = preproj.params(load_config(resolve_base(model)), config, tokens)
    except ValueError as error:
        # The model is an argument here, not a recipe's key.
        typer.echo(f"preproj: {str(error).removeprefix('model.name: ')}", err=True)
        raise typer.Exit(2) from error
    typer.echo(counted)


@app.command()
def analyze(
    adapter: Annotated[Path, typer.Argument(help="An adapter's folder, or a cell of a run: cells/METHOD/seed0.")],
    base: Annotated[str | None, typer.Option(help="Base model; default: the one that run or adapter names.")] = None,
    text: Annotated[
        str | None,
        typer.Option(
            help="python-docs, a file or folder of text, or with --split a data set; default: the held-out text of the "
            "run, or python-docs."
        ),
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="Read --text as a data set, on the Hub or in a folder: its split of this name.")
    ] = None,
    config: Annotated[str | None, typer.Option(help="Which configuration of the data set.")] = None,
    column: Annotated[str, typer.Option(help="Column or field that holds the text.")] = "text",
    documents: Annotated[int, typer.Option(min=1, help="Pieces of text to read.")] = 32,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of a piece.")] = 512,
    ablations: Annotated[
        int, typer.Option(min=0, help="Pieces read for each ablation, two passes a layer; 0 leaves them out.")
    ] = 8,
    out: Annotated[Path | None, typer.Option(help="Folder; default: analysis/ in that of the cell or adapter.")] = None,
) -> None:
    """Measure layer by layer what the skip and the pre-projection of a trained ADAPTER learned."""
    from rich.console import Console

    from preproj.analysis.tables import print_tables
    from preproj.probe.analyze import analyze_adapter, text_of

    console = Console()
    _quiet()
    # Arguments here, not a recipe's keys.
    renamed = {"model.name: ": "", "--text.test": "--text", "--text.name": "--text", "--text.column": "--column"}
    with _sentences(RecipeError, adapter, renamed), console.status("measuring; the ablations take longest"):
        place = text_of(text, split, config, column, documents)
        content, folder = analyze_adapter(adapter, base, place, documents, tokens, ablations, out)
    print_tables(content, console)
    console.print(f"Written: {folder / 'analysis.json'}, {folder / 'layers.parquet'}", soft_wrap=True)


@app.command()
def probe(
    recipe: Annotated[Path | None, typer.Argument(help="YAML recipe; without it the embedded demo runs.")] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; default: runs/ and the recipe's name.")] = None,
    cell: Annotated[
        str | None, typer.Option(metavar="METHOD/seedN", help="Run this cell alone, its method's tuning first.")
    ] = None,
    accept_changes: Annotated[
        bool, typer.Option("--accept-changes", help="Go on where base, text or packages changed since the start.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the cells and what they cost; start and write nothing.")
    ] = False,
) -> None:
    """Train and compare the methods of a RECIPE on a frozen model, and write a report.

    Call it again with the same arguments to continue an interrupted run; finished cells are not run again. Several
    calls at once, on one or many machines that share the run folder, part the work. Started by torchrun or accelerate
    launch, all processes train the one cell together.
    """
    from rich.console import Console

    from preproj.probe import distributed
    from preproj.probe.cell import take_part
    from preproj.probe.plan import plan, said
    from preproj.probe.recipe import load_recipe
    from preproj.probe.runner import PREPARING, run_probe
    from preproj.report import ReportError, print_table, write_report

    console = Console()
    _quiet()
    try:
        with _sentences((RecipeError, ReportError), "run folder"):
            if not distributed.is_main():
                if not dry_run:
                    take_part()
                return
            loaded = load_recipe(recipe)
            run = out or Path("runs") / loaded.name
            if dry_run:
                # Not on standard output, which is the list alone.
                with Console(stderr=True).status(PREPARING):
                    planned, changed = plan(loaded, run, cell)
                typer.echo(said(planned))
                if changed:
                    typer.echo(f"preproj: without --accept-changes it will stop: {'; '.join(changed)}.", err=True)
                return
            distributed.check(loaded, cell)
            distributed.join()
            outcome = run_probe(loaded, run, console, cell, accept_changes)
            distributed.dismiss()
            if outcome.summed_up:
                report = write_report(run)
                print_table(run, console)
    except KeyboardInterrupt as error:
        typer.echo("preproj: interrupted; the same command continues this run.", err=True)
        raise typer.Exit(130) from error
    for part, holder in outcome.elsewhere.items():
        console.print(f"{part} is in the hands of {holder}.", soft_wrap=True, highlight=False)
    if outcome.summed_up:
        console.print(f"Report: {report}", soft_wrap=True)
    else:
        console.print(f"The run has more cells; `preproj report {run}` joins those that have ended.", soft_wrap=True)
    if not outcome.good:
        raise typer.Exit(1)


@app.command()
def report(run: Annotated[Path, typer.Argument(help="Folder that `preproj probe` writes.")]) -> None:
    """Join whatever has ended of a RUN, while workers are at it or after, and write its report."""
    from rich.console import Console

    from preproj.probe.summary import join
    from preproj.report import ReportError, print_table, write_report

    console = Console()
    _quiet()
    with _sentences((RecipeError, ReportError), run):
        join(run)
        written = write_report(run)
        print_table(run, console)
    console.print(f"Report: {written}", soft_wrap=True)


@app.command()
def figures(
    run: Annotated[Path, typer.Argument(help="Folder that `preproj probe` wrote.")],
    file_format: Annotated[str, typer.Option("--format", help="pdf, svg or png.")] = "svg",
    style: Annotated[str, typer.Option(help="report; or paper: 3.25 and 6.75 inches wide, 8 points.")] = "report",
    out: Annotated[Path, typer.Option(help="Folder to write into.")] = Path("figures"),
) -> None:
    """Write every figure of a RUN as a file, with captions that state n, seeds and protocol."""
    from preproj.report import ReportError, write_figures

    with _sentences(ReportError, out):
        written = write_figures(run, out, file_format, style)
    for path in written:
        typer.echo(path)


@app.command()
def compare(
    sources: Annotated[
        list[Path],
        typer.Argument(metavar="RUN_OR_ADAPTER...", help="Runs, cells, or adapters that `preproj analyze` has read."),
    ],
    file_format: Annotated[str, typer.Option("--format", help="Of the figures: pdf, svg or png.")] = "svg",
    out: Annotated[Path, typer.Option(help="Folder to write into.")] = Path("compare"),
) -> None:
    """Draw the layers of several methods, runs and models over each other, with a table of late/early ratios."""
    from rich.console import Console

    from preproj.report import ReportError, write_comparison

    console = Console()
    with _sentences(ReportError, out):
        written = write_comparison(sources, out, file_format, console)
    for path in written:
        console.print(str(path), soft_wrap=True, highlight=False, markup=False)


@contextmanager
def _sentences(
    mistakes: type[Exception] | tuple[type[Exception], ...], place: object, arguments: Mapping[str, str] | None = None
) -> Iterator[None]:
    """End the program with one sentence: status 2 for a user's mistake, 1 for what the system refuses.

    Args:
        mistakes: errors whose message is a sentence for the user.
        place: named where an error of the system names no file.
        arguments: what in a message is a recipe's key, and what it is called as an argument.
    """
    try:
        yield
    except mistakes as error:
        said = str(error)
        for key, argument in (arguments or {}).items():
            said = said.replace(key, argument)
        typer.echo(f"preproj: {said}", err=True)
        raise typer.Exit(2) from error
    except OSError as error:
        typer.echo(f"preproj: {error.filename or place}: {error.strerror or error}.", err=True)
        raise typer.Exit(1) from error
    except (MemoryError, RuntimeError) as error:
        from preproj.probe.ending import is_out_of_memory, out_of_memory

        if not is_out_of_memory(error):
            raise
        typer.echo(f"preproj: {place}: {out_of_memory()}.", err=True)
        raise typer.Exit(1) from error


def _quiet() -> None:
    transformers_logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")


def _indices(text: str | None) -> list[int] | None:
    """Read ``0,1,2``."""
    try:
        return [int(part) for part in text.split(",")] if text else None
    except ValueError as error:
        raise ValueError(f"--layers-to-transform is {text!r}: expected layer indices with commas, 0,1,2.") from error
