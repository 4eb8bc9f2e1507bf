"""Tuning: trials on the validation split before the cells, kept, resumed and told."""

import importlib.util
import json
import math
import shutil
from pathlib import Path

import numpy as np
import optuna
import pytest
from optuna.trial import TrialState
from typer.testing import CliRunner

from preproj.cli import app
from preproj.probe.files import read_json, read_jsonl
from preproj.probe.recipe import Recipe
from preproj.probe.tuning import STARTUP, waits_for, write_parameters

RATES = [1e-4, 3e-3, 1e9]  # the last one diverges


def tuned(recipe: dict, **tuning) -> dict:
    recipe["training"].pop("learning_rate")
    recipe["methods"] = ["none", "skip"]
    recipe["tuning"] = {"trials": 3, "tokens": 640, "search": {"learning_rate": RATES}} | tuning
    return recipe


def probe(*arguments: object):
    return CliRunner().invoke(app, ["probe", *map(str, arguments)])


def test_every_trial_is_kept_and_the_best_trains_the_cells(recipe, write_recipe, tmp_path):
    recipe = tuned(recipe)
    recipe["training"]["pre_lr_ratio"] = 0.5
    recipe["methods"] = ["pre"]
    run = tmp_path / "run"
    assert probe(write_recipe(recipe), "--out", run).exit_code == 0
    tuning = read_json(run / "summary.json")["tuning"]
    assert tuning["measure"] == "document/perplexity"
    trials = tuning["trials"]
    assert [(trial["method"], trial["number"]) for trial in trials] == [("pre", number) for number in range(3)]
    assert [trial["parameters"]["learning_rate"] for trial in trials] == RATES
    best = min((trial for trial in trials if trial["value"] is not None), key=lambda trial: trial["value"])
    assert [trial["chosen"] for trial in trials] == [trial is best for trial in trials]
    assert trials[2]["value"] is None or trials[2]["value"] > best["value"]
    metrics = read_json(run / "cells/pre/seed0/metrics.json")
    assert metrics["learning_rate"] == best["parameters"]["learning_rate"]
    # A trial has its own budget, a cell that of the recipe.
    assert len(read_jsonl(run / "tuning/pre/trial0/training.jsonl")) == 640 / 64
    assert len(read_jsonl(run / "cells/pre/seed0/training.jsonl")) == 1280 / 64
    assert not (run / "tuning/pre/trial0/adapter").exists()
    # The rate that is logged is what the pre-projection had.
    logged = max(row["learning_rate"] for row in read_jsonl(run / "tuning/pre/trial1/training.jsonl"))
    assert logged == pytest.approx(0.5 * RATES[1])
    report = (run / "report.md").read_text("utf-8")
    assert "Tuning: every trial, judged on the validation split" in report
    assert "3 trials of 640 training tokens on seed 0 (every point of the grid: learning\\_rate in 0.0001" in report


def test_a_trial_is_scored_on_validation_text_as_a_cell_would_be(recipe, write_recipe, tmp_path):
    run = tmp_path / "run"
    one = tuned(recipe, trials=1, tokens=1280, seed=3, search={"learning_rate": [1e-3]})
    assert probe(write_recipe(one), "--out", run).exit_code == 0
    trial = read_json(run / "tuning/skip/trial0/trial.json")
    # The same as a run that evaluates the validation split with that rate and seed.
    del recipe["tuning"]
    recipe["training"]["learning_rate"] = {"skip": 1e-3}
    recipe["seeds"] = [3]
    recipe["methods"] = ["skip"]
    recipe["evaluation"] |= {"split": "validation", "passages": 0}
    assert probe(write_recipe(recipe), "--out", tmp_path / "other").exit_code == 0
    loss, tokens = np.array(
        [row["perplexity"] for row in read_jsonl(tmp_path / "other/cells/skip/seed3/items/document.jsonl")]
    ).T
    assert trial["value"] == pytest.approx(math.exp(loss.sum() / tokens.sum()), rel=1e-12)


SEARCH = {"learning_rate": {"low": 1e-5, "high": 1e-1}, "weight_decay": [0.0, 0.1]}


def value_of(parameters: dict) -> float | None:
    """A made-up result, none where the rate is too high."""
    rate = parameters["learning_rate"]
    return None if rate > 3e-2 else abs(math.log10(rate) + 3) + parameters["weight_decay"]


