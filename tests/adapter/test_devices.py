"""Bases whose weights accelerate moved or offloaded; on one CPU, with "disk" and "meta" as the other devices."""

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from life import IDS, KINDS, adapted, base_of, draw, logits, new_weights
from peft import (
    PeftConfig,
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
    load_peft_weights,
    set_peft_model_state_dict,
)
from tiny import tiny_config
from transformers import AutoModelForCausalLM

from preproj import PreProjConfig
from preproj.adapter.layer import adapted_sites


def last_block_on_disk(kind):
    """Maps everything to the CPU but the last block."""
    blocks = [name for name, _ in base_of(kind).named_modules() if name.endswith((".layers.1", ".layer.1"))]
    device_map = {blocks[0]: "disk"}
    for name, _ in base_of(kind).named_modules():
        inside = any(name == key or name.startswith(f"{key}.") for key in device_map)
        around = any(key.startswith(f"{name}.") for key in device_map)
        if name and not inside and not around:
            device_map[name] = "cpu"
    return device_map


OFFLOADED = {
    "cpu_offload": lambda kind, folder: cpu_offload(base_of(kind), "cpu"),
    "disk_offload": lambda kind, folder: disk_offload(base_of(kind), str(folder), "cpu"),
    "dispatch_model": lambda kind, folder: dispatch_model(
        base_of(kind), last_block_on_disk(kind), main_device="cpu", offload_dir=str(folder)
    ),
}


def from_pretrained(kind, folder, device_map):
    base_of(kind).save_pretrained(folder / "base")
    return AutoModelForCausalLM.from_pretrained(
        folder / "base", device_map=device_map, offload_folder=folder / "offloaded", attn_implementation="eager"
    )


@pytest.mark.parametrize("how", OFFLOADED)
@pytest.mark.parametrize("kind", KINDS)
def test_an_offloaded_base_is_adapted_and_trained_where_it_computes(kind, how, tmp_path):
    plain = base_of(kind)
    base = OFFLOADED[how](kind, tmp_path)
    assert any(weight.is_meta for weight in base.parameters())
    model = get_peft_model(base, PreProjConfig(skip_init_std=0))
    assert {weight.device.type for weight in new_weights(model).values()} == {"cpu"}
    assert torch.equal(logits(model), logits(plain))

    reference = adapted(kind)
    draw(model)
    assert torch.equal(logits(model), logits(reference))
    for each in (model, reference):
        each(input_ids=IDS, labels=IDS).loss.backward()
    for name, weight in new_weights(reference).items():
        torch.testing.assert_close(model.get_parameter(name).grad, weight.grad)


@pytest.mark.parametrize("low_cpu_mem_usage", [False, True])
@pytest.mark.parametrize("how", OFFLOADED)
@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_loads_onto_an_offloaded_base(kind, how, low_cpu_mem_usage, tmp_path):
    reference = adapted(kind)
    reference.save_pretrained(tmp_path / "adapter")
    base = OFFLOADED[how](kind, tmp_path / "offloaded")
    model = PeftModel.from_pretrained(base, tmp_path / "adapter", low_cpu_mem_usage=low_cpu_mem_usage)
    assert torch.equal(logits(model), logits(reference))


@pytest.mark.parametrize("kind", KINDS)
def test_device_map_auto_takes_the_adapter(kind, tmp_path):
    reference = adapted(kind)
    reference.save_pretrained(tmp_path / "adapter")
    model = PeftModel.from_pretrained(from_pretrained(kind, tmp_path, "auto"), tmp_path / "adapter")
    assert torch.equal(logits(model), logits(reference))


@pytest.mark.parametrize("kind", KINDS)
def test_a_base_loaded_with_a_block_on_disk_takes_the_adapter(kind, tmp_path):
    """Step by step: PeftModel.from_pretrained dispatches such a base anew and fails, with LoRA too (peft 0.21)."""
    reference = adapted(kind)
    reference.save_pretrained(tmp_path / "adapter")
    base = from_pretrained(kind, tmp_path, last_block_on_disk(kind))
    assert any(weight.is_meta for weight in base.parameters())
    model = get_peft_model(base, PeftConfig.from_pretrained(tmp_path / "adapter"))
    set_peft_model_state_dict(model, load_peft_weights(tmp_path / "adapter"))
    assert torch.equal(logits(model), logits(reference))
    for name, weight in get_peft_model_state_dict(model).items():
        assert torch.equal(weight, get_peft_model_state_dict(reference)[name])


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_on_the_meta_device_stays_there(kind):
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(tiny_config(kind))
    model = get_peft_model(base, PreProjConfig())
    assert {weight.device.type for weight in model.parameters()} == {"meta"}
    assert model.get_nb_trainable_parameters()[0] == adapted(kind).get_nb_trainable_parameters()[0]


@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_x_is_brought_to_the_device_of_attention_before_the_new_weights_read_it(kind, chained):
    """A device map may part attention from its norm; accelerate moves x̂ in attention's own forward, after our hook."""
    model = adapted(kind)
    _, attention, layer = adapted_sites(model)[0]
    attention.to("meta")
    add_hook_to_module(attention, AlignDevicesHook(execution_device="meta"))
    if chained:
        add_hook_to_module(attention, AlignDevicesHook(), append=True)
    seen = []
    position, argument = layer.site.arguments[0]
    attention.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(args[position] if position < len(args) else kwargs[argument]),
        with_kwargs=True,
    )
    with pytest.raises(Exception, match="meta"):  # the residual sum is on the CPU, because the map is not whole
        logits(model)
    assert seen[0].device.type == "meta"
    assert seen[0].shape == (*IDS.shape, layer.in_features)
