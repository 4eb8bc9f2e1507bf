"""One run by many workers: single cells, shared work, takeovers, and a report of what is there."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml
from click.testing import Result
from rich.console import Console
from typer.testing import CliRunner

from preproj.cli import app
from preproj.probe import claims
from preproj.probe.base import resolve_base
from preproj.probe.claims import Watch
from preproj.probe.files import read_json, read_jsonl, write_json
from preproj.probe.parts import Part, parts_of
from preproj.probe.plan import plan
from preproj.probe.recipe import Recipe
from preproj.probe.summary import cells_of
from preproj.probe.worker import work

RESULTS = ("adapter/adapter_model.safetensors", "items/document.jsonl", "items/last_word.jsonl", "training.jsonl")


def preproj(*arguments: object) -> Result:
    """Call the command line without the seconds that a new process needs."""
    return CliRunner().invoke(app, [*map(str, arguments)])


def start(recipe: Path, run: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "preproj", "probe", str(recipe), "--out", str(run)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_for(condition, seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.02)


def children(process: subprocess.Popen) -> list[str]:
    """Return the command lines of a worker's children."""
    pids = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [Path(f"/proc/{pid}/cmdline").read_text() for pid in pids]


def statuses(run: Path) -> dict[str, str]:
    return {f"{row['method']}/seed{row['seed']}": row["status"] for row in read_json(run / "summary.json")["rows"]}


@pytest.fixture(scope="module")
def long_recipe(tiny_recipe, tmp_path_factory) -> Path:
    """The file of a recipe whose cell trains for long enough to be stopped."""
    recipe = tiny_recipe | {"training": tiny_recipe["training"] | {"tokens": 6400}}
    path = tmp_path_factory.mktemp("recipe") / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


@pytest.fixture(scope="module")
def whole(long_recipe, tmp_path_factory) -> tuple[Path, list[str]]:
    """A run of two workers that were started at once, and what each printed; tests leave it as it is."""
    run = tmp_path_factory.mktemp("whole") / "run"
    workers = [start(long_recipe, run) for _ in range(2)]
    printed = [worker.communicate(timeout=300)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], printed
    return run, printed


def test_two_workers_started_at_once_do_every_cell_once(whole):
    run, printed = whole
    begun = re.findall(r"^([\w+]+ seed \d) \(\d/2\)$", "\n".join(printed), re.MULTILINE)
    assert sorted(begun) == ["none seed 0", "pre+skip seed 0"]
    assert statuses(run) == {"none/seed0": "finished", "pre+skip/seed0": "finished"}
    assert (run / "report.html").exists()
    assert not list(run.rglob(".*"))  # no claim, and nothing half-written
    assert sum("Report: " in text for text in printed) >= 1


def test_a_killed_workers_cell_is_taken_over_and_ends_like_an_uninterrupted_one(whole, long_recipe, tmp_path):
    run = tmp_path / "run"
    log = run / "cells/pre+skip/seed0/training.jsonl"
    workers = [start(long_recipe, run) for _ in range(2)]
    wait_for(lambda: log.exists() and len(read_jsonl(log)) >= 6)
    trains = [any("pre+skip" in line for line in children(worker)) for worker in workers]
    killed, other = workers if trains[0] else reversed(workers)
    killed.kill()
    printed, _ = other.communicate(timeout=300)
    killed.communicate()
    assert other.returncode == 0, printed
    assert re.search(r"^pre\+skip seed 0 \(2/2\), left by process \d+ on ", printed, re.MULTILINE)
    assert statuses(run) == {"none/seed0": "finished", "pre+skip/seed0": "finished"}
    for name in RESULTS:
        path = Path("cells/pre+skip/seed0") / name
        assert (run / path).read_bytes() == (whole[0] / path).read_bytes(), name


@pytest.mark.slow
def test_a_worker_that_was_stopped_and_wakes_after_a_takeover_writes_nothing(whole, long_recipe, tmp_path, monkeypatch):
    run = tmp_path / "run"
    log = run / "cells/pre+skip/seed0/training.jsonl"
    stopped = start(long_recipe, run)
    wait_for(lambda: log.exists() and len(read_jsonl(log)) >= 6)
    os.killpg(stopped.pid, signal.SIGSTOP)  # the worker and its cell
    assert len(read_jsonl(log)) < 100  # of its steps
    monkeypatch.setattr(claims, "SILENCE", 1.0)
    done = preproj("probe", long_recipe, "--out", run)
    assert done.exit_code == 0, done.output
    assert "pre+skip seed 0 (2/2), left by process " in done.output
    before = written(run)
    os.killpg(stopped.pid, signal.SIGCONT)
    printed, _ = stopped.communicate(timeout=300)
    assert "pre+skip seed 0 was taken over by another worker" in printed.replace("\n", " ")
    assert written(run) == before
    for name in RESULTS:
        path = Path("cells/pre+skip/seed0") / name
        assert (run / path).read_bytes() == (whole[0] / path).read_bytes(), name


