"""Cells that are killed at any moment, and checkpoints that are cut short: they end like an uninterrupted cell."""

import multiprocessing
import random
import shutil
import time
from pathlib import Path

import pytest
import yaml
from test_training import Killed, new_weights, run, stop_at
from typer.testing import CliRunner

from preproj.cli import app
from preproj.probe.cell import cell_folder
from preproj.probe.checkpoints import MANIFEST, newest_whole, seal
from preproj.probe.files import read_json, read_jsonl

METHOD, SEED = "pre+skip", 0
# A server that has imported everything: its children start at once, and torch has not run in it.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["preproj.probe.cell"])


def one_cell(run: str) -> None:
    import torch

    from preproj.probe.cell import cell_folder, run_cell
    from preproj.probe.files import clear_unfinished

    torch.set_num_threads(1)
    clear_unfinished(cell_folder(Path(run), METHOD, SEED))  # as the cell's own process does
    run_cell(Path(run), METHOD, SEED)


def cell_process(run: Path) -> multiprocessing.Process:
    process = CONTEXT.Process(target=one_cell, args=(str(run),))
    process.start()
    return process


@pytest.fixture(scope="module")
def prepared(tiny_recipe, tmp_path_factory):
    """A run whose text is prepared, and the same with its cell finished by one process, and its seconds."""
    folder = tmp_path_factory.mktemp("interrupted")
    recipe = {**tiny_recipe, "methods": [METHOD], "training": {**tiny_recipe["training"], "save_steps": 2}}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("preproj.probe.runner._run_cells", lambda *args: None)
        CliRunner().invoke(app, ["probe", str(folder / "recipe.yaml"), "--out", str(folder / "begun")])
    for _ in "warm-up", "measured":
        shutil.rmtree(folder / "whole", ignore_errors=True)
        shutil.copytree(folder / "begun", folder / "whole")
        started = time.monotonic()
        process = cell_process(folder / "whole")
        process.join()
        seconds = time.monotonic() - started
        assert process.exitcode == 0
    return folder / "begun", folder / "whole", seconds


def check_equal(run: Path, whole: Path) -> None:
    ours, theirs = (cell_folder(folder, METHOD, SEED) for folder in (run, whole))
    names = {path.relative_to(theirs) for path in theirs.rglob("*")}
    assert {path.relative_to(ours) for path in ours.rglob("*")} == names
    for name in names:
        if (theirs / name).is_file() and name.name not in ("trained.json", "metrics.json"):
            assert (ours / name).read_bytes() == (theirs / name).read_bytes(), name
    measured = ("seconds", "tokens_per_second", "peak_memory_bytes")
    for name in ("trained.json", "metrics.json"):
        mine, others = ({k: v for k, v in read_json(f / name).items() if k not in measured} for f in (ours, theirs))
        assert mine == others


def kill_and_finish(begun: Path, run: Path, delays: list[float]) -> list[float]:
    """Kill the cell after each delay, then let it finish; return the delays that killed a running cell."""
    shutil.copytree(begun, run)
    killed = []
    for delay in delays:
        process = cell_process(run)
        process.join(delay)
        process.kill()
        process.join()
        if process.exitcode == 0:  # it was faster
            break
        assert process.exitcode == -9
        killed.append(delay)
    process = cell_process(run)
    process.join()
    assert process.exitcode == 0
    return killed


def test_a_cell_killed_three_times_ends_like_an_uninterrupted_one(prepared, tmp_path):
    begun, whole, seconds = prepared
    rows = len(read_jsonl(cell_folder(whole, METHOD, SEED) / "training.jsonl"))
    assert rows == read_json(cell_folder(whole, METHOD, SEED) / "metrics.json")["steps"] == 20
    killed = kill_and_finish(begun, tmp_path / "run", [0.5 * seconds, 0.6 * seconds, 0.4 * seconds])
    assert killed
    check_equal(tmp_path / "run", whole)


