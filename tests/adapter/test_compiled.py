"""torch.compile before and after the adapter, with backends that trace but generate no code."""

import pytest
import torch
from life import IDS, KINDS, adapted, base_of, draw, logits
from peft import PeftModel, get_peft_model, get_peft_model_state_dict

from preproj import PreProjConfig


@pytest.fixture(autouse=True)
def _forget_compiled_code():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def first_block(model):
    return next(name for name, _ in model.named_modules() if name.endswith((".layers.0", ".layer.0")))


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_afterwards_it_is_one_graph_with_the_same_numbers_and_saves_as_plain(kind, tmp_path):
    model = adapted(kind)

    def numbers(run):
        model.zero_grad()
        out = run(input_ids=IDS).logits
        out.square().mean().backward()
        return [out.detach(), *(weight.grad.clone() for weight in model.parameters() if weight.requires_grad)]

    expected = numbers(model)
    assert len(expected) == 7
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for ours, eager in zip(numbers(compiled), expected, strict=True):
        torch.testing.assert_close(ours, eager)
    compiled.save_pretrained(tmp_path)
    assert torch.equal(logits(PeftModel.from_pretrained(base_of(kind), tmp_path)), logits(model))


def test_compiled_afterwards_it_follows_set_adapter_and_disable_adapter():
    model = adapted("gemma2")
    model.add_adapter("other", PreProjConfig())
    draw(model, seed=1, adapter="other")
    plain = logits(base_of("gemma2"))
    compiled = torch.compile(model, backend="eager")
    for name in ("default", "other"):
        model.set_adapter(name)
        torch.testing.assert_close(logits(compiled), logits(model))
    with model.disable_adapter():
        torch.testing.assert_close(logits(compiled), plain)


@pytest.mark.parametrize("kind", KINDS)
def test_a_base_compiled_as_a_wrapper_is_refused_before_anything_changes(kind, tmp_path):
    adapted(kind).save_pretrained(tmp_path)
    base = base_of(kind)
    names = [name for name, _ in base.named_modules()]
    wrapped = torch.compile(base, backend="eager")
    sentence = r"The base model is wrapped by torch\.compile.*torch\.compile\(get_peft_model"
    with pytest.raises(ValueError, match=sentence):
        get_peft_model(wrapped, PreProjConfig())
    with pytest.raises(ValueError, match=sentence):
        PeftModel.from_pretrained(wrapped, tmp_path)
    assert [name for name, _ in base.named_modules()] == names


@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_block_is_refused_by_name(kind):
    base = base_of(kind)
    name = first_block(base)
    base.set_submodule(name, torch.compile(base.get_submodule(name), backend="eager"))
    with pytest.raises(ValueError, match=rf"'{name}' is wrapped by torch\.compile"):
        get_peft_model(base, PreProjConfig())


@pytest.mark.parametrize(
    ("kind", "part"), [("llama", "model"), ("gpt_neox", "block"), ("gemma2", "block"), ("bert", "model")]
)
def test_a_base_compiled_in_place_and_run_already_takes_the_adapter(kind, part, tmp_path):
    expected = logits(adapted(kind))
    base = base_of(kind)
    compiled = base if part == "model" else base.get_submodule(first_block(base))
    compiled.compile(backend="eager")
    logits(base)
    model = get_peft_model(base, PreProjConfig())
    draw(model)
    torch.testing.assert_close(logits(model), expected)
    assert not any("_orig_mod" in key for key in get_peft_model_state_dict(model))
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(logits(PeftModel.from_pretrained(base_of(kind), tmp_path)), expected)