def written(run: Path) -> dict[Path, tuple[int, bytes]]:
    """Return the files of all cells with their times, but for what their processes print."""
    files = (path for path in (run / "cells").rglob("*") if path.is_file() and path.name != "log.txt")
    # What it was just writing has no name yet.
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files if not path.name.startswith(".")}


def tuned(recipe: dict) -> dict:
    del recipe["training"]["learning_rate"]
    recipe |= {"methods": ["none", "pre", "skip"], "seeds": [0, 1]}
    recipe["tuning"] = {"trials": 3, "tokens": 640, "search": {"learning_rate": [1e-4, 1e-3, 3e-3]}}
    return recipe


@pytest.fixture
def pretended(whole, recipe, tmp_path, monkeypatch):
    """A prepared run whose cells and trials take no time, and the list of those that have begun."""
    run, begun = tmp_path / "run", []
    shutil.copytree(whole[0], run, ignore=shutil.ignore_patterns("cells"))
    (run / "cells").mkdir()

    def run_module(module, arguments, log, base, claim, on_progress):
        folder, method = claim.folder, arguments[1]
        begun.append(folder.relative_to(run).as_posix())
        time.sleep(0.02)
        if module.endswith("trial"):
            write_json(folder / "trial.json", {"parameters": {}, "value": 1.0, "reason": None, "seconds": 1.0})
        else:
            trials = list((run / "tuning" / method).glob("*/trial.json"))
            write_json(folder / "metrics.json", {"trials": len(trials)})
        return 0

    monkeypatch.setattr("preproj.probe.worker.run_module", run_module)
    monkeypatch.setattr(claims, "POLL", 0.01)
    checked = Recipe.model_validate(tuned(recipe))

    def call(cells=None) -> dict[Part, str]:
        parts = parts_of(checked, cells or cells_of(checked))
        return work(checked, run, parts, resolve_base(checked.model.name), Console(file=open(os.devnull, "w")))

    return run, begun, call


