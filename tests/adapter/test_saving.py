"""Saving and loading through PEFT: the same numbers come back, whatever the name, the dtype or the way of loading."""

import json
import warnings

import pytest
import torch
from huggingface_hub import ModelCard
from life import IDS, KINDS, adapted, base_of, draw, logits, new_weights
from peft import (
    AutoPeftModelForCausalLM,
    LoraConfig,
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
    inject_adapter_in_model,
    set_peft_model_state_dict,
)
from safetensors.torch import load_file

from preproj import PreProjConfig
from preproj.adapter.layer import adapted_sites


@pytest.mark.parametrize("config", [{}, {"pre_projection": False}, {"content_skip": False}, {"skip_rank": 4}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_file_holds_the_adapter_alone_and_loads_to_the_same_logits(kind, config, tmp_path):
    model = adapted(kind, **config)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert saved.keys() == {name.replace(".default.", ".") for name in new_weights(model)}
    loaded = PeftModel.from_pretrained(base_of(kind), tmp_path)
    assert torch.equal(logits(loaded), logits(model))
    assert not any(weight.requires_grad for weight in loaded.parameters())
    trainable = PeftModel.from_pretrained(base_of(kind), tmp_path, is_trainable=True)
    assert {name for name, weight in trainable.named_parameters() if weight.requires_grad} == set(new_weights(model))


@pytest.mark.parametrize("kind", KINDS)
def test_it_loads_under_another_name_and_beside_the_first(kind, tmp_path):
    model = adapted(kind)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(base_of(kind), tmp_path, adapter_name="other")
    assert torch.equal(logits(loaded), logits(model))
    assert all(".other." in name for name in new_weights(loaded))

    draw(model, seed=1)
    changed = logits(model)
    model.load_adapter(tmp_path, adapter_name="second")
    assert torch.equal(logits(model), changed)
    model.set_adapter("second")
    assert torch.equal(logits(model), logits(loaded))


@pytest.mark.parametrize("kind", KINDS)
def test_two_adapters_are_saved_apart(kind, tmp_path):
    model = adapted(kind)
    first = logits(model)
    model.add_adapter("second", PreProjConfig(expansion=0.5))
    model.set_adapter("second")
    draw(model, seed=1, adapter="second")
    second = logits(model)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(PeftModel.from_pretrained(base_of(kind), tmp_path / "second")), second)
    assert torch.equal(logits(PeftModel.from_pretrained(base_of(kind), tmp_path)), first)


@pytest.mark.parametrize("kind", ["llama", "gpt_neox", "gemma2"])
def test_auto_model_finds_the_base_by_the_adapter(kind, tmp_path):
    base_of(kind).save_pretrained(tmp_path / "base")
    base = type(base_of(kind)).from_pretrained(tmp_path / "base", attn_implementation="eager")
    model = get_peft_model(base, PreProjConfig(task_type="CAUSAL_LM"))
    draw(model)
    model.save_pretrained(tmp_path / "adapter")
    loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter", attn_implementation="eager")
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize("kind", KINDS)
def test_low_cpu_mem_usage_loads_the_same(kind, tmp_path):
    model = adapted(kind)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(base_of(kind), tmp_path, low_cpu_mem_usage=True)
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize("low_cpu_mem_usage", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtypes_are_float32_or_the_bases_and_the_values_what_was_saved(
    dtype, saved, autocast, low_cpu_mem_usage, tmp_path
):
    model = adapted("llama")
    for weight in new_weights(model).values():
        weight.data = weight.data.to(saved)
    model.save_pretrained(tmp_path)
    base = base_of("llama", dtype)
    loaded = PeftModel.from_pretrained(
        base, tmp_path, autocast_adapter_dtype=autocast, low_cpu_mem_usage=low_cpu_mem_usage
    )
    expected = torch.float32 if autocast else dtype
    for name, weight in new_weights(loaded).items():
        assert weight.dtype == expected
        assert torch.equal(weight, new_weights(model)[name].to(expected))
    assert logits(loaded).dtype == dtype


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_fresh_adapter_is_float32_or_in_the_bases_dtype(kind, dtype, autocast):
    model = get_peft_model(base_of(kind, dtype), PreProjConfig(), autocast_adapter_dtype=autocast)
    expected = torch.float32 if autocast else dtype
    assert {weight.dtype for weight in new_weights(model).values()} == {expected}
    model(input_ids=IDS).logits.float().square().mean().backward()
    assert all(weight.grad.dtype == expected for weight in new_weights(model).values())


@pytest.mark.parametrize("kind", KINDS)
def test_missing_keys_keep_the_warning_of_peft(kind, tmp_path):
    adapted(kind, pre_projection=False).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"pre_projection": True}))
    with pytest.warns(UserWarning, match=r"missing adapter keys.*preproj\.up"):
        PeftModel.from_pretrained(base_of(kind), tmp_path)


def test_loading_is_silent(tmp_path):
    adapted("llama").save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        PeftModel.from_pretrained(base_of("llama"), tmp_path)


def test_the_model_card_says_how_to_load_and_keeps_what_a_person_wrote(tmp_path):
    model = adapted("llama", task_type="CAUSAL_LM")
    model.save_pretrained(tmp_path)
    card = ModelCard.load(tmp_path / "README.md")
    assert {"preproj", "transformers"} <= set(card.data.tags)
    assert card.data.library_name == "peft"
    title, note = card.text.index("# Model Card"), card.text.index("import preproj")
    assert title < note < card.text.index("## Model Details")

    (tmp_path / "README.md").write_text(str(card).replace("[More Information Needed]", "by me", 1))
    model.save_pretrained(tmp_path)
    again = ModelCard.load(tmp_path / "README.md")
    assert "by me" in again.text
    assert again.text.count("import preproj") == 1
    assert again.data.tags == card.data.tags


