"""Whole runs through the command line, on a tiny model: files, interruptions, failures, and no network."""

import importlib.util
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from click.testing import Result
from peft import __version__ as peft_version
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import __version__ as torch_version
from transformers import AutoModelForCausalLM, CTRLConfig, MambaConfig, PreTrainedTokenizerFast
from typer.testing import CliRunner

from preproj.cli import app
from preproj.probe.files import read_json, read_jsonl
from preproj.probe.summary import write_summary

DOCS = Path(__file__).parent.parent.parent / "docs"


def preproj(*arguments: object, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "preproj", *map(str, arguments)], capture_output=True, text=True, check=False, **options
    )


def start(*arguments: object) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "preproj", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # A job in the background of a script ignores Ctrl-C, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509  # no threads here
    )


def in_process(*arguments: object) -> Result:
    """Call the command line without the seconds that a new process needs."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def finished(tiny_recipe, tmp_path_factory):
    """A finished run of `none` and `pre+skip`, its recipe file and its process; tests leave it as it is."""
    folder = tmp_path_factory.mktemp("finished")
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(tiny_recipe))
    done = preproj("probe", path, "--out", folder / "run")
    assert done.returncode == 0, done.stderr
    return folder / "run", done


def wait_for(condition, seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.05)


CELL_FILES = ("metrics.json", "items/document.jsonl", "items/last_word.jsonl", "log.txt")
DATASET_FILES = ("data-00000-of-00001.arrow", "dataset_info.json", "state.json")
ADAPTER_FILES = ("README.md", "adapter_config.json", "adapter_model.safetensors")


def test_a_run_writes_its_folder_and_a_second_call_does_nothing_again(finished, write_recipe, recipe, monkeypatch):
    run, done = finished
    assert "pre+skip" in done.stdout
    assert f"Report: {run / 'report.html'}" in done.stdout
    written = {p.relative_to(run).as_posix() for p in run.rglob("*") if p.is_file()}
    assert written == {
        *("recipe.yaml", "environment.json", "corpus.json", "summary.json", "report.html", "report.md"),
        *(f"data/{name}" for name in ("blocks.npy", "passages.jsonl", "tokens.json")),
        *(f"data/{split}/{name}" for split in ("test", "validation") for name in DATASET_FILES),
        *(f"figures/{name}.svg" for name in ("headline", "learning-curves", "cost-quality")),
        *(f"figures/{name}.svg" for name in ("pre-to-input", "skip-norm", "skip-to-attention")),
        *("texts/document.jsonl", "texts/last_word.jsonl"),
        *(f"cells/none/seed0/{name}" for name in CELL_FILES),
        *(f"cells/pre+skip/seed0/{name}" for name in (*CELL_FILES, "training.jsonl", "trained.json")),
        *(f"cells/pre+skip/seed0/adapter/{name}" for name in ADAPTER_FILES),
    }
    stamps = {p: p.stat().st_mtime_ns for p in (run / "cells").rglob("metrics.json")}
    monkeypatch.setattr("subprocess.Popen", None)  # no cell is started
    again = in_process("probe", write_recipe(recipe), "--out", run)
    assert again.exit_code == 0
    assert {p: p.stat().st_mtime_ns for p in (run / "cells").rglob("metrics.json")} == stamps


def test_metrics_agree_with_the_items_and_with_the_adapter(finished):
    run, _ = finished
    metrics = read_json(run / "cells/pre+skip/seed0/metrics.json")
    documents = read_jsonl(run / "cells/pre+skip/seed0/items/document.jsonl")
    passages = read_jsonl(run / "cells/pre+skip/seed0/items/last_word.jsonl")
    weights = load_file(run / "cells/pre+skip/seed0/adapter/adapter_model.safetensors")
    assert metrics["trainable_parameters"] == sum(w.numel() for w in weights.values()) == 2 * 3.5 * 32 * 32
    assert metrics["tokens"] == 1280
    assert metrics["steps"] == 20
    loss, tokens = (sum(column) for column in zip(*(d["perplexity"] for d in documents), strict=True))
    right = sum(p["acc"][0] for p in passages)
    summary = read_json(run / "summary.json")
    rows = {row["method"]: row["scores"] for row in summary["rows"]}
    assert rows["pre+skip"]["document/perplexity"] == pytest.approx(math.exp(loss / tokens))
    assert rows["pre+skip"]["last_word/acc"] == pytest.approx(right / len(passages))
    assert {m["name"]: m["items"] for m in summary["measures"]} == {
        **{f"document/{metric}": 8 for metric in ("perplexity", "word_perplexity", "byte_perplexity")},
        "last_word/acc": len(passages),
    }
    skips = {k.split(".layers.")[1][0]: w.norm().item() for k, w in weights.items() if "skip" in k}
    assert [row["skip_norm"] for row in metrics["layers"]] == pytest.approx([skips["0"], skips["1"]])
    (pair,) = summary["pairs"]
    assert (pair["ours"], pair["theirs"], pair["matched"]) == ("pre+skip", "none", False)
    found = pair["differences"]["document/perplexity"]
    assert found["value"] == pytest.approx(
        rows["pre+skip"]["document/perplexity"] - rows["none"]["document/perplexity"]
    )
    assert found["low"] <= found["value"] <= found["high"] < 0
    assert read_json(run / "corpus.json")["splits"]["test"]["documents"] == 24
    assert yaml.safe_load((run / "recipe.yaml").read_text())["training"]["warmup_ratio"] == 0.1


def test_another_recipe_in_the_same_folder_is_refused(finished, recipe, write_recipe):
    run, _ = finished
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    recipe["training"]["tokens"] = 640
    done = in_process("probe", write_recipe(recipe), "--out", run)
    assert done.exit_code == 2
    assert "another recipe: training.tokens was 1280 and is 640; choose another with --out." in done.stderr
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize(
    "signal_sent", [pytest.param(signal.SIGKILL, marks=pytest.mark.slow), signal.SIGINT], ids=["kill -9", "Ctrl-C"]
)
def test_an_interrupted_run_goes_on_and_ends_like_an_uninterrupted_one(
    finished, recipe, write_recipe, tmp_path, signal_sent
):
    whole, _ = finished
    cut = tmp_path / "cut"
    log = cut / "cells/pre+skip/seed0/training.jsonl"
    process = start("probe", write_recipe(recipe), "--out", cut)
    wait_for(lambda: log.exists() and len(read_jsonl(log)) >= 6)
    if signal_sent == signal.SIGINT:
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        assert process.wait(300) == 130
        assert "interrupted; the same command continues this run" in process.stdout.read()
    else:
        process.kill()  # the runner only: its cell must end by itself
    process.wait()
    done = preproj("probe", write_recipe(recipe), "--out", cut)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in (
        "adapter/adapter_model.safetensors",
        "items/document.jsonl",
        "items/last_word.jsonl",
        "training.jsonl",
    ):
        assert (cut / "cells/pre+skip/seed0" / name).read_bytes() == (
            whole / "cells/pre+skip/seed0" / name
        ).read_bytes(), name


@pytest.mark.slow
def test_a_killed_cell_does_not_stop_the_others_and_is_run_again(recipe, write_recipe, tmp_path):
    recipe["methods"] = ["pre+skip", "none"]
    run = tmp_path / "run"
    process = start("probe", write_recipe(recipe), "--out", run)
    log = run / "cells/pre+skip/seed0/training.jsonl"
    wait_for(log.exists)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert children
    for child in children:
        os.kill(int(child), signal.SIGKILL)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "pre+skip seed 0 stopped with exit code -9: " in output.replace("\n", " ")
    rows = {row["method"]: row["status"] for row in read_json(run / "summary.json")["rows"]}
    assert rows == {"pre+skip": "missing", "none": "finished"}
    assert preproj("probe", write_recipe(recipe), "--out", run).returncode == 0


LEFT_BEHIND = {
    "the text without corpus.json": ["corpus.json", "environment.json", "summary.json", "cells"],
    "the text without environment.json": ["corpus.json", "cells"],
    "an adapter without its record": ["cells/pre+skip/seed0/trained.json", "cells/pre+skip/seed0/metrics.json"],
    "a trained cell without its scores": [
        "cells/pre+skip/seed0/metrics.json",
        "cells/pre+skip/seed0/items/document.jsonl",
    ],
    "cells without a summary": ["summary.json", "report.html"],
}


@pytest.mark.slow
@pytest.mark.parametrize("missing", LEFT_BEHIND.values(), ids=LEFT_BEHIND.keys())
def test_any_state_a_kill_can_leave_is_completed_to_the_same_result(finished, recipe, write_recipe, tmp_path, missing):
    whole, _ = finished
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    for name in missing:
        shutil.rmtree(run / name) if (run / name).is_dir() else (run / name).unlink()
    result = in_process("probe", write_recipe(recipe), "--out", run)
    assert result.exit_code == 0, result.output
    for name in ("adapter/adapter_model.safetensors", "items/document.jsonl", "items/last_word.jsonl"):
        path = Path("cells/pre+skip/seed0") / name
        assert (run / path).read_bytes() == (whole / path).read_bytes(), name
    assert {p.relative_to(run) for p in run.rglob("*")} == {p.relative_to(whole) for p in whole.rglob("*")}


def test_a_pair_of_adapters_is_trained_resumed_saved_measured_and_marked(recipe, write_recipe, tmp_path):
    recipe["methods"] = ["none", "pre+skip+lora"]
    run, cell = tmp_path / "run", tmp_path / "run/cells/pre+skip+lora/seed0"
    done = preproj("probe", write_recipe(recipe), "--out", run)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""  # PEFT warns of a second adapter
    assert "UserWarning" not in (cell / "log.txt").read_text()
    weights = [load_file(cell / name / "adapter_model.safetensors") for name in ("adapter", "adapter/beside")]
    metrics = read_json(cell / "metrics.json")
    assert metrics["trainable_parameters"] == sum(w.numel() for part in weights for w in part.values())
    assert min(part.abs().max() for name, part in weights[1].items() if "lora_B" in name) > 0
    assert metrics["adapter"]["beside"]["type"] == "LORA"
    assert len(metrics["layers"]) == 2
    assert any("over budget" in note for note in metrics["notes"])
    assert "over budget" in (run / "report.md").read_text("utf-8")
    # A kill between training and scoring: both adapters come back from their folders.
    items = (cell / "items/document.jsonl").read_bytes()
    (cell / "metrics.json").unlink()
    (cell / "items/document.jsonl").unlink()
    assert in_process("probe", write_recipe(recipe), "--out", run).exit_code == 0
    assert (cell / "items/document.jsonl").read_bytes() == items


@pytest.fixture(scope="module")
def many_methods(tiny_recipe, tmp_path_factory):
    """A finished run of methods that train weights of the base, name a rank, or are widened, and its recipe file."""
    folder = tmp_path_factory.mktemp("many")
    rates = dict.fromkeys(("pre", "dense-qkv", "full", "skip-r4"), 3e-3)
    recipe = tiny_recipe | {"methods": ["none", *rates], "match": True}
    recipe["training"] = recipe["training"] | {"learning_rate": rates}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    done = preproj("probe", folder / "recipe.yaml", "--out", folder / "run")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run", folder / "recipe.yaml"


def test_every_kind_of_method_has_its_files_its_size_and_its_notes(many_methods, tiny_base):
    run, _ = many_methods
    metrics = {folder.name: read_json(folder / "seed0/metrics.json") for folder in (run / "cells").iterdir()}
    base = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(tiny_base).parameters())
    assert metrics["pre"]["trainable_parameters"] == 2 * 3.5 * 32 * 32
    assert metrics["dense-qkv"]["trainable_parameters"] == 2 * (32 * 32 + 2 * 32 * 16)
    assert metrics["full"]["trainable_parameters"] == metrics["full"]["total_parameters"] == base
    assert metrics["full"]["adapter"] is metrics["dense-qkv"]["adapter"] is None
    assert {name: len(cell["layers"]) for name, cell in metrics.items()} == {
        **dict.fromkeys(("none", "dense-qkv", "full"), 0),
        **dict.fromkeys(("pre", "skip-r4"), 2),
    }
    for method in ("dense-qkv", "full"):
        folder = run / "cells" / method / "seed0/adapter"
        assert [path.name for path in folder.iterdir()] == ["weights.safetensors"]
    report = (run / "report.md").read_text("utf-8")
    for sentence in ("pre: widened to an expansion of 1.75, 100% of", "dense-qkv: 57% of", "full: over budget, "):
        assert sentence in report
    assert "In dense-qkv and full weights of the base train, in place of new ones." in report


def test_trained_weights_load_as_the_page_says_and_score_as_the_cell_did(many_methods, tmp_path, tiny_base):
    run, recipe = many_methods
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / "run-folder.md").read_text("utf-8"), re.DOTALL)
    cells = [run / "cells" / method / "seed0" for method in ("dense-qkv", "full")]
    for cell in cells:
        names: dict = {"base": AutoModelForCausalLM.from_pretrained(tiny_base), "folder": cell / "adapter"}
        exec(code, names)
        loaded = names["base"].state_dict()
        weights = load_file(cell / "adapter/weights.safetensors")
        assert all(torch.equal(loaded[name], weight) for name, weight in weights.items())
    # A kill between training and scoring: the weights come back from their file.
    items = [(cell / "items/document.jsonl").read_bytes() for cell in cells]
    for cell in cells:
        (cell / "metrics.json").unlink()
        (cell / "items/document.jsonl").unlink()
    assert in_process("probe", recipe, "--out", run).exit_code == 0
    assert [(cell / "items/document.jsonl").read_bytes() for cell in cells] == items


def test_a_pair_names_what_differs_between_its_cells(many_methods, tmp_path):
    whole, recipe = many_methods
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    for method, changes in {
        "dense-qkv": {"device": "cuda", "trainable_parameters": 7024},  # 2.01 % less than pre's 7168
        "skip-r4": {"trainable_parameters": 7025},  # 1.99 % less
        "full": {"dtype": "bfloat16", "token_order_sha256": "other", "trainable_parameters": 7168},
    }.items():
        path = run / "cells" / method / "seed0/metrics.json"
        path.write_text(json.dumps(read_json(path) | changes))
    assert in_process("probe", recipe, "--out", run).exit_code == 0
    pairs = {(pair["ours"], pair["theirs"]): pair for pair in read_json(run / "summary.json")["pairs"]}
    assert {ours: pairs[ours, "pre"]["differs"] for ours in ("dense-qkv", "full", "skip-r4")} == {
        "dense-qkv": ["parameters", "device"],
        "full": ["dtype", "data"],
        "skip-r4": [],
    }
    assert pairs["skip-r4", "none"]["differs"] == ["parameters"]  # the untouched model saw no tokens at all
    assert [names for names, pair in pairs.items() if pair["matched"]] == [("skip-r4", "pre")]


def test_a_method_that_does_not_fit_the_model_is_refused_before_anything_is_written(
    recipe, write_recipe, tmp_path, tiny_base
):
    folder = tmp_path / "ctrl"
    config = CTRLConfig(n_embd=16, dff=16, n_layer=1, n_head=2, vocab_size=384, n_positions=128)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    PreTrainedTokenizerFast.from_pretrained(tiny_base).save_pretrained(folder)
    recipe["model"]["name"], recipe["methods"] = str(folder), ["none", "lora-qkv"]
    done = in_process("probe", write_recipe(recipe), "--out", tmp_path / "run")
    assert done.exit_code == 2, done.stderr
    assert "preproj does not know their names in this model" in done.stderr
    assert not (tmp_path / "run").exists()


def test_the_summary_is_written_once_a_run(recipe, write_recipe, tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(
        "preproj.probe.runner.write_summary", lambda *args: written.append(write_summary(*args)) or written[-1]
    )
    recipe |= {"methods": ["none"]}
    for count in (1, 2):  # and once where no cell is left
        assert in_process("probe", write_recipe(recipe), "--out", tmp_path / "run").exit_code == 0
        assert written == [True] * count


def test_a_loss_that_is_not_finite_fails_its_cell_alone(recipe, write_recipe, tmp_path):
    recipe["methods"] = ["pre", "none", "skip"]
    recipe["training"]["learning_rate"]["pre"] = 1e30
    done = preproj("probe", write_recipe(recipe), "--out", tmp_path / "run")
    assert done.returncode == 1
    failed = read_json(tmp_path / "run/cells/pre/seed0/failed.json")
    assert failed["step"] > 1
    assert f"not finite at step {failed['step']}" in done.stdout.replace("\n", " ")
    rows = {row["method"]: row["status"] for row in read_json(tmp_path / "run/summary.json")["rows"]}
    assert rows == {"pre": "failed", "none": "finished", "skip": "finished"}
    # It stays failed, and costs nothing, when the command is repeated.
    assert in_process("probe", write_recipe(recipe), "--out", tmp_path / "run").exit_code == 1
    assert read_json(tmp_path / "run/cells/pre/seed0/failed.json") == failed


def test_seeds_and_methods_make_cells_and_the_untouched_model_is_one(recipe, write_recipe, tmp_path):
    recipe |= {"methods": ["none", "skip"], "seeds": [0, 3]}
    recipe["evaluation"]["passages"] = 0
    done = preproj("probe", write_recipe(recipe), "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    rows = read_json(tmp_path / "run/summary.json")["rows"]
    assert [(r["method"], r["seed"]) for r in rows] == [("none", 0), ("skip", 0), ("skip", 3)]
    assert all("last_word/acc" not in row["scores"] for row in rows)
    orders = [read_json(tmp_path / f"run/cells/skip/seed{s}/metrics.json")["token_order_sha256"] for s in (0, 3)]
    assert orders[0] != orders[1]


NO_NETWORK = """
import socket
def refuse(self, address, *rest):
    if self.family != socket.AF_UNIX:
        with open({log!r}, "a") as file:
            file.write(repr(address))
        raise OSError("no network in this test")
