"""A run of the probe: check everything, prepare the text, run the cells one by one, sum up."""

import gc
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import disable_progress_bars
from filelock import FileLock, Timeout
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import AutoModelForCausalLM, PretrainedConfig

from preproj.probe import distributed
from preproj.probe.base import Base, load_config, load_tokenizer, resolve_base
from preproj.probe.cell import cell_folder, train_cell, trial_units, work_units
from preproj.probe.continuity import check_recipe, describe_inputs, go_on
from preproj.probe.ending import why
from preproj.probe.environment import describe_environment
from preproj.probe.errors import RecipeError
from preproj.probe.files import clear_unfinished, read_json, write_json, write_text
from preproj.probe.harness import load_tasks
from preproj.probe.methods import attach
from preproj.probe.prepared import Prepared, describe_corpus, prepare
from preproj.probe.process import Progress as Work
from preproj.probe.recipe import Recipe
from preproj.probe.sources import read_corpus
from preproj.probe.summary import cells_of, find_cell, write_summary
from preproj.probe.tokenised import text_cache
from preproj.probe.trackers import check_trackers, keep_wandb_in
from preproj.probe.tuning import best_trial, check_optuna, read_trials, trial_folder, tune, tuned_methods


def run_probe(
    recipe: Recipe, run: Path, console: Console, cell: str | None = None, accept_changes: bool = False
) -> bool:
    """Run every unfinished cell of a recipe, or only one, and write summary.json.

    Args:
        recipe: the checked recipe.
        run: the run folder: new, or left by an earlier call with the same recipe.
        console: for progress.
        cell: ``METHOD/seedN``, to run this one alone.
        accept_changes: whether to go on where base, text, packages or the machine's settings are others than before.

    Returns:
        Whether every cell that was asked for is finished.

    Raises:
        RecipeError: where the recipe, its model or its text is wrong (before anything is written), or the run folder
            holds something else or is in use.
    """
    cells = [find_cell(recipe, cell)] if cell else sorted(cells_of(recipe), key=lambda c: recipe.seeds.index(c[1]))
    _check_folder(run, recipe)
    left = not all(_ended(cell_folder(run, *cell)) for cell in cells)
    if left:
        check_trackers(recipe.report_to)
        if recipe.tuning is not None:
            check_optuna()
    with console.status("preparing the base model (the packaged model's first use takes half a minute)"):
        base = resolve_base(recipe.model.name)
        config = load_config(base)
        described = _describe_base(recipe, base, config)
        if left and recipe.evaluation.tasks:
            load_tasks(recipe.evaluation.tasks, recipe.evaluation.task_data)
        if left:
            go_on(run, recipe, base, config, accept_changes)
    # Outside the status: the library that tokenises draws its own progress bars, and forks.
    ready = all((run / name).exists() for name in ("environment.json", "corpus.json", "data"))
    fresh = _load_text(run, recipe, base, config, console) if left and not ready else None
    run.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(run / ".lock", timeout=0):
            write_text(run / "recipe.yaml", recipe.to_yaml())
            if fresh:
                _write_text(run, describe_inputs(run, recipe, base, config), recipe.model.dtype, *fresh)
            if left:
                _check_precision(recipe, run, base, console)
                _run_cells(recipe, run, cells, base, console)
            write_summary(run, recipe, described)
            return all((cell_folder(run, *cell) / "metrics.json").exists() for cell in cells)
    except Timeout as error:
        raise RecipeError(f"run folder {run} is in use by another preproj; wait for it or choose another.") from error


def _check_folder(run: Path, recipe: Recipe) -> None:
    """Refuse a folder that is not a run, or a run of another recipe."""
    if run.exists() and not run.is_dir():
        raise RecipeError(f"run folder {run} is a file; choose another with --out.")
    filled = run.exists() and any(not entry.name.startswith(".") for entry in run.iterdir())
    if filled and not (run / "recipe.yaml").exists():
        raise RecipeError(f"run folder {run} is not empty and not a run; choose another with --out.")
    check_recipe(run, recipe)


def _describe_base(recipe: Recipe, base: Base, config: PretrainedConfig) -> dict[str, Any]:
    """Return summary.json's ``base``, and check that the methods fit this architecture."""
    try:
        for method in recipe.methods:
            with torch.device("meta"):
                shell = AutoModelForCausalLM.from_config(config)
            parameters = sum(p.numel() for p in shell.parameters())
            attach(shell, method, 0, recipe.match)
    except ValueError as error:
        raise RecipeError(f"model.name: {base.name}: {error}") from error
    return {"name": base.name, "dtype": recipe.model.dtype, "parameters": parameters, "note": base.note}


