"""Tuning: which settings each method trains with, searched on the validation split with equal trials for every method.

A list of values for every key is a grid, tried whole; with a range among them optuna's sampler suggests the trials.
What it suggests depends on the folders of the trials before and on nothing else, so any number of workers may run them.
"""

import importlib.util
from itertools import product
from pathlib import Path
from typing import Any

from preproj.probe.errors import RecipeError
from preproj.probe.files import read_json, write_json
from preproj.probe.recipe import Range, Recipe, Training, Tuning

STARTUP = 10
"""Trials that optuna's sampler draws at random, before it learns from those that have ended."""


def check_optuna(tuning: Tuning) -> None:
    """Refuse a search over a range where optuna is missing.

    Raises:
        RecipeError: naming the command that installs it.
    """
    if not _grid(tuning) and importlib.util.find_spec("optuna") is None:
        raise RecipeError("tuning over a range needs optuna; run `pip install 'preproj[tuning]'`.")


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


def waits_for(tuning: Tuning, number: int) -> int:
    """Return how many trials, from the first, must have ended before one can be suggested."""
    return number if number >= STARTUP and not _grid(tuning) else 0


def write_parameters(recipe: Recipe, run: Path, method: str, number: int) -> None:
    """Write what a trial tries into its ``parameters.json``, unless an interrupted worker has."""
    assert recipe.tuning is not None
    path = trial_folder(run, method, number) / "parameters.json"
    if not path.exists():
        grid = _grid(recipe.tuning)
        write_json(path, {"parameters": grid[number] if grid else _suggest(recipe, run, method, number)})


def _suggest(recipe: Recipe, run: Path, method: str, number: int) -> dict[str, float]:
    """Ask optuna what to try after the trials before."""
    import optuna
    from optuna.trial import TrialState

    tuning = recipe.tuning
    assert tuning is not None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    distributions: dict[str, optuna.distributions.BaseDistribution] = {
        key: optuna.distributions.FloatDistribution(space.low, space.high, log=True)
        if isinstance(space, Range)
        else optuna.distributions.CategoricalDistribution(space)
        for key, space in tuning.search.spaces().items()
    }
    # A seed for each trial, so that neither an interruption nor another worker changes a suggestion.
    sampler = optuna.samplers.TPESampler(n_startup_trials=STARTUP, seed=(tuning.seed + number) % 2**32)
    study = optuna.create_study(sampler=sampler)
    for trial in read_trials(recipe, run, method)[: waits_for(tuning, number)]:
        study.add_trial(
            optuna.trial.create_trial(
                params=trial["parameters"],
                distributions=distributions,
                value=trial["value"],
                state=TrialState.FAIL if trial["value"] is None else TrialState.COMPLETE,
            )
        )
    return study.ask(distributions).params


def nothing_found(recipe: Recipe, run: Path, method: str) -> str | None:
    """Say why a method cannot be trained, after its last trial: every one failed."""
    if method not in tuned_methods(recipe):
        return None
    trials = read_trials(recipe, run, method)
    return None if best_trial(trials) else f"every trial of its tuning failed; the last one: {trials[-1]['reason']}"


def _grid(tuning: Tuning) -> list[dict[str, float]]:
    """Return the points of the grid in the order of the recipe, or none where a range is searched."""
    spaces = tuning.search.spaces()
    if any(isinstance(space, Range) for space in spaces.values()):
        return []
    return [dict(zip(spaces, values, strict=True)) for values in product(*spaces.values())]  # type: ignore[arg-type]
