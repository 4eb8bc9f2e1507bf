"""The paper's recipes on stand-ins of the same shape: only names, sizes and budgets are other than in the files.

The stand-ins are a tiny random model of the same architecture, a data set laid out as Salesforce/wikitext is on the
Hub, and local items of the benchmarks.
"""

import re
from pathlib import Path

import pytest
import torch
import yaml
from datasets import Dataset
from naive import tiny_model
from task_items import write_task_data
from transformers import AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig, PreTrainedTokenizerFast
from typer.testing import CliRunner

from preproj.cli import app
from preproj.probe import published
from preproj.probe.files import read_json, read_jsonl
from preproj.probe.methods import attach
from preproj.probe.recipe import load_recipe

RECIPES = Path(__file__).parents[2] / "recipes"
WIDTH, LAYERS = 32, 2  # of the stand-ins
PRE, SKIP = 2 * 40 * WIDTH, WIDTH**2  # new weights of a layer; 40 = 1.25 · 32
SKIP_R64 = 2 * 64 * WIDTH


def hub_layout(folder: Path, lines: dict[str, list[str]]) -> str:
    """Lay a data set out as Salesforce/wikitext is: two configurations, the training split in two files."""
    wrong = {split: ["of the other configuration"] for split in lines}
    for config, splits in {"wikitext-103-raw-v1": lines, "wikitext-2-raw-v1": wrong}.items():
        (folder / config).mkdir(parents=True)
        for split, rows in splits.items():
            parts = [rows[: len(rows) // 2], rows[len(rows) // 2 :]] if split == "train" else [rows]
            for n, part in enumerate(parts):
                file = folder / config / f"{split}-{n:05}-of-{len(parts):05}.parquet"
                Dataset.from_dict({"text": part}).to_parquet(file)
    entries = [
        {"config_name": config, "data_files": [{"split": s, "path": f"{config}/{s}-*"} for s in lines]}
        for config in ("wikitext-103-raw-v1", "wikitext-2-raw-v1")
    ]
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump({'configs': entries})}---\n")
    return str(folder)


@pytest.fixture(scope="module")
def wikitext(corpus, tmp_path_factory) -> str:
    """Python's documentation as lines of WikiText: blank lines are empty, headings stand between them."""
    lines: dict[str, list[str]] = {}
    for split, documents in corpus.splits.items():
        lines[split] = []
        for n, row in enumerate(documents.select(range(6))):
            text = [f" {line} \n" for line in row["text"][:900].splitlines() if line.strip()]
            lines[split] += ["", f" = {split} {n} = \n", "", *text, "", " = = Section = = \n", "", " The end . \n"]
    return hub_layout(tmp_path_factory.mktemp("hub") / "wikitext", lines)


@pytest.fixture(scope="module")
def task_data(tmp_path_factory) -> str:
    return write_task_data(tmp_path_factory.mktemp("items"))


@pytest.fixture(scope="module")
def tiny_llama(byte_tokenizer, tmp_path_factory) -> Path:
    """Stands for meta-llama/Llama-3.2-1B: grouped queries and tied embeddings."""
    folder = tmp_path_factory.mktemp("llama")
    byte_tokenizer.save_pretrained(folder)
    sizes = {"vocab_size": 257, "max_position_embeddings": 256, "tie_word_embeddings": True}
    tiny_model("llama", **sizes).float().save_pretrained(folder)
    return folder


def stand_in(name: str, base: Path, wikitext: str, task_data: str, methods: list[str]) -> dict:
    """A recipe with other names, sizes and budgets."""
    content = yaml.safe_load((RECIPES / f"{name}.yaml").read_text("utf-8"))
    assert set(methods) <= set(content["methods"])
    content["model"]["name"], content["data"]["name"] = str(base), wikitext
    content["evaluation"]["task_data"] = task_data
    content |= {"methods": methods}
    content["training"] |= {"tokens": 1280, "block_size": 32, "batch_size": 2}
    content["tuning"] |= {"trials": 1, "tokens": 256, "search": {"learning_rate": [1.0e-3]}}
    content["evaluation"] |= {"context": 64, "stride": 32, "batch_size": 4}
    return content


def run(content: dict, folder: Path) -> Path:
    (folder / "recipe.yaml").write_text(yaml.safe_dump(content))
    done = CliRunner().invoke(app, ["probe", str(folder / "recipe.yaml"), "--out", str(folder / "run")])
    assert done.exit_code == 0, done.output
    return folder / "run"


@pytest.mark.parametrize(
    ("name", "model", "parameters"),
    [
        ("paper-160m", "tiny_pythia", {"none": 0, "pre+skip": LAYERS * (PRE + SKIP)}),
        pytest.param("llama-3.2-1b", "tiny_llama", {"pre+skip-r64": LAYERS * (PRE + SKIP_R64)}, marks=pytest.mark.slow),
        pytest.param(
            "paper-410m",
            "tiny_pythia",
            {"none": 0, "lora-qkv-r960": LAYERS * 960 * 4 * WIDTH, "pre+skip": LAYERS * (PRE + SKIP)},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "pythia-1.4b",
            "tiny_pythia",
            {"none": 0, "pre+skip-r64": LAYERS * (PRE + SKIP_R64)},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_recipe_runs_whole_on_stand_ins(name, model, parameters, wikitext, task_data, tmp_path, request, monkeypatch):
    base = request.getfixturevalue(model)
    hub_name = load_recipe(RECIPES / f"{name}.yaml").model.name
    for known in (published.BASELINES, published.PAPER_RESULTS):
        if hub_name in known:
            monkeypatch.setitem(known, str(base), known[hub_name])
    folder = run(stand_in(name, base, wikitext, task_data, list(parameters)), tmp_path)

    summary = read_json(folder / "summary.json")
    rows = {row["method"]: row for row in summary["rows"]}
    assert {method: row["status"] for method, row in rows.items()} == dict.fromkeys(parameters, "finished")
    assert {method: row["trainable_parameters"] for method, row in rows.items()} == parameters
    measures = {measure["name"]: measure["items"] for measure in summary["measures"]}
    assert measures["document/perplexity"] == 6  # every article of the test split
    assert {task: measures[f"{task}/acc"] for task in ("lambada_openai", "hellaswag", "arc_easy")} == {
        "lambada_openai": 12,
        "hellaswag": 6,
        "arc_easy": 9,
    }
    corpus = read_json(folder / "corpus.json")
    assert corpus["source"].endswith("wikitext wikitext-103-raw-v1 train validation test")
    assert {split: counts["documents"] for split, counts in corpus["splits"].items()} == dict.fromkeys(
        ("train", "validation", "test"), 6
    )
    assert [row["id"] for row in read_jsonl(folder / f"cells/{next(iter(parameters))}/seed0/items/document.jsonl")] == [
        f"{n + 1} test {n}" for n in range(6)
    ]
    check_published_numbers((folder / "report.md").read_text("utf-8"), hub_name, rows)


def check_published_numbers(report: str, hub_name: str, rows: dict[str, dict]) -> None:
    """What others published stands beside what was measured, with its source, and an odd baseline comes first."""
    assert ("**Published by others, not measured here**" in report) == (hub_name in published.PAPER_RESULTS)
    for method, numbers in published.PAPER_RESULTS.get(hub_name, {}).items():
        for what, value in numbers.items():
            (row,) = re.findall(rf"^\| {re.escape(method)} \| {re.escape(what)} \| (.*) \|$", report, re.MULTILINE)
            theirs, ours, source = row.split(" | ")
            assert source == "Shinde 2026, arXiv 2604.10791 (WikiText-103, 500 items a task, half precision suspected)"
            measure = published.PAPER_MEASURES.get(what)
            if method in rows and measure is not None:
                scale = 100 if what == "LAMBADA" else 1
                assert number(theirs) == pytest.approx(scale * value)
                assert number(ours) == pytest.approx(scale * rows[method]["scores"][measure], abs=0.051)
            else:
                assert (number(theirs), ours) == (value, "–")
    if hub_name in published.BASELINES:  # a random model never says the last word
        first = next(line for line in report.splitlines() if line.startswith(">"))
        assert first.startswith(r"> **Warning: the untouched model has lambada\_openai acc 0.0 % ")


def number(cell: str) -> float:
    return float(cell.partition("<br>")[0].removesuffix(" %").replace(",", ""))


@pytest.mark.parametrize("damaged", [pytest.param(False, marks=pytest.mark.slow), True])
def test_in_half_precision_the_paper_s_recipe_is_checked_first(damaged, tiny_pythia, wikitext, task_data, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_pythia, dtype="float32")
    if damaged:  # LayerNorm takes it away again, but in bfloat16 nothing else is left beside it
        model.gpt_neox.embed_in.weight.data += 1000
    base = tmp_path / "base"
    model.save_pretrained(base)
    PreTrainedTokenizerFast.from_pretrained(tiny_pythia).save_pretrained(base)
    content = stand_in("paper-160m", base, wikitext, task_data, ["none"])
    content["model"]["dtype"] = "bfloat16"
    content["evaluation"] |= {"tasks": [], "task_data": None}
    folder = run(content, tmp_path)
    scores = read_json(folder / "precision.json")["scores"]
    assert (abs(scores["bfloat16"]["perplexity"] / scores["float32"]["perplexity"] - 1) > 0.02) == damaged
    report = (folder / "report.md").read_text("utf-8")
    assert report.startswith("# No verdict: bfloat16 damages the untouched model") == damaged
    assert ("\n> **The untouched model is damaged by bfloat16: perplexity " in report) == damaged


def full_size(name: str) -> torch.nn.Module:
    """The model of a recipe, without weights, as its configuration on the Hub has it."""
    neox = {
        "160m": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
        "410m": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16},
        "1.4b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24, "num_attention_heads": 16},
    }
    config = (
        GPTNeoXConfig(vocab_size=50304, **neox[name.removeprefix("EleutherAI/pythia-")])
        if "pythia" in name
        else LlamaConfig(
            vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
            num_key_value_heads=8, tie_word_embeddings=True,
        )
    )  # fmt: skip
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    ("name", "fixed"),
    [
        ("paper-160m", {"pre+skip": 24_772_608}),
        ("paper-410m", {"pre+skip": 88_080_384, "lora-qkv-r960": 94_371_840}),
        ("pythia-1.4b", {"pre+skip": 352_321_536, "pre+skip-r64": 24 * (2.5 * 2048**2 + 2 * 64 * 2048)}),
        ("llama-3.2-1b", {"pre+skip": 234_881_024, "pre+skip-r64": 16 * (2.5 * 2048**2 + 2 * 64 * 2048)}),
    ],
)
def test_at_full_size_the_methods_have_the_parameters_of_the_paper_or_of_pre_skip(name, fixed):
    recipe = load_recipe(RECIPES / f"{name}.yaml")
    sizes = {method: attach(full_size(recipe.model.name), method, 0).trainable_parameters for method in recipe.methods}
    for method in ("lora", "lora-qkv", "pre+lora"):
        if method in sizes:
            assert sizes[method] == pytest.approx(fixed["pre+skip"], rel=0.005), method
    assert {method: sizes[method] for method in fixed} == fixed


@pytest.mark.parametrize("name", ["paper-160m", "paper-410m"])
def test_the_full_recipe_differs_in_items_and_seeds_only(name):
    short, full = (load_recipe(RECIPES / f"{name}{end}.yaml") for end in ("", "-full"))
    assert (short.evaluation.limit, full.evaluation.limit) == (500, None)
    assert (short.seeds, full.seeds) == ([0], [0, 1, 2])
    evaluation = full.evaluation.model_copy(update={"limit": 500})
    assert full.model_copy(update={"name": name, "seeds": [0], "evaluation": evaluation}) == short


@pytest.mark.slow
@pytest.mark.data
def test_the_paper_s_recipe_runs_with_pythia_s_tokenizer_on_wikitext_and_the_benchmarks(data_folder, tmp_path):
    base = tmp_path / "base"
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(data_folder / "pythia-tokenizer/tokenizer.json"), eos_token="<|endoftext|>"
    )
    tokenizer.save_pretrained(base)
    tiny_model("gpt_neox", vocab_size=50304, max_position_embeddings=2048, eos_token_id=0).float().save_pretrained(base)
    files = {"train": "wiki.valid.raw", "validation": "wiki.valid.raw", "test": "wiki.test.raw"}
    lines = {}
    for split, file in files.items():
        text = (data_folder / file).read_text("utf-8").splitlines(keepends=True)
        part = text[-150:] if split == "validation" else text[:150]
        lines[split] = ["" if line == " \n" else line for line in part]  # as on the Hub
    content = stand_in("paper-160m", base, hub_layout(tmp_path / "wikitext", lines), str(data_folder), ["none", "skip"])
    content["training"]["block_size"] = 128
    content["evaluation"] |= {"context": 256, "stride": 256, "windows": 8, "document_tokens": 64, "limit": 8}
    folder = run(content, tmp_path)
    summary = read_json(folder / "summary.json")
    assert {row["method"]: row["status"] for row in summary["rows"]} == {"none": "finished", "skip": "finished"}
    measures = {measure["name"]: measure["items"] for measure in summary["measures"]}
    assert {measures[f"{task}/acc"] for task in ("lambada_openai", "hellaswag", "arc_easy")} == {8}
    titles = sum(re.fullmatch(r" = [^=].* = \n", line) is not None for line in lines["test"])
    assert measures["document/perplexity"] == titles > 1
