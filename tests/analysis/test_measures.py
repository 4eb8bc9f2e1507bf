"""Layer measures against planted weights with known answers."""

import copy
from typing import Any

import pytest
import torch
from checks import shake
from naive import tiny_model
from peft import get_peft_model
from tiny import tiny_of
from transformers import AutoModelForMaskedLM

from preproj import PreProjConfig
from preproj.adapter.layer import adapted_sites
from preproj.analysis.measures import measure_layers

TEXTS = torch.randint(0, 64, (3, 12), generator=torch.Generator().manual_seed(0)).tolist()


def test_norms_are_those_of_the_weights_now_and_at_the_start():
    model = get_peft_model(tiny_model("llama"), PreProjConfig(skip_init_std=0.01, init_seed=4))
    starts = [layer.skip["default"].weight.norm().item() for _, _, layer in adapted_sites(model)]
    with torch.no_grad():
        for _, _, layer in adapted_sites(model):
            layer.skip["default"].weight.copy_(2 * torch.eye(32))
    rows = measure_layers(model, TEXTS)
    assert [row["initial_skip_norm"] for row in rows] == pytest.approx(starts)
    assert [row["skip_norm"] for row in rows] == pytest.approx([2 * 32**0.5] * 2)
    assert [(row["layer"], row["site"]) for row in rows] == [
        (0, "model.layers.0.self_attn"),
        (1, "model.layers.1.self_attn"),
    ]


def test_ratios_equal_a_plain_recomputation_and_scale_with_the_weight():
    model = get_peft_model(tiny_model("gpt_neox"), PreProjConfig())
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for _, _, layer in adapted_sites(model):
            for linears in (layer.down, layer.skip):
                weight = linears["default"].weight
                weight.copy_(0.1 * torch.randn(weight.shape, generator=generator))
    rows = measure_layers(model, TEXTS)

    # The same numbers from the block's own inputs and outputs, one text at a time.
    site = adapted_sites(model)[0]
    skips, pres, seen = [], [], {}
    handles = [
        site[1].register_forward_pre_hook(lambda m, a: seen.update(x_hat=a[0]), prepend=True),
        site[1].register_forward_pre_hook(lambda m, a: seen.update(x_tilde=a[0])),
        site[1].register_forward_hook(lambda m, a, out: seen.update(attn_out=out[0]), prepend=True),
        site[1].register_forward_hook(lambda m, a, out: seen.update(out=out[0])),
    ]
    for ids in TEXTS:
        model(torch.tensor([ids]))
        skip = seen["out"] - seen["attn_out"]
        skips.append(skip.norm(dim=-1) / seen["attn_out"].norm(dim=-1))
        pres.append((seen["x_tilde"] - seen["x_hat"]).norm(dim=-1) / seen["x_hat"].norm(dim=-1))
    for handle in handles:
        handle.remove()
    assert rows[0]["skip_to_attention"] == pytest.approx(torch.cat(skips).mean().item(), rel=1e-5)
    assert rows[0]["pre_to_input"] == pytest.approx(torch.cat(pres).mean().item(), rel=1e-5)

    with torch.no_grad():
        site[2].skip["default"].weight.mul_(3)
    assert measure_layers(model, TEXTS)[0]["skip_to_attention"] == pytest.approx(3 * rows[0]["skip_to_attention"])


# x̂ of the first block, and what its attention adds to the residual stream for a given x̃.
HOSTS: dict[str, tuple[Any, Any]] = {
    "gemma2": (
        lambda b, x: b.input_layernorm(x),
        lambda b, x_tilde, k: b.post_attention_layernorm(b.self_attn(x_tilde, **k)[0]),
    ),
    "granite": (lambda b, x: b.input_layernorm(x), lambda b, x_tilde, k: 0.3 * b.self_attn(x_tilde, **k)[0]),
    "bloom": (
        lambda b, x: b.input_layernorm(x),
        lambda b, x_tilde, k: b.self_attention(x_tilde, torch.zeros_like(x_tilde), **k)[0],  # residual 0
    ),
    "bert": (
        lambda b, x: x,
        lambda b, x_tilde, k: b.attention.output.dense(b.attention.self(x_tilde, k["attention_mask"])[0]),
    ),
}


