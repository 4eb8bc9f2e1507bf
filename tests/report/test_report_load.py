"""The loader: what it reads, and the sentence it gives for everything that is wrong."""

import json
from pathlib import Path
from typing import Any

import pytest

from preproj.report import ReportError, write_report
from preproj.report.load import load

CELL = "cells/skip/seed0"


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_reads_cells_in_recipe_order_with_their_logs(build_run):
    run = load(build_run(failed=["pre"], missing=["lora-qkv"]))
    assert run.methods == ("none", "pre", "skip", "pre+skip", "lora", "lora-qkv")
    assert [row.status for row in run.rows] == ["finished", "failed", *["finished"] * 3, "missing"]
    assert [row.method for row, _ in run.finished] == ["none", "skip", "pre+skip", "lora"]
    untouched, skip = run.finished[0][1], run.finished[1][1]
    assert untouched.training == ()
    assert (len(skip.training), skip.training[-1].tokens) == (60, 819_180)
    assert [layer.layer for layer in skip.layers] == list(range(6))
    assert skip.layers[3].pre_to_input is None


def test_one_untouched_cell_does_not_make_several_seeds(build_run):
    assert load(build_run("two", seeds=(0, 1))).several_seeds
    assert not load(build_run("one", seeds=(7,))).several_seeds


@pytest.mark.parametrize(
    "name", ["summary.json", "environment.json", "corpus.json", "recipe.yaml", f"{CELL}/metrics.json"]
)
def test_a_missing_file_is_named_with_what_to_do(build_run, name):
    folder = build_run()
    (folder / name).unlink()
    with pytest.raises(ReportError, match=rf"{name} is missing; run `preproj probe` .* again"):
        load(folder)


@pytest.mark.parametrize("name", ["summary.json", "environment.json", "corpus.json", f"{CELL}/metrics.json"])
def test_a_newer_format_is_refused(build_run, name):
    folder = build_run()
    edit(folder / name, format_version=3)
    with pytest.raises(ReportError, match=rf"{name} has format version 3.*install a newer preproj"):
        load(folder)


def test_a_summary_of_the_first_format_is_refused_with_what_to_do(build_run):
    folder = build_run()
    edit(folder / "summary.json", format_version=1)
    with pytest.raises(ReportError, match=r"summary of format 1; run `preproj probe` on the recipe again"):
        load(folder)


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("summary.json", "{", r"summary\.json is not JSON"),
        ("summary.json", "[]", r"summary\.json is not a JSON object"),
        ("corpus.json", "{}", r"corpus\.json has no 'format_version'"),
        ("recipe.yaml", "a: [", r"recipe\.yaml is not YAML"),
        ("recipe.yaml", "text", r"recipe\.yaml holds no recipe"),
        (f"{CELL}/training.jsonl", '{"tokens": 1, "loss": 2}\n{"tokens"', r"training\.jsonl, line 2 is not JSON"),
        (f"{CELL}/training.jsonl", '{"tokens": 1}', r"training\.jsonl, line 1 has no 'loss'"),
    ],
)
def test_a_broken_file_is_named(build_run, name, text, sentence):
    folder = build_run()
    (folder / name).write_text(text)
    with pytest.raises(ReportError, match=sentence):
        load(folder)


def test_a_file_that_is_not_text_is_named(build_run):
    folder = build_run()
    (folder / "corpus.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ReportError, match=r"corpus\.json cannot be read"):
        load(folder)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"scores": {"last_word/acc": "31"}}, r"rows\[2\]: 'scores': 'last_word/acc' should be a number, not '31'"),
        ({"trainable_parameters": True}, r"'trainable_parameters' should be a whole number, not True"),
        ({"notes": [3]}, r"'notes' should be text, not 3"),
        ({"status": "running"}, r"'status' is 'running', which is no known status"),
        ({"method": "../skip"}, r"'method' is '\.\./skip', which cannot name a folder"),
    ],
)
def test_a_wrong_field_is_named_with_its_place(build_run, changes, sentence):
    folder = build_run()
    summary = json.loads((folder / "summary.json").read_text())
    summary["rows"][2] |= changes
    (folder / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(ReportError, match=sentence):
        load(folder)


@pytest.mark.parametrize(
    ("part", "changes", "sentence"),
    [
        ("pairs", {"differences": {"last_word/acc": {"value": 1.0}}}, r"pairs\[0\].*'last_word/acc' has no 'low'"),
        ("measures", {"kind": "length"}, r"measures\[0\]: 'kind' is 'length', which is no known kind"),
        ("methods", {"scores": []}, r"methods\[0\]: 'scores' should be an object"),
    ],
)
def test_a_wrong_field_of_the_comparison_is_named(build_run, part, changes, sentence):
    folder = build_run()
    summary = json.loads((folder / "summary.json").read_text())
    summary[part][0] |= changes
    (folder / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(ReportError, match=sentence):
        load(folder)


def test_a_folder_that_is_none_is_refused(tmp_path):
    with pytest.raises(ReportError, match="nowhere is not a folder; give the folder"):
        write_report(tmp_path / "nowhere")


@pytest.mark.parametrize(("matched", "differs"), [(True, ()), (False, ("parameters",))])
def test_a_summary_without_what_differs_says_it_of_the_sizes(build_run, matched, differs):
    folder = build_run()
    summary = json.loads((folder / "summary.json").read_text())
    for pair in summary["pairs"]:
        del pair["differs"]
        pair["matched"] = matched
    (folder / "summary.json").write_text(json.dumps(summary))
    assert {pair.differs for pair in load(folder).pairs} == {differs}
