"""Tuning: which settings each method trains with, searched on the validation split with equal trials for every method.

A method has a study of optuna's, kept in ``tuning/journal.log`` of the run folder, and a folder for each trial. A list
of values for every key is a grid, tried whole; with a range among them optuna's sampler suggests the trials.
"""

import importlib.util
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

from preproj.probe.errors import RecipeError
from preproj.probe.files import read_json, write_json
from preproj.probe.recipe import Range, Recipe, Training, Tuning


def check_optuna() -> None:
    """Refuse a recipe with tuning where optuna is missing.

    Raises:
        RecipeError: naming the command that installs it.
    """
    if importlib.util.find_spec("optuna") is None:
        raise RecipeError("tuning needs optuna; run `pip install 'preproj[tuning]'`.")


def tuned_methods(recipe: Recipe) -> list[str]:
    """List the methods that are tuned."""
    return [method for method in recipe.methods if method != "none"] if recipe.tuning else []


def trial_folder(run: Path, method: str, number: int) -> Path:
    """Return the folder of a trial."""
    return run / "tuning" / method / f"trial{number}"


def objective(recipe: Recipe) -> str:
    """Name the measure that a trial is judged by, on the validation split: the first perplexity of the recipe."""
    return f"{[*recipe.evaluation.perplexity, 'document'][0]}/perplexity"


def trial_settings(recipe: Recipe, method: str, parameters: dict[str, float]) -> Training:
    """Return the training section of a trial."""
    assert recipe.tuning is not None
    return _settings(recipe, method, parameters).changed(tokens=recipe.tuning.tokens or recipe.training.tokens)


def cell_settings(recipe: Recipe, run: Path, method: str) -> Training:
    """Return the training section of a cell, with what tuning found best for its method."""
    if method not in tuned_methods(recipe):
        return recipe.training
    best = best_trial(read_trials(recipe, run, method))
    assert best is not None  # the runner starts no cell of a method without
    return _settings(recipe, method, best["parameters"])


def _settings(recipe: Recipe, method: str, parameters: dict[str, float]) -> Training:
    return recipe.training.changed(**parameters | {"learning_rate": {method: parameters["learning_rate"]}})


def read_trials(recipe: Recipe, run: Path, method: str) -> list[dict[str, Any]]:
    """Return the finished trials of a method: ``number``, ``parameters``, ``value``, ``reason`` and ``seconds``."""
    assert recipe.tuning is not None
    trials = []
    for number in range(recipe.tuning.trials):
        path = trial_folder(run, method, number) / "trial.json"
        if path.exists():
            trial = read_json(path)
            trials.append(
                {"number": number} | {key: trial[key] for key in ("parameters", "value", "reason", "seconds")}
            )
    return trials


def best_trial(trials: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the trial of the lowest perplexity, or None where none has any."""
    return min((trial for trial in trials if trial["value"] is not None), key=lambda t: t["value"], default=None)


def describe_tuning(recipe: Recipe, run: Path) -> dict[str, Any] | None:
    """Return summary.json's ``tuning``: every trial of every method, and which was chosen."""
    if recipe.tuning is None:
        return None
    trials = []
    for method in tuned_methods(recipe):
        finished = read_trials(recipe, run, method)
        best = best_trial(finished) if len(finished) == recipe.tuning.trials else None
        trials += [{"method": method, **trial, "chosen": trial is best} for trial in finished]
    return {"measure": objective(recipe), "trials": trials}


def tuning_protocol(tuning: Tuning, training: Training) -> str:
    """Say in one sentence how the settings were found."""
    keys = ", ".join(f"{key} in {_said(space)}" for key, space in tuning.search.spaces().items())
    tokens = tuning.tokens or training.tokens
    sampler = "optuna's TPE sampler" if not _grid(tuning) else "every point of the grid"
    return (
        f"Each method has {tuning.trials} trials of {tokens:,} training tokens on seed {tuning.seed} ({sampler}: "
        f"{keys}), judged by perplexity on the validation split; the test split plays no part. The best trial's "
        "settings train every cell of the method."
    )


def _said(space: list[float] | Range) -> str:
    if isinstance(space, Range):
        return f"{space.low:g} to {space.high:g}, logarithmic"
    return " / ".join(f"{value:g}" for value in space)


def tune(recipe: Recipe, run: Path, method: str, run_trial: Callable[[int], bool]) -> bool:
    """Run the trials of a method that are missing, continuing where an interrupted call left them.

    Args:
        recipe: with a tuning section.
        run: the run folder.
        method: which to tune.
        run_trial: runs the trial of a number, whose ``parameters.json`` is written, and says whether it has ended.

    Returns:
        Whether every trial has ended.
    """
    import optuna
    from optuna.samplers import TPESampler
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend
    from optuna.trial import TrialState

    assert recipe.tuning is not None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    journal = run / "tuning" / "journal.log"
    journal.parent.mkdir(exist_ok=True)
    storage = JournalStorage(JournalFileBackend(str(journal)))
    grid = _grid(recipe.tuning)
    for number in range(recipe.tuning.trials):
        # A seed for each trial, so that an interruption changes no suggestion.
        sampler = TPESampler(seed=(recipe.tuning.seed + number) % 2**32)
        study = optuna.create_study(storage=storage, study_name=method, sampler=sampler, load_if_exists=True)
        if number == len(study.trials):
            if grid:
                study.enqueue_trial(grid[number])
            study.ask(_distributions(recipe.tuning))
        trial = study.trials[number]
        if trial.state.is_finished():
            continue
        folder = trial_folder(run, method, number)
        write_json(folder / "parameters.json", {"parameters": trial.params})
        if not (folder / "trial.json").exists() and not run_trial(number):
            return False
        value = read_json(folder / "trial.json")["value"]
        study.tell(number, value, state=TrialState.FAIL if value is None else TrialState.COMPLETE)
    return True


def _grid(tuning: Tuning) -> list[dict[str, float]]:
    """Return the points of the grid in the order of the recipe, or none where a range is searched."""
    spaces = tuning.search.spaces()
    if any(isinstance(space, Range) for space in spaces.values()):
        return []
    return [dict(zip(spaces, values, strict=True)) for values in product(*spaces.values())]  # type: ignore[arg-type]


def _distributions(tuning: Tuning) -> dict[str, Any]:
    from optuna.distributions import CategoricalDistribution, FloatDistribution

    return {
        key: FloatDistribution(space.low, space.high, log=True)
        if isinstance(space, Range)
        else CategoricalDistribution(space)
        for key, space in tuning.search.spaces().items()
    }
