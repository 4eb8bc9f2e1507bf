"""What all tests share.

Real data: tests marked `data` read the folder named by PREPROJ_DATA, and are deselected where it is not set; the
summary counts them, also where several processes run the tests.
"""

import os
from pathlib import Path
from typing import Any

import pytest
from naive import tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>{% endfor %}"


WITHOUT_DATA = pytest.StashKey[int]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "PREPROJ_DATA" in os.environ:
        return
    without = [item for item in items if item.get_closest_marker("data")]
    if without:
        config.hook.pytest_deselected(items=without)
        items[:] = [item for item in items if not item.get_closest_marker("data")]
        config.stash[WITHOUT_DATA] = len(without)
        if hasattr(config, "workeroutput"):  # a process of pytest-xdist, whose summary nobody sees
            config.workeroutput["without_data"] = len(without)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over what a process of pytest-xdist counted; all count the same tests."""
    node.config.stash[WITHOUT_DATA] = getattr(node, "workeroutput", {}).get("without_data", 0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say how many tests wait for real data."""
    if count := config.stash.get(WITHOUT_DATA, 0):
        terminalreporter.write_line(f"{count} tests of real data deselected: PREPROJ_DATA is not set")


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
