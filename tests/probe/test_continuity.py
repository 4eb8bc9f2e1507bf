"""What may change between the start of a run and its continuation: noticed, refused or accepted and recorded."""

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from preproj.cli import app
from preproj.probe.base import Base, load_config, resolve_base
from preproj.probe.continuity import OF_THE_MACHINE, PACKAGES, describe_inputs, go_on
from preproj.probe.environment import describe_environment
from preproj.probe.errors import RecipeError
from preproj.probe.files import read_json, write_json
from preproj.probe.recipe import Recipe
from preproj.report import write_report


def probe(*arguments: object):
    return CliRunner().invoke(app, ["probe", *map(str, arguments)])


@pytest.fixture
def begun(recipe, tmp_path, tiny_base):
    """A run that has begun, as its files say: its folder, recipe, base and the base's configuration."""
    shutil.copytree(tiny_base, tmp_path / "base")
    recipe["model"]["name"] = str(tmp_path / "base")
    for split in ("train", "validation", "test"):
        recipe["data"][split] = shutil.copy(recipe["data"][split], tmp_path)
    checked, base = Recipe.model_validate(recipe), resolve_base(recipe["model"]["name"])
    run, config = tmp_path / "run", load_config(base)
    run.mkdir()
    (run / "recipe.yaml").write_text(checked.to_yaml())
    inputs = describe_inputs(run, checked, base, config)
    write_json(run / "environment.json", describe_environment() | inputs)
    return run, checked, base, config


def refusal(begun, recipe: Recipe | None = None) -> str:
    run, then, *base = begun
    with pytest.raises(RecipeError) as refused:
        go_on(run, recipe or then, *base, accept=False)
    return str(refused.value)


def test_an_unchanged_run_goes_on_and_nothing_is_written(begun):
    run, *rest = begun
    before = {path: path.read_bytes() for path in run.iterdir()}
    for accept in (False, True):
        go_on(run, *rest, accept=accept)
    assert {path: path.read_bytes() for path in run.iterdir()} == before


