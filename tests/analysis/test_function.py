"""What skip and pre-projection do to tokens, against planted ratios and angles and plain recomputations."""

import copy
import gc
import math
from typing import Any

import pytest
import torch
from checks import shake
from naive import tiny_model
from peft import LoraConfig, get_peft_model
from tiny import tiny_of
from transformers import AutoModelForMaskedLM, AutoModelForSeq2SeqLM

from preproj import PreProjConfig
from preproj.adapter.layer import adapted_sites
from preproj.analysis import analyze
from preproj.analysis.token_classes import TOKEN_CLASSES, WORD_CLASSES, token_classes

TEXTS = torch.randint(0, 64, (3, 12), generator=torch.Generator().manual_seed(0)).tolist()


def turned(angle: float) -> torch.Tensor:
    """A rotation that turns every vector by the angle."""
    cos, sin = math.cos(angle), math.sin(angle)
    return torch.kron(torch.eye(16), torch.tensor([[cos, -sin], [sin, cos]])).double()


@pytest.mark.parametrize(("ratio", "angle"), [(0.3, 0.0), (0.5, 1.1), (2.0, 2.5), (0.01, math.pi)])
@torch.no_grad()
def test_a_skip_of_chosen_ratio_and_angle_to_attention(ratio, angle):
    """Where all tokens are the same, attention's mean over them is W_o·W_v·x̂; so W_skip = c·R·W_o·W_v is planted."""
    model = get_peft_model(tiny_model("llama"), PreProjConfig(pre_projection=False))
    for _, attention, layer in adapted_sites(model):
        values = attention.v_proj.weight.unflatten(0, (2, 8)).repeat_interleave(2, 0).flatten(0, 1)  # 4 heads share 2
        skip = layer.skip["default"].double()
        skip.weight.copy_(ratio * turned(angle) @ attention.o_proj.weight @ values)
    rows = analyze(model, [[token] * (1 + token % 4) for token in range(0, 60, 7)]).layers
    assert [row["layer"] for row in rows] == [0, 1]
    for row in rows:
        assert row["tokens"] == sum(1 + token % 4 for token in range(0, 60, 7))
        assert row["skip_to_attention"] == pytest.approx(ratio)
        assert row["skip_cosine"] == pytest.approx(math.cos(angle))
        both = 1 + 2 * ratio * math.cos(angle) + ratio**2  # ⟨u, u⟩ over ⟨a, a⟩ with u = a + s
        assert row["skip_share"] == pytest.approx((ratio * math.cos(angle) + ratio**2) / both)


def test_ratios_equal_a_plain_recomputation_and_scale_with_the_weight():
    model = get_peft_model(tiny_model("gpt_neox"), PreProjConfig())
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for _, _, layer in adapted_sites(model):
            for linears in (layer.down, layer.skip):
                weight = linears["default"].weight
                weight.copy_(0.1 * torch.randn(weight.shape, generator=generator))
    rows = analyze(model, TEXTS).layers

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
    assert analyze(model, TEXTS).layers[0]["skip_to_attention"] == pytest.approx(3 * rows[0]["skip_to_attention"])


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
    row = analyze(model, TEXTS).layers[0]
    handle.remove()

    maps = {what: linear.weight for what, linear in layer.linears("default").items()}
    w_skip = maps["skip"] if rank is None else maps["skip_b"] @ maps["skip_a"]
    block, (x_hat_of, attn_out_of) = untouched.get_submodule(path), HOSTS[host]
    skips, pres, cosines, updates = [], [], [], []
    for args, kwargs in seen:
        x_hat = x_hat_of(block, args[0])
        inner = x_hat @ maps["up"].T
        change = (inner * torch.sigmoid(inner)) @ maps["down"].T
        given = {"attention_mask": args[1]} if host == "bert" else kwargs
        attn_out = attn_out_of(block, x_hat + change, given)
        skip = (x_hat + change) @ w_skip.T
        skips.append(skip.norm(dim=-1) / attn_out.norm(dim=-1))
        cosines.append(torch.cosine_similarity(skip, attn_out, dim=-1))
        updates.append(torch.stack([(skip * (skip + attn_out)).sum(), (skip + attn_out).square().sum()]))
        pres.append(change.norm(dim=-1) / x_hat.norm(dim=-1))
    assert row["skip_to_attention"] == pytest.approx(torch.cat(skips).mean().item(), rel=1e-5)
    assert row["skip_cosine"] == pytest.approx(torch.cat(cosines).mean().item(), rel=1e-5)
    above, below = sum(updates).tolist()
    assert row["skip_share"] == pytest.approx(above / below, rel=1e-5)
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
    (row,) = analyze(model, TEXTS).layers
    assert row["skip_to_attention"] == pytest.approx(torch.cat(ratios).mean().item(), rel=1e-5)


