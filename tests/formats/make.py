"""Write a tiny run with the installed preproj, as a sample of its format for the versions to come.

    python tests/formats/make.py tests/formats/runs/NAME METHOD,METHOD [TRIALS]

The base's weights follow from a formula, so that only its configuration is kept. Of each adapter the logits that this
preproj computes are kept in ``logits.json``.
"""

import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import IO, Any

import torch
import yaml
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

CONFIG = {
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 0,
}
TOKENS = [[5, 80, 211, 7, 99, 310, 42, 150]]


def formula_base() -> PreTrainedModel:
    """Return a two-layer Llama of width 8 whose weights are sines."""
    model = AutoModelForCausalLM.from_config(LlamaConfig(**CONFIG))
    with torch.no_grad():
        for number, (name, weight) in enumerate(model.named_parameters()):
            if "norm" not in name:
                weight.copy_(torch.sin(torch.arange(weight.numel()) * 0.7 + number).view_as(weight))
    return model.eval()


def logits(adapter: Path) -> list[float]:
    """Return what the base and the adapters in a folder say after the last of some tokens."""
    from peft import PeftModel

    import preproj  # noqa: F401

    model = PeftModel.from_pretrained(formula_base(), adapter)
    if (adapter / "beside").is_dir():
        model = PeftModel.from_pretrained(model.get_base_model(), adapter / "beside", adapter_name="beside")
    with torch.no_grad():
        return model.eval()(torch.tensor(TOKENS)).logits[0, -1, :8].tolist()


def main(out: str, methods: str, trials: str = "") -> None:
    """Write the run and the logits of its adapters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    place, names = Path(out).resolve(), methods.split(",")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        _write_text()
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=["<eos>"], initial_alphabet=alphabet)
        tokenizer.train(["train.jsonl"], trainer)
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained("base")
        formula_base().save_pretrained("base")
        Path("recipe.yaml").write_text(yaml.safe_dump(_recipe(names, trials)))
        _probe()
        adapters = [path.parent for path in Path("run").glob("cells/*/*/adapter/*config.json")]
        said = {str(adapter.parent.relative_to("run")): logits(adapter) for adapter in adapters}
        Path("run/logits.json").write_text(json.dumps(said, indent=1))
        _thin(Path("run"))
        shutil.copy("recipe.yaml", "run/given.yaml")
        shutil.copytree("run", place)


def _probe() -> None:
    """Run the recipe, with cells that are forked from this process instead of started: in seconds, not minutes."""
    import preproj.probe.cell
    import preproj.probe.runner  # noqa: F401
    from preproj.cli import app

    popen = subprocess.Popen

    def start(command: list[str], *arguments: object, **options: Any) -> object:
        if command[:2] == [sys.executable, "-m"]:
            return Forked(command, options["stderr"], options["env"])
        return popen(command, *arguments, **options)

    subprocess.Popen = start  # type: ignore[misc,assignment]
    sys.argv = ["preproj", "probe", "recipe.yaml", "--out", "run"]
    app(standalone_mode=False)


class Forked:
    """A ``Popen`` of ``python -m MODULE ARGUMENT...`` that is a fork."""

    def __init__(self, command: list[str], stderr: IO, env: dict[str, str]):
        """Start it."""
        inputs, outputs = os.pipe(), os.pipe()
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            for theirs, ours in ((inputs[0], 0), (outputs[1], 1), (stderr.fileno(), 2)):
                os.dup2(theirs, ours)
            os.close(inputs[1])
            os.environ |= env
            sys.argv, sys.stdout = command[2:], os.fdopen(1, "w")
            try:
                runpy.run_module(command[2], run_name="__main__", alter_sys=True)
            except SystemExit as error:
                print(error, file=sys.stderr, flush=True)
                os._exit(1)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        self.stdin, self.stdout = os.fdopen(inputs[1], "w"), os.fdopen(outputs[0])
        os.close(inputs[0])
        os.close(outputs[1])

    def wait(self) -> int:
        """Wait for its end."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def poll(self) -> int | None:
        """Return None as long as nobody has waited for it."""
        return self.returncode

    def kill(self) -> None:
        """End it."""
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)


def _recipe(methods: list[str], trials: str) -> dict:
    rates = {} if trials else {"learning_rate": {method: 1e-2 for method in methods if method != "none"}}
    recipe = {
        "name": "sample",
        "model": {"name": "base"},
        "data": {"source": "files", **{split: f"{split}.jsonl" for split in ("train", "validation", "test")}},
        "methods": methods,
        "training": {"tokens": 256, "block_size": 32, "batch_size": 2, "save_steps": 2, **rates},
        "evaluation": {"context": 32, "stride": 16, "document_tokens": 64, "documents": 4, "passages": 4},
    }
    if trials:
        recipe["tuning"] = {
            "trials": int(trials),
            "tokens": 128,
            "search": {"learning_rate": {"low": 1e-3, "high": 0.1}},
        }
    return recipe


def _write_text() -> None:
    """Write long topics of Python's own help, a third for each split."""
    from pydoc_data.topics import topics

    long = sorted(topics, key=lambda name: -len(topics[name]))[:36]
    for part, split in enumerate(("train", "validation", "test")):
        rows = [{"id": name, "text": topics[name][:3000]} for name in long[part::3]]
        Path(f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _thin(run: Path) -> None:
    """Leave out the text and what is made of the other files."""
    for name in ("data", "figures"):
        shutil.rmtree(run / name, ignore_errors=True)
    for path in [*run.glob("report.*"), *run.rglob("log.txt"), *run.rglob("README.md")]:
        path.unlink()


if __name__ == "__main__":
    main(*sys.argv[1:])
