"""Mixed batches: each sample of a batch goes through its own adapter (``adapter_names``)."""

import pytest
import torch
from naive import tiny_model
from peft import get_peft_model
from tiny import tiny_of
from transformers import AutoModelForSeq2SeqLM, AutoModelForSequenceClassification

from preproj import PreProjConfig
from preproj.adapter.layer import adapted_sites

IDS = torch.randint(3, 60, (5, 9), generator=torch.Generator().manual_seed(0))
NAMES = ["pre", "__base__", "both", "low", "pre"]


def with_adapters(base):
    model = get_peft_model(base, PreProjConfig(init_weights=False), adapter_name="both")
    model.add_adapter("pre", PreProjConfig(init_weights=False, init_seed=1, content_skip=False))
    model.add_adapter("low", PreProjConfig(init_weights=False, init_seed=2, pre_projection=False, skip_rank=2))
    return model.eval()


def alone(model, name, run):
    """What one adapter, or the base, makes of the whole batch."""
    if name == "__base__":
        with model.disable_adapter():
            return run()
    model.set_adapter(name)
    return run()


@pytest.mark.parametrize("model_type", ["llama", "gpt_neox", "gemma2", "bloom"])
def test_each_sample_goes_through_its_adapter(model_type):
    model = with_adapters(tiny_of(model_type))
    mixed = model(IDS, adapter_names=NAMES).logits
    for row, name in enumerate(NAMES):
        expected = alone(model, name, lambda: model(IDS).logits)[row]
        torch.testing.assert_close(mixed[row], expected, rtol=0, atol=1e-12)
    assert (
        len({tuple(row.flatten().tolist()) for row in model(IDS[:1].expand(4, -1), adapter_names=NAMES[:4]).logits})
        == 4
    )
    model.set_adapter("both")
    assert torch.equal(model(IDS).logits, alone(model, "both", lambda: model(IDS).logits))
    assert all(layer.mixed_batch.get() is None for _, _, layer in adapted_sites(model))


@pytest.mark.parametrize("beams", [1, 3])
def test_generation_is_each_adapters_own(beams):
    model = with_adapters(tiny_model("llama"))
    settings = {"max_new_tokens": 6, "do_sample": False, "num_beams": beams, "pad_token_id": 0}
    mixed = model.generate(input_ids=IDS, adapter_names=NAMES, **settings)
    for row, name in enumerate(NAMES):
        own = alone(model, name, lambda: model.generate(input_ids=IDS, **settings))
        assert torch.equal(mixed[row], own[row])


def test_beams_of_an_encoder_decoder_are_each_adapters_own():
    model = with_adapters(tiny_of("t5", auto=AutoModelForSeq2SeqLM, is_decoder=False))
    settings = {
        "max_new_tokens": 6,
        "do_sample": False,
        "num_beams": 2,
        "decoder_start_token_id": 0,
        "eos_token_id": None,
    }
    mixed = model.generate(input_ids=IDS, adapter_names=NAMES, **settings)
    for row, name in enumerate(NAMES):
        own = alone(model, name, lambda: model.generate(input_ids=IDS, **settings))
        assert torch.equal(mixed[row], own[row])


def test_a_head_saved_with_the_adapter_is_its_own():
    base = tiny_of("bert", auto=AutoModelForSequenceClassification, num_labels=3, is_decoder=False)
    model = get_peft_model(base, PreProjConfig(init_weights=False, modules_to_save=["classifier"]), adapter_name="a")
    model.add_adapter("b", PreProjConfig(init_weights=False, init_seed=1, modules_to_save=["classifier"]))
    model.eval()
    with torch.no_grad():
        for scale, name in enumerate("ab", start=2):
            model.base_model.model.classifier.modules_to_save[name].weight.mul_(scale)
    names = ["b", "a", "__base__", "a", "b"]
    mixed = model(IDS, adapter_names=names).logits
    for row, name in enumerate(names):
        expected = alone(model, name, lambda: model(IDS).logits)[row]
        torch.testing.assert_close(mixed[row], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (
            ["both", "nobody", "pre", "pre", "pre"],
            "adapter_names holds 'nobody': expected '__base__' or one of 'both', 'pre'",
        ),
        (["both", "pre"], "but got 2 names for a batch of 5: give one name per sample"),
        (["both"], "but got 1 names for a batch of 5: give one name per sample"),
    ],
)
def test_names_that_do_not_fit_are_refused(names, sentence):
    model = with_adapters(tiny_model("llama"))
    before = model(IDS).logits
    with pytest.raises(ValueError, match=sentence):
        model(IDS, adapter_names=names)
    assert torch.equal(model(IDS).logits, before)


def test_training_is_refused():
    with pytest.raises(ValueError, match="call eval"):
        with_adapters(tiny_model("llama")).train()(IDS, adapter_names=NAMES)


def test_a_batch_that_does_not_stand_first_is_refused():
    """FSMT's layers take (sequence, batch, hidden): a row there is a position, not a sample."""
    base = tiny_of(
        "fsmt", torch.float32, AutoModelForSeq2SeqLM, src_vocab_size=64, tgt_vocab_size=64, langs=["en", "de"]
    )
    model = get_peft_model(base, PreProjConfig(init_weights=False)).eval()
    with pytest.raises(ValueError, match=r"first dimension of what 'model\.encoder\.layers\.0\.self_attn' reads"):
        model(IDS[:2, :8], adapter_names=["default", "__base__"])


def test_names_in_one_string_are_refused():
    with pytest.raises(ValueError, match="adapter_names is 'both': expected a list with one name per sample"):
        with_adapters(tiny_model("llama"))(IDS, adapter_names="both")
