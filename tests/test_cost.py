"""What an adapter costs: counts from the papers, and FLOPs counted on real models while they run."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from naive import tiny_model
from peft import LoraConfig, get_peft_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, BertConfig, GPTNeoXConfig, LlamaConfig, T5Config, ViTConfig
from typer.testing import CliRunner

import preproj
from preproj import PreProjConfig, params
from preproj.cli import app

PYTHIA_160M = GPTNeoXConfig(
    hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072, vocab_size=50_304
)
PYTHIA_410M = GPTNeoXConfig(
    hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096, vocab_size=50_304
)
IDS = torch.zeros(1, 16, dtype=torch.long)
ALL, INPUTS = "all linear layers", "attention's input projections"


def test_pythia_160m_has_the_numbers_of_the_paper():
    counted = params(PYTHIA_160M)
    assert counted.new == 24_772_608
    assert f"{counted.share_of_total:.1%}" == "13.2%"
    # 2 · 1.25 · 768² and 768² in each of 12 layers.
    assert counted.parts == {"pre-projection": 12 * 2 * 960 * 768, "content skip": 12 * 768 * 768}


def test_pythia_410m_has_the_numbers_of_the_paper_and_its_lora():
    counted = params(PYTHIA_410M)
    assert counted.new == 88_080_384
    assert f"{counted.share_of_total:.1%}" == "17.9%"
    per_rank = 24 * (1024 + 3072)
    assert 960 * per_rank == 94_371_840  # the paper's LoRA
    assert counted.lora[INPUTS].rank == round(88_080_384 / per_rank)
    assert counted.lora[INPUTS].parameters == counted.lora[INPUTS].rank * per_rank
    # All linear layers of a block, in + out: qkv 1024 + 3072, dense 2048, up 1024 + 4096, down 4096 + 1024.
    per_rank = 24 * (4096 + 2048 + 5120 + 5120)
    assert counted.lora[ALL].rank == round(88_080_384 / per_rank)
    assert counted.decoding_bytes == 4 * 88_080_384
    assert counted.adamw_bytes == 16 * 88_080_384


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox"])
def test_the_matching_lora_is_closer_than_its_neighbours(name):
    base = tiny_model(name)
    counted = params(base)
    rank = counted.lora[ALL].rank

    def distance(r: int) -> int:
        model = get_peft_model(tiny_model(name), LoraConfig(r=r, target_modules="all-linear"))
        return abs(model.get_nb_trainable_parameters()[0] - counted.new)

    assert distance(rank) == abs(counted.lora[ALL].parameters - counted.new)
    assert distance(rank) <= min(distance(rank - 1), distance(rank + 1))


CONFIGS = {
    "the method": {},
    "skip alone": {"pre_projection": False},
    "pre-projection alone": {"content_skip": False},
    "skip of low rank": {"skip_rank": 3},
    "one layer": {"layers_to_transform": [1]},
    "unequal expansions": {"expansion_pattern": {r"layers\.0\..*": 2.0}},
}


@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
@pytest.mark.parametrize("values", CONFIGS.values(), ids=CONFIGS.keys())
def test_flops_are_those_of_a_real_model_while_it_runs(name, values):
    counted = params(tiny_model(name), PreProjConfig(**values), tokens=16)
    model = get_peft_model(tiny_model(name), PreProjConfig(**values))
    with FlopCounterMode(display=False) as prefill, torch.no_grad():
        model(IDS)
    with FlopCounterMode(display=False) as training:
        model(IDS, labels=IDS).loss.backward()
    with FlopCounterMode(display=False) as plain, torch.no_grad():
        tiny_model(name)(IDS)
    assert 16 * (counted.prefill.base + counted.prefill.new) == prefill.get_total_flops()
    assert 16 * (counted.training.base + counted.training.new) == training.get_total_flops()
    assert 16 * counted.prefill.base == plain.get_total_flops()
    # Every new weight is one multiply-add a token.
    assert counted.prefill.new == 2 * counted.new == 2 * sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_the_base_part_of_training_is_a_frozen_model_with_input_gradients():
    # In the first layer no gradient reaches below x̃: only the parallel MLP's two products are not taken back.
    base = tiny_model("gpt_neox")
    base.requires_grad_(False)
    base.enable_input_require_grads()
    with FlopCounterMode(display=False) as frozen:
        base(IDS, labels=IDS).loss.backward()
    inner = base.config.intermediate_size
    counted = params(tiny_model("gpt_neox"), tokens=16)
    assert 16 * counted.training.base == frozen.get_total_flops() - 2 * 2 * 16 * 32 * inner
    # Forward, weight gradient, input gradient; the first W_up reads x̂, which needs none.
    assert counted.training.new == 6 * counted.new - 2 * 40 * 32


def test_only_the_experts_a_token_is_sent_to_are_counted():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    experts = {"num_key_value_heads": 4, "vocab_size": 64, "num_experts_per_tok": 2}
    few = params(AutoConfig.for_model("mixtral", **sizes, **experts, num_local_experts=4), tokens=16)
    many = params(AutoConfig.for_model("mixtral", **sizes, **experts, num_local_experts=8), tokens=16)
    assert many.base > few.base
    assert many.prefill.base == few.prefill.base + 2 * 32 * 4  # the router's four more rows


SMALL_BERT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}


@pytest.mark.parametrize(
    ("config", "cls"),
    [
        (BertConfig(**SMALL_BERT, architectures=["BertForSequenceClassification"]), "BertForSequenceClassification"),
        (BertConfig(**SMALL_BERT), "BertLMHeadModel"),
        (T5Config(d_model=32, d_kv=8, num_layers=2, num_heads=4, d_ff=48), "T5Model"),
        (ViTConfig(**SMALL_BERT), "ViTModel"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_class_is_the_one_named_else_the_causal_else_the_plain_one(config, cls):
    counted = params(config, tokens=16)
    assert counted.model == cls
    layers = 4 if cls == "T5Model" else 2
    assert counted.new == layers * 3.5 * 32 * 32
    if cls == "ViTModel":
        assert counted.prefill is counted.training is None
        assert "FLOPs are not counted" in str(counted)
    else:
        assert counted.prefill.new == 2 * counted.new
    assert counted.lora.keys() == {ALL, INPUTS}


def test_a_sequence_is_not_longer_than_the_models_positions():
    assert params(tiny_model("llama", max_position_embeddings=24)).tokens == 24


def test_the_model_and_the_configuration_are_left_alone():
    base, config = tiny_model("llama"), PreProjConfig()
    before, names = base(IDS).logits, [name for name, _ in base.named_modules()]
    counted = params(base, config)
    assert [name for name, _ in base.named_modules()] == names
    assert torch.equal(base(IDS).logits, before)
    assert config.target_modules is None
    assert all(p.requires_grad for p in base.parameters())
    assert params(get_peft_model(base, config), config) == counted


def test_no_weights_are_allocated():
    # 144 GB in float32: more memory than the machines this runs on.
    config = LlamaConfig(hidden_size=32_768, intermediate_size=131_072, num_hidden_layers=2, num_attention_heads=64)
    counted = params(config, tokens=8)
    assert counted.base > 34e9
    assert counted.new == 2 * 3.5 * 32_768**2


def test_the_printed_table_says_what_is_counted():
    text = str(params(PYTHIA_160M))
    for part in ("24,772,608", "13.24%", "+94.5 MiB", "+0 bytes", "378.0 MiB", "1,024 tokens", "2 per multiply-add"):
        assert part in text


def test_tokens_below_one_are_refused():
    with pytest.raises(ValueError, match="tokens is 0: expected a number above 0"):
        params(PYTHIA_160M, tokens=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder without weights."""
    path = tmp_path_factory.mktemp("model")
    config = tiny_model("llama").config
    config.save_pretrained(path)
    return path


