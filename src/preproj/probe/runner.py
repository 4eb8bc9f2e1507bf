"""A run of the probe: check everything, prepare the text, run the cells one by one, sum up."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import disable_progress_bars
from filelock import FileLock, Timeout
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import AutoModelForCausalLM, PretrainedConfig

from preproj.cost import new_parameters
from preproj.probe.base import Base, load_config, load_tokenizer, resolve_base
from preproj.probe.cell import cell_folder, work_units
from preproj.probe.environment import describe_environment
from preproj.probe.errors import RecipeError
from preproj.probe.files import read_json, write_json, write_text
from preproj.probe.harness import load_tasks
from preproj.probe.methods import method_configs
from preproj.probe.prepared import Prepared, describe_corpus, prepare
from preproj.probe.python_docs import python_docs
from preproj.probe.recipe import Recipe, parse_recipe
from preproj.probe.sources import read_corpus
from preproj.probe.summary import cells_of, write_summary
from preproj.probe.tokenised import text_cache


def run_probe(recipe: Recipe, run: Path, console: Console) -> bool:
    """Run every unfinished cell of a recipe and write summary.json.

    Args:
        recipe: the checked recipe.
        run: the run folder: new, or left by an earlier call with the same recipe.
        console: for progress.

    Returns:
        Whether every cell is finished.

    Raises:
        RecipeError: where the recipe, its model or its text is wrong (before anything is written), or the run folder
            holds something else or is in use.
    """
    _check_folder(run, recipe)
    with console.status("preparing the base model (the packaged model's first use takes half a minute)"):
        base = resolve_base(recipe.model.name)
        config = load_config(base)
        described = _describe_base(recipe, base, config)
        if recipe.evaluation.tasks and not all(_ended(cell_folder(run, *cell)) for cell in cells_of(recipe)):
            load_tasks(recipe.evaluation.tasks, recipe.evaluation.task_data)
    # Outside the status: the library that tokenises draws its own progress bars, and forks.
    fresh = None if (run / "corpus.json").exists() else _load_text(recipe, base, config, console)
    run.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(run / ".lock", timeout=0):
            write_text(run / "recipe.yaml", recipe.to_yaml())
            if fresh:
                _write_text(run, recipe.model.dtype, *fresh)
            _check_precision(recipe, run, base, console)
            _run_cells(recipe, run, base, console)
            return write_summary(run, recipe, described)
    except Timeout as error:
        raise RecipeError(f"run folder {run} is in use by another preproj; wait for it or choose another.") from error


def _check_folder(run: Path, recipe: Recipe) -> None:
    """Refuse a folder that is not a run, or a run of another recipe."""
    if run.exists() and not run.is_dir():
        raise RecipeError(f"run folder {run} is a file; choose another with --out.")
    known = run / "recipe.yaml"
    if not known.exists():
        if run.exists() and any(not entry.name.startswith(".") for entry in run.iterdir()):
            raise RecipeError(f"run folder {run} is not empty and not a run; choose another with --out.")
        return
    try:
        then = parse_recipe(known.read_text("utf-8"), str(known))  # a key that is newer than the run has its default
    except RecipeError as error:
        raise RecipeError(f"{known} is damaged; choose another folder with --out.") from error
    changed = _first_difference(then.model_dump(), recipe.model_dump())
    if changed:
        raise RecipeError(f"run folder {run} holds a run of another recipe: {changed}; choose another with --out.")


def _first_difference(then: Any, now: Any, key: str = "") -> str | None:
    """Name the first key at which two recipes differ."""
    if not (isinstance(then, dict) and isinstance(now, dict)):
        return None if then == now else f"{key} was {then!r} and is {now!r}"
    for name in [*then, *(name for name in now if name not in then)]:
        difference = _first_difference(then.get(name), now.get(name), f"{key}.{name}" if key else name)
        if difference:
            return difference
    return None


def _describe_base(recipe: Recipe, base: Base, config: PretrainedConfig) -> dict[str, Any]:
    """Return summary.json's ``base``, and check that the methods fit this architecture."""
    try:
        with torch.device("meta"):
            shell = AutoModelForCausalLM.from_config(config)
        parameters = sum(p.numel() for p in shell.parameters())
        for method in recipe.methods:
            if method != "none":
                for adapter in method_configs(shell, method, seed=0).values():
                    new_parameters(shell, adapter)
    except ValueError as error:
        raise RecipeError(f"model.name: {base.name}: {error}") from error
    return {"name": base.name, "dtype": recipe.model.dtype, "parameters": parameters, "note": base.note}


