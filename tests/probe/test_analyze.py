"""`preproj analyze`, from an adapter in a folder to the files of docs/analysis.md."""

import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig
from typer.testing import CliRunner

from preproj import PreProjConfig
from preproj.adapter.layer import adapted_sites
from preproj.analysis import analyze
from preproj.analysis.attention import measure_attention
from preproj.analysis.interventions import measure_ablations
from preproj.analysis.position import measure_position
from preproj.analysis.token_classes import TOKEN_CLASSES
from preproj.cli import app
from preproj.probe.methods import attach
from preproj.probe.prepared import prepare
from preproj.probe.recipe import parse_recipe
from preproj.probe.sources import read_corpus
from preproj.probe.tokenised import text_cache

WORDS = "The second cell holds 4 keys. "


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["analyze", *map(str, arguments)], env={"COLUMNS": "100"})


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype="float32")


def trained(base: Path, folder: Path, config: PreProjConfig) -> PeftModel:
    """Saves an adapter whose weights have left their start."""
    model = get_peft_model(load(base), config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for _, _, layer in adapted_sites(model):
            for linear in layer.linears("default").values():
                linear.weight += 0.05 * torch.randn(linear.weight.shape, generator=generator)
    model.save_pretrained(folder)
    return model.eval()


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three documents, the second of them longer than two pieces of the tests."""
    path = tmp_path_factory.mktemp("own") / "text.jsonl"
    texts = [f"First. {WORDS}", WORDS * 9, f"Third! {WORDS}"]
    path.write_text("".join(json.dumps({"id": f"d{i}", "text": text}) + "\n" for i, text in enumerate(texts)))
    return path


@pytest.fixture(scope="module")
def adapter(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PeftModel]:
    """An adapter's folder, and the model it was saved from."""
    folder = tmp_path_factory.mktemp("adapter")
    return folder, trained(tiny_base, folder, PreProjConfig(task_type="CAUSAL_LM", init_seed=3))


def test_the_files_hold_what_python_measures(adapter, text, tiny_base, tmp_path):
    folder, model = adapter
    done = run(folder, "--text", text, "--documents", 5, "--tokens", 24, "--ablations", 2, "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    content = json.loads((tmp_path / "out/analysis.json").read_text("utf-8"))

    # One piece of each document in turn, then the second pieces of those that have one.
    tokenizer = AutoTokenizer.from_pretrained(tiny_base)
    documents = [json.loads(line) for line in text.read_text("utf-8").splitlines()]
    ids = [tokenizer(document["text"], add_special_tokens=False).input_ids for document in documents]
    seconds = [i for i in ids if len(i) > 24]
    pieces = [i[:24] for i in ids] + [i[24:48] for i in seconds] + [i[48:72] for i in seconds if len(i) > 48]
    expected = analyze(model, pieces[:5], tokenizer)
    assert len(pieces) >= 5
    for found, own in zip(content["layers"], expected.layers, strict=True):
        assert found == pytest.approx(own)
    assert len(content["token_classes"]) == 2 * len(TOKEN_CLASSES)
    assert content["text"]["tokens"] == sum(map(len, pieces[:5])) == content["layers"][0]["tokens"]
    rows = (json.dumps(["test", d["id"], d["text"]]).encode() + b"\n" for d in documents)
    assert content["text"]["sha256"] == hashlib.sha256(b"".join(rows)).hexdigest()
    assert (content["text"]["documents"], content["text"]["pieces"]) == (3, 5)

    # What wants pieces of one length reads those that have it.
    whole = [piece for piece in pieces[:5] if len(piece) == 24]
    cause = measure_ablations(model, whole[:2], 24)
    assert content["cause"]["perplexity"] == pytest.approx(cause["perplexity"])
    for found, own in zip(content["cause"]["ablations"], cause["ablations"], strict=True):
        assert (found.pop("part"), found.pop("group"), found.pop("layers")) == (
            own.pop("part"),
            own.pop("group"),
            own.pop("layers"),
        )
        assert found == pytest.approx(own)
    for name, measure in (("position", measure_position), ("attention", measure_attention)):
        for found, own in zip(content[name]["layers"], measure(model, whole, 24)["layers"], strict=True):
            assert found == pytest.approx(own)
    assert max(content["permutation_deviation"]) < 1e-5
    assert "rises without a part" in done.output

    assert content["format_version"] == 1
    assert content["model"] == {"name": str(tiny_base), "note": None}
    assert content["adapter"]["folder"] == str(folder)
    assert content["adapter"]["init_seed"] == 3
    assert content["dtype"] == "float32"
    assert content["packages"]["torch"] == torch.__version__
    assert content["hardware"]["device"] in {"cpu", "cuda"}
    assert content["early_layers"] == 1
    assert content["depth"] == json.loads(json.dumps(expected.depth()))

    table = pq.read_table(tmp_path / "out/layers.parquet").to_pylist()
    assert [(row["layer"], row["token_class"]) for row in table] == [
        (layer, name) for layer in (0, 1) for name in ("all", *TOKEN_CLASSES)
    ]
    assert [row for row in table if row["token_class"] == "all"] == content["layers"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["analysis.json", "layers.parquet"]
    for title in ("Weights of each layer", "Function of each layer", "Depth: last layer over the mean of layers 0-0"):
        assert title in done.output


def test_without_a_text_the_python_documentation_is_read(adapter, corpus, tmp_path):
    copied = Path(shutil.copytree(adapter[0], tmp_path / "copied"))
    done = run(copied, "--documents", 3, "--tokens", 16)
    assert done.exit_code == 0, done.output
    content = json.loads((copied / "analysis/analysis.json").read_text("utf-8"))
    assert content["text"]["source"] == "python-docs, test"
    rows = [["test", row["id"], row["text"]] for row in corpus.splits["test"].select(range(3))]
    joined = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    assert content["text"]["sha256"] == hashlib.sha256(joined).hexdigest()
    assert content["text"]["tokens"] == 48


@pytest.fixture
def cell(tiny_recipe: dict, tiny_base: Path, tmp_path: Path) -> Path:
    """The cell of a run with LoRA beside the pre-projection, in bfloat16."""
    folder = tmp_path / "run"
    recipe = parse_recipe(
        yaml.safe_dump(tiny_recipe | {"model": {"name": str(tiny_base), "dtype": "bfloat16"}}), "recipe"
    )
    with text_cache() as documents:
        corpus = read_corpus(recipe.data, None, documents)
        tokenizer = AutoTokenizer.from_pretrained(tiny_base)
        prepare(recipe, corpus, tokenizer, AutoConfig.from_pretrained(tiny_base)).write(folder)
    (folder / "recipe.yaml").write_text(recipe.to_yaml())
    attached = attach(load(tiny_base), "pre+lora", 1)
    with torch.no_grad():
        for name, weight in attached.model.named_parameters():
            if ".lora_B." in name or ".down." in name:
                weight.normal_(std=0.5, generator=torch.Generator().manual_seed(0))
    attached.save(folder / "cells/pre+lora/seed1/adapter")
    return folder / "cells/pre+lora/seed1"


def test_a_cell_is_measured_on_its_runs_text_with_the_lora_beside_it(cell, text_files, tmp_path):
    for given in (cell, cell / "adapter"):
        done = run(given, "--documents", 4, "--tokens", 16)
        assert done.exit_code == 0, done.output
    content = json.loads((cell / "analysis/analysis.json").read_text("utf-8"))
    assert content["text"]["source"] == "tiny, test"
    rows = [json.loads(line) for line in Path(text_files["test"]).read_text("utf-8").splitlines()[:4]]
    joined = b"".join(json.dumps(["test", row["id"], row["text"]]).encode() + b"\n" for row in rows)
    assert content["text"]["sha256"] == hashlib.sha256(joined).hexdigest()
    assert content["dtype"] == "bfloat16"
    assert content["adapter"]["init_seed"] == 1
    assert {row["skip_norm"] for row in content["layers"]} == {None}
    # The second layer reads what LoRA made of the first.
    shutil.rmtree(cell / "adapter/beside")
    assert run(cell, "--documents", 4, "--tokens", 16, "--out", tmp_path / "alone").exit_code == 0
    alone = json.loads((tmp_path / "alone/analysis.json").read_text("utf-8"))
    reach, reach_alone = ([row["pre_to_input"] for row in found["layers"]] for found in (content, alone))
    assert reach[0] == reach_alone[0] > 0
    assert abs(reach[1] / reach_alone[1] - 1) > 1e-3
    shutil.rmtree(cell.parents[2] / "data")
    refused = run(cell)
    assert refused.exit_code == 2
    assert "the run was copied without its text; name a text with --text." in refused.output


def test_another_base_may_be_named(adapter, text, tiny_base, tmp_path):
    moved = Path(shutil.copytree(adapter[0], tmp_path / "moved"))
    config = json.loads((moved / "adapter_config.json").read_text())
    for name in (None, str(tmp_path / "gone")):
        (moved / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": name}))
        refused = run(moved, "--text", text)
        assert refused.exit_code == 2
        assert refused.output.count("\n") == 1
    done = run(moved, "--text", text, "--base", tiny_base, "--tokens", 8)
    assert done.exit_code == 0, done.output


def lora(base: Path, folder: Path) -> None:
    get_peft_model(load(base), LoraConfig(target_modules=["q_proj"])).save_pretrained(folder)


def damaged(base: Path, folder: Path) -> None:
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"peft_type": "PREPROJ", "expansion": -1}')


def wider(base: Path, folder: Path) -> None:
    config = LlamaConfig(hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=9)
    model = get_peft_model(AutoModelForCausalLM.from_config(config), PreProjConfig())
    model.peft_config["default"].base_model_name_or_path = str(base)
    model.save_pretrained(folder)


def deeper(base: Path, folder: Path) -> None:
    trained(base, folder, PreProjConfig(layers_to_transform=[0]))
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"layers_to_transform": None}))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (None, r"preproj: \S+ is no folder; give an adapter's folder or a cell of a run\."),
        (
            lambda base, folder: folder.mkdir(),
            r"preproj: \S+ has no adapter_config\.json; give .*, cells/METHOD/seed0\.",
        ),
        (lora, r"preproj: \S+ is an adapter of LORA: only preproj's can be analysed\."),
        (damaged, r"preproj: \S+ cannot be read: expansion is -1: expected a number above 0, such as 1\.25\."),
        (wider, r"preproj: \S+ cannot be put on \S+: .*size mismatch.*"),
        (deeper, r"preproj: \S+ does not fit \S+: only one of them has \S+layers\.1\S+\."),
    ],
)
def test_a_wrong_folder_gives_one_sentence(make, sentence, tiny_base, text, tmp_path):
    folder = tmp_path / "given"
    if make:
        make(tiny_base, folder)
    done = run(folder, "--text", text)
    assert done.exit_code == 2, done.output
    assert re.fullmatch(f"{sentence}\n", done.output), done.output
    assert not (folder / "analysis").exists()