@pytest.mark.parametrize("rank", [None, 3])
@pytest.mark.parametrize("host", HOSTS)
@torch.no_grad()
def test_attn_out_is_what_joins_the_residual_stream(host, rank):
    base = tiny_of(host)
    shake(base)
    untouched = copy.deepcopy(base)
    model = get_peft_model(base, PreProjConfig(skip_rank=rank))
    name, _, layer = adapted_sites(model)[0]
    shake(layer)
    path = name[: name.index(".0.") + 2]
    seen: list[Any] = []
    handle = base.get_submodule(path).register_forward_pre_hook(lambda m, a, k: seen.append((a, k)), with_kwargs=True)
    row = measure_layers(model, TEXTS)[0]
    handle.remove()

    maps = {what: linear.weight for what, linear in layer.linears("default").items()}
    w_skip = maps["skip"] if rank is None else maps["skip_b"] @ maps["skip_a"]
    block, (x_hat_of, attn_out_of) = untouched.get_submodule(path), HOSTS[host]
    skips, pres = [], []
    for args, kwargs in seen:
        x_hat = x_hat_of(block, args[0])
        inner = x_hat @ maps["up"].T
        change = (inner * torch.sigmoid(inner)) @ maps["down"].T
        given = {"attention_mask": args[1]} if host == "bert" else kwargs
        attn_out = attn_out_of(block, x_hat + change, given)
        skips.append(((x_hat + change) @ w_skip.T).norm(dim=-1) / attn_out.norm(dim=-1))
        pres.append(change.norm(dim=-1) / x_hat.norm(dim=-1))
    assert row["skip_to_attention"] == pytest.approx(torch.cat(skips).mean().item(), rel=1e-5)
    assert row["pre_to_input"] == pytest.approx(torch.cat(pres).mean().item(), rel=1e-5)
    assert row["skip_norm"] == pytest.approx(w_skip.norm().item(), rel=1e-5)
    assert (row["initial_skip_norm"] == 0) == (rank is not None)


def test_every_place_of_a_shared_module_is_measured():
    """ALBERT's attention adds its own input, and is called once for each of its two layers."""
    model = get_peft_model(tiny_of("albert", auto=AutoModelForMaskedLM), PreProjConfig())
    ((_, attention, layer),) = adapted_sites(model)
    shake(layer)
    x_tildes: list[torch.Tensor] = []
    attn_outs: list[torch.Tensor] = []
    handles = [
        attention.register_forward_pre_hook(lambda m, a: x_tildes.append(a[0])),
        attention.output_dropout.register_forward_hook(lambda m, a, out: attn_outs.append(out), prepend=True),
    ]
    for ids in TEXTS:
        model(torch.tensor([ids]))
    for handle in handles:
        handle.remove()
    skips = [x_tilde @ layer.skip["default"].weight.T for x_tilde in x_tildes]
    ratios = [skip.norm(dim=-1) / out.norm(dim=-1) for skip, out in zip(skips, attn_outs, strict=True)]
    assert len(ratios) == 2 * len(TEXTS)
    (row,) = measure_layers(model, TEXTS)
    assert row["skip_to_attention"] == pytest.approx(torch.cat(ratios).mean().item(), rel=1e-5)


def test_a_part_that_is_off_has_no_number():
    skip = measure_layers(get_peft_model(tiny_model("llama"), PreProjConfig(pre_projection=False)), TEXTS)[0]
    assert skip["pre_to_input"] is None
    assert skip["skip_to_attention"] > 0
    pre = measure_layers(get_peft_model(tiny_model("llama"), PreProjConfig(content_skip=False)), TEXTS)[0]
    assert (pre["skip_norm"], pre["initial_skip_norm"], pre["skip_to_attention"]) == (None, None, None)
    assert pre["pre_to_input"] == 0.0  # W_down is zero


def test_hooks_stay_only_while_measuring():
    model = get_peft_model(tiny_model("llama"), PreProjConfig())
    before = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    measure_layers(model, TEXTS)
    assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()] == before
