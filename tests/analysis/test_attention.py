"""Entropy and distance against the weights that transformers returns, and uniform attention in closed form."""

import math
import weakref

import numpy as np
import pytest
import torch
from checks import shake
from naive import tiny_model
from peft import get_peft_model
from scipy.stats import entropy
from tiny import tiny_of
from transformers import AutoModelForMaskedLM

from preproj import PreProjConfig
from preproj.adapter.layer import adapted_sites
from preproj.analysis.attention import measure_attention

WINDOW = 12
TEXTS = torch.randint(3, 64, (3, WINDOW), generator=torch.Generator().manual_seed(0)).tolist()
HOSTS = ["llama", "gpt_neox", "gemma2", "gpt2"]
NUMBERS = ("entropy", "distance", "base_entropy", "base_distance")


def shaken(base, scale=0.3):
    model = get_peft_model(base, PreProjConfig()).eval()
    for _, _, layer in adapted_sites(model):
        shake(layer, scale)
    return model


def written_out(model):
    """Entropy and distance of each layer, from all weights at once."""
    attentions = model(torch.tensor(TEXTS), output_attentions=True).attentions
    found = []
    for weights in attentions:
        rows = weights.double().flatten(0, 1).numpy()  # (documents · heads, queries, keys)
        back = [[abs(query - key) for key in range(WINDOW)] for query in range(WINDOW)]
        found.append((entropy(rows, axis=-1).mean(), (rows * back).sum(-1).mean()))
    return found


@pytest.mark.parametrize("host", [*HOSTS, "bloom", "gpt_neo"])
@torch.no_grad()
def test_numbers_are_those_of_the_weights_that_transformers_returns(host):
    base = tiny_of(host)
    shake(base, 0.3)
    model = shaken(base)
    found = measure_attention(model, TEXTS, WINDOW)
    ours = written_out(model)
    with model.disable_adapter():
        bases = written_out(model)
    assert [row["site"] for row in found["layers"]] == [name for name, _, _ in adapted_sites(model)]
    for row, expected, expected_base in zip(found["layers"], ours, bases, strict=True):
        assert [row[name] for name in NUMBERS] == pytest.approx([*expected, *expected_base], rel=1e-5)
        assert row["entropy"] != row["base_entropy"]
    assert (found["window"], found["documents"], found["skipped"]) == (WINDOW, 3, 0)


@torch.no_grad()
def test_a_shared_module_has_the_mean_over_its_places():
    model = shaken(tiny_of("albert", auto=AutoModelForMaskedLM))
    (row,) = measure_attention(model, TEXTS, WINDOW)["layers"]
    first, second = (np.array(numbers) for numbers in written_out(model))
    assert [row["entropy"], row["distance"]] == pytest.approx((first + second) / 2, rel=1e-5)


@pytest.mark.parametrize(
    ("host", "queries"), [("llama", "q_proj"), ("gpt_neox", "query_key_value"), ("gpt2", "c_attn")]
)
@torch.no_grad()
def test_uniform_attention_has_the_closed_form(host, queries):
    """Token n attends to n tokens alike: entropy log n, on average (n - 1) / 2 tokens back."""
    base = tiny_of(host)
    for name, weight in base.named_parameters():
        if f".{queries}." in name:
            weight.zero_()
    lengths = range(1, WINDOW + 1)
    expected = [sum(map(math.log, lengths)) / WINDOW, sum((n - 1) / 2 for n in lengths) / WINDOW] * 2
    for row in measure_attention(shaken(base), TEXTS, WINDOW)["layers"]:
        assert [row[name] for name in NUMBERS] == pytest.approx(expected, rel=1e-6)


def state(model):
    """What measuring has to leave as it was."""
    implementation = model.get_base_model().config._attn_implementation
    hooks = [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()]
    trains = [weight.requires_grad for weight in model.parameters()]
    return implementation, hooks, trains, [layer.disable_adapters for _, _, layer in adapted_sites(model)]


@pytest.mark.parametrize("trainable", [True, False])
@pytest.mark.parametrize("host", ["llama", "gpt_neox", "gpt2"])
def test_a_model_with_fused_attention_is_measured_eagerly_and_left_as_it_was(host, trainable):
    model = shaken(tiny_of(host))
    if not trainable:
        model.requires_grad_(False)
    eager = measure_attention(model, TEXTS, WINDOW)
    model.get_base_model().set_attn_implementation("sdpa")
    before = state(model)
    assert before[0] == "sdpa"
    assert measure_attention(model, TEXTS, WINDOW) == eager
    assert eager["layers"][0]["entropy"] > 0
    assert state(model) == before
    with pytest.raises(IndexError):
        measure_attention(model, [[99] * WINDOW] * 2, WINDOW)  # no such token
    assert state(model) == before


def test_an_error_while_the_adapter_is_disabled_leaves_it_enabled():
    model = shaken(tiny_of("llama"))
    model.requires_grad_(False)
    before, first = state(model), adapted_sites(model)[0]

    def fail(attention, args):
        if first[2].disable_adapters:
            raise RuntimeError("stop")

    handle = first[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="stop"):
        measure_attention(model, TEXTS, WINDOW)
    handle.remove()
    assert state(model) == before


def test_each_part_of_a_model_gets_its_own_attention_back():
    model = shaken(tiny_of("llama"))
    base = model.get_base_model()
    base.set_attn_implementation("sdpa")
    base.model.config = type(base.config)(**base.config.to_dict())
    for layer in base.model.layers:
        layer.self_attn.config = base.model.config
    base.model.config._attn_implementation = "eager"
    measure_attention(model, TEXTS, WINDOW)
    assert [base.config._attn_implementation, base.model.config._attn_implementation] == ["sdpa", "eager"]


def test_attention_that_returns_no_weights_has_no_numbers():
    rows = measure_attention(shaken(tiny_of("openai-gpt")), TEXTS, WINDOW)["layers"]
    assert [[row[name] for name in NUMBERS] for row in rows] == [[None] * 4] * 2


def test_never_more_than_two_layers_have_their_weights_in_memory():
    model = shaken(tiny_model("llama", num_hidden_layers=6))
    held, most = [], []

    def count(attention, args, output):
        held.append(weakref.ref(output[1]))
        most.append(sum(weights() is not None for weights in held))

    for _, attention, _ in adapted_sites(model):
        attention.register_forward_hook(count)
    measure_attention(model, TEXTS, WINDOW)
    assert len(held) == 6 * 2 * len(TEXTS)
    assert max(most) <= 2


def test_short_documents_are_skipped_and_counted():
    model = shaken(tiny_of("llama"))
    found = measure_attention(model, [[3], *TEXTS, [3, 4]], WINDOW)
    assert (found["documents"], found["skipped"]) == (3, 2)
    assert found["layers"] == measure_attention(model, TEXTS, WINDOW)["layers"]