def test_many_workers_part_trials_and_cells_and_a_cell_waits_for_all_trials_of_its_method(pretended):
    run, begun, call = pretended
    left = []
    threads = [threading.Thread(target=lambda: left.append(call())) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(left) == 5
    trials = {f"tuning/{method}/trial{number}" for method in ("pre", "skip") for number in range(3)}
    cells = {"cells/none/seed0", *(f"cells/{method}/seed{seed}" for method in ("pre", "skip") for seed in (0, 1))}
    assert sorted(begun) == sorted(trials | cells)
    for cell in cells - {"cells/none/seed0"}:
        assert read_json(run / cell / "metrics.json")["trials"] == 3, cell


def test_a_worker_leaves_what_another_is_at_and_waits_where_its_own_cell_needs_it(pretended, monkeypatch):
    run, begun, call = pretended
    monkeypatch.setattr(claims, "BEAT", 0.05)
    other = Watch()
    with other.take(run / "cells/skip/seed0"), other.take(run / "tuning/pre/trial1") as trial:
        left = call([("none", 0), ("skip", 0)])
        assert {part.name for part in left} == {"skip/seed0"}
        assert f"process {os.getpid()} on " in left[Part("cell", "skip", 0)]
        waiting = threading.Thread(target=lambda: call([("pre", 1)]))
        waiting.start()
        wait_for(lambda: "tuning/pre/trial2" in begun)
        time.sleep(0.3)
        assert waiting.is_alive()
        assert "cells/pre/seed1" not in begun
        write_json(trial.folder / "trial.json", {"parameters": {}, "value": 2.0, "reason": None, "seconds": 1.0})
        trial.remove()
        waiting.join(60)
    assert begun[-1] == "cells/pre/seed1"
    assert "tuning/pre/trial1" not in begun


def test_one_cell_runs_alone_its_methods_tuning_first(recipe, write_recipe, tmp_path):
    recipe = tuned(recipe)
    recipe["tuning"] |= {"trials": 1, "search": {"learning_rate": [3e-3]}}
    run = tmp_path / "run"
    done = preproj("probe", write_recipe(recipe), "--out", run, "--cell", "skip/seed1")
    assert done.exit_code == 0, done.output
    assert f"The run has more cells; `preproj report {run}` joins those that have ended." in done.output
    assert {path.parent.relative_to(run).as_posix() for path in run.rglob("metrics.json")} == {"cells/skip/seed1"}
    assert {path.parent.relative_to(run).as_posix() for path in run.rglob("trial.json")} == {"tuning/skip/trial0"}
    assert not (run / "report.html").exists()
    joined = preproj("report", run)
    assert joined.exit_code == 0, joined.output
    assert statuses(run) == dict.fromkeys(("none/seed0", "pre/seed0", "pre/seed1", "skip/seed0"), "missing") | {
        "skip/seed1": "finished"
    }
    assert "4 of 5 cells have no result (none, seed 0, missing; pre, seed 0, missing; " in (
        run / "report.md"
    ).read_text("utf-8")


@pytest.mark.parametrize("name", ["lora/seed0", "pre+skip/seed1", "none/seed3", "pre+skip/0", "pre+skip", ""])
def test_a_cell_that_the_recipe_has_not_is_one_sentence_with_those_it_has(recipe, write_recipe, tmp_path, name):
    path = write_recipe(recipe | {"seeds": [0, 3]})
    for more in ([], ["--dry-run"]):
        done = preproj("probe", path, "--out", tmp_path / "run", "--cell", name, *more)
        assert done.exit_code == 2
        assert done.stderr == (
            f"preproj: --cell is {name!r}, no cell of this recipe; it has none/seed0, pre+skip/seed0, pre+skip/seed3.\n"
        )
        assert not (tmp_path / "run").exists()


def test_a_folder_that_cannot_part_the_work_is_refused(recipe, write_recipe, tmp_path, monkeypatch):
    make = os.open
    monkeypatch.setattr(os, "open", lambda path, flags, *rest, **at: make(path, flags & ~os.O_EXCL, *rest, **at))
    done = preproj("probe", write_recipe(recipe), "--out", tmp_path / "run")
    assert done.exit_code == 2, done.output
    assert done.stderr.startswith(f"preproj: {tmp_path / 'run'} is on a file system that makes a file anew where ")
    assert done.stderr.count("\n") == 1
    assert not list((tmp_path / "run").iterdir())


def forward_flops(length: int) -> int:
    """Matrix products of the tiny Llama per token: projections, attention over all pairs, MLP and output."""
    width, inner, layers, keys, words = 32, 64, 2, 16, 384
    layer = 2 * (2 * width * width + 2 * width * keys + 3 * width * inner) + 2 * 2 * length * width
    return layers * layer + 2 * width * words


def test_a_dry_run_counts_in_closed_form_and_writes_nothing(recipe, write_recipe, tmp_path):
    recipe |= {"methods": ["none", "full", "pre+skip"], "seeds": [0, 1]}
    recipe["evaluation"] |= {"perplexity": ["document", "stream"], "windows": 3}
    path, run = write_recipe(recipe), tmp_path / "run"
    before = sorted(tmp_path.rglob("*"))
    done = preproj("probe", path, "--out", run, "--dry-run")
    assert done.exit_code == 0, done.output
    assert sorted(tmp_path.rglob("*")) == before
    rows = {row.name: row for row in plan(Recipe.model_validate(recipe), run)[0]}
    assert list(rows) == ["none/seed0", "full/seed0", "full/seed1", "pre+skip/seed0", "pre+skip/seed1"]
    assert {row.trained for name, row in rows.items() if name != "none/seed0"} == {1280}
    assert (rows["none/seed0"].trained, rows["none/seed0"].flops, rows["none/seed0"].parameters) == (0, 0, 0)
    assert {(row.scored, row.at_most) for row in rows.values()} == {(8 * 64 + 3 * 16, True)}
    assert rows["pre+skip/seed0"].parameters == 2 * 3.5 * 32 * 32
    assert all(row.seconds is None for row in rows.values())
    # With every weight trained, the gradients of weights and inputs are two products for each of the forward pass.
    rotary = 2 * 4  # angles of half a head for a position, without a gradient; newer transformers need no product
    assert rows["full/seed0"].flops in (1280 * 3 * forward_flops(32), 1280 * (3 * forward_flops(32) + rotary))
    for name in rows:
        assert re.search(rf"^{re.escape(name)} .* to do$", done.output, re.MULTILINE)
    assert "5 of 5 parts left: 5,120 tokens to train on, " in done.output


def test_a_dry_run_prints_no_warning_of_a_library(recipe, write_recipe, tmp_path, recwarn):
    recipe |= {"methods": ["pre+lora", "pre+skip+lora"]}
    recipe["training"]["learning_rate"] = dict.fromkeys(recipe["methods"], 1e-3)
    done = preproj("probe", write_recipe(recipe), "--out", tmp_path / "run", "--dry-run")
    assert done.exit_code == 0, done.output
    assert done.stderr == ""
    assert [str(warning.message) for warning in recwarn if warning.category is UserWarning] == []


def test_a_dry_run_of_a_run_that_has_begun_knows_its_text_its_times_and_who_is_at_it(
    whole, long_recipe, tmp_path, monkeypatch
):
    run = tmp_path / "run"
    shutil.copytree(whole[0], run)
    recipe = Recipe.model_validate(yaml.safe_load(long_recipe.read_text()))
    tokens = sum(row["perplexity"][1] for row in read_jsonl(run / "cells/none/seed0/items/document.jsonl"))
    rows = {row.name: row for row in plan(recipe, run)[0]}
    assert {(row.scored, row.at_most, row.status) for row in rows.values()} == {(tokens, False, "finished")}
    seconds = read_json(run / "cells/pre+skip/seed0/metrics.json")["seconds"]["total"]
    assert (rows["pre+skip/seed0"].seconds, rows["pre+skip/seed0"].alike) == (seconds, False)
    (run / "cells/none/seed0/metrics.json").unlink()
    with Watch().take(run / "cells/none/seed0"):
        held = plan(recipe, run)[0][0]
    assert (held.seconds, held.status) == (None, f"process {os.getpid()} on {os.uname().nodename}")
    # Other seeds of a method take as long as those that are finished.
    more = recipe.model_copy(update={"seeds": [0, 1]})
    monkeypatch.setattr("preproj.probe.plan.check_folder", lambda *given: None)
    monkeypatch.setattr("preproj.probe.plan.changes", lambda *given: ([], {}))
    ((other,), _) = plan(more, run, "pre+skip/seed1")
    assert (other.seconds, other.alike, other.status) == (seconds, True, "to do")


def test_a_dry_run_names_what_the_run_will_refuse(whole, long_recipe, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole[0], run)
    arguments = ("probe", long_recipe, "--out", run, "--dry-run")
    environment = read_json(run / "environment.json")
    now, environment["packages"]["torch"] = environment["packages"]["torch"], "2.0.0"
    write_json(run / "environment.json", environment)
    assert preproj(*arguments).stderr == ""  # a finished run computes nothing
    (run / "cells/none/seed0/metrics.json").unlink()
    done = preproj(*arguments)
    assert (done.exit_code, "1 of 2 parts left" in done.stdout) == (0, True)
    assert done.stderr == f"preproj: without --accept-changes it will stop: torch was 2.0.0 and is {now}.\n"


def test_a_report_joins_what_is_there_and_names_what_is_missing(whole, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole[0], run, ignore=shutil.ignore_patterns("report.*", "figures"))
    for name in ("metrics.json", "adapter", "trained.json"):
        path = run / "cells/pre+skip/seed0" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    done = preproj("report", run)
    assert done.exit_code == 0, done.output
    assert statuses(run) == {"none/seed0": "finished", "pre+skip/seed0": "missing"}
    report = (run / "report.md").read_text("utf-8")
    assert "1 of 2 cells have no result (pre+skip, seed 0, missing)" in report.replace("\\", "")
    assert read_json(run / "summary.json")["base"] == read_json(whole[0] / "summary.json")["base"]


def test_a_report_of_no_run_is_one_sentence(tmp_path):
    for name in ("summary.json", "recipe.yaml"):
        done = preproj("report", tmp_path)
        assert done.exit_code == 2
        said = f"{tmp_path}/{name} is missing: give the folder of a run that `preproj probe` has begun."
        assert done.stderr == f"preproj: {said}\n"
        write_json(tmp_path / "summary.json", {})


def test_every_cell_says_what_it_ran_with_and_the_report_where_that_differs(whole, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole[0], run)
    started = read_json(run / "environment.json")
    cells = {name: run / "cells" / name / "seed0/metrics.json" for name in ("none", "pre+skip")}
    for name, path in cells.items():
        environment = read_json(path)["environment"]
        assert environment["evaluation"]["packages"] == started["packages"]
        assert environment["evaluation"]["hardware"] == started["hardware"]
        assert (environment["training"] is None) is (name == "none")
    assert read_json(cells["pre+skip"].with_name("trained.json"))["environment"]["packages"] == started["packages"]
    assert preproj("report", run).exit_code == 0
    assert len(read_json(run / "summary.json")["environments"]) == 1
    assert "not all run in one environment" not in (run / "report.md").read_text("utf-8")
    changed = read_json(cells["none"])
    changed["environment"]["evaluation"]["packages"]["torch"] = "2.6.0"
    changed["environment"]["evaluation"]["hardware"]["device_name"] = "NVIDIA A100"
    cells["none"].write_text(json.dumps(changed))
    assert preproj("report", run).exit_code == 0
    here, torch = started["hardware"]["device_name"], started["packages"]["torch"]
    said = (
        "Warning: the cells were not all run in one environment: none seed 0 with device NVIDIA A100, torch 2.6.0; "
        f"pre+skip seed 0 with device {here}, torch {torch}."
    )
    assert said in (run / "report.md").read_text("utf-8").replace("\\", "")