@pytest.mark.slow
def test_a_cell_killed_at_twenty_random_moments_ends_like_an_uninterrupted_one(prepared, tmp_path):
    begun, whole, seconds = prepared
    seed = random.randrange(2**32)
    print("seed of the moments:", seed)
    moments, kills, runs = random.Random(seed), 0, 0
    while kills < 20:
        run = tmp_path / f"run{runs}"
        delays = [moments.uniform(0.1, 1.1) * seconds for _ in range(20 - kills)]
        kills += len(kill_and_finish(begun, run, delays))
        check_equal(run, whole)
        runs += 1


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A training stopped after step 9 of 12, with its checkpoints of steps 4 and 8."""
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.raises(Killed):
        run(folder, on_step=stop_at(9))
    return folder / "checkpoints"


def files_of(checkpoint: Path) -> set[str]:
    return {path.name for path in checkpoint.iterdir()}


def test_a_checkpoint_holds_what_the_trainer_needs_and_its_manifest(stopped):
    needed = {"adapter_model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"}
    assert files_of(stopped / "checkpoint-8") >= {*needed, MANIFEST}
    assert newest_whole(stopped) == stopped / "checkpoint-8"


DAMAGES = {
    "cut in half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "empty": lambda path: path.write_bytes(b""),
    "gone": lambda path: path.unlink(),
    "another last byte": lambda path: path.write_bytes(path.read_bytes()[:-1] + b"?"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_damage_to_any_file_of_a_checkpoint_takes_back_to_the_one_before(stopped, tmp_path, damage):
    for name in files_of(stopped / "checkpoint-8"):
        checkpoints = tmp_path / name
        shutil.copytree(stopped, checkpoints)
        damage(checkpoints / "checkpoint-8" / name)
        assert newest_whole(checkpoints) == checkpoints / "checkpoint-4", name
        assert [path.name for path in checkpoints.iterdir()] == ["checkpoint-4"]


def test_without_any_whole_checkpoint_training_starts_again(stopped, tmp_path):
    shutil.copytree(stopped, tmp_path / "checkpoints")
    for step in (4, 8):
        (tmp_path / f"checkpoints/checkpoint-{step}" / MANIFEST).unlink()
    assert newest_whole(tmp_path / "checkpoints") is None
    assert newest_whole(tmp_path / "none") is None


def test_while_a_checkpoint_is_written_the_one_before_stays_whole(tmp_path, monkeypatch):
    def die_at_the_third(checkpoint: Path) -> None:
        if checkpoint.name == "checkpoint-12":
            raise Killed
        seal(checkpoint)

    monkeypatch.setattr("preproj.probe.training.seal", die_at_the_third)
    monkeypatch.setattr("preproj.probe.files.shutil.rmtree", lambda *args, **kwargs: None)  # the dead remove nothing
    with pytest.raises(Killed):
        run(tmp_path / "cut")
    monkeypatch.undo()
    assert {path.name for path in (tmp_path / "cut/checkpoints").iterdir()} >= {"checkpoint-8", "checkpoint-12"}
    assert newest_whole(tmp_path / "cut/checkpoints") == tmp_path / "cut/checkpoints/checkpoint-8"


def test_a_log_that_was_lost_or_goes_further_is_that_of_the_checkpoint_again(tmp_path):
    whole, _ = run(tmp_path / "whole")
    expected = read_jsonl(tmp_path / "whole/training.jsonl")
    for name, content in {"lost": None, "empty": "", "half a line": '{"step": 1, "lo'}.items():
        with pytest.raises(Killed):
            run(tmp_path / name, on_step=stop_at(9))
        log = tmp_path / name / "training.jsonl"
        log.unlink()
        if content is not None:
            log.write_text(content)
        resumed, _ = run(tmp_path / name)
        assert read_jsonl(log) == expected
        assert (new_weights(resumed) == new_weights(whole)).all()
