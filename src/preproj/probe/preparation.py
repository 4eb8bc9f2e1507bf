"""What a run needs before its first cell: a folder that is its own, its text, and a word on its dtype."""

import time
from pathlib import Path
from typing import Any

from datasets import disable_progress_bars
from rich.console import Console
from transformers import PretrainedConfig

from preproj.probe import claims
from preproj.probe.base import Base, load_tokenizer
from preproj.probe.claims import Claim, Watch
from preproj.probe.continuity import check_recipe, describe_inputs
from preproj.probe.environment import describe_environment
from preproj.probe.errors import RecipeError
from preproj.probe.files import read_json, write_json, write_text
from preproj.probe.prepared import Prepared, describe_corpus, prepare
from preproj.probe.process import last_line, run_module
from preproj.probe.recipe import Recipe
from preproj.probe.sources import read_corpus
from preproj.probe.summary import write_summary
from preproj.probe.tokenised import text_cache


def check_folder(run: Path, recipe: Recipe) -> None:
    """Refuse a folder that is not a run, or a run of another recipe.

    Raises:
        RecipeError: naming what it is.
    """
    if run.exists() and not run.is_dir():
        raise RecipeError(f"run folder {run} is a file; choose another with --out.")
    filled = run.exists() and any(not entry.name.startswith(".") for entry in run.iterdir())
    if filled and not (run / "recipe.yaml").exists():
        raise RecipeError(f"run folder {run} is not empty and not a run; choose another with --out.")
    check_recipe(run, recipe)


def prepare_run(
    recipe: Recipe, run: Path, base: Base, described: dict[str, Any], config: PretrainedConfig, console: Console
) -> None:
    """Write what every cell reads, and what is known of its origin; a run that goes on keeps what it has.

    One worker does that while the others wait.

    Args:
        recipe: the checked recipe.
        run: the run folder, new or checked.
        base: the model.
        described: summary.json's ``base``.
        config: of the model.
        console: for progress.

    Raises:
        RecipeError: where the text is wrong (before anything is written) or another than the run began with.
    """
    # Outside a status: the library that tokenises draws its own progress bars, and forks.
    text = None if has_text(run) else _load_text(run, recipe, base, config, console)
    run.mkdir(parents=True, exist_ok=True)
    claim = None if _ready(recipe, run) else _wait_for_claim(recipe, run, console)
    if claim:
        with claim:
            _write(recipe, run, base, text, described, claim, console)
            claim.remove()
    warning = read_json(run / "precision.json")["warning"] if _needs_precision(recipe) else None
    if warning:
        console.print(f"[bold red]{warning}[/]")


def has_text(run: Path) -> bool:
    """Whether a run has its text, and the record of where it comes from."""
    return all((run / name).exists() for name in ("environment.json", "corpus.json", "data"))


def _needs_precision(recipe: Recipe) -> bool:
    return recipe.model.dtype != "float32"


def _ready(recipe: Recipe, run: Path) -> bool:
    written = ("recipe.yaml", "summary.json", *(["precision.json"] if _needs_precision(recipe) else []))
    return has_text(run) and all((run / name).exists() for name in written)


def _wait_for_claim(recipe: Recipe, run: Path, console: Console) -> Claim | None:
    """Return the claim on the preparation, or None when another worker has done it."""
    watch, said = Watch(), False
    while not (claim := watch.take(run)):
        if _ready(recipe, run):
            return None
        if not said:
            console.print(
                f"waiting for {watch.holder(run) or 'another worker'}, which prepares this run", soft_wrap=True
            )
            said = True
        time.sleep(claims.POLL)
    return claim


def _load_text(
    run: Path, recipe: Recipe, base: Base, config: PretrainedConfig, console: Console
) -> tuple[dict[str, Any], dict[str, Any], Prepared]:
    """Read and tokenise the text; return the contents of environment.json and corpus.json, and what the cells read.

    A run folder that was copied without its text gets it again, if it is still the same.
    """
    if not console.is_terminal:
        disable_progress_bars()
    tokenizer = load_tokenizer(base)
    with text_cache() as documents:
        corpus = read_corpus(recipe.data, recipe.evaluation.retention, documents)
        prepared = prepare(recipe, corpus, tokenizer, config)
        description = describe_corpus(corpus, prepared)
        known = run / "corpus.json"
        if known.exists() and (then := read_json(known)["sha256"]) != description["sha256"]:
            raise RecipeError(
                f"run folder {run} began with another text: its sha256 was {then[:16]}… and is "
                f"{description['sha256'][:16]}…; restore that text or choose another folder with --out."
            )
        inputs = describe_inputs(run, recipe, base, config)
        environment = describe_environment() | {"dtype": recipe.model.dtype} | inputs
        return environment, description, prepared


def _write(
    recipe: Recipe,
    run: Path,
    base: Base,
    text: tuple[dict[str, Any], dict[str, Any], Prepared] | None,
    described: dict[str, Any],
    claim: Claim,
    console: Console,
) -> None:
    """Write what is missing, the text last of all that it takes, so that a kill leaves no text without its record."""
    write_text(run / "recipe.yaml", recipe.to_yaml())
    if text and not has_text(run):
        environment, corpus, prepared = text
        if not (run / "environment.json").exists():
            write_json(run / "environment.json", environment)
        if not (run / "corpus.json").exists():
            write_json(run / "corpus.json", corpus)
        claim.check()
        prepared.write(run)
    if _needs_precision(recipe) and not (run / "precision.json").exists():
        log = run / "precision.log"
        with console.status(f"comparing {recipe.model.dtype} with float32 on the untouched model"):
            if run_module("preproj.probe.precision", [str(run)], log, base, claim):
                raise RecipeError(f"the precision check failed: {last_line(log)} (see {log}).")
    if not (run / "summary.json").exists():
        write_summary(run, recipe, described)
