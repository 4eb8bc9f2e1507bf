"""The code of docs/many-devices.md runs in two processes."""

import os
import re
from functools import partial
from pathlib import Path

from safetensors.torch import load_file
from two import in_two_processes

PAGE = (Path(__file__).parents[2] / "docs/many-devices.md").read_text("utf-8")


def run_page(base: Path, rank: int, folder: Path) -> dict:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    os.chdir(folder)
    exec(code.replace("EleutherAI/pythia-160m", str(base)), {})
    return {}


def test_the_loop_of_the_page_trains_and_saves(tiny_pythia, tmp_path):
    in_two_processes(partial(run_page, tiny_pythia), tmp_path)
    saved = load_file(tmp_path / "my-adapter/adapter_model.safetensors")
    assert sum(weight.numel() for weight in saved.values()) == 2 * 3.5 * 32 * 32
    assert any(weight.abs().max() > 0 for key, weight in saved.items() if "down" in key)  # zero at the start