def test_a_wrong_text_gives_one_sentence(adapter, tmp_path):
    done = run(adapter[0], "--text", tmp_path / "none.txt")
    assert done.exit_code == 2
    assert done.output == (
        f"preproj: --text: {tmp_path / 'none.txt'} does not exist; "
        "give a .txt, .raw, .jsonl or .parquet file, or a folder of such files.\n"
    )


@pytest.fixture(scope="module")
def data_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the Hub holds them, of one configuration; its second text is empty."""
    folder = tmp_path_factory.mktemp("set")
    (folder / "large").mkdir()
    texts = ["", *(f"{name}. {WORDS}" for name in ("One", "Two", "Three", "Four"))]
    Dataset.from_dict({"content": texts}).to_parquet(folder / "large/test.parquet")
    (folder / "README.md").write_text("---\nconfigs:\n- config_name: large\n  data_dir: large\n---\n")
    return folder


@pytest.mark.parametrize(("split", "first"), [("test", "One"), ("test[1:3]", "Two")])
def test_a_split_of_a_data_set_is_read_as_far_as_it_is_needed(split, first, adapter, data_set, tiny_base, tmp_path):
    named = ("--text", data_set, "--split", split, "--config", "large", "--column", "content")
    done = run(adapter[0], *named, "--documents", 2, "--tokens", 64, "--ablations", 0, "--out", tmp_path)
    assert done.exit_code == 0, done.output
    text = json.loads((tmp_path / "analysis.json").read_text("utf-8"))["text"]
    start = ("One", "Two", "Three", "Four").index(first)
    texts = [f"{name}. {WORDS}" for name in ("One", "Two", "Three", "Four")[start : start + 2]]
    tokenizer = AutoTokenizer.from_pretrained(tiny_base)
    assert text["documents"] == 2
    assert text["tokens"] == sum(len(tokenizer(one, add_special_tokens=False).input_ids[:64]) for one in texts)
    shown = split if "[" in split else f"{split}[:2]"
    assert text["source"] == f"{data_set} large {shown}"
    ids = [f"test:{start + 2 + n}" for n in range(2)]  # counted in rows, the empty one too
    rows = (json.dumps(["test", *pair]).encode() + b"\n" for pair in zip(ids, texts, strict=True))
    assert text["sha256"] == hashlib.sha256(b"".join(rows)).hexdigest()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--split", "test"), "--split is of a data set; name the data set with --text."),
        (("--config", "large"), "--config is of a data set; name the data set with --text."),
        (
            ("--text", "a/b", "--config", "large"),
            "--config is of a data set; name the split of a/b to read with --split.",
        ),
        (
            ("--text", "a/b", "--split", "test[90%:]"),
            "--split is test[90%:]: expected a split's name, or one with a number of documents, train[100:200].",
        ),
        (("--out", __file__), f"--out is {__file__}, a file; name a folder."),
    ],
)
def test_options_that_do_not_go_together_give_one_sentence(options, sentence, adapter):
    done = run(adapter[0], *options)
    assert (done.exit_code, done.output) == (2, f"preproj: {sentence}\n")


def test_a_missing_column_of_a_data_set_is_named_as_the_option_is(adapter, data_set):
    done = run(adapter[0], "--text", data_set, "--split", "test")
    assert done.output == "preproj: --column is text: --text has no such column; it has content.\n"


def test_a_cell_without_an_adapter_gives_one_sentence(tmp_path):
    (tmp_path / "metrics.json").write_text("{}")
    done = run(tmp_path)
    sentence = f"{tmp_path} is a cell without an adapter; give one whose method has pre or skip."
    assert (done.exit_code, done.output) == (2, f"preproj: {sentence}\n")
