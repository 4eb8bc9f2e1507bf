"""What a user can choose: ranges, layers, sizes, start weights."""

import json
import math

import pytest
import torch
from naive import tiny_model
from peft import LoraConfig, PeftConfig, get_peft_model
from tiny import tiny_of

from preproj import PreProjConfig
from preproj.adapter.layer import adapted_sites

IDS = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"pre_projection": False, "content_skip": False}, "both False: switch at least one on"),
        ({"expansion": 0}, "expansion is 0: expected a number above 0"),
        ({"expansion": float("nan")}, "expansion is nan"),
        ({"activation": "swish"}, "activation is 'swish': expected one of silu, gelu, relu"),
        ({"expansion": float("inf")}, "expansion is inf: expected a number above 0"),
        ({"expansion": "1.25"}, "expansion is '1.25': expected a number above 0"),
        ({"init_seed": 1.5}, "init_seed is 1.5: expected a whole number"),
        ({"pre_projection": "no"}, "pre_projection is 'no': expected True or False"),
        ({"init_weights": "gaussian"}, "init_weights is 'gaussian': expected True or False"),
        ({"expansion_pattern": {"attn": -1}}, r"expansion_pattern\['attn'\] is -1: expected a number above 0"),
        ({"expansion_pattern": [2.0]}, r"expansion_pattern is \[2.0\]: expected names of attention modules"),
        ({"layers_to_transform": [0, -1]}, r"layers_to_transform is \[0, -1\]: expected layer indices from 0 on"),
        ({"layers_to_transform": True}, "layers_to_transform is True"),
        ({"layers_pattern": "layers"}, "layers_pattern needs layers_to_transform"),
        ({"layers_to_transform": 0, "target_modules": ".*attn"}, "does not go with target_modules as a regular"),
        ({"activation": []}, r"activation is \[\]: expected one of silu"),
        ({"target_modules": 5}, "target_modules is 5: expected a list of names"),
        ({"target_modules": [5]}, r"target_modules is \[5\]: expected a list of names"),
        ({"target_modules": "["}, r"target_modules is '\[': not a regular expression"),
        ({"exclude_modules": "["}, r"exclude_modules is '\[': not a regular expression"),
        ({"layers_pattern": 5, "layers_to_transform": [0]}, "layers_pattern is 5: expected a list of names"),
        ({"modules_to_save": "lm_head"}, "modules_to_save is 'lm_head': expected a list of names"),
        ({"layers_to_transform": []}, r"layers_to_transform is \[\]: expected layer indices"),
        ({"skip_rank": 4, "content_skip": False}, "skip_rank is 4, but content_skip is False"),
        ({"skip_rank": 0}, "skip_rank is 0: expected a whole number from 1 on, or None"),
        ({"skip_rank": 4.0}, "skip_rank is 4.0: expected a whole number"),
        ({"skip_rank": 4, "skip_init_std": 0}, "skip_rank is 4 and skip_init_std is 0: give one of them"),
        ({"skip_init_std": -1.0}, "skip_init_std is -1.0: expected 0 or a positive number"),
    ],
)
def test_values_out_of_range_are_named(values, sentence):
    with pytest.raises(ValueError, match=sentence):
        PreProjConfig(**values)


def adapted(model):
    return [name for name, _, _ in adapted_sites(model)]


def test_the_paper_is_the_default():
    config = PreProjConfig()
    assert (config.expansion, config.activation, config.skip_init_std) == (1.25, "silu", 1e-4)
    assert config.pre_projection
    assert config.content_skip
    assert config.skip_rank is None


@pytest.mark.parametrize("targets", [None, ["self_attn"]])
@pytest.mark.parametrize(
    ("choice", "layers"),
    [
        ({"layers_to_transform": 1}, [1]),
        ({"layers_to_transform": [0, 2]}, [0, 2]),
        ({"layers_to_transform": [2], "layers_pattern": "layers"}, [2]),
        ({"exclude_modules": ["0.self_attn", "1.self_attn"]}, [2]),
        ({"exclude_modules": r".*\.[02]\.self_attn"}, [1]),
    ],
)
def test_layers_are_chosen_as_for_lora(targets, choice, layers):
    ours = get_peft_model(tiny_model("llama", num_hidden_layers=3), PreProjConfig(target_modules=targets, **choice))
    assert adapted(ours) == [f"model.layers.{i}.self_attn" for i in layers]
    if "exclude_modules" not in choice:
        lora = get_peft_model(tiny_model("llama", num_hidden_layers=3), LoraConfig(target_modules=["q_proj"], **choice))
        assert lora.targeted_module_names == [f"{name}.q_proj" for name in adapted(ours)]


def test_layers_may_come_as_a_range_or_a_tuple():
    assert PreProjConfig(layers_to_transform=range(2)).layers_to_transform == [0, 1]
    assert PreProjConfig(layers_to_transform=(1,), target_modules=("self_attn",)).layers_to_transform == [1]


