"""A run of the probe: check everything, prepare the text, run the cells one by one, sum up."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
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
from preproj.probe.files import write_json, write_text
from preproj.probe.methods import method_configs
from preproj.probe.prepared import Prepared, describe_corpus, prepare
from preproj.probe.python_docs import python_docs
from preproj.probe.recipe import Recipe
from preproj.probe.sources import read_corpus
from preproj.probe.summary import cells_of, write_summary
from preproj.probe.tokenised import text_cache

Rows = list[dict[str, Any]]


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
    # Outside the status: the library that tokenises draws its own progress bars, and forks.
    fresh = None if (run / "corpus.json").exists() else _load_text(recipe, base, config, console)
    run.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(run / ".lock", timeout=0):
            write_text(run / "recipe.yaml", recipe.to_yaml())
            if fresh:
                _write_text(run, recipe.model.dtype, *fresh)
            rows = _run_cells(recipe, run, base, console, lambda: write_summary(run, recipe, described))
    except Timeout as error:
        raise RecipeError(f"run folder {run} is in use by another preproj; wait for it or choose another.") from error
    return all(row["status"] == "finished" for row in rows)


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
        then = yaml.safe_load(known.read_text("utf-8"))
    except yaml.YAMLError as error:
        raise RecipeError(f"{known} is damaged; choose another folder with --out.") from error
    changed = _first_difference(then, yaml.safe_load(recipe.to_yaml()))
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


def _run_cells(recipe: Recipe, run: Path, base: Base, console: Console, sum_up: Callable[[], Rows]) -> Rows:
    """Run the unfinished cells, and sum up after each of them, or once if there is none; return the last rows."""
    rows: Rows | None = None
    cells = cells_of(recipe)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, speed_estimate_period=120) as progress:
        task = progress.add_task("", total=sum(work_units(recipe, method) for method, _ in cells))
        done = 0
        for number, (method, seed) in enumerate(cells, 1):
            folder = cell_folder(run, method, seed)
            before = done
            done += work_units(recipe, method)
            name = f"{method} seed {seed}"
            if not any((folder / end).exists() for end in ("metrics.json", "failed.json")):
                progress.update(task, description=f"{name} ({number}/{len(cells)})")
                if not console.is_terminal:
                    console.print(f"{name} ({number}/{len(cells)})")
                folder.mkdir(parents=True, exist_ok=True)
                show = partial(_show, progress, task, before)
                code = _run_cell(run, folder, method, seed, base, show)
                rows = sum_up()
                if code:
                    last = (folder / "log.txt").read_text("utf-8").strip().rpartition("\n")[2]
                    progress.console.print(
                        f"{name} stopped with exit code {code}: {last or 'no message'} "
                        f"(see {folder / 'log.txt'}). The same command tries again."
                    )
            progress.update(task, completed=done)
        progress.update(task, description="done")
    return rows or sum_up()


def _show(progress: Progress, task: TaskID, before: int, units: int) -> None:
    progress.update(task, completed=before + units)


def _run_cell(run: Path, folder: Path, method: str, seed: int, base: Base, on_progress: Callable[[int], Any]) -> int:
    """Run one cell in its own process, so that its peak memory is its own; return the exit code."""
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    # One device a cell: with more, the Trainer would split the batch over them.
    environment["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    if base.path is not None:
        environment["HF_HUB_OFFLINE"] = "1"
    with (folder / "log.txt").open("a", encoding="utf-8") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "preproj.probe.cell", str(run), method, str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
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