def names_of(row: dict[str, Any], *beginnings: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name.startswith(beginnings)}


def test_a_part_that_is_off_has_no_number():
    skip = analyze(get_peft_model(tiny_model("llama"), PreProjConfig(pre_projection=False)), TEXTS).layers[0]
    assert set(names_of(skip, "pre_").values()) == {None}
    assert all(
        value > 0 for value in names_of(skip, "skip_norm", "initial_skip", "skip_to_", "skip_effective").values()
    )
    pre = analyze(get_peft_model(tiny_model("llama"), PreProjConfig(content_skip=False)), TEXTS).layers[0]
    assert set(names_of(pre, "skip_", "initial_skip").values()) == {None}
    assert (pre["pre_to_input"], pre["pre_norm"], pre["pre_effective_rank"]) == (0, 0, None)  # W_down is zero


def test_tokens_without_a_direction_count_in_no_mean():
    """A fresh skip of low rank is zero: its size is 0, and it has no angle to attention."""
    row = analyze(get_peft_model(tiny_model("llama"), PreProjConfig(skip_rank=2)), TEXTS).layers[0]
    assert (row["skip_to_attention"], row["skip_cosine"], row["skip_share"]) == (0, None, 0)


def test_classes_are_means_over_their_own_tokens(byte_tokenizer):
    model = get_peft_model(tiny_model("gpt_neox", vocab_size=257, max_position_embeddings=256), PreProjConfig())
    shake(model)
    texts = byte_tokenizer(["The 3 cats sat. On mats, they didn't sleep!", "One is  blue."]).input_ids
    analysis = analyze(model, texts, byte_tokenizer)
    x_tildes: list[torch.Tensor] = []
    attn_outs: list[torch.Tensor] = []
    _, attention, layer = adapted_sites(model)[1]
    handles = [
        attention.register_forward_pre_hook(lambda m, a: x_tildes.append(a[0][0])),
        attention.register_forward_hook(lambda m, a, out: attn_outs.append(out[0][0]), prepend=True),
    ]
    for ids in texts:
        model(torch.tensor([ids]))
    for handle in handles:
        handle.remove()
    skip, attn_out = torch.cat(x_tildes) @ layer.skip["default"].weight.double().T, torch.cat(attn_outs)
    ratios, update = skip.norm(dim=-1) / attn_out.norm(dim=-1), skip + attn_out
    belongs = torch.cat([token_classes(byte_tokenizer, ids) for ids in texts])
    rows = {row["token_class"]: row for row in analysis.token_classes if row["layer"] == 1}
    assert list(rows) == list(TOKEN_CLASSES)
    for name, mask in zip(TOKEN_CLASSES, belongs.T, strict=True):
        assert rows[name]["tokens"] == mask.sum() > 0
        assert rows[name]["skip_to_attention"] == pytest.approx(ratios[mask].mean().item(), rel=1e-5)
        share = (skip[mask] * update[mask]).sum() / update[mask].square().sum()
        assert rows[name]["skip_share"] == pytest.approx(share.item(), rel=1e-5)
    assert sum(rows[name]["tokens"] for name in WORD_CLASSES) == analysis.layers[1]["tokens"] == len(belongs)


def test_layers_that_see_other_tokens_than_the_text_have_none_by_class(byte_tokenizer):
    """Longformer pads a text to whole windows of attention."""
    model = get_peft_model(
        tiny_of("longformer", auto=AutoModelForMaskedLM, vocab_size=257, attention_window=16), PreProjConfig()
    )
    analysis = analyze(model, byte_tokenizer(["Ten bytes!"]).input_ids, byte_tokenizer)
    assert [row["tokens"] for row in analysis.layers] == [16, 16]
    assert {row["tokens"] for row in analysis.token_classes} == {0}
    assert {row["skip_to_attention"] for row in analysis.token_classes} == {None}


