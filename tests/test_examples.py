"""The examples run as scripts, on a tiny model."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

import preproj

EXAMPLES = Path(__file__).parent.parent / "examples"
CHATS = [
    [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "Content goes around attention."}]
    for i in range(20)
]
DATA = {
    "finetune.py": ("text.txt", "Content goes around attention.\n\n" * 20),
    "sft.py": ("chats.jsonl", "".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS)),
}


def run(example: str, *arguments: object, cache: Path) -> subprocess.CompletedProcess:
    source = Path(preproj.__file__).parents[1]
    besides = {"HF_DATASETS_CACHE": str(cache), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(source)}
    command = [sys.executable, str(EXAMPLES / example), *map(str, arguments)]
    return subprocess.run(
        command, env=os.environ | besides, capture_output=True, text=True, check=False, cwd=cache, timeout=300
    )


def test_every_example_is_run():
    assert {path.name for path in EXAMPLES.glob("*.py")} == DATA.keys()


@pytest.mark.parametrize("example", DATA)
def test_an_example_trains_and_saves_an_adapter_that_loads_again(example, tiny_pythia, tmp_path):
    name, text = DATA[example]
    (tmp_path / name).write_text(text)
    out = tmp_path / "out"
    ran = run(example, tiny_pythia, tmp_path / name, out, "--learning-rate", 0.01, cache=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "trainable params: 7,168" in ran.stdout  # 2 layers · 3.5 · 32²

    state = json.loads((out / "checkpoint-20/trainer_state.json").read_text("utf-8"))
    losses = [step["loss"] for step in state["log_history"] if "loss" in step]
    assert len(losses) == 4
    assert losses[-1] < 0.8 * losses[0]

    ids = torch.tensor([[5, 6, 7, 8]])
    base = AutoModelForCausalLM.from_pretrained(tiny_pythia, dtype="float32")
    before = base(ids).logits
    loaded = PeftModel.from_pretrained(base, out)
    moved = [p.abs().max().item() for n, p in loaded.named_parameters() if ".down." in n]
    assert len(moved) == 2
    assert min(moved) > 0
    assert (loaded(ids).logits - before).abs().max() > 0.1


@pytest.mark.parametrize("example", DATA)
def test_an_example_without_arguments_says_what_it_needs(example, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [example])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(EXAMPLES / example), run_name="__main__")
    said = capsys.readouterr().err
    assert said.startswith(f"usage: {example}")
    assert said.endswith("error: the following arguments are required: model, data, out\n")
