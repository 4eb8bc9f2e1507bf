"""The skip stays where the branch ends, when another method changes the module that it lands on."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import tiny_of

from preproj import PreProjConfig

IDS = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(0))
LANDING = {"bert": "attention.output.dense", "bloom": "self_attention.dense"}


def ours_of(base):
    return get_peft_model(base, PreProjConfig(init_weights=False)).eval()


def lora_of(base, model_type, **besides):
    config = LoraConfig(target_modules=[LANDING[model_type]], init_lora_weights=False, **besides)
    return get_peft_model(base, config).eval()


def changed_weights(model_type, **besides):
    """What both together must be: our adapter on a base whose landing modules hold the merged LoRA weights."""
    torch.manual_seed(0)
    return ours_of(lora_of(tiny_of(model_type), model_type, **besides).merge_and_unload())


@pytest.mark.parametrize("model_type", LANDING)
@pytest.mark.parametrize("besides", [{}, {"use_dora": True}], ids=["lora", "dora"])
@pytest.mark.parametrize("ours_first", [True, False])
def test_lora_on_the_landing_module_in_both_orders(model_type, besides, ours_first):
    base = tiny_of(model_type)
    alone = ours_of(tiny_of(model_type))(IDS).logits
    both = changed_weights(model_type, **besides)(IDS).logits
    if ours_first:
        ours = ours_of(base)
        torch.manual_seed(0)
        lora = lora_of(base, model_type, **besides)
    else:
        torch.manual_seed(0)
        lora = lora_of(base, model_type, **besides)
        ours = ours_of(lora.base_model.model)
    assert (both - alone).abs().max() > 1e-3
    torch.testing.assert_close(ours(IDS).logits, both, rtol=0, atol=1e-10)
    lora.base_model.set_adapter([])
    torch.testing.assert_close(ours(IDS).logits, alone, rtol=0, atol=1e-12)
    lora.unload()
    torch.testing.assert_close(ours(IDS).logits, alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("model_type", LANDING)
def test_lora_on_the_landing_module_merges(model_type):
    base = tiny_of(model_type)
    ours = ours_of(base)
    torch.manual_seed(0)
    lora_of(base, model_type).merge_and_unload()
    torch.testing.assert_close(ours(IDS).logits, changed_weights(model_type)(IDS).logits, rtol=0, atol=1e-10)


def test_a_landing_norm_is_trained_beside_us():
    """Gemma 2: the skip lands on the norm after attention, which ``modules_to_save`` wraps in a copy."""
    base = tiny_of("gemma2")
    model = get_peft_model(base, PreProjConfig(init_weights=False, modules_to_save=["post_attention_layernorm"]))
    expected = ours_of(tiny_of("gemma2"))
    torch.testing.assert_close(model(IDS).logits, expected(IDS).logits, rtol=0, atol=0)
    with torch.no_grad():
        for layer, plain in zip(base.model.layers, expected.base_model.model.model.layers, strict=True):
            layer.post_attention_layernorm.modules_to_save["default"].weight.add_(0.5)
            plain.post_attention_layernorm.weight.add_(0.5)
    torch.testing.assert_close(model(IDS).logits, expected(IDS).logits, rtol=0, atol=1e-12)
    assert model.unload() is base
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in base.modules())
    assert type(base.model.layers[0].post_attention_layernorm).__name__ == "Gemma2RMSNorm"