def test_a_model_may_be_called_with_more_than_token_ids():
    model = get_peft_model(tiny_of("t5", auto=AutoModelForSeq2SeqLM), PreProjConfig())
    ids = torch.tensor([TEXTS[0]])
    rows = analyze(model, [{"input_ids": ids, "decoder_input_ids": ids[:, :5]}] * 2).layers
    assert {row["site"].split(".")[0]: row["tokens"] for row in rows} == {"encoder": 24, "decoder": 10}
    assert all(row["skip_to_attention"] > 0 for row in rows)


def test_half_precision_gives_nearly_the_same_numbers():
    """The weights of both are those that bfloat16 can hold; each product of it rounds to eight bits."""
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        model = get_peft_model(tiny_model("llama").bfloat16().to(dtype), PreProjConfig(), autocast_adapter_dtype=False)
        with torch.no_grad():
            for _, _, layer in adapted_sites(model):
                shake(layer)
                layer.bfloat16().to(dtype)
        found.append(analyze(model, TEXTS).layers)
    for wide, half in zip(*found, strict=True):
        for name in ("skip_to_attention", "pre_to_input", "skip_norm", "pre_norm"):
            assert half[name] == pytest.approx(wide[name], rel=2**-6)


def test_what_is_kept_does_not_grow_with_the_text():
    model = get_peft_model(tiny_model("llama"), PreProjConfig())
    numbers = []

    def texts(count):
        for _ in range(count):
            yield TEXTS[0]
            gc.collect()
            numbers.append(sum(o.numel() for o in gc.get_objects() if isinstance(o, torch.Tensor)))

    analyze(model, texts(20))
    assert numbers[-1] == numbers[1] > 0


def hooks_of(model: Any) -> list[tuple[int, int]]:
    return [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]


def test_hooks_stay_only_while_measuring():
    model = get_peft_model(tiny_model("llama"), PreProjConfig())
    before = hooks_of(model)
    during = []

    def texts():
        during.extend(hooks_of(model))
        yield TEXTS[0]

    analyze(model, texts())
    assert during != before
    assert hooks_of(model) == before


@pytest.mark.parametrize("where", ["model.layers.0.self_attn.o_proj", "model.layers.1.mlp", None])
def test_hooks_are_gone_after_an_error(where):
    """In the middle of attention, between two layers, and in a text."""
    base = tiny_model("llama")
    model = get_peft_model(base, PreProjConfig())

    def fail(*_: Any) -> None:
        raise RuntimeError("planted")

    def texts():
        yield TEXTS[0]
        fail()

    before = hooks_of(model)
    handle = base.get_submodule(where).register_forward_pre_hook(fail) if where else None
    with pytest.raises(RuntimeError, match="planted"):
        analyze(model, texts())
    if handle:
        handle.remove()
    assert hooks_of(model) == before
    assert analyze(model, TEXTS).layers[0]["tokens"] == 36


def test_what_cannot_be_measured_is_said_in_one_sentence():
    model = get_peft_model(tiny_model("llama"), PreProjConfig())
    with pytest.raises(ValueError, match=r"no token went through the adapted layers: give at least one text"):
        analyze(model, [])
    model.train()
    with pytest.raises(ValueError, match=r"the model is in training mode: call eval\(\) first"):
        analyze(model, TEXTS)
    model.eval()
    model.base_model.set_adapter(["default"])
    assert analyze(model, TEXTS).layers
    lora = get_peft_model(tiny_model("llama"), LoraConfig(target_modules=["q_proj"]), adapter_name="other")
    with pytest.raises(ValueError, match=r"the active adapters are other: expected one, of pre-projection or content"):
        analyze(lora, TEXTS)
    with torch.no_grad():
        adapted_sites(model)[1][2].skip["default"].weight[0, 0] = math.nan
    with pytest.raises(ValueError, match=r"a weight of 'model.layers.1.self_attn' is not finite, so there is nothing"):
        analyze(model, TEXTS)


@torch.no_grad()
def test_numbers_that_overflow_are_refused():
    base = tiny_model("llama")
    model = get_peft_model(base, PreProjConfig())
    base.model.layers[0].self_attn.o_proj.weight[0, 0] = math.inf
    with pytest.raises(
        ValueError, match=r"what 'model.layers.0.self_attn' computes is not finite: load the model in float32"
    ):
        analyze(model, TEXTS)
