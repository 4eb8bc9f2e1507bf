"""Weighted sums of adapters: exact for content skips, refused for everything else."""

import pytest
import torch
from life import KINDS, adapted, base_of, draw, logits, new_weights
from peft import PeftModel

from preproj import PreProjConfig
from preproj.adapter.layer import adapted_sites

SKIP = {"pre_projection": False}


def two(kind="llama", first=None, second=None):
    """Builds a model with the adapters "default" and "second", skips alone unless said otherwise."""
    model = adapted(kind, **(SKIP | (first or {})))
    model.add_adapter("second", PreProjConfig(**(SKIP | (second or {}))))
    draw(model, seed=1, adapter="second")
    return model


def maps(model, adapter):
    """Lists W_skip of each layer; of low rank, the product of its factors."""
    linears = [layer.linears(adapter) for _, _, layer in adapted_sites(model)]
    return [
        parts["skip"].weight if "skip" in parts else parts["skip_b"].weight @ parts["skip_a"].weight
        for parts in linears
    ]


@pytest.mark.parametrize(
    ("combination_type", "first", "second"), [("linear", {}, {}), ("cat", {"skip_rank": 2}, {"skip_rank": 3})]
)
@pytest.mark.parametrize("kind", KINDS)
def test_the_skip_of_the_sum_is_the_weighted_sum_of_the_skips(kind, combination_type, first, second, tmp_path):
    model = two(kind, first, second)
    before = logits(model)
    model.add_weighted_adapter(["default", "second"], [0.7, -2.0], "sum", combination_type)
    assert torch.equal(logits(model), before)  # it waits until it is set
    trainable = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert trainable == {name for name in new_weights(model) if ".default." in name}
    for w1, w2, combined in zip(maps(model, "default"), maps(model, "second"), maps(model, "sum"), strict=True):
        torch.testing.assert_close(combined, 0.7 * w1 - 2.0 * w2)

    model.set_adapter("sum")
    assert not torch.equal(logits(model), before)
    model.save_pretrained(tmp_path, selected_adapters=["sum"])
    assert torch.equal(logits(PeftModel.from_pretrained(base_of(kind), tmp_path / "sum")), logits(model))


@pytest.mark.parametrize(
    ("combination_type", "ranks"), [("linear", (None, None)), ("cat", (2, 3))], ids=["linear", "cat"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_with_weights_of_one_it_is_both_at_once(kind, combination_type, ranks):
    model = two(kind, *({"skip_rank": rank} for rank in ranks))
    model.base_model.set_adapter(["default", "second"])
    both = logits(model)
    model.add_weighted_adapter(["default", "second"], [1.0, 1.0], "sum", combination_type)
    model.set_adapter("sum")
    torch.testing.assert_close(logits(model), both)


def test_one_adapter_is_scaled():
    model = two()
    model.add_weighted_adapter(["second"], [0.5], "scaled")
    for whole, scaled in zip(maps(model, "second"), maps(model, "scaled"), strict=True):
        assert torch.equal(scaled, 0.5 * whole)


def test_the_sum_has_the_dtype_of_its_parts():
    model = adapted("llama", torch.float64, **SKIP)
    model.add_weighted_adapter(["default"], [0.5], "scaled")
    assert {weight.dtype for weight in new_weights(model).values()} == {torch.float64}


@pytest.mark.parametrize(
    ("first", "second", "combination_type", "sentence"),
    [
        ({"pre_projection": True}, {}, "linear", "adapter 'default' has a pre-projection, and only content skips"),
        ({}, {"modules_to_save": ["lm_head"]}, "linear", "adapter 'second' has modules_to_save, and only content"),
        ({}, {}, "cat", "combination_type is 'cat' and the skips are dense, dense"),
        ({}, {}, "svd", "combination_type is 'svd' and the skips are dense, dense"),
        ({"skip_rank": 2}, {"skip_rank": 2}, "linear", "is 'linear' and the skips are of rank 2, of rank 2"),
        ({"skip_rank": 2}, {}, "cat", "is 'cat' and the skips are of rank 2, dense"),
        ({"skip_rank": 2}, {}, "linear", "is 'linear' and the skips are of rank 2, dense"),
        ({}, {"layers_to_transform": [1]}, "linear", r"'second' has no skip at 'model\.layers\.0\.self_attn'"),
    ],
)
def test_where_no_sum_is_defined_it_is_refused_and_nothing_changes(first, second, combination_type, sentence):
    model = two("llama", first, second)
    names = set(dict(model.named_parameters()))
    with pytest.raises(ValueError, match=sentence):
        model.add_weighted_adapter(["default", "second"], [1.0, 1.0], "sum", combination_type)
    assert set(model.peft_config) == {"default", "second"}
    assert set(dict(model.named_parameters())) == names


@pytest.mark.parametrize(
    ("adapters", "weights", "name", "sentence"),
    [
        (["default", "third"], [1, 1], "sum", "adapters names 'third': expected some of 'default', 'second'"),
        (["default", "second"], [1], "sum", r"weights is \[1\] for 2 adapters"),
        ([], [], "sum", r"weights is \[\] for 0 adapters"),
        (["default"], ["1"], "sum", r"weights is \['1'\] for 1 adapters"),
        (["default"], [float("nan")], "sum", r"weights is \[nan\] for 1 adapters"),
        (["default"], [1], "second", "adapter_name is 'second', which is loaded already"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(adapters, weights, name, sentence):
    model = two()
    with pytest.raises(ValueError, match=sentence):
        model.add_weighted_adapter(adapters, weights, name)
    assert set(model.peft_config) == {"default", "second"}


def test_a_name_that_torch_does_not_take_leaves_nothing_behind():
    model = two()
    with pytest.raises(KeyError, match="attribute 'half' already exists"):
        model.add_weighted_adapter(["default"], [0.5], "half")
    assert set(model.peft_config) == {"default", "second"}
