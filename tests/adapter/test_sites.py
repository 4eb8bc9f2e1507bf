"""What is found in models and blocks of every kind, what is refused, and what is carried between the hooks."""

import collections
import copy
import re

import pytest
import torch
import transformers
from checks import IDS, check_blocks, shake
from families import FAMILIES
from naive import tiny_model
from peft import get_peft_model
from tiny import tiny_of
from torch import nn
from transformers import AutoModelForImageClassification, AutoModelForSeq2SeqLM

import preproj
from preproj import PreProjConfig
from preproj.adapter.layer import adapted_sites


def found(model):
    return [(site.name, site.kind, site.landing) for site in preproj.sites(model)]


@pytest.mark.parametrize(
    ("model_type", "kind", "path", "landing"),
    [
        ("llama", "plain", "model.layers.1.self_attn", "model.layers.1.self_attn"),
        ("phi", "parallel", "model.layers.1.self_attn", "model.layers.1.self_attn"),
        ("falcon", "parallel", "transformer.h.1.self_attention", "transformer.h.1.self_attention"),
        ("gemma3_text", "norm after it", "model.layers.1.self_attn", "model.layers.1.post_attention_layernorm"),
        ("glm4", "norm after it", "model.layers.1.self_attn", "model.layers.1.post_self_attn_layernorm"),
        (
            "olmo2",
            "no norm before it, norm after it",
            "model.layers.1.self_attn",
            "model.layers.1.post_attention_layernorm",
        ),
        ("granite", "multiplier 0.3", "model.layers.1.self_attn", "model.layers.1.self_attn"),
        (
            "bloom",
            "residual inside it",
            "transformer.h.1.self_attention",
            "transformer.h.1.self_attention.dense",
        ),
        (
            "bert",
            "no norm before it, projection after it",
            "bert.encoder.layer.1.attention.self",
            "bert.encoder.layer.1.attention.output.dense",
        ),
        ("longcat_flash", "plain", "model.layers.1.self_attn.1", "model.layers.1.self_attn.1"),
        ("qwen3_next", "plain", "model.layers.3.self_attn", "model.layers.3.self_attn"),
    ],
)
def test_kind_and_landing(model_type, kind, path, landing):
    assert found(tiny_of(model_type))[-1] == (path, kind, landing)


def test_hybrids_are_adapted_at_their_attention_layers_only():
    assert [name for name, _, _ in found(tiny_of("qwen3_next"))] == ["model.layers.3.self_attn"]
    assert [name for name, _, _ in found(tiny_of("jamba"))] == [f"model.layers.{i}.self_attn" for i in (1, 3)]


def test_cross_attention_is_not_adapted():
    names = [name for name, _, _ in found(tiny_of("t5", auto=AutoModelForSeq2SeqLM, is_decoder=False))]
    assert names == [f"{part}.block.{i}.layer.0.SelfAttention" for part in ("encoder", "decoder") for i in (0, 1)]
    gpt2 = tiny_of("gpt2", add_cross_attention=True)
    assert [name for name, _, _ in found(gpt2)] == ["transformer.h.0.attn", "transformer.h.1.attn"]
    model = get_peft_model(tiny_of("bert", add_cross_attention=True), PreProjConfig())
    assert [name.split(".")[-2] for name, _, _ in adapted_sites(model)] == ["attention", "attention"]
    assert model.peft_config["default"].target_modules == {"attention.self"}


def test_parts_for_images_are_left_alone():
    names = [name for name, _, _ in found(tiny_of("got_ocr2"))]
    assert names == ["model.language_model.layers.0.self_attn", "model.language_model.layers.1.self_attn"]


def test_parts_for_sound_are_left_alone():
    names = [name for name, _, _ in found(tiny_of("granite_speech", auto=AutoModelForSeq2SeqLM))]
    assert [re.findall(r"language_model|layers.*", name) for name in names] == [
        ["language_model", f"layers.{i}.self_attn"] for i in (0, 1)
    ]


def test_attention_that_pools_the_stream_is_left_alone():
    siglip = tiny_of("siglip", auto=AutoModelForImageClassification)
    assert [name for name, _, _ in found(siglip)] == [f"vision_model.encoder.layers.{i}.self_attn" for i in (0, 1)]