def test_a_readme_that_is_no_card_of_peft_is_left_alone(tmp_path):
    (tmp_path / "README.md").write_text("# My project\n")
    PreProjConfig().save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "# My project\n"


@pytest.mark.parametrize("kind", KINDS)
def test_injecting_leaves_the_class_of_the_model_and_takes_a_state_dict(kind):
    model = adapted(kind)
    state = {key.removeprefix("base_model.model."): value for key, value in get_peft_model_state_dict(model).items()}
    base = base_of(kind)
    assert inject_adapter_in_model(PreProjConfig(), base) is base
    assert len(adapted_sites(base)) == 2
    assert get_peft_model_state_dict(base).keys() == state.keys()
    result = set_peft_model_state_dict(base, state)
    assert not result.unexpected_keys
    assert not any("preproj" in key for key in result.missing_keys)
    assert torch.equal(logits(base), logits(model))


@pytest.mark.parametrize("kind", KINDS)
def test_injecting_by_a_state_dict_adapts_the_layers_in_it(kind):
    model = adapted(kind)
    state = {key.removeprefix("base_model.model."): value for key, value in get_peft_model_state_dict(model).items()}
    whole = base_of(kind)
    inject_adapter_in_model(PreProjConfig(), whole, state_dict=state)
    set_peft_model_state_dict(whole, state)
    assert torch.equal(logits(whole), logits(model))

    second = {key: value for key, value in state.items() if ".1." in key}
    part = base_of(kind)
    with pytest.warns(RuntimeWarning, match="PEFT config contained these additional target modules"):
        inject_adapter_in_model(PreProjConfig(), part, state_dict=second)
    assert [".1." in name for name, _, _ in adapted_sites(part)] == [True]


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_dict_wins_over_a_narrower_config(kind):
    model = adapted(kind)
    state = {key.removeprefix("base_model.model."): value for key, value in get_peft_model_state_dict(model).items()}
    base = base_of(kind)
    narrow = PreProjConfig(target_modules=[adapted_sites(model)[0][0]])
    with pytest.warns(RuntimeWarning, match="state_dict contained these additional target modules"):
        inject_adapter_in_model(narrow, base, state_dict=state)
    set_peft_model_state_dict(base, state)
    assert torch.equal(logits(base), logits(model))


@pytest.mark.parametrize("kind", KINDS)
def test_injecting_on_the_meta_device_waits_for_the_state_dict(kind):
    model = adapted(kind)
    state = {key.removeprefix("base_model.model."): value for key, value in get_peft_model_state_dict(model).items()}
    base = base_of(kind)
    inject_adapter_in_model(PreProjConfig(), base, low_cpu_mem_usage=True)
    assert {weight.device.type for weight in new_weights(base).values()} == {"meta"}
    set_peft_model_state_dict(base, state, low_cpu_mem_usage=True)
    assert torch.equal(logits(base), logits(model))


def test_converting_to_a_change_of_the_start_is_refused_by_peft(tmp_path):
    start = str(tmp_path / "start")
    # Before 0.21 PEFT takes every configuration for LoRA's there.
    with pytest.raises((ValueError, AttributeError), match=r"not supported for PreProjModel|no attribute 'use_rslora'"):
        adapted("llama").save_pretrained(tmp_path, path_initial_model_for_weight_conversion=start)
    assert not (tmp_path / "adapter_model.safetensors").exists()


def test_what_only_lora_has_is_missing_as_in_every_other_method():
    model = adapted("llama")
    assert hasattr(get_peft_model(base_of("llama"), LoraConfig(target_modules=["q_proj"])), "subtract_mutated_init")
    with pytest.raises(AttributeError, match="no attribute 'subtract_mutated_init'"):
        _ = model.subtract_mutated_init


@pytest.mark.parametrize("how", ["peft", "transformers"])
@pytest.mark.parametrize(
    ("left", "would_hold"),
    [
        (
            lambda weight: weight[:0].flatten(),
            r"model\.layers\.0\.self_attn\.preproj\.up\.default\.weight of shape \(0,\)",
        ),
        (
            lambda weight: weight.flatten()[:7],
            r"model\.layers\.0\.self_attn\.preproj\.up\.default\.weight of shape \(7,\)",
        ),
        (None, "no weight"),
    ],
    ids=["empty", "flat", "nothing"],
)
def test_pieces_of_a_sharded_model_are_refused_and_nothing_is_written(how, left, would_hold, tmp_path):
    """What DeepSpeed ZeRO-3 and FSDP leave in each process, in the place of the weights."""
    if how == "peft":
        model = adapted("llama")
        given = {key: left(weight.detach()) for key, weight in new_weights(model).items()} if left else {}
        save = lambda: model.save_pretrained(tmp_path, state_dict=given)  # noqa: E731
    else:
        model = base_of("llama")
        model.add_adapter(PreProjConfig())
        for weight in new_weights(model).values() if left else ():
            weight.data = left(weight.data)
        if not left:
            model.state_dict = dict
        save = lambda: model.save_pretrained(tmp_path)  # noqa: E731
    with pytest.raises(ValueError, match=rf"cannot be saved: it would hold \S*{would_hold}\. .*stage3_gather"):
        save()
    assert not list(tmp_path.rglob("adapter*"))
