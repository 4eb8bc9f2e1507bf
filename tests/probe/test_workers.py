"""One run by many workers: single cells, claims, takeovers, and a report of what is there."""

import pytest
from click.testing import Result
from typer.testing import CliRunner

from preproj.cli import app
from preproj.probe.files import read_json


def probe(*arguments: object) -> Result:
    """Call the command line without the seconds that a new process needs."""
    return CliRunner().invoke(app, ["probe", *map(str, arguments)])


def statuses(run) -> dict[str, str]:
    return {f"{row['method']}/seed{row['seed']}": row["status"] for row in read_json(run / "summary.json")["rows"]}


def test_one_cell_runs_alone_its_methods_tuning_first(recipe, write_recipe, tmp_path):
    del recipe["training"]["learning_rate"]
    recipe |= {"methods": ["none", "pre", "skip"], "seeds": [0, 1]}
    recipe["tuning"] = {"trials": 2, "tokens": 640, "search": {"learning_rate": [1e-4, 3e-3]}}
    run = tmp_path / "run"
    done = probe(write_recipe(recipe), "--out", run, "--cell", "skip/seed1")
    assert done.exit_code == 0, done.output
    assert {path.parent.relative_to(run).as_posix() for path in run.rglob("metrics.json")} == {"cells/skip/seed1"}
    trials = {path.parent.relative_to(run).as_posix() for path in run.rglob("trial.json")}
    assert trials == {"tuning/skip/trial0", "tuning/skip/trial1"}


@pytest.mark.parametrize("name", ["lora/seed0", "pre+skip/seed1", "none/seed1", "pre+skip/0", "pre+skip"])
def test_a_cell_that_the_recipe_has_not_is_one_sentence_with_those_it_has(recipe, write_recipe, tmp_path, name):
    done = probe(write_recipe(recipe | {"seeds": [0, 3]}), "--out", tmp_path / "run", "--cell", name)
    assert done.exit_code == 2
    said = f"preproj: --cell is {name!r}, no cell of this recipe; it has none/seed0, pre+skip/seed0, pre+skip/seed3.\n"
    assert done.stderr == said
    assert not (tmp_path / "run").exists()