socket.socket.connect = socket.socket.connect_ex = refuse
def no_name(host, *rest, **options):
    with open({log!r}, "a") as file:
        file.write(repr(host))
    raise socket.gaierror("no network in this test")
socket.getaddrinfo = no_name
"""


def test_a_run_touches_no_network(recipe, write_recipe, tmp_path):
    log = tmp_path / "network.log"
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(NO_NETWORK.format(log=str(log)))
    path = os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    probe = "import socket; socket.create_connection(('127.0.0.1', 9))"
    guarded = subprocess.run([sys.executable, "-c", probe], check=False, env=environment, capture_output=True)
    assert guarded.returncode == 1
    assert "127.0.0.1" in log.read_text()  # the guard works
    log.unlink()
    recipe["methods"] = ["none", "pre+skip", "lora"]
    done = preproj("probe", write_recipe(recipe), "--out", tmp_path / "run", env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not log.exists()


MISTAKES = [
    (lambda r: r["model"].update(name="/nowhere/model"), "model.name: /nowhere/model"),
    (lambda r: r["data"].update(test="/nowhere/text.txt"), "data.test: "),
    (lambda r: r["training"].update(block_size=640, batch_size=1), "training.block_size is 640: "),
    (lambda r: r["evaluation"].update(context=129), "evaluation.context is 129: "),
    (lambda r: r["data"].update(column="body"), "has no string in the field body; it has id, text."),
    (lambda r: r["data"].update(test=r["data"]["test"] + "[:none]"), "data.test ends in [:none]; "),
]


@pytest.mark.parametrize(("change", "sentence"), MISTAKES, ids=[sentence for _, sentence in MISTAKES])
def test_a_mistake_exits_with_2_one_sentence_and_nothing_written(recipe, write_recipe, tmp_path, change, sentence):
    change(recipe)
    path = write_recipe(recipe)
    before = sorted(tmp_path.rglob("*"))
    done = in_process("probe", path, "--out", tmp_path / "run")
    assert done.exit_code == 2, done.output
    assert done.stderr.startswith("preproj: ")
    assert sentence in done.stderr
    assert done.stderr.strip().count("\n") == 0
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("tracker", ["tensorboard", "wandb", "trackio"])
def test_a_tracker_that_is_not_installed_is_refused_before_anything_is_written(
    recipe, write_recipe, tmp_path, monkeypatch, tracker
):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == tracker else find(name, *rest))
    done = in_process("probe", write_recipe({**recipe, "report_to": [tracker]}), "--out", tmp_path / "run")
    assert done.exit_code == 2, done.output
    assert done.stderr == f"preproj: report_to: {tracker} is not installed; run `pip install {tracker}`.\n"
    assert not (tmp_path / "run").exists()


def test_tensorboard_of_a_cell_is_in_its_folder_and_is_named_by_recipe_method_and_seed(recipe, write_recipe, tmp_path):
    recipe |= {"methods": ["pre"], "seeds": [3], "report_to": ["tensorboard"]}
    run = tmp_path / "run"
    assert in_process("probe", write_recipe(recipe), "--out", run).exit_code == 0
    cell = run / "cells/pre/seed3"
    events = EventAccumulator(str(cell / "tensorboard")).Reload()
    losses = [row["loss"] for row in read_jsonl(cell / "training.jsonl")]
    assert [scalar.value for scalar in events.Scalars("train/loss")] == pytest.approx(losses, rel=1e-6)  # float32
    text = events.Tensors("args/text_summary")[0].tensor_proto.string_val[0]
    assert json.loads(text)["run_name"] == "tiny pre seed3"


def test_text_that_is_too_short_or_empty(recipe, write_recipe, tmp_path):
    (tmp_path / "short.txt").write_text("Too short.")
    recipe["data"]["train"] = str(tmp_path / "short.txt")
    done = in_process("probe", write_recipe(recipe), "--out", tmp_path / "run")
    assert done.exit_code == 2
    assert "data.train has" in done.stderr
    assert "expected at least one block of training.block_size = 32" in done.stderr
    (tmp_path / "short.txt").write_text(" \n")
    done = in_process("probe", write_recipe(recipe), "--out", tmp_path / "run")
    assert done.exit_code == 2
    assert "data.train" in done.stderr
    assert not (tmp_path / "run").exists()


def test_held_out_text_that_is_trained_on_is_refused(recipe, write_recipe, tmp_path):
    recipe["data"]["test"] = recipe["data"]["train"]
    done = in_process("probe", write_recipe(recipe), "--out", tmp_path / "run")
    assert done.exit_code == 2
    assert "is also in data.train" in done.output
    assert not (tmp_path / "run").exists()


def test_line_separators_in_ids_and_passages_longer_than_the_context(recipe, write_recipe, tmp_path):
    rows = [json.loads(line) for line in Path(recipe["data"]["test"]).read_text("utf-8").splitlines()]
    for row in rows:
        row["id"] += "\u2028"
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    recipe["data"]["test"] = str(tmp_path / "test.jsonl")
    recipe["methods"] = ["none"]
    recipe["evaluation"]["passages"] = 100
    done = preproj("probe", write_recipe(recipe), "--out", tmp_path / "run")
    assert done.returncode == 0, done.stdout + done.stderr
    kept = read_jsonl(tmp_path / "run/data/passages.jsonl")
    assert 0 < len(kept) < 100  # the model reads 128 tokens, and some passages have more


def test_a_damaged_result_is_one_sentence(finished, recipe, write_recipe, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished[0], run)
    (run / "cells/none/seed0/metrics.json").write_text("{")
    done = in_process("probe", write_recipe(recipe), "--out", run)
    assert done.exit_code == 2
    assert "metrics.json is damaged; remove it and repeat the command." in done.output
    shutil.copy(finished[0] / "cells/none/seed0/metrics.json", run / "cells/none/seed0")
    (run / "cells/none/seed0/items/document.jsonl").unlink()
    done = in_process("probe", write_recipe(recipe), "--out", run)
    assert done.exit_code == 2
    assert "document.jsonl is missing; remove metrics.json of its cell and repeat" in done.output.replace("\n", " ")


def test_folders_that_are_no_run(recipe, write_recipe, tmp_path):
    (tmp_path / "file").write_text("")
    assert "is a file; choose another" in in_process("probe", write_recipe(recipe), "--out", tmp_path / "file").stderr
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").write_text("mine")
    done = in_process("probe", write_recipe(recipe), "--out", tmp_path / "full")
    assert done.exit_code == 2
    assert "is not empty and not a run" in done.stderr
    assert [p.name for p in (tmp_path / "full").iterdir()] == ["notes.txt"]


def test_a_model_without_attention_is_refused_in_one_sentence(recipe, write_recipe, tmp_path, tiny_base):
    folder = tmp_path / "mamba"
    config = MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=384, state_size=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    PreTrainedTokenizerFast.from_pretrained(tiny_base).save_pretrained(folder)
    recipe["model"]["name"] = str(folder)
    done = in_process("probe", write_recipe(recipe), "--out", tmp_path / "run")
    assert done.exit_code == 2, done.stderr
    assert "finds no self-attention in MambaForCausalLM" in done.stderr
    assert not (tmp_path / "run").exists()


def test_environment_names_versions_and_hardware(finished):
    environment = read_json(finished[0] / "environment.json")
    assert environment["packages"]["torch"] in torch_version
    assert environment["packages"]["peft"] == peft_version
    assert environment["hardware"]["cores"] == os.cpu_count()
    assert environment["hardware"]["memory_bytes"] == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