def command(*arguments: object):
    return CliRunner().invoke(app, ["params", *map(str, arguments)])


def test_the_command_prints_the_table_of_the_function(folder):
    done = command(folder, "--expansion", 2, "--skip-rank", 4, "--layers-to-transform", "1", "--tokens", 8)
    assert done.exit_code == 0, done.output
    expected = PreProjConfig(expansion=2, skip_rank=4, layers_to_transform=[1])
    assert done.stdout == f"{params(AutoConfig.from_pretrained(folder), expected, tokens=8)}\n"
    assert "  pre-projection" in done.stdout
    assert "  pre-projection" not in command(folder, "--no-pre-projection").stdout
    assert "  content skip" not in command(folder, "--no-content-skip", "--target-modules", "self_attn").stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["/nowhere/model"], "/nowhere/model is no folder"),
        (["{}", "--expansion", 0], "expansion is 0.0: expected a number above 0"),
        (["{}", "--target-modules", "attn"], "target_modules 'attn' match nothing in this model"),
        (["{}", "--layers-to-transform", "a"], "--layers-to-transform is 'a': expected layer indices"),
        (["{}", "--no-pre-projection", "--no-content-skip"], "both False: switch at least one on"),
        (["{}", "--tokens", 0], "tokens is 0: expected a number above 0"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(folder, arguments, sentence):
    done = command(*(str(a).format(folder) for a in arguments))
    assert done.exit_code == 2
    assert done.stderr.startswith("preproj: ")
    assert sentence in done.stderr
    assert done.stderr.strip().count("\n") == 0
    assert done.stdout == ""


def test_a_model_without_attention_is_refused_in_one_sentence(tmp_path):
    AutoConfig.for_model("mamba", hidden_size=16, num_hidden_layers=1, vocab_size=64).save_pretrained(tmp_path)
    done = command(tmp_path)
    assert done.exit_code == 2
    assert "finds no self-attention in MambaForCausalLM" in done.stderr


def test_the_version_is_printed():
    assert CliRunner().invoke(app, ["--version"]).stdout == f"preproj {preproj.__version__}\n"


def test_the_command_needs_the_plain_installation_only(folder):
    extra = ["datasets", "gguf", "matplotlib", "platformdirs", "scipy"]
    hide = f"import sys\nfor name in {extra}: sys.modules[name] = None\nfrom preproj.__main__ import main\nmain()"
    done = subprocess.run([sys.executable, "-c", hide, "params", folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "new parameters" in done.stdout
    done = subprocess.run([sys.executable, "-c", hide, "probe"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "install it with `pip install 'preproj[probe]'`" in done.stderr
