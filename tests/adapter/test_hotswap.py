"""A saved adapter in the place of a loaded one: same numbers as loaded alone, and nothing compiled anew."""

import pytest
import torch
from life import IDS, KINDS, adapted, base_of, draw, logits, new_weights
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from peft.utils.hotswap import hotswap_adapter as hotswap_of_peft
from tiny import tiny_of
from transformers import AutoModelForSequenceClassification

from preproj import PreProjConfig, hotswap_adapter


@pytest.fixture(autouse=True)
def _forget_compiled_code():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("config", [{}, {"skip_rank": 2}], ids=["dense", "low rank"])
@pytest.mark.parametrize("kind", KINDS)
def test_after_the_swap_it_is_the_other_adapter_loaded_alone(kind, config, tmp_path):
    other = adapted(kind, seed=1, init_seed=7, **config)
    other.save_pretrained(tmp_path)
    model = adapted(kind, **config)
    assert not torch.equal(logits(model), logits(other))
    where = {name: weight.data_ptr() for name, weight in new_weights(model).items()}
    hotswap_adapter(model, tmp_path, "default")
    assert torch.equal(logits(model), logits(other))
    assert {name: weight.data_ptr() for name, weight in new_weights(model).items()} == where
    assert model.peft_config["default"].init_seed == 7
    assert all(weight.requires_grad for weight in new_weights(model).values())


@pytest.mark.parametrize("how", ["wrapped", "in place"])
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_code_is_kept(kind, how, tmp_path):
    other = adapted(kind, seed=1)
    other.save_pretrained(tmp_path)
    model = adapted(kind)
    if how == "wrapped":
        model = torch.compile(model, backend="eager", fullgraph=True)
    else:
        model.compile(backend="eager", fullgraph=True)
    logits(model)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(2):
            hotswap_adapter(model, tmp_path, "default")
            torch.testing.assert_close(logits(model), logits(other))


def test_one_of_several_is_swapped_and_the_others_stay(tmp_path):
    other = adapted("llama", seed=2)
    other.save_pretrained(tmp_path)
    model = adapted("llama")
    model.add_adapter("second", PreProjConfig())
    draw(model, seed=1, adapter="second")
    first = logits(model)
    hotswap_adapter(model, tmp_path, "second")
    assert torch.equal(logits(model), first)
    model.set_adapter("second")
    assert torch.equal(logits(model), logits(other))


def test_a_head_that_was_trained_whole_is_swapped_too(tmp_path):
    def classifier(seed):
        base = tiny_of("bert", torch.float32, AutoModelForSequenceClassification)
        model = get_peft_model(base, PreProjConfig(task_type="SEQ_CLS"))
        draw(model, seed)
        torch.nn.init.normal_(
            model.base_model.classifier.modules_to_save["default"].weight,
            generator=torch.Generator().manual_seed(seed),
        )
        return model

    other, model = classifier(1), classifier(0)
    other.save_pretrained(tmp_path)
    hotswap_adapter(model, tmp_path, "default")
    assert torch.equal(model(input_ids=IDS).logits, other(input_ids=IDS).logits)


def check_refused(folder, sentence):
    """Checks that a saved adapter is refused, and that the model computes what it did."""
    model = adapted("llama")
    before = logits(model)
    with pytest.raises(ValueError, match=sentence):
        hotswap_adapter(model, folder, "default")
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize(
    ("config", "difference"),
    [
        ({"expansion": 0.5}, r"layers\.0\.self_attn\.preproj\.up\.weight is \(16, 32\) there and \(40, 32\) here"),
        ({"content_skip": False}, r"skip\.weight is None there and \(32, 32\) here"),
        ({"layers_to_transform": [0]}, r"layers\.1\.self_attn\.preproj\.up\.weight is None there"),
        ({"activation": "gelu"}, r"activation is gelu there and silu here"),
    ],
)
def test_an_adapter_of_another_shape_is_refused_and_nothing_changes(config, difference, tmp_path):
    adapted("llama", seed=1, **config).save_pretrained(tmp_path)
    check_refused(tmp_path, f"cannot take the place of adapter 'default': .*{difference}")


def test_another_method_and_an_unknown_name_are_refused(tmp_path):
    get_peft_model(base_of("llama"), LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="peft_type is LORA there and PREPROJ here"):
        hotswap_adapter(adapted("llama"), tmp_path, "default")
    with pytest.raises(ValueError, match="no adapter 'law' to swap: expected one of 'default'"):
        hotswap_adapter(adapted("llama"), tmp_path, "law")


@pytest.mark.parametrize("damage", ["no folder", "adapter_config.json", "adapter_model.safetensors"])
def test_an_adapter_that_cannot_be_read_is_refused_and_nothing_changes(damage, tmp_path):
    folder = tmp_path / "law"
    if damage != "no folder":
        adapted("llama", seed=1).save_pretrained(folder)
        (folder / damage).write_bytes((folder / damage).read_bytes()[:50])
    check_refused(folder, f"no adapter can be read from {folder}: .")


def test_a_model_without_adapters_is_refused(tmp_path):
    with pytest.raises(ValueError, match="model is LlamaForCausalLM, without an adapter to swap"):
        hotswap_adapter(base_of("llama"), tmp_path, "default")


def test_pefts_own_function_takes_lora_only(tmp_path):
    """Where this fails, PEFT may swap adapters of any method, and ours is not needed."""
    adapted("llama").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="Hotswapping only supports"):
        hotswap_of_peft(adapted("llama"), str(tmp_path), "default")


def test_the_swapped_adapter_is_saved_as_the_one_it_is(tmp_path):
    other = adapted("llama", seed=1, init_seed=7)
    other.save_pretrained(tmp_path / "other")
    model = adapted("llama")
    hotswap_adapter(model, tmp_path / "other", "default")
    model.save_pretrained(tmp_path / "swapped")
    assert PeftConfig.from_pretrained(tmp_path / "swapped").init_seed == 7
    assert torch.equal(logits(PeftModel.from_pretrained(base_of("llama"), tmp_path / "swapped")), logits(other))