def test_inputs_are_the_hashes_of_the_files_of_base_and_text(begun):
    run, recipe, base, _ = begun
    inputs = read_json(run / "environment.json")["inputs"]
    assert {"base/model.safetensors", "base/config.json", "base/tokenizer.json"} <= set(inputs)
    assert {recipe.data.train, recipe.data.validation, recipe.data.test} <= set(inputs)
    files = {"base/model.safetensors": base.path / "model.safetensors", recipe.data.test: Path(recipe.data.test)}
    for name, path in files.items():
        assert inputs[name]["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_file_of_the_same_size_and_time_is_not_read_again(begun):
    run, recipe, base, config = begun
    weights = base.path / "model.safetensors"
    state = weights.stat()
    weights.write_bytes(bytes(state.st_size))
    os.utime(weights, ns=(state.st_atime_ns, state.st_mtime_ns))
    go_on(run, recipe, base, config, accept=False)  # what a hash would have refused
    os.utime(weights)
    assert "base/model.safetensors was " in refusal(begun)


def test_a_file_that_was_only_touched_or_copied_is_the_same(begun):
    run, recipe, base, config = begun
    for path in base.path.iterdir():
        os.utime(path, (0, 0))
    go_on(run, recipe, base, config, accept=False)


def test_another_weight_in_the_base_is_named_with_both_hashes(begun):
    _, _, base, _ = begun
    path = base.path / "model.safetensors"
    then = hashlib.sha256(path.read_bytes()).hexdigest()
    weights = load_file(path)
    weights["model.norm.weight"] += torch.tensor(1e-3)
    save_file(weights, path, {"format": "pt"})
    now = hashlib.sha256(path.read_bytes()).hexdigest()
    assert f"began otherwise: base/model.safetensors was {then[:16]}… and is {now[:16]}…; change that" in refusal(begun)


def test_another_text_is_named_and_one_that_is_gone_is_not_missed(begun):
    run, recipe, base, config = begun
    Path(recipe.data.test).unlink()  # the run has its own copy
    go_on(run, recipe, base, config, accept=False)
    with Path(recipe.data.train).open("a") as file:
        file.write(json.dumps({"id": "more", "text": "More text."}) + "\n")
    assert f"began otherwise: {recipe.data.train} was " in refusal(begun)


@pytest.mark.parametrize("name", PACKAGES)
def test_another_version_of_a_package_that_changes_numbers_is_named(begun, name):
    run, *_ = begun
    environment = read_json(run / "environment.json")
    now = environment["packages"][name]
    environment["packages"][name] = "0.0.1"
    write_json(run / "environment.json", environment)
    assert f"began otherwise: {name} was 0.0.1 and is {now}; " in refusal(begun)


def test_a_base_from_the_hub_is_its_commit(begun, monkeypatch):
    run, recipe, _, config = begun
    base = Base("someone/model", None, None)
    for commit in ("a" * 40, "b" * 40):
        monkeypatch.setattr(config, "_commit_hash", commit, raising=False)
        inputs = describe_inputs(run, recipe, base, config)
        assert inputs["inputs"]["base"] == {"commit": commit}
        if commit[0] == "a":
            write_json(run / "environment.json", describe_environment() | inputs)
    assert f"began otherwise: base was {'a' * 16}… and is {'b' * 16}…; " in refusal((run, recipe, base, config))


def test_a_run_from_before_inputs_were_recorded_is_held_to_its_packages_alone(begun):
    run, recipe, base, config = begun
    environment = read_json(run / "environment.json")
    del environment["inputs"]
    write_json(run / "environment.json", environment)
    go_on(run, recipe, base, config, accept=False)


def test_what_was_accepted_is_recorded_and_counts_from_then_on(begun):
    run, recipe, base, config = begun
    started = read_json(run / "environment.json")
    started["packages"] |= {"torch": "2.0.0", "peft": "0.1.0"}
    write_json(run / "environment.json", started)
    go_on(run, recipe, base, config, accept=True)
    go_on(run, recipe, base, config, accept=False)
    environment = read_json(run / "environment.json")
    (continued,) = environment.pop("continued")
    assert environment == started  # what it began with stays
    packages = describe_environment()["packages"]
    assert continued["packages"] == packages
    assert continued["changes"] == [
        f"torch was 2.0.0 and is {packages['torch']}",
        f"peft was 0.1.0 and is {packages['peft']}",
    ]


def test_keys_that_change_no_number_may_change_with_consent_and_no_other(begun):
    run, recipe, base, config = begun
    changed = recipe.model_copy(update={"training": recipe.training.changed(save_steps=7)})
    assert "began otherwise: training.save_steps was 4 and is 7; " in refusal(begun, changed)
    go_on(run, changed, base, config, accept=True)
    assert (run / "recipe.yaml").read_text() == changed.to_yaml()
    assert read_json(run / "environment.json")["continued"][0]["changes"] == ["training.save_steps was 4 and is 7"]
    other = changed.model_copy(update={"training": recipe.training.changed(save_steps=7, weight_decay=0.5)})
    with pytest.raises(RecipeError, match=r"another recipe: training\.weight_decay was 0\.0 and is 0\.5"):
        go_on(run, other, base, config, accept=True)
    for key in OF_THE_MACHINE:  # each is a key of the recipe
        content = recipe.model_dump()
        for part in key.split("."):
            content = content[part]


def test_through_the_command_line_a_change_is_refused_then_accepted_and_reported(
    recipe, write_recipe, tmp_path, monkeypatch
):
    recipe["methods"] = ["none"]
    run, path = tmp_path / "run", write_recipe(recipe)
    assert probe(path, "--out", run).exit_code == 0
    environment = read_json(run / "environment.json")
    then = environment["packages"]["torch"]
    environment["packages"]["torch"] = "1.0.0"
    write_json(run / "environment.json", environment)
    assert probe(path, "--out", run).exit_code == 0  # a finished run computes nothing
    metrics = run / "cells/none/seed0/metrics.json"
    measured = metrics.read_bytes()
    metrics.unlink()
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    refused = probe(path, "--out", run)
    assert refused.exit_code == 2
    assert refused.stderr.startswith(f"preproj: run folder {run} began otherwise: torch was 1.0.0 and is {then}; ")
    assert refused.stderr.count("\n") == 1
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before

    def work(*args: object) -> dict:
        metrics.write_bytes(measured)
        return {}

    monkeypatch.setattr("preproj.probe.runner.work", work)
    assert probe(path, "--out", run, "--accept-changes").exit_code == 0
    (started,) = (entry["started"] for entry in read_json(run / "environment.json")["continued"])
    for report in (run / "report.md", run / "report.html"):
        text = report.read_text("utf-8")
        assert f"went on {started} with changes" in text
        assert f"torch was 1.0.0 and is {then}" in text
    assert write_report(run) == run / "report.html"


def test_a_lost_record_is_a_change_also_of_a_finished_run(recipe, write_recipe, tmp_path):
    recipe["methods"] = ["none"]
    run, path = tmp_path / "run", write_recipe(recipe)
    assert probe(path, "--out", run).exit_code == 0
    (run / "environment.json").write_text('{"format_ver')
    damaged = probe(path, "--out", run)
    assert (damaged.exit_code, damaged.stderr) == (
        2,
        f"preproj: {run / 'environment.json'} is damaged; remove it and repeat the command.\n",
    )
    (run / "environment.json").unlink()
    shutil.rmtree(run / "data")  # as a finished run that was published
    lost = "environment.json was lost, and with it what earlier results ran with"
    refused = probe(path, "--out", run)
    assert (refused.exit_code, refused.stderr.partition("; ")[0]) == (
        2,
        f"preproj: run folder {run} began otherwise: {lost}",
    )
    assert f"it will stop: {lost}." in probe(path, "--out", run, "--dry-run").stderr
    accepted = probe(path, "--out", run, "--accept-changes")
    assert accepted.exit_code == 0, accepted.output
    assert [entry["changes"] for entry in read_json(run / "environment.json")["continued"]] == [[lost]]
    assert lost in (run / "report.md").read_text("utf-8")
    assert probe(path, "--out", run).exit_code == 0
