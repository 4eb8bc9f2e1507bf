"""The optimiser with a rate of its own for the pre-projection."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig

from preproj import PreProjConfig, create_optimizer


@pytest.fixture
def base():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=50
    )
    return AutoModelForCausalLM.from_config(config)


def steps(model):
    """Return how far the first step of Adam moves each weight: about its rate, wherever there is a gradient."""
    ids = torch.arange(12)[None]
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    model(input_ids=ids, labels=ids).loss.backward()
    yield
    yield {name: (weight - before[name]).abs().max().item() for name, weight in model.named_parameters()}


def moved(model, **options):
    measured = steps(model)
    next(measured)
    create_optimizer(model, torch.optim.Adam, **options).step()
    return next(measured)


def test_the_pre_projection_moves_by_its_share_of_the_rate_and_the_skip_by_all_of_it(base):
    model = get_peft_model(base, PreProjConfig(init_weights=False))  # at once every weight has a gradient
    distances = moved(model, lr=1e-2, pre_lr_ratio=0.03)
    # Adam's first step is the rate in every coordinate whose gradient is far from 0.
    for name, distance in distances.items():
        if ".preproj.up." in name or ".preproj.down." in name:
            assert distance == pytest.approx(3e-4, rel=1e-2), name
        elif ".preproj.skip." in name:
            assert distance == pytest.approx(1e-2, rel=1e-2), name
        else:
            assert distance == 0, name


def test_lora_beside_it_and_a_skip_of_low_rank_have_the_whole_rate(base):
    ours = get_peft_model(base, PreProjConfig(skip_rank=2, init_weights=False))
    lora = get_peft_model(base, LoraConfig(target_modules=["q_proj"], init_lora_weights=False), "lora")
    for name, weight in lora.named_parameters():
        weight.requires_grad_("lora_" in name or ".preproj." in name)
    distances = moved(lora, lr=1e-2, pre_lr_ratio=0.5)
    assert ours.active_adapter == "default"
    for what, expected in {
        "lora_A": 1e-2,
        "lora_B": 1e-2,
        "skip_a": 1e-2,
        "skip_b": 1e-2,
        "up": 5e-3,
        "down": 5e-3,
    }.items():
        found = [distance for name, distance in distances.items() if f".{what}." in name and ".mlp." not in name]
        assert found == pytest.approx([expected] * len(found), rel=1e-2)
        assert found


def test_options_reach_the_optimiser_and_one_part_alone_is_one_group(base):
    model = get_peft_model(base, PreProjConfig(content_skip=False))
    optimizer = create_optimizer(model, torch.optim.AdamW, lr=1e-3, pre_lr_ratio=0.1, weight_decay=0.2)
    (group,) = optimizer.param_groups
    assert (group["lr"], group["weight_decay"]) == (pytest.approx(1e-4), 0.2)


def test_mistakes_are_told_in_one_sentence(base):
    for ratio in (0, -1.0, float("nan"), float("inf"), True, "0.1", None):
        with pytest.raises(ValueError, match=rf"pre_lr_ratio is {ratio!r}: expected a number above 0, such as 0\.03"):
            create_optimizer(base, torch.optim.AdamW, lr=1e-3, pre_lr_ratio=ratio)
    with pytest.raises(ValueError, match="the model has no trainable weight: put an adapter on it"):
        create_optimizer(base.requires_grad_(False), torch.optim.AdamW, lr=1e-3, pre_lr_ratio=1)