def tried(checked: Recipe, run: Path, number: int) -> dict:
    """Have a trial of a run suggested and ended, and return what it tried."""
    write_parameters(checked, run, "skip", number)
    folder = run / "tuning/skip" / f"trial{number}"
    parameters = read_json(folder / "parameters.json")["parameters"]
    value = value_of(parameters)
    content = {"parameters": parameters, "value": value, "reason": None if value else "too high", "seconds": 1.0}
    (folder / "trial.json").write_text(json.dumps(content))
    return parameters


def test_the_suggestions_are_those_of_optunas_sampler_whatever_is_interrupted_and_whoever_runs_them(recipe, tmp_path):
    trials = STARTUP + 4
    checked = Recipe.model_validate(tuned(recipe, trials=trials, seed=7, search=SEARCH))
    # Optuna's own study, one trial after the other, with a sampler of its own seed for each.
    study, expected = optuna.create_study(), []
    for number in range(trials):
        study.sampler = optuna.samplers.TPESampler(seed=7 + number)
        trial = study.ask()
        parameters = {
            "learning_rate": trial.suggest_float("learning_rate", 1e-5, 1e-1, log=True),
            "weight_decay": trial.suggest_categorical("weight_decay", [0.0, 0.1]),
        }
        value = value_of(parameters)
        study.tell(trial, value, state=TrialState.FAIL if value is None else TrialState.COMPLETE)
        expected.append(parameters)
    assert any(value_of(parameters) is None for parameters in expected)
    assert len({parameters["learning_rate"] for parameters in expected}) == trials
    # Side by side the first end in any order; a later one waits for all before it.
    order = [*reversed(range(STARTUP)), *range(STARTUP, trials)]
    assert [waits_for(checked.tuning, number) for number in range(trials)] == [0] * STARTUP + list(
        range(STARTUP, trials)
    )
    found = {number: tried(checked, tmp_path, number) for number in order}
    assert [found[number] for number in range(trials)] == expected
    # A trial that was interrupted keeps what it tries.
    (tmp_path / "tuning/skip/trial12/trial.json").unlink()
    (tmp_path / "tuning/skip/trial3/trial.json").unlink()
    assert tried(checked, tmp_path, 12) == expected[12]


def test_the_trials_of_a_grid_wait_for_nothing_and_are_its_points_in_order(recipe, tmp_path):
    search = {"learning_rate": [1e-3, 1e-4], "weight_decay": [0.0, 0.1]}
    checked = Recipe.model_validate(tuned(recipe, trials=4, search=search))
    assert [waits_for(checked.tuning, number) for number in range(4)] == [0] * 4
    found = [tried(checked, tmp_path, number) for number in (3, 1, 2, 0)]
    assert [(one["learning_rate"], one["weight_decay"]) for one in found] == [
        (1e-4, 0.1),
        (1e-3, 0.1),
        (1e-4, 0.0),
        (1e-3, 0.0),
    ]


def test_a_method_whose_trials_all_fail_has_failed_cells_and_a_reason(recipe, write_recipe, tmp_path):
    run = tmp_path / "run"
    recipe = tuned(recipe, trials=1, search={"learning_rate": [1e30]})
    recipe["methods"] = ["none", "pre"]
    done = probe(write_recipe(recipe), "--out", run)
    assert done.exit_code == 1
    failed = read_json(run / "cells/pre/seed0/failed.json")
    assert failed["reason"].startswith("every trial of its tuning failed; the last one: the training loss was not ")
    assert (run / "cells/none/seed0/metrics.json").exists()
    assert "not finite" in (run / "report.md").read_text("utf-8")


@pytest.mark.slow
def test_trained_weights_that_are_finite_and_of_no_use_fail_their_trial_and_their_cell(recipe, write_recipe, tmp_path):
    # Two steps: the last update comes after the last loss that is looked at.
    recipe["training"]["tokens"] = 128
    recipe["training"]["learning_rate"] = {"pre": 1e15}
    recipe["methods"] = ["pre"]
    assert probe(write_recipe(recipe), "--out", tmp_path / "cell").exit_code == 1
    failed = read_json(tmp_path / "cell/cells/pre/seed0/failed.json")
    assert "was not finite at step 2; try a lower learning rate." in failed["reason"]
    recipe = tuned(recipe, trials=2, tokens=128, search={"learning_rate": [1e-3, 1e15]})
    recipe["methods"] = ["pre"]
    assert probe(write_recipe(recipe), "--out", tmp_path / "run").exit_code == 0
    best, broken = read_json(tmp_path / "run/summary.json")["tuning"]["trials"]
    assert best["chosen"]
    assert broken["value"] is None
    assert "was not finite" in broken["reason"]


