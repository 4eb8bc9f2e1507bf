"""One attention module at several places: counted once, acting at each, with the gradients of all of them."""

import copy
from typing import Any

import pytest
import torch
from checks import IDS, shake
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from tiny import tiny_of
from torch import Tensor, nn
from transformers import AutoModel

import preproj
from preproj import PreProjConfig
from preproj.adapter.layer import adapted_sites


def shared(model_type: str) -> nn.Module:
    """A decoder of three layers with one attention module."""
    base = tiny_of(model_type, num_hidden_layers=3)
    shake(base)
    for layer in base.model.layers[1:]:
        layer.self_attn = base.model.layers[0].self_attn
    return base


def drawn(model: nn.Module) -> tuple[Any, list[Tensor]]:
    """Draws the new weights of the only site anew; returns its layer, and the weights as leaves of their own."""
    ((_, _, layer),) = adapted_sites(model)
    shake(layer)
    return layer, [layer.linears("default")[w].weight.detach().clone().requires_grad_() for w in ("up", "down", "skip")]


def new(weights: list[Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """x̃ and W_skip·x̃, from the equations."""
    up, down, skip = weights
    inner = x @ up.T
    x_tilde = x + (inner * torch.sigmoid(inner)) @ down.T
    return x_tilde, x_tilde @ skip.T


def assert_same_gradients(layer: Any, weights: list[Tensor]) -> None:
    for what, weight in zip(("up", "down", "skip"), weights, strict=True):
        gradient = layer.linears("default")[what].weight.grad
        torch.testing.assert_close(gradient, weight.grad, rtol=1e-10, atol=1e-10)


def test_llama_with_one_attention_for_three_layers():
    base = shared("llama")
    untouched = copy.deepcopy(base.model).requires_grad_(False)
    model = get_peft_model(base, PreProjConfig())
    assert len(preproj.sites(base)) == 1
    assert model.get_nb_trainable_parameters()[0] == 2 * 40 * 32 + 32 * 32  # round(1.25 * 32) = 40
    layer, weights = drawn(model)

    given: dict[str, Any] = {}
    untouched.layers[0].register_forward_pre_hook(lambda m, a, k: given.update(k), with_kwargs=True)
    untouched(input_ids=IDS, use_cache=False)
    x = untouched.embed_tokens(IDS)
    for block in untouched.layers:
        x_tilde, skip = new(weights, block.input_layernorm(x))
        x = x + block.self_attn(x_tilde, **given)[0] + skip
        x = x + block.mlp(block.post_attention_layernorm(x))
    expected = untouched.norm(x)

    output = base.model(input_ids=IDS, use_cache=False).last_hidden_state
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-10)
    output.square().mean().backward()
    expected.square().mean().backward()
    assert_same_gradients(layer, weights)


def albert_by_hand(untouched: nn.Module, weights: list[Tensor]) -> Tensor:
    x = untouched.encoder.embedding_hidden_mapping_in(untouched.embeddings(IDS))
    block = untouched.encoder.albert_layer_groups[0].albert_layers[0]
    own = block.attention
    for _ in range(3):
        x_tilde, skip = new(weights, x)
        q, k, v = (m(x_tilde).view(2, 9, 4, 8).transpose(1, 2) for m in (own.query, own.key, own.value))
        mixed = (q @ k.mT / 8**0.5).softmax(-1) @ v
        x = own.LayerNorm(x + own.dense(mixed.transpose(1, 2).reshape(2, 9, 32)) + skip)
        x = block.full_layer_layer_norm(x + block.ff_chunk(x))
    return x


def test_albert():
    """Its layers share one block, whose attention adds its own input: x̃ enters Q/K/V, the residual stays x̂."""
    base = tiny_of("albert", auto=AutoModel, num_hidden_layers=3)
    shake(base)
    untouched = copy.deepcopy(base).requires_grad_(False)
    model = get_peft_model(base, PreProjConfig())
    layer, weights = drawn(model)

    x = albert_by_hand(untouched, weights)
    output = model(input_ids=IDS).last_hidden_state
    torch.testing.assert_close(output, x, rtol=1e-10, atol=1e-10)
    output.square().mean().backward()
    x.square().mean().backward()
    assert_same_gradients(layer, weights)
    with model.disable_adapter(), torch.no_grad():
        assert torch.equal(model(input_ids=IDS).last_hidden_state, untouched(input_ids=IDS).last_hidden_state)


@pytest.mark.parametrize("lora_first", [True, False])
def test_lora_in_albert_reads_x_tilde_whichever_comes_first(lora_first):
    base = tiny_of("albert", auto=AutoModel, num_hidden_layers=3)
    shake(base)
    untouched = copy.deepcopy(base)
    lora = LoraConfig(target_modules=["query", "dense"], r=2)
    inject_adapter_in_model(lora, untouched)
    shake(untouched)
    if lora_first:
        inject_adapter_in_model(lora, base)
    get_peft_model(base, PreProjConfig())
    if not lora_first:
        inject_adapter_in_model(lora, base)
    base.load_state_dict(untouched.state_dict(), strict=False)
    _, weights = drawn(base)
    with torch.no_grad():
        expected = albert_by_hand(untouched, weights)
        torch.testing.assert_close(base(input_ids=IDS).last_hidden_state, expected, rtol=1e-10, atol=1e-10)


def test_albert_keeps_its_residual_under_dropout():
    """The residual is put back after the dropout, which would otherwise drop part of it."""
    base = tiny_of("albert", auto=AutoModel, num_hidden_layers=1, hidden_dropout_prob=0.5).train()
    shake(base)
    own = base.encoder.albert_layer_groups[0].albert_layers[0].attention
    model = get_peft_model(base, PreProjConfig())
    drawn(model)
    seen: dict[str, Tensor] = {}

    def keep(name: str, module: nn.Module) -> None:
        module.register_forward_pre_hook(lambda m, args: seen.update({name: args[0]}))

    keep("x", base.encoder.albert_layer_groups[0])
    keep("x_tilde", own)
    keep("sum", own.LayerNorm)
    own.output_dropout.register_forward_hook(lambda m, args, out: seen.update(dropped=out), prepend=True)
    model(input_ids=IDS)
    ((_, _, layer),) = adapted_sites(model)
    skip = seen["x_tilde"] @ layer.skip["default"].weight.T
    assert (seen["dropped"] == 0).any()
    torch.testing.assert_close(seen["sum"], seen["x"] + seen["dropped"] + skip, rtol=1e-10, atol=1e-10)


def test_shared_attention_whose_branch_ends_in_another_norm_at_each_place_is_refused():
    with pytest.raises(ValueError, match="its branch does not end in the same module at each"):
        preproj.sites(shared("gemma2"))
