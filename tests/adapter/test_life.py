"""The adapter as a citizen of PEFT: configuration, targets, several adapters, unloading, registration."""

import copy
import json
import pickle
import subprocess
import sys

import pytest
import torch
from naive import tiny_model
from peft import PeftConfig, PeftType, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from preproj import PreProjConfig, PreProjModel
from preproj.adapter.layer import adapted_sites
from preproj.adapter.register import peft_type, register

IDS = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(0))
LOUD = {"skip_init_std": 0.5}


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_activation_is_used(activation):
    base = tiny_model("llama")
    model = get_peft_model(base, PreProjConfig(activation=activation, expansion=2, content_skip=False))
    _, attention, layer = adapted_sites(model)[0]
    torch.nn.init.normal_(layer.down["default"].weight)
    seen = []
    attention.register_forward_pre_hook(lambda m, a, k: seen.append(k["hidden_states"]), with_kwargs=True, prepend=True)
    attention.register_forward_pre_hook(lambda m, a, k: seen.append(k["hidden_states"]), with_kwargs=True)
    model(IDS)
    x_hat, x_tilde = seen
    inner = x_hat @ layer.up["default"].weight.T
    assert inner.shape[-1] == 64
    expected = {"gelu": lambda x: 0.5 * x * (1 + torch.erf(x / 2**0.5)), "relu": lambda x: x.clamp(min=0)}[activation]
    torch.testing.assert_close(x_tilde, x_hat + expected(inner) @ layer.down["default"].weight.T)


def other_architecture():
    """XLM calls its attention modules in a loop over the whole model: a layout that is not understood."""
    config = AutoConfig.for_model("xlm", emb_dim=32, n_layers=2, n_heads=4, n_words=64, max_position_embeddings=64)
    return AutoModelForCausalLM.from_config(config).double().eval()


def test_unknown_architecture_is_refused_with_the_candidates():
    with pytest.raises(
        ValueError,
        match=r"cannot place the content skip at 'transformer\.attentions\.0'.*"
        r"candidates: transformer\.attentions\.0 \(MultiHeadAttention\)",
    ):
        get_peft_model(other_architecture(), PreProjConfig())


def test_other_architecture_works_where_its_attention_is_named():
    base = other_architecture()
    before = base(IDS).logits
    with pytest.warns(UserWarning, match="layout of 'xlm' models is not verified"):
        model = get_peft_model(base, PreProjConfig(target_modules=r".*attentions\.\d", skip_init_std=0))
    assert torch.equal(model(IDS).logits, before)
    assert len(adapted_sites(model)) == 2
    sites = adapted_sites(model)
    with torch.no_grad():
        sites[0][2].skip["default"].weight.copy_(torch.eye(32))
    seen = {}
    sites[0][1].register_forward_pre_hook(lambda m, a: seen.update(x=a[0]))
    sites[0][1].register_forward_hook(lambda m, a, out: seen.update(before=out[0]), prepend=True)
    sites[0][1].register_forward_hook(lambda m, a, out: seen.update(after=out[0]))
    model(IDS)
    torch.testing.assert_close(seen["after"], seen["before"] + seen["x"])


@pytest.mark.parametrize(
    ("targets", "sentence"),
    [
        (["attn"], r"target_modules 'attn' match nothing in this model.*model\.layers\.\*\.self_attn"),
        (["q_proj"], r"'model\.layers\.0\.self_attn\.q_proj' \(Linear\), which is not an attention module"),
        (["input_layernorm"], "which is not an attention module"),
        (["mlp"], r"'model\.layers\.0\.mlp' \(LlamaMLP\), which is not an attention module"),
        ("all-linear", r"means every linear layer, but preproj acts on whole attention modules.*self_attn"),
        ("self_attn", r"'self_attn' match nothing.*One string is a regular expression.*give a list, \['self_attn'\]"),
        ([], r"target_modules is empty: leave it out to adapt every self-attention module"),
    ],
)
def test_wrong_targets_are_refused_and_leave_the_model_as_it_was(targets, sentence):
    base = tiny_model("llama")
    names, logits = [name for name, _ in base.named_modules()], base(IDS).logits
    with pytest.raises(ValueError, match=sentence):
        get_peft_model(base, PreProjConfig(target_modules=targets))
    assert [name for name, _ in base.named_modules()] == names
    assert torch.equal(base(IDS).logits, logits)