def test_layers_are_chosen_where_names_are_whole_paths():
    """In a hybrid, the ending ``self_attn`` alone may pick layers without attention too."""
    base = tiny_of("longcat_flash", torch.float32)
    every = adapted(get_peft_model(base, PreProjConfig()))
    some = adapted(get_peft_model(tiny_of("longcat_flash", torch.float32), PreProjConfig(layers_to_transform=[1])))
    assert some == [name for name in every if name.startswith("model.layers.1.")]
    assert some


@pytest.mark.parametrize(
    ("choice", "sentence"),
    [
        ({"layers_to_transform": [7]}, r"target_modules 'self_attn', layers_to_transform \[7\] match nothing"),
        (
            {"layers_to_transform": [0, 9]},
            r"layers_to_transform names \[9\], where this model has no attention to adapt",
        ),
        ({"exclude_modules": ["self_attn"]}, r"exclude_modules {'self_attn'} match nothing"),
        (
            {"layers_to_transform": [0], "layers_pattern": "blocks"},
            "layers_pattern 'blocks' match nothing in this model. Name the attention modules",
        ),
        ({"expansion_pattern": {"layers.9.self_attn": 2}}, "names 'layers.9.self_attn', which is none of the adapted"),
        ({"expansion": 0.01}, r"expansion 0.01 of 'model.layers.0.self_attn' \(32 wide\) leaves an inner width of 0"),
    ],
)
def test_a_choice_that_fits_nothing_is_refused_and_the_model_left_alone(choice, sentence):
    base = tiny_model("llama")
    names = [name for name, _ in base.named_modules()]
    with pytest.raises(ValueError, match=sentence):
        get_peft_model(base, PreProjConfig(**choice))
    assert [name for name, _ in base.named_modules()] == names


def test_expansions_differ_by_layer():
    pattern = {"layers.0.self_attn": 2, r".*\.1\.self_attn": 0.5}
    model = get_peft_model(
        tiny_model("llama", num_hidden_layers=3), PreProjConfig(expansion=1.0, expansion_pattern=pattern)
    )
    assert [tuple(layer.up["default"].weight.shape) for _, _, layer in adapted_sites(model)] == [
        (64, 32),
        (16, 32),
        (32, 32),
    ]


def test_a_low_rank_skip_starts_as_the_base_and_is_its_two_factors():
    plain = tiny_model("llama")(IDS).logits
    low = get_peft_model(tiny_model("llama"), PreProjConfig(skip_rank=3))
    assert torch.equal(low(IDS).logits, plain)
    dense = get_peft_model(tiny_model("llama"), PreProjConfig())
    assert low.get_nb_trainable_parameters()[0] == 2 * (2 * 40 * 32 + 3 * (32 + 32))
    for (_, _, factors), (_, _, whole) in zip(adapted_sites(low), adapted_sites(dense), strict=True):
        a, b = factors.skip_a["default"].weight, factors.skip_b["default"].weight
        assert a.std().item() == pytest.approx(
            1 / math.sqrt(3 * 32), rel=0.3
        )  # of the uniform distribution within 1/√32
        torch.nn.init.normal_(b)
        whole.skip["default"].weight.data = (b @ a).detach()
    torch.testing.assert_close(low(IDS).logits, dense(IDS).logits, rtol=0, atol=1e-10)


def test_a_low_rank_skip_is_saved_and_loaded(tmp_path):
    model = get_peft_model(tiny_model("llama"), PreProjConfig(skip_rank=3, init_weights=False))
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tiny_model("llama"), tmp_path)
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)


def test_without_init_weights_every_part_acts_at_once():
    plain = tiny_model("llama")(IDS).logits
    for choice in ({"content_skip": False}, {"pre_projection": False}, {"pre_projection": False, "skip_rank": 2}):
        model = get_peft_model(tiny_model("llama"), PreProjConfig(init_weights=False, **choice))
        assert (model(IDS).logits - plain).abs().max() > 1e-3
        for weight in (p for p in model.parameters() if p.requires_grad):
            bound = 1 / math.sqrt(weight.shape[1])
            assert weight.abs().max() <= bound
            assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.25)


def test_keys_of_a_newer_version_are_warned_of(tmp_path):
    PreProjConfig(expansion=2.0).save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"wings": 2}))
    with pytest.warns(UserWarning, match="wings"):
        assert PeftConfig.from_pretrained(tmp_path) == PreProjConfig(expansion=2.0)


@pytest.mark.parametrize(
    "config",
    [
        PreProjConfig(skip_rank=4),
        PreProjConfig(expansion_pattern={"layers.0.self_attn": 2}, skip_init_std=0),
        PreProjConfig(target_modules=["attn"], exclude_modules=["x"], layers_to_transform=[0], layers_pattern="h"),
    ],
)
def test_a_configuration_survives_its_file(config, tmp_path):
    config.save_pretrained(tmp_path)
    assert PeftConfig.from_pretrained(tmp_path) == config
