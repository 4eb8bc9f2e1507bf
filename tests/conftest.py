"""What all tests share.

Tests marked `data` read the folder named by PREPROJ_DATA, those marked `browser` open pages in the machine's Chromium,
those marked `quantised` or `deepspeed` need more packages. They are deselected where that is missing, and the summary
counts them, also where several processes run the tests.
"""

import importlib.util
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from naive import tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>{% endfor %}"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WAITING = pytest.StashKey[dict[str, int]]()
MISSING = {
    "data": "of real data deselected: PREPROJ_DATA is not set",
    "browser": "in a browser deselected: no Chromium is on this machine",
    "deepspeed": "of DeepSpeed deselected: it is not installed",
    "quantised": "of quantised bases deselected: bitsandbytes and torchao are not installed, see `make slow`",
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = {
        "data": "PREPROJ_DATA" in os.environ,
        "browser": CHROMIUM is not None,
        "deepspeed": importlib.util.find_spec("deepspeed") is not None,
        "quantised": all(importlib.util.find_spec(name) is not None for name in ("bitsandbytes", "torchao")),
    }
    waiting = {}
    for marker in (marker for marker in MISSING if not here[marker]):
        without = [item for item in items if item.get_closest_marker(marker)]
        config.hook.pytest_deselected(items=without)
        items[:] = [item for item in items if not item.get_closest_marker(marker)]
        waiting[marker] = len(without)
    config.stash[WAITING] = waiting
    if hasattr(config, "workeroutput"):  # a process of pytest-xdist, whose summary nobody sees
        config.workeroutput["waiting"] = waiting


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over what a process of pytest-xdist counted; all count the same tests."""
    node.config.stash[WAITING] = getattr(node, "workeroutput", {}).get("waiting", {})


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say how many tests wait for something that is not here."""
    for marker, count in config.stash.get(WAITING, {}).items():
        if count:
            terminalreporter.write_line(f"{count} tests {MISSING[marker]}")


@pytest.fixture(scope="session")
def chromium() -> str:
    """The path of the machine's Chromium."""
    assert CHROMIUM is not None  # else the test is deselected
    return CHROMIUM


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The folder of real text and benchmarks."""
    return Path(os.environ["PREPROJ_DATA"])


@pytest.fixture(scope="session")
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of bytes, 257 entries, with an end-of-text token and a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(["<|endoftext|>", *alphabet])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>", chat_template=CHAT)


@pytest.fixture(scope="session")
def tiny_pythia(byte_tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that stands for EleutherAI/pythia-160m: tiny, same architecture, with a tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("pythia")
    byte_tokenizer.save_pretrained(folder)
    tiny_model("gpt_neox", vocab_size=257, max_position_embeddings=256).float().save_pretrained(folder)
    return folder