def test_table():
    table = str(preproj.sites(tiny_of("gemma2"))).splitlines()
    assert re.split(r"\s{2,}", table[0]) == ["attention", "kind", "width", "x̃ enters as", "skip lands on the output of"]
    assert re.split(r"\s{2,}", table[2]) == [
        "model.layers.1.self_attn", "norm after it", "32", "hidden_states", "model.layers.1.post_attention_layernorm",
    ]  # fmt: skip


def test_sites_of_an_adapted_model_are_those_of_its_base():
    base = tiny_of("gemma2")
    before = found(base)
    assert found(get_peft_model(base, PreProjConfig())) == before


@pytest.mark.parametrize(
    ("model_type", "sentence"),
    [
        ("mamba", "finds no self-attention in MambaForCausalLM. It has no module that looks like attention."),
        ("zaya", r"`\(hidden_states \+ self.hidden_states_bias\) \* self.hidden_states_scale` stands between it and"),
        ("deepseek_v4", r"`.unsqueeze\(...\)` stands between it and the residual sum"),
        ("zamba2", r"`self.feed_forward\(...\)` stands between it and the residual sum"),
        ("luke", "it reads a second stream, entity_hidden_states"),
        ("perceiver", "it norms its input itself"),
        ("mobilebert", "its queries, keys and values are read from different tensors"),
        ("swinv2", "its tokens are moved before they go through LayerNorm"),
        ("lw_detr_vit", r"`attention_output \* self.gamma_1` stands between it and the residual sum"),
    ],
)
def test_what_is_not_understood_is_refused_with_the_step(model_type, sentence):
    family = next((family for family in FAMILIES if model_type in family.auto), None)
    if family is None:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    base = tiny_of(model_type, auto=family.auto[model_type], small=family.small)
    names = [name for name, _ in base.named_modules()]
    with pytest.raises(ValueError, match=sentence):
        get_peft_model(base, PreProjConfig())
    assert [name for name, _ in base.named_modules()] == names


