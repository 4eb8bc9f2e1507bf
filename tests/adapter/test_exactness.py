"""The adapter in whole models, against an independent naive computation of every architecture."""

import copy

import pytest
import torch
from naive import ARCHITECTURES, naive_logits, tiny_model
from peft import PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from preproj import PreProjConfig
from preproj.adapter.layer import adapted_sites
from preproj.initial import draw_initial_weight

IDS = torch.randint(0, 64, (2, 11), generator=torch.Generator().manual_seed(0))
HOSTS = [*((name, {}) for name in ARCHITECTURES), ("gpt_neox", {"use_parallel_residual": False})]
PARTS = [{}, {"pre_projection": False}, {"content_skip": False}]


def randomise(model: PeftModel, seed: int = 1) -> list[dict[str, torch.Tensor]]:
    """Draw every new weight anew, and return them per layer as the oracle wants them."""
    generator = torch.Generator().manual_seed(seed)
    layers = []
    for _, _, layer in adapted_sites(model):
        weights = {}
        for what in ("up", "down", "skip"):
            for linear in getattr(layer, what).values():
                with torch.no_grad():
                    linear.weight.copy_(0.2 * torch.randn(linear.weight.shape, generator=generator))
                weights[what] = linear.weight.detach()
        layers.append(weights)
    return layers


@pytest.mark.parametrize("parts", PARTS, ids=["pre+skip", "skip", "pre"])
@pytest.mark.parametrize(("name", "overrides"), HOSTS, ids=[name + "".join(more) for name, more in HOSTS])
def test_logits_equal_the_naive_computation(name, overrides, parts):
    base = tiny_model(name, **overrides)
    untouched = copy.deepcopy(base)
    model = get_peft_model(base, PreProjConfig(**parts))
    weights = randomise(model)
    assert len(weights) == base.config.num_hidden_layers
    expected = naive_logits(untouched, IDS, weights)
    assert (expected - naive_logits(untouched, IDS)).abs().max() > 0.1  # the new weights matter
    torch.testing.assert_close(model(IDS).logits, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_start_without_skip_noise_is_the_base_bit_for_bit(name, dtype):
    base = tiny_model(name).to(dtype)
    before = base(IDS).logits
    model = get_peft_model(base, PreProjConfig(skip_init_std=0))
    assert torch.equal(model(IDS).logits, before)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_disabled_adapter_is_the_base_bit_for_bit(name):
    base = tiny_model(name)
    before = base(IDS).logits
    model = get_peft_model(base, PreProjConfig())
    randomise(model)
    changed = model(IDS).logits
    assert not torch.equal(changed, before)
    with model.disable_adapter():
        assert torch.equal(model(IDS).logits, before)
    assert torch.equal(model(IDS).logits, changed)


# Pythia's published configurations.
PYTHIA = {
    "160m": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
    "410m": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
}


@pytest.mark.parametrize(
    ("size", "new", "share"), [("160m", 24_772_608, 0.132), ("410m", 88_080_384, 0.179)], ids=["160m", "410m"]
)
def test_parameter_counts_of_the_paper(size, new, share):
    config = AutoConfig.for_model("gpt_neox", vocab_size=50_304, rotary_pct=0.25, **PYTHIA[size])
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(config)
    model = get_peft_model(base, PreProjConfig())
    trainable, total = model.get_nb_trainable_parameters()
    assert trainable == new
    assert round(trainable / total, 3) == share


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_cache_has_the_shapes_and_bytes_of_the_base(name):
    base = tiny_model(name)
    before = base(IDS, use_cache=True).past_key_values
    model = get_peft_model(base, PreProjConfig())
    randomise(model)
    after = model(IDS, use_cache=True).past_key_values

    def layout(cache):
        return [(layer.keys.shape, layer.values.shape, layer.keys.dtype, layer.keys.nbytes) for layer in cache.layers]

    assert layout(after) == layout(before)
    assert not torch.equal(after.layers[0].keys, before.layers[0].keys)  # keys are made of x̃


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_cached_and_uncached_generation_agree(name):
    model = get_peft_model(tiny_model(name), PreProjConfig())
    randomise(model)
    options = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(IDS)}
    cached = model.generate(input_ids=IDS, use_cache=True, **options)
    uncached = model.generate(input_ids=IDS, use_cache=False, **options)
    assert cached.shape == (2, 11 + 12)
    assert torch.equal(cached, uncached)
    # The cache gives the same distribution, not only the same argmax.
    past = model(IDS[:, :7], use_cache=True).past_key_values
    rest = model(IDS[:, 7:], past_key_values=past, use_cache=True).logits
    # All hosts but GPT-2 compute norms or softmax in float32 even in a float64 model.
    torch.testing.assert_close(rest, model(IDS).logits[:, 7:], rtol=0, atol=1e-10 if name == "gpt2" else 5e-6)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_gradients_at_the_start_and_after_one_step(name):
    model = get_peft_model(tiny_model(name), PreProjConfig())
    old = {n: p for n, p in model.named_parameters() if ".preproj." not in n}
    new = {n: p for n, p in model.named_parameters() if ".preproj." in n}
    assert old.keys() == {n for n, p in model.named_parameters() if not p.requires_grad}
    optimizer = torch.optim.AdamW(new.values(), lr=1e-3)

    model(IDS, labels=IDS).loss.backward()
    for n, p in new.items():
        if ".up." in n:
            assert torch.count_nonzero(p.grad) == 0, n  # W_down is zero, so nothing reaches W_up
        else:
            assert torch.count_nonzero(p.grad) > 0, n
    optimizer.step()
    optimizer.zero_grad()
    model(IDS, labels=IDS).loss.backward()
    for n, p in new.items():
        assert torch.count_nonzero(p.grad) > 0, n
    assert all(p.grad is None for p in old.values())


def test_gradients_equal_those_of_the_naive_computation():
    base = tiny_model("gpt_neox")
    untouched = copy.deepcopy(base)
    model = get_peft_model(base, PreProjConfig())
    weights = [{k: w.clone().requires_grad_() for k, w in layer.items()} for layer in randomise(model)]
    naive_logits(untouched, IDS, weights).square().mean().backward()
    model(IDS).logits.square().mean().backward()
    for (_, _, layer), expected in zip(adapted_sites(model), weights, strict=True):
        for what, weight in expected.items():
            torch.testing.assert_close(getattr(layer, what)["default"].weight.grad, weight.grad, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_saved_and_loaded_adapter_gives_equal_logits(name, tmp_path):
    base = tiny_model(name)
    fresh = copy.deepcopy(base)
    model = get_peft_model(base, PreProjConfig(init_seed=3, skip_init_std=0.02))
    randomise(model)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(fresh, tmp_path)
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    assert loaded.peft_config["default"].init_seed == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_start_weights_are_rebuilt_exactly_whatever_the_base_dtype(dtype):
    model = get_peft_model(tiny_model("llama").to(dtype), PreProjConfig(init_seed=7))
    for site, _, layer in adapted_sites(model):
        for what in ("up", "down", "skip"):
            weight = getattr(layer, what)["default"].weight
            assert weight.dtype == torch.float32
            assert torch.equal(weight, draw_initial_weight(what, tuple(weight.shape), 7, site))
    assert [site for site, _, _ in adapted_sites(model)] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]


def test_without_autocast_the_new_weights_follow_the_base():
    model = get_peft_model(tiny_model("llama").to(torch.bfloat16), PreProjConfig(), autocast_adapter_dtype=False)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model(IDS).logits.dtype == torch.bfloat16
