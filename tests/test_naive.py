"""The oracle computes what the untouched host computes, so it may judge the adapted one."""

import pytest
import torch
from naive import ARCHITECTURES, naive_logits, silu, tiny_model

HOSTS = [pytest.param(name, {}, id=name) for name in ARCHITECTURES]
HOSTS.append(pytest.param("gpt_neox", {"use_parallel_residual": False}, id="gpt_neox-sequential"))
ATTENTION = {"gpt_neox": "attention", "gpt2": "attn"}  # elsewhere self_attn


def some_ids(batch=3, length=17):
    return torch.randint(64, (batch, length), generator=torch.Generator().manual_seed(1))


def random_new_weights(model, hidden=24, seed=2):
    """Draws new weights for every layer, large enough to move every logit."""
    generator = torch.Generator().manual_seed(seed)
    d = model.config.hidden_size
    shapes = {"up": (hidden, d), "down": (d, hidden), "skip": (d, d)}
    return [
        {k: 0.3 * torch.randn(s, generator=generator, dtype=torch.float64) for k, s in shapes.items()}
        for _ in range(model.config.num_hidden_layers)
    ]


def blocks(model):
    return model.base_model.h if model.config.model_type == "gpt2" else model.base_model.layers


def hook(attention, new):
    """Edits the input and output of a host's attention module, a second route to the same equations."""

    def before(module, args, kwargs):
        x = args[0] if args else kwargs["hidden_states"]
        module.xt = x + torch.nn.functional.linear(silu(torch.nn.functional.linear(x, new["up"])), new["down"])
        return ((module.xt, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": module.xt})

    def after(module, args, output):
        return (output[0] + torch.nn.functional.linear(module.xt, new["skip"]), *output[1:])

    attention.register_forward_pre_hook(before, with_kwargs=True)
    attention.register_forward_hook(after)


@torch.no_grad()
@pytest.mark.parametrize(("architecture", "overrides"), HOSTS)
@pytest.mark.parametrize("seed", [0, 1])
def test_equals_the_untouched_host(architecture, overrides, seed):
    model = tiny_model(architecture, seed=seed, num_hidden_layers=3, **overrides)
    ids = some_ids()
    logits = naive_logits(model, ids)
    assert logits.dtype == torch.float64
    assert logits.std() > 0.5
    assert (logits - model(ids).logits).abs().max() < 1e-10


@torch.no_grad()
@pytest.mark.parametrize(("architecture", "overrides"), HOSTS)
def test_plain_mathematics_is_within_float32_of_the_host(architecture, overrides):
    model = tiny_model(architecture, **overrides)
    ids = some_ids()
    difference = (naive_logits(model, ids, island=torch.float64) - model(ids).logits).abs().max()
    assert difference < 1e-4


@torch.no_grad()
@pytest.mark.parametrize(("architecture", "overrides"), HOSTS)
def test_new_weights_equal_a_host_edited_by_hooks(architecture, overrides):
    model = tiny_model(architecture, **overrides)
    ids, new_weights = some_ids(), random_new_weights(model)
    plain, expected = naive_logits(model, ids), naive_logits(model, ids, new_weights)
    for block, new in zip(blocks(model), new_weights, strict=True):
        hook(block.get_submodule(ATTENTION.get(architecture, "self_attn")), new)
    assert (expected - plain).abs().mean() > 0.1
    assert (expected - model(ids).logits).abs().max() < 1e-10


@torch.no_grad()
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_zero_new_weights_change_nothing_and_each_part_may_be_absent(architecture):
    model = tiny_model(architecture)
    ids, new_weights = some_ids(), random_new_weights(model)
    plain = naive_logits(model, ids)
    zero_ended = [{**new, "down": 0 * new["down"], "skip": 0 * new["skip"]} for new in new_weights]
    assert torch.equal(naive_logits(model, ids, zero_ended), plain)
    assert torch.equal(naive_logits(model, ids, [None for _ in new_weights]), plain)
    alone = [naive_logits(model, ids, [{"skip": new["skip"], "up": None} for new in new_weights])]
    alone.append(naive_logits(model, ids, [{"up": new["up"], "down": new["down"]} for new in new_weights]))
    both = naive_logits(model, ids, new_weights)
    for one, other in [(alone[0], plain), (alone[1], plain), (alone[0], alone[1]), (both, alone[0])]:
        assert (one - other).abs().mean() > 0.1


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tiny_models_are_reproducible_and_nowhere_trivial(architecture):
    before = torch.random.get_rng_state()
    model = tiny_model(architecture)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not model.training
    same, other = tiny_model(architecture), tiny_model(architecture, seed=1)
    for name, weight in model.named_parameters():
        assert weight.dtype == torch.float64
        assert weight.std() > 0.05
        assert torch.equal(weight, same.get_parameter(name))
        assert not torch.equal(weight, other.get_parameter(name))