class ToyAttention(nn.Module):
    """Stands for attention in blocks made for these tests."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out_proj = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out_proj((q @ k.mT).softmax(-1) @ v)


class ToyBlock(nn.Module):
    """A block whose forward is given by a subclass."""

    def __init__(self):
        super().__init__()
        self.attn, self.norm, self.gate, self.training_scale = ToyAttention(), nn.LayerNorm(8), nn.Linear(8, 8), 2.0


class ScaledSum(ToyBlock):
    def forward(self, x):
        return (x + self.attn(self.norm(x))) * self.training_scale


class Gated(ToyBlock):
    def forward(self, x):
        return x + self.attn(self.norm(x)) * self.gate(x)


class Subtracted(ToyBlock):
    def forward(self, x):
        return x - self.attn(self.norm(x))


class Twice(ToyBlock):
    def forward(self, x):
        a = self.attn(self.norm(x))
        return x + a + self.attn(self.norm(a))


class AtRunTime(ToyBlock):
    def forward(self, x):
        a = self.attn(self.norm(x))
        if x.mean() > 0:
            a = self.norm(a)
        return x + a


class InALoop(ToyBlock):
    def forward(self, x):
        for _ in range(2):
            x = x + self.attn(self.norm(x))
        return x


class ScaledInALoop(ToyBlock):
    def forward(self, x):
        a = self.attn(self.norm(x))
        for _ in range(2):
            a = a * 2
        return x + a


class ChangedInPlace(ToyBlock):
    def forward(self, x):
        a = self.attn(self.norm(x))
        a[..., 1] *= 2
        return x + a


class Negated(ToyBlock):
    def forward(self, x):
        return x + -self.attn(self.norm(x))


class GatedByAnArgument(ToyBlock):
    def forward(self, x, gate=None):
        a = self.attn(self.norm(x))
        if gate is not None:
            a = self.gate(a)
        return x + a


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(self.up(x).relu())


class MlpOnTheBranch(ToyBlock):
    def __init__(self):
        super().__init__()
        self.mlp = FeedForward()

    def forward(self, x):
        return x + self.mlp(self.attn(self.norm(x)))


class MovedBeforeANorm(ToyBlock):
    def forward(self, x):
        return x + self.norm(self.attn(self.norm(x)).flip(1).transpose(0, 1))


class SomeFeatures(ToyBlock):
    def forward(self, x):
        return x + self.attn(self.norm(x))[..., :4].repeat(1, 1, 2)


class LostInAHelper(ToyBlock):
    def forward(self, x):
        return x + lose(self.attn(self.norm(x)))


def lose(branch):
    shape = branch.shape
    return torch.ones(shape)


class UsedAfterTheSum(ToyBlock):
    def forward(self, x):
        a = self.attn(self.norm(x))
        x = x + a
        return x + self.gate(a)


class RolledAway(ToyBlock):
    def forward(self, x):
        return x + self.attn(self.norm(x)).roll(1, 1)


class NoSum(ToyBlock):
    def forward(self, x):
        return self.gate(self.attn(self.norm(x)).relu())


@pytest.mark.parametrize(
    "block",
    [
        ScaledSum, Gated, Subtracted, Twice, AtRunTime, InALoop, ScaledInALoop, ChangedInPlace, Negated,
        GatedByAnArgument, MlpOnTheBranch, MovedBeforeANorm, SomeFeatures, LostInAHelper, NoSum,
        UsedAfterTheSum, RolledAway,
    ],
)  # fmt: skip
def test_blocks_that_are_not_certain_are_refused(block):
    with pytest.raises(ValueError, match=r"cannot place the content skip at '0\.attn' \(ToyAttention\)"):
        preproj.sites(nn.Sequential(block()))


def test_bloom_that_slices_its_output_projection_is_refused():
    """It then multiplies by slices of the weight and never calls the module that the skip would land on."""
    with pytest.raises(ValueError, match="cannot place the content skip"):
        preproj.sites(tiny_of("bloom", pretraining_tp=2, slow_but_exact=True))


class Plain(ToyBlock):
    def forward(self, x):
        return x + self.attn(self.norm(x))


class RolledThereAndBack(ToyBlock):
    def forward(self, x):
        return x + self.attn(self.norm(x).roll(-1, 1)).roll(1, 1)


class ATupleReadLater(ToyBlock):
    def forward(self, x):
        a = (self.attn(self.norm(x)), None)
        x = x + a[0]
        return x, a[1:]


Pair = collections.namedtuple("Pair", ("hidden_states", "weights"))


class NamedAttention(ToyAttention):
    def forward(self, x):
        return Pair(super().forward(x), None)


class OfANamedTuple(ToyBlock):
    def __init__(self):
        super().__init__()
        self.attn = NamedAttention()

    def forward(self, x):
        return x + self.attn(self.norm(x))[0]


@pytest.mark.parametrize("block", [RolledThereAndBack, ATupleReadLater, OfANamedTuple])
def test_blocks_that_only_look_uncertain_get_the_skip_right(block):
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    base = nn.Sequential(block())
    first = lambda output: output[0] if isinstance(output, tuple) else output  # noqa: E731
    before = first(base(x))
    model = get_peft_model(base, PreProjConfig(pre_projection=False, init_weights=False))
    ((_, _, layer),) = adapted_sites(model)
    expected = before + base[0].norm(x) @ layer.skip["default"].weight.T
    torch.testing.assert_close(first(model(x)), expected)


class Shared(nn.Module):
    """One block at three places, as in ALBERT."""

    def __init__(self):
        super().__init__()
        self.block = Plain()

    def forward(self, x):
        return self.block(self.block(self.block(x)))


def test_a_shared_module_counts_once_and_acts_at_each_place():
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    base = Shared()
    untouched = copy.deepcopy(base.block)
    model = get_peft_model(base, PreProjConfig(pre_projection=False))
    ((name, _, layer),) = adapted_sites(model)
    assert name == "block.attn"
    shake(layer)
    expected = x
    for _ in range(3):
        normed = untouched.norm(expected)
        expected = expected + untouched.attn(normed) + normed @ layer.skip["default"].weight.T
    torch.testing.assert_close(model(x), expected)


class Wide(nn.Module):
    """Attention that reads twice the width of the stream."""

    def __init__(self):
        super().__init__()
        self.attn = ToyAttention()
        self.attn.qkv = nn.Linear(16, 24)

    def forward(self, x):
        return x + self.attn(torch.cat((x, x.flip(1)), -1))


def test_unequal_widths():
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    base = Wide()
    (site,) = preproj.sites(nn.Sequential(base))
    assert (site.width, site.out_width) == (16, 8)
    untouched = copy.deepcopy(base)
    model = get_peft_model(nn.Sequential(base), PreProjConfig(skip_init_std=0.5))
    ((_, _, layer),) = adapted_sites(model)
    skip = layer.skip["default"].weight
    assert skip.shape == (8, 16)
    expected = untouched(x) + torch.cat((x, x.flip(1)), -1) @ skip.T
    torch.testing.assert_close(model(x), expected)


def adapted(model_type="gemma2", **options):
    model = get_peft_model(tiny_of(model_type), PreProjConfig(**options))
    for _, _, layer in adapted_sites(model):
        shake(layer)
    return model


@pytest.mark.parametrize("where", ["self_attn.o_proj", "post_attention_layernorm", "mlp"])
def test_an_exception_leaves_nothing_behind(where):
    model = adapted()
    expected = model(IDS).logits
    block = model.get_base_model().model.layers[1]

    def fail(*_):
        raise RuntimeError("stop here")

    handle = block.get_submodule(where).register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="stop here"):
        model(IDS)
    assert all(layer._waiting.get() is None for _, _, layer in adapted_sites(model))
    handle.remove()
    assert torch.equal(model(IDS).logits, expected)
    with model.disable_adapter():
        plain = model(IDS).logits
    assert torch.equal(plain, tiny_of("gemma2")(IDS).logits)


def test_an_interruption_between_the_hooks_does_no_harm():
    model = adapted()
    expected = model(IDS).logits
    block = model.get_base_model().model.layers[1]

    def interrupt(*_):
        raise KeyboardInterrupt

    handle = block.post_attention_layernorm.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(IDS)
    handle.remove()
    with model.disable_adapter():
        assert torch.equal(model(IDS).logits, tiny_of("gemma2")(IDS).logits)
    assert torch.equal(model(IDS).logits, expected)


def test_nested_calls_keep_their_own_x_tilde():
    model = adapted()
    expected = model(IDS).logits
    block = model.get_base_model().model.layers[0]
    inside = []

    def call_again(*_):
        if not inside:
            inside.append(None)
            inside.append(model(IDS[:1, :4]).logits)

    block.self_attn.o_proj.register_forward_pre_hook(call_again)
    assert torch.equal(model(IDS).logits, expected)
    assert torch.equal(inside[1], model(IDS[:1, :4]).logits)


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "bert"])
def test_compilation_changes_nothing(model_type):
    model = adapted(model_type)
    expected = model(input_ids=IDS, use_cache=False).logits
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(input_ids=IDS, use_cache=False).logits, expected, rtol=0, atol=1e-12)
    assert all(layer._waiting.get() is None for _, _, layer in adapted_sites(model))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("model_type", ["gemma2", "bert", "bloom", "granite"])
def test_gradient_checkpointing_recomputes_the_same(model_type, reentrant):
    model = adapted(model_type).train()

    def gradients():
        model.zero_grad()
        model(input_ids=IDS, use_cache=False).logits.square().mean().backward()
        assert all(layer._waiting.get() is None for _, _, layer in adapted_sites(model))
        return [p.grad.clone() for p in model.parameters() if p.requires_grad]

    plain = gradients()
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    for checkpointed, expected in zip(gradients(), plain, strict=True):
        torch.testing.assert_close(checkpointed, expected, rtol=0, atol=1e-10)


def test_a_skip_in_the_wrong_place_is_seen_by_the_numerical_check():
    """The check that the sweep rests on fails where the skip lands before the norm after attention."""
    model = adapted(pre_projection=True)
    for name, attention, layer in adapted_sites(model):
        block = model.get_base_model().get_submodule(name.rpartition(".")[0])
        block.post_attention_layernorm._forward_hooks.clear()
        attention.register_forward_hook(layer._end_branch)
    with pytest.raises(AssertionError, match="planted skip"):
        check_blocks(model)


def test_layers_of_the_naive_oracle_are_still_found():
    assert [site.kind for site in preproj.sites(tiny_model("gpt2"))] == ["plain", "plain"]