def _load_text(
    recipe: Recipe, base: Base, config: PretrainedConfig, console: Console
) -> tuple[dict[str, Any], Prepared]:
    """Read and tokenise the text; return the content of corpus.json and what the cells read."""
    if not console.is_terminal:
        disable_progress_bars()
    tokenizer = load_tokenizer(base)
    with text_cache() as documents:
        corpus = python_docs() if recipe.data.source == "python-docs" else read_corpus(recipe.data, documents)
        prepared = prepare(recipe, corpus, tokenizer, config)
        return describe_corpus(corpus, prepared), prepared


def _write_text(run: Path, dtype: str, description: dict[str, Any], prepared: Prepared) -> None:
    """Write what every cell reads; corpus.json last, as the sign that all of it is there."""
    prepared.write(run)
    write_json(run / "environment.json", describe_environment(dtype))
    write_json(run / "corpus.json", description)


def _check_precision(recipe: Recipe, run: Path, base: Base, console: Console) -> None:
    """Say loudly, before any training, where the run's dtype damages the untouched model."""
    if recipe.model.dtype == "float32":
        return
    if not (run / "precision.json").exists():
        log = run / "precision.log"
        with console.status(f"comparing {recipe.model.dtype} with float32 on the untouched model"):
            if _run_module("preproj.probe.precision", [str(run)], log, base):
                raise RecipeError(f"the precision check failed: {_last_line(log)} (see {log}).")
    warning = read_json(run / "precision.json")["warning"]
    if warning:
        console.print(f"[bold red]{warning}[/]")


def _run_cells(recipe: Recipe, run: Path, base: Base, console: Console) -> None:
    cells = cells_of(recipe)
    prepared = Prepared.read(run, recipe.evaluation)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, speed_estimate_period=120) as progress:
        task = progress.add_task("", total=sum(work_units(recipe, prepared, method) for method, _ in cells))
        done = 0
        for number, (method, seed) in enumerate(cells, 1):
            folder = cell_folder(run, method, seed)
            before = done
            done += work_units(recipe, prepared, method)
            name = f"{method} seed {seed}"
            if not _ended(folder):
                progress.update(task, description=f"{name} ({number}/{len(cells)})")
                if not console.is_terminal:
                    console.print(f"{name} ({number}/{len(cells)})")
                folder.mkdir(parents=True, exist_ok=True)
                show = partial(_show, progress, task, before)
                log = folder / "log.txt"
                code = _run_module("preproj.probe.cell", [str(run), method, str(seed)], log, base, show)
                if code:
                    progress.console.print(
                        f"{name} stopped with exit code {code}: {_last_line(log)} (see {log}). "
                        "The same command tries again."
                    )
            progress.update(task, completed=done)
        progress.update(task, description="done")


def _ended(folder: Path) -> bool:
    """Whether a cell is finished or has failed for good."""
    return any((folder / end).exists() for end in ("metrics.json", "failed.json"))


def _show(progress: Progress, task: TaskID, before: int, units: int) -> None:
    progress.update(task, completed=before + units)


def _run_module(
    module: str, arguments: list[str], log: Path, base: Base, on_progress: Callable[[int], Any] = lambda _: None
) -> int:
    """Run a part of the work in its own process, so that its peak memory is its own; return the exit code."""
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    # One device a cell: with more, the Trainer would split the batch over them.
    environment["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    if base.path is not None:
        environment["HF_HUB_OFFLINE"] = "1"
    with log.open("a", encoding="utf-8") as file:
        child = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            env=environment,
        )
        try:
            assert child.stdout is not None
            for line in child.stdout:
                if line.strip().isdigit():
                    on_progress(int(line))
            return child.wait()
        finally:
            child.kill()
            child.wait()


def _last_line(log: Path) -> str:
    return log.read_text("utf-8").strip().rpartition("\n")[2] or "no message"