@pytest.mark.slow
def test_a_run_folder_without_its_text_gets_it_again_or_is_refused(recipe, write_recipe, tmp_path, text_files):
    run = tmp_path / "run"
    recipe = tuned(recipe, trials=1, search={"learning_rate": [1e-3]})
    own = tmp_path / "train.jsonl"
    shutil.copy(text_files["train"], own)
    recipe["data"]["train"] = str(own)
    path = write_recipe(recipe)
    assert probe(path, "--out", run).exit_code == 0
    before = (run / "cells/skip/seed0/items/document.jsonl").read_bytes()
    environment = (run / "environment.json").read_bytes()
    shutil.rmtree(run / "data")
    assert probe(path, "--out", run).exit_code == 0  # nothing is left to run
    assert not (run / "data").exists()
    shutil.rmtree(run / "cells/skip")
    assert probe(path, "--out", run).exit_code == 0
    assert (run / "cells/skip/seed0/items/document.jsonl").read_bytes() == before
    assert (run / "environment.json").read_bytes() == environment
    shutil.rmtree(run / "data")
    shutil.rmtree(run / "cells/skip")
    own.write_text(own.read_text("utf-8") + '{"text": "one more"}\n', "utf-8")
    for consent, sentence in (([], f"began otherwise: {own} was "), (["--accept-changes"], "began with another text")):
        refused = probe(path, "--out", run, *consent)
        assert refused.exit_code == 2
        assert sentence in refused.output


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trials": 2}, "tuning: trials is 2: expected 3, one for each point of the grid."),
        ({"tokens": 100}, "tuning.tokens is 100: expected a multiple of block_size · batch_size = 64."),
        (
            {"search": {"learning_rate": {"low": 1e-2, "high": 1e-3}}},
            "learning_rate: low is 0.01: expected less than hi",
        ),
        ({"search": {"learning_rate": {"low": 1e-2}}}, "tuning.search.learning_rate.high is missing."),
        ({"search": {"learning_rate": {"low": 1e-2, "up": 1}}}, "tuning.search.learning_rate.high is missing."),
        (
            {"search": {"learning_rate": [0, 1e-3, 1e-2]}},
            "tuning.search.learning_rate has 0; it should be greater than 0",
        ),
        ({"search": {"learning_rate": [1e-3] * 3}}, "tuning: search names a value twice."),
        ({"search": {"learning_rate": "1e-3"}}, "it should be a valid list (write 1.0e-3, with a point)"),
        ({"search": {}}, "tuning.search.learning_rate is missing."),
        (
            {"search": {"learning_rate": RATES, "tokens": [1]}},
            "unknown key tuning.search.tokens; allowed here: learning",
        ),
        (
            {"search": {"learning_rate": RATES, "warmup_ratio": [2]}},
            "search.warmup_ratio has 2; it should be less than",
        ),
    ],
)
def test_mistakes_in_the_section_are_one_sentence(recipe, write_recipe, tmp_path, change, message):
    done = probe(write_recipe(tuned(recipe, **change)), "--out", tmp_path / "run")
    assert done.exit_code == 2
    assert message in done.output
    assert done.output.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_rates_beside_tuning_and_validation_as_the_test_are_refused(recipe):
    rates = dict(recipe["training"]["learning_rate"])
    recipe = tuned(recipe)
    with pytest.raises(ValueError, match=r"leave training\.learning_rate out"):
        Recipe.model_validate(recipe | {"training": recipe["training"] | {"learning_rate": rates}})
    with pytest.raises(ValueError, match=r"evaluate on evaluation\.split: test"):
        Recipe.model_validate(recipe | {"evaluation": recipe["evaluation"] | {"split": "validation"}})


def test_without_optuna_a_range_is_refused_in_one_sentence(recipe, write_recipe, tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "optuna" else find(name, *rest)
    )
    done = probe(write_recipe(tuned(recipe, search=SEARCH)), "--out", tmp_path / "run")
    assert (done.exit_code, done.stderr) == (
        2,
        "preproj: tuning over a range needs optuna; run `pip install 'preproj[tuning]'`.\n",
    )
    assert not (tmp_path / "run").exists()