def test_a_regular_expression_picks_layers():
    model = get_peft_model(tiny_model("llama"), PreProjConfig(target_modules=r".*layers\.1\.self_attn"))
    assert [site for site, _, _ in adapted_sites(model)] == ["model.layers.1.self_attn"]


def test_keys_of_the_base_do_not_change():
    base = tiny_model("gpt_neox")
    before = set(base.state_dict())
    model = get_peft_model(base, PreProjConfig())
    after = set(model.get_base_model().state_dict())
    assert before < after
    assert all(".attention.preproj." in key for key in after - before)


def test_two_active_adapters_add_their_skips():
    base = tiny_model("llama")
    model = get_peft_model(base, PreProjConfig(init_seed=0, pre_projection=False, **LOUD), adapter_name="a")
    model.add_adapter("b", PreProjConfig(init_seed=1, pre_projection=False, **LOUD))
    model.base_model.set_adapter(["a", "b"])
    both = model(IDS).logits
    summed = get_peft_model(tiny_model("llama"), PreProjConfig(pre_projection=False))
    for (_, _, ours), (_, _, layer) in zip(adapted_sites(summed), adapted_sites(model), strict=True):
        ours.skip["default"].weight.data = layer.skip["a"].weight.data + layer.skip["b"].weight.data
    torch.testing.assert_close(both, summed(IDS).logits, rtol=0, atol=1e-5)


def test_deep_copy_is_independent():
    model = get_peft_model(tiny_model("llama"), PreProjConfig(**LOUD))
    logits = model(IDS).logits
    twin = copy.deepcopy(model)
    assert torch.equal(twin(IDS).logits, logits)
    for _, _, layer in adapted_sites(twin):
        torch.nn.init.zeros_(layer.skip["default"].weight)
    assert not torch.equal(twin(IDS).logits, logits)
    assert torch.equal(model(IDS).logits, logits)


def test_nothing_is_kept_from_one_forward_to_the_next():
    model = get_peft_model(tiny_model("gpt2"), PreProjConfig())
    model(IDS)
    assert all(layer._waiting.get() is None for _, _, layer in adapted_sites(model))


def test_gradient_checkpointing_gives_the_same_gradients():
    model = get_peft_model(tiny_model("llama"), PreProjConfig(**LOUD))
    for _, _, layer in adapted_sites(model):
        torch.nn.init.normal_(layer.down["default"].weight, std=0.2)

    def gradients():
        model.zero_grad()
        model.train()
        model(IDS, labels=IDS).loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.requires_grad]

    plain = gradients()
    model.get_base_model().gradient_checkpointing_enable({"use_reentrant": False})
    for checkpointed, expected in zip(gradients(), plain, strict=True):
        torch.testing.assert_close(checkpointed, expected, rtol=0, atol=1e-10)


def test_registration_is_idempotent_and_the_type_copies_pickles_and_serialises():
    kind = peft_type()
    register(PreProjConfig, PreProjModel)
    assert list(PeftType).count(kind) == 1
    assert PeftType("PREPROJ") is kind is PeftType.PREPROJ
    assert pickle.loads(pickle.dumps(kind)) is kind is copy.deepcopy(kind)
    assert json.loads(json.dumps({"type": kind})) == {"type": "PREPROJ"}
    config = PreProjConfig(init_seed=5)
    assert pickle.loads(pickle.dumps(config)) == config == copy.deepcopy(config)


def test_pickled_config_opens_in_a_fresh_process(tmp_path):
    (tmp_path / "config.pickle").write_bytes(pickle.dumps(PreProjConfig(init_seed=5)))
    code = "import pickle, sys; print(pickle.load(open(sys.argv[1], 'rb')).init_seed)"
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "config.pickle"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "5"


def test_config_is_found_by_peft(tmp_path):
    PreProjConfig(expansion=2.0).save_pretrained(tmp_path)
    assert PeftConfig.from_pretrained(tmp_path) == PreProjConfig(expansion=2.0)


def test_import_costs_little_more_than_peft():
    code = (
        "import sys, time, peft; known = set(sys.modules); before = time.perf_counter(); import preproj;"
        "print(time.perf_counter() - before);"
        "print(*sorted({name.split('.')[0] for name in set(sys.modules) - known}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, loaded = done.stdout.splitlines()
    assert float(seconds) < 0.5  # peft itself takes several seconds
    assert loaded == "preproj"
