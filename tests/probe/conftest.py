"""A tiny base model with a real tokenizer, and real text in files."""

import copy
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from one_cell import METHOD, cell_process
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast
from typer.testing import CliRunner

from preproj.cli import app
from preproj.probe.corpus import Corpus
from preproj.probe.python_docs import python_docs

TRAINED = ("pre", "skip", "pre+skip", "lora", "pre+skip+lora", "lora-qkv", "dora", "dense-qkv", "full")


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keep texts and converted models out of the user's cache."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREPROJ_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session")
def corpus() -> Corpus:
    return python_docs()


@pytest.fixture(scope="session")
def text_files(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Some of the Python documentation as JSON lines, one file per split."""
    folder = tmp_path_factory.mktemp("text")
    paths = {}
    for split, documents in corpus.splits.items():
        path = folder / f"{split}.jsonl"
        rows = [{"id": d["id"], "text": d["text"][:4000]} for d in documents.select(range(24))]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        paths[split] = str(path)
    return paths


@pytest.fixture(scope="session")
def tiny_base(text_files: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama of width 32 with a byte-level BPE tokenizer trained on the text."""
    folder = tmp_path_factory.mktemp("base")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384, special_tokens=["<eos>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train([text_files["train"]], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=tokenizer.get_vocab_size(),
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture
def recipe(tiny_recipe: dict) -> dict:
    """A recipe that runs in seconds, to change."""
    return copy.deepcopy(tiny_recipe)


@pytest.fixture(scope="session")
def tiny_recipe(tiny_base: Path, text_files: dict[str, str]) -> dict:
    """The same, to leave as it is."""
    return {
        "name": "tiny",
        "model": {"name": str(tiny_base)},
        "data": {"source": "files", **text_files},
        "methods": ["none", "pre+skip"],
        "seeds": [0],
        "training": {
            "tokens": 1280,
            "block_size": 32,
            "batch_size": 2,
            "learning_rate": dict.fromkeys(TRAINED, 3e-3),
            "save_steps": 4,
        },
        "evaluation": {"context": 32, "stride": 16, "document_tokens": 64, "documents": 8, "passages": 8},
    }


@pytest.fixture
def write_recipe(tmp_path: Path):
    """Return a function that writes a recipe to a file."""

    def write(content: dict, name: str = "recipe.yaml") -> Path:
        path = tmp_path / name
        path.write_text(yaml.safe_dump(content))
        return path

    return write


@pytest.fixture(scope="session")
def one_cell_run(tiny_recipe, tmp_path_factory):
    """A run whose text is prepared, and the same with its cell finished by one process, and its seconds."""
    folder = tmp_path_factory.mktemp("interrupted")
    recipe = {**tiny_recipe, "methods": [METHOD], "training": {**tiny_recipe["training"], "save_steps": 2}}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("preproj.probe.runner.work", lambda *args: {})
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
