"""One trial of tuning: a method trained with suggested settings, scored on the validation split, in its own process.

The runner starts it as ``python -m preproj.probe.trial RUN METHOD NUMBER``.
"""

import shutil
import sys
import time
from pathlib import Path

from preproj.probe.base import load_model, load_tokenizer, resolve_base
from preproj.probe.cell import mean_perplexity, perplexity_items
from preproj.probe.files import clear_unfinished, read_json, write_json
from preproj.probe.fit import fit
from preproj.probe.methods import attach
from preproj.probe.prepared import Prepared
from preproj.probe.process import Progress, start_process
from preproj.probe.recipe import parse_recipe
from preproj.probe.training import NonFiniteLossError
from preproj.probe.tuning import objective, trial_folder, trial_settings


def run_trial(run: Path, method: str, number: int) -> None:
    """Run one trial and write its ``trial.json``: the perplexity, or the reason why there is none.

    Args:
        run: the run folder, prepared by the runner.
        method: one of the recipe's.
        number: of the trial, whose ``parameters.json`` the runner has written.
    """
    recipe = parse_recipe((run / "recipe.yaml").read_text("utf-8"), str(run / "recipe.yaml"))
    assert recipe.tuning is not None
    folder = trial_folder(run, method, number)
    parameters = read_json(folder / "parameters.json")["parameters"]
    prepared = Prepared.read(run, recipe.evaluation)
    base = resolve_base(recipe.model.name)
    started, progress = time.perf_counter(), Progress()
    value, reason = None, None
    try:
        settings = trial_settings(recipe, method, parameters)
        model = load_model(base, recipe.model.dtype)
        attached = attach(model, method, recipe.tuning.seed, recipe.match)
        fit(attached, prepared, settings, method, recipe.tuning.seed, folder, progress)
        protocol, metric = objective(recipe).split("/")
        items = perplexity_items(
            attached.model.eval(), load_tokenizer(base), protocol, prepared, "validation", recipe.evaluation, progress
        )
        value = mean_perplexity(list(items), metric, "validation", settings.steps)
    except NonFiniteLossError as error:
        reason = str(error)
    seconds = time.perf_counter() - started
    write_json(folder / "trial.json", {"parameters": parameters, "value": value, "reason": reason, "seconds": seconds})
    for leftover in ("adapter", "checkpoints"):  # a trial is measured, not kept
        shutil.rmtree(folder / leftover, ignore_errors=True)


def main(run: str, method: str, number: str) -> None:
    """Run the trial named on the command line."""
    folder = trial_folder(Path(run), method, int(number))
    with start_process(folder):
        clear_unfinished(folder)
        run_trial(Path(run), method, int(number))


if __name__ == "__main__":
    main(*sys.argv[1:])
