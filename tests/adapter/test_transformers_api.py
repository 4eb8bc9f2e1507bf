"""The adapter through transformers' own methods, without a PeftModel.

Every scene is played with LoRA first. Where that fails (transformers 5.24 asks for a PEFT that is not released), ours
must fail in the same way.
"""

import peft
import pytest
import torch
from life import KINDS, base_of, logits
from packaging.version import Version
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM

from preproj import PreProjConfig


def lora():
    return LoraConfig(target_modules=["q_proj", "query_key_value", "query"])


def added(kind, config, adapter="default"):
    """Adds an adapter with random weights to a base."""
    base = base_of(kind)
    base.add_adapter(config, adapter_name=adapter)
    draw(base, adapter)
    return base


def draw(model, adapter, seed=0):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if f".{adapter}." in name:
                weight.copy_(0.2 * torch.randn(weight.shape, generator=generator))


def switch(kind, config, folder):
    base = added(kind, config(), "first")
    first = logits(base)
    base.add_adapter(config(), adapter_name="second")
    draw(base, "second", seed=1)
    seen = [base.active_adapters() == ["second"], not torch.equal(logits(base), first)]
    base.set_adapter("first")
    seen += [base.active_adapters() == ["first"], torch.equal(logits(base), first)]
    base.disable_adapters()
    seen.append(torch.equal(logits(base), logits(base_of(kind))))
    base.enable_adapters()
    seen.append(torch.equal(logits(base), first))
    return seen


def delete(kind, config, folder):
    base = added(kind, config(), "first")
    first = logits(base)
    base.add_adapter(config(), adapter_name="second")
    base.delete_adapter("second")
    seen = [torch.equal(logits(base), first)]
    base.delete_adapter("first")
    seen.append(torch.equal(logits(base), logits(base_of(kind))))
    return seen


def save_and_load(kind, config, folder):
    base = added(kind, config(), "first")
    first = logits(base)
    base.save_pretrained(folder)
    loaded = base_of(kind)
    info = loaded.load_adapter(folder)
    seen = [not info.missing_keys, not info.unexpected_keys, torch.equal(logits(loaded), first)]
    draw(loaded, "default", seed=1)
    changed = logits(loaded)
    loaded.load_adapter(folder, adapter_name="second")
    loaded.set_adapter("second")
    seen.append(torch.equal(logits(loaded), first))
    loaded.set_adapter("default")
    seen.append(torch.equal(logits(loaded), changed))
    seen.append(torch.equal(logits(PeftModel.from_pretrained(base_of(kind), folder)), first))
    return seen


def load_with_little_memory(kind, config, folder):
    base = added(kind, config())
    base.save_pretrained(folder)
    loaded = base_of(kind)
    loaded.load_adapter(folder, low_cpu_mem_usage=True)
    return [torch.equal(logits(loaded), logits(base))]


def load_a_state_dict(kind, config, folder):
    base = added(kind, config())
    state = base.get_adapter_state_dict()
    loaded = base_of(kind)
    loaded.load_adapter(peft_config=config(), adapter_state_dict=state)
    return [torch.equal(logits(loaded), logits(base))]


def auto_model(kind, config, folder):
    base_of(kind).save_pretrained(folder / "base")
    base = AutoModelForCausalLM.from_pretrained(folder / "base", attn_implementation="eager")
    base.add_adapter(config())
    draw(base, "default")
    base.save_pretrained(folder / "adapter")
    loaded = AutoModelForCausalLM.from_pretrained(folder / "adapter", attn_implementation="eager")
    return [torch.equal(logits(loaded), logits(base))]


@pytest.mark.parametrize("scene", [switch, save_and_load, load_with_little_memory, load_a_state_dict])
@pytest.mark.parametrize("kind", KINDS)
def test_ours_does_as_lora_does(kind, scene, tmp_path):
    play_both(kind, scene, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_delete_adapter_works_from_peft_0_20_on(kind, tmp_path):
    """Before, PEFT told new modules from the base's by names that begin as LoRA's do, and trips over ours."""
    if Version(peft.__version__) < Version("0.20"):
        with pytest.raises(AttributeError, match="second"):
            delete(kind, PreProjConfig, tmp_path)
    else:
        play_both(kind, delete, tmp_path)


@pytest.mark.parametrize("kind", ["llama", "gpt_neox", "gemma2"])
def test_auto_model_opens_the_folder_of_an_adapter(kind, tmp_path):
    play_both(kind, auto_model, tmp_path)


def play_both(kind, scene, folder):
    try:
        expected = scene(kind, lora, folder / "lora")
    except Exception as error:
        with pytest.raises(type(error)):
            scene(kind, PreProjConfig, folder / "ours")
    else:
        ours = scene(kind, PreProjConfig, folder / "ours")
        assert [mine or not theirs for mine, theirs in zip(ours, expected, strict=True)] == [True] * len(ours)


@pytest.mark.parametrize("kind", KINDS)
def test_disable_adapters_switches_off_another_method_beside_us_too(kind):
    """``disable_adapters`` walks every tuner layer, whoever put it there."""
    base = added(kind, PreProjConfig())
    base.add_adapter(lora(), adapter_name="lora")
    draw(base, "lora")
    base.disable_adapters()
    assert torch.equal(logits(base), logits(base_of(kind)))
