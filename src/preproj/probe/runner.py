"""A run of the probe: check everything, prepare the text, run the cells that nobody else runs, sum up."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, PretrainedConfig

from preproj.probe.base import Base, load_config, resolve_base
from preproj.probe.cell import cell_folder
from preproj.probe.continuity import check_recipe, go_on
from preproj.probe.errors import RecipeError
from preproj.probe.files import write_text
from preproj.probe.harness import load_tasks
from preproj.probe.methods import attach
from preproj.probe.parts import Part, parts_of
from preproj.probe.preparation import check_folder, prepare_run
from preproj.probe.recipe import Recipe
from preproj.probe.summary import cells_of, find_cell, write_summary
from preproj.probe.trackers import check_trackers
from preproj.probe.tuning import check_optuna
from preproj.probe.worker import work

PREPARING = "preparing the base model (the packaged model's first use takes half a minute)"


@dataclass(frozen=True)
class Outcome:
    """How a worker left a run.

    Attributes:
        good: whether every cell that it was asked for is finished, or in the hands of another worker.
        elsewhere: what other workers hold, and who.
        summed_up: whether summary.json says it all: not while others are at work, and not after a single cell.
    """

    good: bool
    elsewhere: dict[Part, str]
    summed_up: bool


def run_probe(
    recipe: Recipe, run: Path, console: Console, cell: str | None = None, accept_changes: bool = False
) -> Outcome:
    """Run every unfinished cell of a recipe, or only one, and write summary.json if no other worker is left to.

    Any number of workers may do this at once in one folder: each takes what no other holds.

    Args:
        recipe: the checked recipe.
        run: the run folder: new, or left by an earlier call with the same recipe.
        console: for progress.
        cell: ``METHOD/seedN``, to run this one alone.
        accept_changes: whether to go on where base, text, packages or the machine's settings are others than before.

    Raises:
        RecipeError: where the recipe, its model or its text is wrong (before anything is written), or the run folder
            holds something else.
    """
    every = sorted(cells_of(recipe), key=lambda each: recipe.seeds.index(each[1]))
    cells = [find_cell(recipe, cell)] if cell is not None else every
    check_folder(run, recipe)
    parts = parts_of(recipe, cells)
    left = not all(_ended(run, each) for each in cells)
    if left:
        check_trackers(recipe.report_to)
        if recipe.tuning is not None:
            check_optuna(recipe.tuning)
    with console.status(PREPARING):
        base = resolve_base(recipe.model.name)
        config = load_config(base)
        described = _describe_base(recipe, base, config)
        if left and recipe.evaluation.tasks:
            load_tasks(recipe.evaluation.tasks, recipe.evaluation.task_data)
        if left or not (run / "environment.json").exists():
            go_on(run, recipe, base, config, accept_changes)
    elsewhere: dict[Part, str] = {}
    if left:
        prepare_run(recipe, run, base, described, config, console)
        elsewhere = work(recipe, run, parts, base, console)
    summed_up = all(_ended(run, each) for each in every) or not (cell or elsewhere)
    if summed_up:
        write_summary(run, recipe, described)
        if not check_recipe(run, recipe):
            write_text(run / "recipe.yaml", recipe.to_yaml())  # with the keys that are newer than the run
    held = [(part.method, part.number) for part in elsewhere]
    good = all((cell_folder(run, *each) / "metrics.json").exists() or each in held for each in cells)
    return Outcome(good, elsewhere, summed_up)


def _ended(run: Path, cell: tuple[str, int]) -> bool:
    return Part("cell", *cell).ended(run)


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