def _load_text(
    run: Path, recipe: Recipe, base: Base, config: PretrainedConfig, console: Console
) -> tuple[dict[str, Any], Prepared]:
    """Read and tokenise the text; return the content of corpus.json and what the cells read.

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
        return description, prepared


def _write_text(run: Path, inputs: dict[str, Any], dtype: str, description: dict[str, Any], prepared: Prepared) -> None:
    """Write what every cell reads, and what is known of its origin; a run that goes on keeps what it has."""
    prepared.write(run)
    if not (run / "environment.json").exists():
        write_json(run / "environment.json", describe_environment(dtype) | inputs)
    if not (run / "corpus.json").exists():
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


def _run_cells(recipe: Recipe, run: Path, cells: list[tuple[str, int]], base: Base, console: Console) -> None:
    """Run what is missing of the cells, the trials of a method before its first cell."""
    prepared = Prepared.read(run, recipe.evaluation)
    methods = {method for method, _ in cells}
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, speed_estimate_period=120) as progress:
        trials = {m: recipe.tuning.trials for m in tuned_methods(recipe) if m in methods} if recipe.tuning else {}
        total = sum(work_units(recipe, prepared, method) for method, _ in cells)
        total += sum(count * trial_units(recipe, prepared) for count in trials.values())
        part = _Parts(progress, progress.add_task("", total=total), base, console)
        for number, (method, seed) in enumerate(cells, 1):
            if method in trials:
                _tune(recipe, run, method, trial_units(recipe, prepared), part)
                del trials[method]
            folder = cell_folder(run, method, seed)
            units = work_units(recipe, prepared, method)
            if tried := _nothing_found(recipe, run, method):
                write_json(folder / "failed.json", {"method": method, "seed": seed, "step": None, "reason": tried})
            if _ended(folder):
                part.skip(units)
            elif not _tuning_left(recipe, run, method):
                name, count = f"{method} seed {seed}", f"{number}/{len(cells)}"
                if distributed.world_size() > 1:
                    part.train_with_others(name, run, method, seed)
                if not _ended(folder):
                    part.run(name, count, "preproj.probe.cell", [str(run), method, str(seed)], folder, units)
        progress.update(part.task, description="done")


def _tune(recipe: Recipe, run: Path, method: str, units: int, part: "_Parts") -> None:
    """Run the trials of a method; those that have ended only move the bar."""
    assert recipe.tuning is not None
    trials, before = recipe.tuning.trials, part.done

    def run_trial(number: int) -> bool:
        part.skip(before + number * units - part.done)
        folder = trial_folder(run, method, number)
        arguments = [str(run), method, str(number)]
        part.run(f"{method} trial {number}", f"{number + 1}/{trials}", "preproj.probe.trial", arguments, folder, units)
        return (folder / "trial.json").exists()

    tune(recipe, run, method, run_trial)
    part.skip(before + trials * units - part.done)


class _Parts:
    """Runs the parts of a run, each in a process of its own, and shows how far all of them are."""

    def __init__(self, progress: Progress, task: TaskID, base: Base, console: Console):
        self.progress, self.task, self.base, self.console = progress, task, base, console
        self.done = 0

    def skip(self, units: int) -> None:
        """Count work that needs none."""
        self.done += units
        self.progress.update(self.task, completed=self.done)

    def run(self, name: str, count: str, module: str, arguments: list[str], folder: Path, units: int) -> None:
        """Run one part, and say so where it stops before its end."""
        self.progress.update(self.task, description=f"{name} ({count})")
        if not self.console.is_terminal:
            self.console.print(f"{name} ({count})")
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / "log.txt"
        code = _run_module(module, arguments, log, self.base, self._show)
        if code:
            self.progress.console.print(
                f"{name} stopped with exit code {code}: {why(code, folder, _last_line(log))} (see {log}). "
                "The same command tries again."
            )
        self.skip(units)

    def train_with_others(self, name: str, run: Path, method: str, seed: int) -> None:
        """Train a cell in this process and the others; the cell's own process finds it trained."""
        folder = cell_folder(run, method, seed)
        if method == "none" or (folder / "trained.json").exists():
            return
        self.progress.update(self.task, description=f"{name} ({distributed.world_size()} processes)")
        keep_wandb_in(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock", timeout=60):
            clear_unfinished(folder)
            distributed.from_main(lambda: (run.resolve(), method, seed))
            train_cell(run, method, seed, Work(self._show))
        distributed.leave()
        gc.collect()
        torch.cuda.empty_cache()  # the cell's own process needs the device now

    def _show(self, units: int) -> None:
        self.progress.update(self.task, completed=self.done + units)


def _tuning_left(recipe: Recipe, run: Path, method: str) -> bool:
    """Whether a method still waits for a trial."""
    tuning = recipe.tuning
    return tuning is not None and method != "none" and len(read_trials(recipe, run, method)) < tuning.trials


def _nothing_found(recipe: Recipe, run: Path, method: str) -> str | None:
    """Say why a method cannot be trained: every trial failed."""
    if method not in tuned_methods(recipe) or _tuning_left(recipe, run, method):
        return None
    trials = read_trials(recipe, run, method)
    return None if best_trial(trials) else f"every trial of its tuning failed; the last one: {trials[-1]['reason']}"


def _ended(folder: Path) -> bool:
    """Whether a cell is finished or has failed for good."""
    return any((folder / end).exists() for end in ("metrics.json", "failed.json"))


def _run_module(
    module: str, arguments: list[str], log: Path, base: Base, on_progress: Callable[[int], Any] = lambda _: None
) -> int:
    """Run a part of the work in its own process, so that its peak memory is its own; return the exit code."""
    environment = {**distributed.alone(os.environ), "TOKENIZERS_PARALLELISM": "false"}
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
    """Return the last message of a log, which is no line of a warning's source or of a progress bar."""
    lines = re.split(r"[\r\n]+", log.read_text("utf-8"))
    return next((line for line in reversed(lines) if re.match(r"\S", line) and "%|" not in line), "no message")
