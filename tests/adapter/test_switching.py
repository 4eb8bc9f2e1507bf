"""Several adapters on one base: switching, switching off, deleting, taking off, and what PEFT tells of them."""

import pytest
import torch
from life import IDS, KINDS, adapted, base_of, draw, logits, new_weights
from peft import LoraConfig, get_peft_model

from preproj import PreProjConfig
from preproj.adapter.layer import adapted_sites


def two(kind):
    """Builds a model with two adapters of different parts and sizes, and the logits of each alone."""
    model = adapted(kind)
    model.add_adapter("second", PreProjConfig(expansion=0.5, content_skip=False))
    draw(model, seed=1, adapter="second")
    alone = [logits(adapted(kind)), logits(adapted(kind, seed=1, expansion=0.5, content_skip=False))]
    return model, alone


@pytest.mark.parametrize("kind", KINDS)
def test_each_adapter_acts_alone_when_it_is_set(kind):
    model, (first, second) = two(kind)
    assert torch.equal(logits(model), first)
    model.set_adapter("second")
    assert torch.equal(logits(model), second)
    trainable = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert trainable == {name for name in new_weights(model) if ".second." in name}
    model.set_adapter("default")
    assert torch.equal(logits(model), first)


@pytest.mark.parametrize("names", ["third", ["default", "third"]])
def test_an_adapter_that_is_not_loaded_is_refused_and_nothing_changes(names):
    model, (first, _) = two("llama")
    with pytest.raises(ValueError, match="Adapter 'third' not found: expected some of 'default', 'second'"):
        model.base_model.set_adapter(names)
    assert torch.equal(logits(model), first)


@pytest.mark.parametrize("kind", KINDS)
def test_disabled_it_is_the_base_also_after_training_steps(kind):
    plain = logits(base_of(kind))
    model, (first, _) = two(kind)
    for _ in range(2):
        with model.disable_adapter():
            assert torch.equal(logits(model), plain)
        assert torch.equal(logits(model), first)
    with pytest.raises(RuntimeError, match="stop"), model.disable_adapter():
        raise RuntimeError("stop")
    assert torch.equal(logits(model), first)


@pytest.mark.parametrize("kind", KINDS)
def test_deleting_the_active_adapter_activates_another_and_the_last_leaves_the_base(kind):
    model, (_, second) = two(kind)
    model.delete_adapter("default")
    assert model.active_adapters == ["second"]
    assert torch.equal(logits(model), second)
    assert not any(".default." in name for name in new_weights(model))
    model.delete_adapter("second")
    assert not new_weights(model)
    plain = logits(base_of(kind))
    # The tuner, because PEFT's own wrapper cannot run without an adapter.
    assert torch.equal(logits(model.base_model), plain)
    assert torch.equal(logits(model.unload()), plain)


def test_peft_itself_cannot_run_a_model_without_adapters():
    """Where this fails, deleting the last adapter can be tested on the wrapper itself."""
    model = get_peft_model(base_of("llama"), LoraConfig(target_modules=["q_proj"]))
    model.delete_adapter("default")
    with pytest.raises(KeyError):
        logits(model)


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_can_come_back_after_the_last_was_deleted(kind):
    model, (first, _) = two(kind)
    model.delete_adapter("second")
    model.delete_adapter("default")
    model.add_adapter("third", PreProjConfig())
    model.set_adapter("third")
    draw(model, adapter="third")
    assert torch.equal(logits(model), first)


@pytest.mark.parametrize("kind", KINDS)
def test_unloading_gives_back_the_base_without_a_trace(kind):
    base = base_of(kind)
    names, keys = [name for name, _ in base.named_modules()], list(base.state_dict())
    model = get_peft_model(base, PreProjConfig())
    draw(model)
    logits(model)
    assert model.unload() is base
    assert [name for name, _ in base.named_modules()] == names
    assert list(base.state_dict()) == keys
    assert torch.equal(logits(base), logits(base_of(kind)))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in base.modules())
    again = get_peft_model(base, PreProjConfig())
    draw(again)
    assert torch.equal(logits(again), logits(adapted(kind)))


@pytest.mark.parametrize("call", ["merge_and_unload", "merge_adapter", "unmerge_adapter"])
@pytest.mark.parametrize("kind", KINDS)
def test_merging_is_refused_with_what_to_do_instead(kind, call):
    model = adapted(kind)
    before = logits(model)
    with pytest.raises(NotImplementedError, match=r"cannot be merged.*unload\(\)"):
        getattr(model, call)()
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("kind", KINDS)
def test_status_tells_of_both_adapters(kind):
    model, _ = two(kind)
    layers = model.get_layer_status()
    assert [layer.name for layer in layers] == [f"model.{name}.preproj" for name, _, _ in adapted_sites(model)]
    for layer in layers:
        assert layer.enabled
        assert layer.active_adapters == ["default"]
        assert layer.available_adapters == ["default", "second"]
        assert layer.requires_grad == {"default": True, "second": False}
        assert layer.devices == {"default": ["cpu"], "second": ["cpu"]}
    status = model.get_model_status()
    assert status.num_adapter_layers == 2
    assert status.peft_types == {"default": "PREPROJ", "second": "PREPROJ"}
    first = [weight.numel() for name, weight in new_weights(model).items() if ".default." in name]
    assert status.trainable_params == sum(first)
    assert status.active_adapters == ["default"]
    with model.disable_adapter():
        assert model.get_model_status().enabled is False


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_adapter_elsewhere_leaves_the_first_alone(kind):
    """The layers of the second alone do not start to act, nor to train, before it is set."""
    name = adapted_sites(adapted(kind))[0][0]
    other = adapted_sites(adapted(kind))[1][0]
    model = adapted(kind, target_modules=[name])
    first = logits(model)
    model.add_adapter("second", PreProjConfig(target_modules=[other]))
    draw(model, adapter="second")
    assert torch.equal(logits(model), first)
    model(input_ids=IDS).logits.square().mean().backward()
    assert {n for n, weight in model.named_parameters() if weight.grad is not None} == {
        n for n in new_weights(model) if name in n
    }
    model.set_adapter("second")
    second = adapted(kind, target_modules=[other])
    assert torch.equal(logits(model), logits(second))
