"""The command line: parses, calls, prints."""

import warnings
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from transformers.utils import logging as transformers_logging

from preproj.probe.errors import RecipeError
from preproj.probe.recipe import load_recipe
from preproj.probe.runner import run_probe
from preproj.report import ReportError, print_table, write_report

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Pre-projection and content skip for transformer attention: measure them on a frozen model.",
)


@app.callback()
def preproj() -> None:
    """Keep `probe` a command of its own while it is the only one."""


@app.command()
def probe(
    recipe: Annotated[Path | None, typer.Argument(help="YAML recipe; without it the embedded demo runs.")] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; default: runs/ and the recipe's name.")] = None,
) -> None:
    """Train and compare the methods of a RECIPE on a frozen model, and write a report.

    Call it again with the same arguments to continue an interrupted run; finished cells are not run again.
    """
    console = Console()
    transformers_logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    try:
        loaded = load_recipe(recipe)
        run = out or Path("runs") / loaded.name
        finished = run_probe(loaded, run, console)
        report = write_report(run)
        print_table(run, console)
    except (RecipeError, ReportError) as error:
        typer.echo(f"preproj: {error}", err=True)
        raise typer.Exit(2) from error
    except OSError as error:
        typer.echo(f"preproj: {error.filename or 'run folder'}: {error.strerror or error}.", err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt as error:
        typer.echo("preproj: interrupted; the same command continues this run.", err=True)
        raise typer.Exit(130) from error
    console.print(f"Report: {report}", soft_wrap=True)
    if not finished:
        raise typer.Exit(1)
