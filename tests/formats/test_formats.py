"""Files of every format version so far: each says what it did when it was written, and a newer one is refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from click.testing import Result
from formats.make import CONFIG, logits
from transformers import LlamaConfig
from typer.testing import CliRunner

from preproj import PreProjConfig
from preproj.cli import app

RUNS = Path(__file__).parent / "runs"
NAMES = sorted(path.name for path in RUNS.iterdir())
CELLS = sorted(path / cell for path in RUNS.iterdir() for cell in json.loads((path / "logits.json").read_text()))


def preproj(*arguments: object) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)])


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Return a function that puts a run where it was written: beside its recipe and its base."""
    monkeypatch.chdir(tmp_path)
    LlamaConfig(**CONFIG, architectures=["LlamaForCausalLM"]).save_pretrained("base")

    def put(name: str) -> Path:
        shutil.copytree(RUNS / name, "run")
        (tmp_path / "run/given.yaml").rename("recipe.yaml")
        return Path("run")

    return put


def said_then(run: Path) -> dict[tuple[str, str], float]:
    """Return the scores that the preproj of that time wrote, under their names of today."""
    scores = {}
    for row in json.loads((run / "summary.json").read_text())["rows"]:
        names = {"perplexity": "document_v1/perplexity", "last_word_accuracy": "last_word/acc"}
        found = row.get("scores") or {name: row[key] for key, name in names.items()}
        scores |= {(row["method"], name): value for name, value in found.items()}
    return scores


@pytest.mark.parametrize("command", ["report", "probe"])
@pytest.mark.parametrize("name", NAMES)
def test_a_run_of_every_version_is_reported_with_the_scores_it_had(place, name, command):
    run = place(name)
    before = {path: path.read_bytes() for path in (run / "cells").rglob("*") if path.is_file()}
    done = preproj("report", run) if command == "report" else preproj("probe", "recipe.yaml", "--out", run)
    assert done.exit_code == 0, done.output
    summary = json.loads((run / "summary.json").read_text())
    assert summary["format_version"] == 2
    assert {row["status"] for row in summary["rows"]} == {"finished"}
    scores = {(row["method"], name): value for row in summary["rows"] for name, value in row["scores"].items()}
    assert scores == pytest.approx(said_then(RUNS / name), rel=1e-12)
    assert {path: path.read_bytes() for path in before} == before
    assert {row["method"] for row in summary["rows"]} == set(yaml.safe_load(Path("recipe.yaml").read_text())["methods"])
    assert all(f"| {row['method']}" in (run / "report.md").read_text("utf-8") for row in summary["rows"])


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: str(cell.relative_to(RUNS)))
def test_an_adapter_of_every_version_computes_what_it_did(cell):
    run = next(path for path in cell.parents if path.parent == RUNS)
    expected = json.loads((run / "logits.json").read_text())[str(cell.relative_to(run))]
    torch.testing.assert_close(torch.tensor(logits(cell / "adapter")), torch.tensor(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("file", ["summary.json", "environment.json", "corpus.json", "cells/none/seed0/metrics.json"])
def test_a_run_of_a_newer_preproj_is_refused_and_left_as_it_is(place, file):
    run = place("format2-methods")
    content = json.loads((run / file).read_text()) | {"format_version": 3}
    (run / file).write_text(json.dumps(content))
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for arguments in (("report", run), ("probe", "recipe.yaml", "--out", run)):
        done = preproj(*arguments)
        assert done.exit_code == 2
        assert done.stderr == (
            f"preproj: run/{file} has format version 3, and this preproj reads up to version 2; "
            "install a newer preproj to read it.\n"
        )
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_a_recipe_of_a_newer_preproj_is_refused(place):
    run = place("format2-methods")
    for file in (run / "recipe.yaml", Path("recipe.yaml")):
        file.write_text("format_version: 2\nnews: true\n" + file.read_text().replace("format_version: 1\n", ""))
        done = preproj("probe", "recipe.yaml", "--out", run, "--dry-run")
        assert done.exit_code == 2
        assert (
            "recipe.yaml has format version 2, and this preproj reads up to version 1; install a newer" in done.stderr
        )


def test_an_adapter_of_a_newer_preproj_is_refused(place):
    run = place("format2-methods")
    file = run / "cells/pre+skip/seed0/adapter/adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format_version": 2}))
    with pytest.raises(ValueError, match=r"the adapter has format version 2, and this preproj reads up to version 1; "):
        PreProjConfig.from_pretrained(str(file.parent))
    done = preproj("analyze", run / "cells/pre+skip/seed0")
    assert done.exit_code == 2
    assert "the adapter has format version 2" in done.stderr
    with pytest.raises(ValueError, match="format version 0"):
        PreProjConfig(format_version=0)
