"""Methods: what trains, how much, and LoRA's rank."""

import pytest
import torch
from naive import tiny_model
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from preproj.analysis import analyze
from preproj.probe.errors import RecipeError
from preproj.probe.methods import attach, reference_budget

PYTHIA_410M = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "vocab_size": 50_304,
}


def meta(model_type: str, **sizes: int):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes))


def test_none_trains_nothing():
    attached = attach(tiny_model("llama"), "none", 0)
    assert attached.trainable_parameters == 0
    assert attached.adapter is None
    assert not any(p.requires_grad for p in attached.model.parameters())


@pytest.mark.parametrize(
    ("method", "per_layer"),
    [("pre", 2.5 * 32 * 32), ("skip", 32 * 32), ("pre+skip", 3.5 * 32 * 32)],
)
def test_new_weights_are_those_of_the_equations(method, per_layer):
    attached = attach(tiny_model("llama"), method, 0)
    assert attached.trainable_parameters == 2 * per_layer
    assert attached.total_parameters == 2 * per_layer + sum(p.numel() for p in tiny_model("llama").parameters())


def test_only_ablations_carry_a_size_mark():
    assert attach(tiny_model("llama"), "pre", 0).notes == [
        "pre: an ablation at its natural size, 71% of pre+skip's parameters."
    ]
    assert attach(tiny_model("llama"), "skip", 0).notes == [
        "skip: an ablation at its natural size, 29% of pre+skip's parameters."
    ]
    assert attach(tiny_model("llama"), "pre+skip", 0).notes == []


def test_lora_rank_is_the_nearest_to_the_budget():
    base = meta("gpt_neox", **PYTHIA_410M)
    assert reference_budget(base) == 88_080_384
    # All linear layers of a block, in + out: qkv 1024 + 3072, dense 2048, up 1024 + 4096, down 4096 + 1024.
    per_rank = 24 * (4096 + 2048 + 5120 + 5120)
    attached = attach(base, "lora", 0)
    assert attached.adapter["rank"] == round(88_080_384 / per_rank) == 224
    assert attached.trainable_parameters == 224 * per_rank
    assert attached.notes == []


def test_lora_qkv_reproduces_the_papers_size():
    # The paper's LoRA has 94.4 M parameters at 410M: rank 960 on query_key_value alone.
    attached = attach(meta("gpt_neox", **PYTHIA_410M), "lora-qkv", 0)
    per_rank = 24 * (1024 + 3072)
    assert 960 * per_rank == 94_371_840
    assert attached.adapter["target_modules"] == ["query_key_value"]
    assert attached.trainable_parameters == attached.adapter["rank"] * per_rank
    assert attached.adapter["rank"] == round(88_080_384 / per_rank) == 896
    # 896 · 4096 is more than the dense 1024 · 3072.
    assert len(attached.notes) == 1
    assert (
        "LoRA at rank 896 has more parameters than the dense matrix it changes in query_key_value" in attached.notes[0]
    )


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox"])
def test_lora_beside_the_pre_projection_gets_the_skips_budget(name):
    pair = attach(tiny_model(name), "pre+lora", 0)
    lora = {n: p.numel() for n, p in pair.model.named_parameters() if ".lora_" in n}
    per_rank = sum(lora.values()) / pair.adapter["beside"]["rank"]
    assert abs(sum(lora.values()) - 2 * 32 * 32) <= per_rank / 2  # the skip's; no rank comes closer
    assert pair.trainable_parameters == 2 * 2.5 * 32 * 32 + sum(lora.values())
    assert pair.total_parameters == sum(p.numel() for p in tiny_model(name).parameters()) + pair.trainable_parameters
    assert not any("over budget" in note for note in pair.notes)
    assert not any(".preproj." in n for n in lora)  # LoRA adapts the base, not our weights
    assert pair.adapter["type"] == "PREPROJ"
    assert pair.adapter["beside"]["type"] == "LORA"


def test_all_three_have_the_lora_of_pre_and_lora_and_say_that_they_are_over_budget():
    pair, all_three = (attach(tiny_model("llama"), method, 0) for method in ("pre+lora", "pre+skip+lora"))
    assert all_three.adapter["beside"] == pair.adapter["beside"]
    assert all_three.trainable_parameters == pair.trainable_parameters + 2 * 32 * 32
    share = all_three.trainable_parameters / (2 * 3.5 * 32 * 32)
    assert f"pre+skip+lora: over budget, {share:.0%} of pre+skip's parameters." in all_three.notes


def test_both_adapters_of_a_pair_act_and_have_gradients():
    attached = attach(tiny_model("llama"), "pre+skip+lora", 0)
    ids = torch.arange(9)[None]
    with torch.no_grad():
        for name, weight in attached.model.named_parameters():
            if ".lora_B." in name or ".down." in name:
                weight.normal_(std=0.1)
    attached.model(ids, labels=ids).loss.backward()
    gradients = {n: p.grad for n, p in attached.model.named_parameters() if p.requires_grad}
    assert {n.rsplit(".", 3)[1] for n in gradients} == {"up", "down", "skip", "lora_A", "lora_B"}
    assert all(g is not None and g.abs().max() > 0 for g in gradients.values())
    assert len(analyze(attached.adapters[0], [ids[0].tolist()]).layers) == 2


@pytest.mark.parametrize(
    "method", ["pre+skip", "lora", "dora", "rslora", "pre+lora", "pre+skip+lora", "pre+skip-r4+dora-r2"]
)
def test_what_is_saved_loads_again_alone_and_together(method, tmp_path):
    attached = attach(tiny_model("llama"), method, 0)
    ids = torch.arange(9)[None]
    with torch.no_grad():
        for weight in (p for p in attached.model.parameters() if p.requires_grad):
            weight.normal_(std=0.1, generator=torch.Generator().manual_seed(weight.numel()))
    expected = attached.model(ids).logits
    attached.save(tmp_path)
    files = [load_file(path) for path in sorted(tmp_path.rglob("*.safetensors"))]
    assert sum(weight.numel() for file in files for weight in file.values()) == attached.trainable_parameters
    assert len({".preproj." in key for key in files[0]}) == 1  # each file holds its own adapter only
    again = attach(tiny_model("llama"), method, 1)
    assert not torch.equal(again.model(ids).logits, expected)
    again.load(tmp_path)
    assert torch.equal(again.model(ids).logits, expected)
    assert sum(p.numel() for p in again.model.parameters() if p.requires_grad) == again.trainable_parameters
    by_hand = PeftModel.from_pretrained(tiny_model("llama"), tmp_path)
    if len(attached.adapters) == 2:
        beside = tmp_path / "beside"
        by_hand = PeftModel.from_pretrained(by_hand.get_base_model(), beside, adapter_name="beside")
        alone = PeftModel.from_pretrained(tiny_model("llama"), beside)
        assert not any(".preproj." in n for n, _ in alone.named_parameters())
    assert torch.equal(by_hand(ids).logits, expected)


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("llama", ["k_proj", "q_proj", "v_proj"]),
        ("phi", ["k_proj", "q_proj", "v_proj"]),
        ("gpt2", ["c_attn"]),
        ("gpt_neox", ["query_key_value"]),
    ],
)
def test_lora_qkv_targets_the_input_projections_alone(name, targets):
    attached = attach(tiny_model(name), "lora-qkv", 0)
    assert attached.adapter["target_modules"] == targets
    adapted = {n.rsplit(".", 1)[-1] for n, m in attached.model.named_modules() if hasattr(m, "lora_A")}
    assert adapted == set(targets)


def test_lora_leaves_the_output_head_alone_and_scales_by_one():
    attached = attach(tiny_model("llama"), "lora", 0)
    adapted = {n.rsplit(".", 1)[-1]: m for n, m in attached.model.named_modules() if hasattr(m, "lora_A")}
    assert set(adapted) == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert adapted["q_proj"].scaling == {"default": 1.0}


@pytest.mark.parametrize("method", ["pre+skip", "lora"])
def test_start_weights_follow_the_seed(method):
    def start(seed: int) -> torch.Tensor:
        torch.manual_seed(99)
        model = attach(tiny_model("llama"), method, seed).model
        return torch.cat([p.flatten() for p in model.parameters() if p.requires_grad])

    assert torch.equal(start(0), start(0))
    assert not torch.equal(start(0), start(1))


KEPT = {"pre+skip": "adapter_model.safetensors", "dora": "adapter_model.safetensors", "full": "weights.safetensors"}


@pytest.mark.parametrize(("method", "name"), KEPT.items())
def test_trained_weights_are_loaded_whole_or_not_at_all(method, name, tmp_path):
    trained = attach(tiny_model("llama"), method, 1)
    shift_trained_weights(trained.model)
    folder = tmp_path / "cell" / "adapter"
    trained.save(folder)
    again = attach(tiny_model("llama"), method, 0)
    again.load(folder)
    for key, weight in trained.model.named_parameters():
        assert torch.equal(again.model.get_parameter(key), weight), key

    file = folder / name
    whole = load_file(file)
    key = sorted(whole)[0]
    save_file({k: v for k, v in whole.items() if k != key}, file)
    with pytest.raises(RecipeError, match=r"not this method's adapter: it lacks .*Remove .*cell and repeat"):
        again.load(folder)
    save_file(whole | {f"{key}.more": whole[key].clone()}, file)
    with pytest.raises(RecipeError, match=r"it has besides .*\.more"):
        again.load(folder)
    save_file(whole | {key: whole[key][:1].clone()}, file)
    with pytest.raises(RecipeError, match="cannot be loaded: size mismatch for"):
        again.load(folder)
    file.write_bytes(b"half")
    with pytest.raises(RecipeError, match="cannot be loaded"):
        again.load(folder)
    file.unlink()
    with pytest.raises(RecipeError, match="cannot be loaded"):
        again.load(folder)


def shift_trained_weights(model) -> None:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in (p for p in model.parameters() if p.requires_grad):
            weight.add_(0.1 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype))


LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def test_lora_of_the_papers_rank_has_the_papers_size():
    attached = attach(meta("gpt_neox", **PYTHIA_410M), "lora-qkv-r960", 0)
    assert attached.trainable_parameters == 94_371_840
    assert attached.adapter == {"type": "LORA", "target_modules": ["query_key_value"], "rank": 960}
    assert "lora-qkv-r960: over budget, 107% of pre+skip's parameters." in attached.notes
    assert any("LoRA at rank 960 has more parameters than the dense" in note for note in attached.notes)


def test_a_named_rank_is_the_rank_with_its_size_and_alpha():
    # A block of the tiny Llama, in + out of each layer.
    base = tiny_model("llama")
    outs_and_ins = [sum(base.get_submodule(n).weight.shape) for n, m in base.named_modules() if n.endswith(LINEARS)]
    for method in ("lora-r3", "rslora-r3"):
        attached = attach(tiny_model("llama"), method, 0)
        assert attached.trainable_parameters == 3 * sum(outs_and_ins)
        assert attached.model.peft_config["default"].lora_alpha == 3
        assert attached.notes == [f"{method}: {attached.trainable_parameters / 7168:.0%} of pre+skip's parameters."]
    skip = attach(tiny_model("llama"), "pre+skip-r3", 0)
    assert skip.trainable_parameters == 2 * (2.5 * 32 * 32 + 2 * 3 * 32)
    assert skip.adapter["skip_rank"] == 3
    pair = attach(tiny_model("llama"), "pre+skip+lora-r3", 0)
    assert pair.trainable_parameters == 7168 + 3 * sum(outs_and_ins)


def test_a_skip_with_factors_larger_than_itself_is_marked():
    note = "The skip at rank 17 has more parameters than a dense one: its low-rank form restricts nothing."
    assert note in attach(tiny_model("llama"), "skip-r17", 0).notes  # 2 · 17 · 32 > 32 · 32
    assert not any("restricts" in text for text in attach(tiny_model("llama"), "skip-r16", 0).notes)


def test_dora_counts_its_magnitudes_in_the_budget():
    attached = attach(meta("gpt_neox", **PYTHIA_410M), "dora", 0)
    # As for LoRA, and one magnitude for each output: qkv 3072, dense 1024, up 4096, down 1024.
    per_rank, magnitudes = 24 * (4096 + 2048 + 5120 + 5120), 24 * (3072 + 1024 + 4096 + 1024)
    rank = round((88_080_384 - magnitudes) / per_rank)
    assert attached.adapter["rank"] == rank == 223
    assert attached.trainable_parameters == rank * per_rank + magnitudes


@pytest.mark.parametrize(("method", "scaling"), [("lora", 1.0), ("dora", 1.0), ("rslora", 4.0)])
def test_peers_are_those_of_peft(method, scaling):
    attached = attach(tiny_model("llama"), f"{method}-r16", 0)
    config = attached.model.peft_config["default"]
    assert isinstance(config, LoraConfig)
    assert (config.use_dora, config.use_rslora) == (method == "dora", method == "rslora")
    adapted = {n.rsplit(".", 1)[-1]: m for n, m in attached.model.named_modules() if hasattr(m, "lora_A")}
    assert set(adapted) == set(LINEARS)
    # rsLoRA divides alpha = r by the square root of r, LoRA by r.
    assert {module.scaling["default"] for module in adapted.values()} == {scaling}
    magnitudes = [n for n, p in attached.model.named_parameters() if "lora_magnitude_vector" in n and p.requires_grad]
    assert len(magnitudes) == (2 * len(LINEARS) if method == "dora" else 0)
    ids = torch.arange(9)[None]
    expected = tiny_model("llama")(ids).logits
    assert torch.allclose(attached.model(ids).logits, expected, atol=1e-9)  # a fresh one changes nothing


@pytest.mark.parametrize(
    ("method", "budget"),
    [("skip+lora", 2.5 * 32 * 32), ("pre+skip-r4+lora", 32 * 32 - 2 * 4 * 32), ("pre+skip+rslora", 32 * 32)],
)
def test_a_peer_beside_ours_has_what_is_left_of_the_budget(method, budget):
    attached = attach(tiny_model("llama"), method, 0)
    lora = sum(p.numel() for n, p in attached.model.named_parameters() if ".lora_" in n)
    assert abs(lora - 2 * budget) <= lora / attached.adapter["beside"]["rank"] / 2  # no rank comes closer


@pytest.mark.parametrize(
    ("name", "per_layer"),
    [
        ("gpt_neox", 3 * 32 * 32),
        ("gpt2", 3 * 32 * 32),
        ("phi", 32 * 32 + 2 * 32 * 16),  # two of four heads for keys and values
        ("llama", 32 * 32 + 2 * 32 * 16),
    ],
)
def test_dense_qkv_trains_the_matrices_of_attention_and_nothing_else(name, per_layer):
    attached = attach(tiny_model(name), "dense-qkv", 0)
    trained = {n for n, p in attached.model.named_parameters() if p.requires_grad}
    assert {n.rsplit(".", 2)[1] for n in trained} <= {"q_proj", "k_proj", "v_proj", "c_attn", "query_key_value"}
    assert all(n.endswith(".weight") for n in trained)
    assert attached.trainable_parameters == 2 * per_layer
    assert attached.total_parameters == sum(p.numel() for p in tiny_model(name).parameters())
    share = attached.trainable_parameters / 7168
    assert attached.notes == [f"dense-qkv: {share:.0%} of pre+skip's parameters."]
    assert attached.adapter is None


def test_full_trains_every_weight():
    attached = attach(tiny_model("gpt2"), "full", 0)
    total = sum(p.numel() for p in tiny_model("gpt2").parameters())
    assert attached.trainable_parameters == attached.total_parameters == total
    assert all(p.requires_grad for p in attached.model.parameters())
    assert attached.notes == [f"full: over budget, {total / 7168:.0%} of pre+skip's parameters."]


@pytest.mark.parametrize("method", ["dense-qkv", "lora-qkv", "lora-qkv-r4"])
def test_input_projections_of_unknown_names_are_refused(method):
    # CTRL's are called Wq, Wk and Wv.
    base = meta("ctrl", n_embd=16, dff=16, n_layer=1, n_head=2, vocab_size=64)
    with pytest.raises(ValueError, match="attention's input projections: preproj does not know their names in this"):
        attach(base, method, 0)


@pytest.mark.parametrize("method", ["dense-qkv", "full"])
@pytest.mark.parametrize("tied", [True, False])
def test_trained_weights_of_the_base_are_one_plain_file(method, tied, tmp_path):
    ids = torch.arange(9)[None]
    attached = attach(tiny_model("llama", tie_word_embeddings=tied), method, 0)
    shift_trained_weights(attached.model)
    expected = attached.model(ids).logits
    attached.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["weights.safetensors"]
    weights = load_file(tmp_path / "weights.safetensors")
    assert sum(weight.numel() for weight in weights.values()) == attached.trainable_parameters
    again = attach(tiny_model("llama", tie_word_embeddings=tied), method, 0)
    assert not torch.equal(again.model(ids).logits, expected)
    again.load(tmp_path)
    assert torch.equal(again.model(ids).logits, expected)
    by_hand = tiny_model("llama", tie_word_embeddings=tied)
    by_hand.load_state_dict(weights, strict=False)  # as docs/run-folder.md says
    assert torch.equal(by_hand(ids).logits, expected)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox"])
def test_match_widens_pre_to_the_budget_and_says_so(name):
    attached = attach(tiny_model(name), "pre", 0, match=True)
    assert attached.trainable_parameters == 2 * 3.5 * 32 * 32
    assert attached.adapter["expansion"] == 1.75
    assert attached.notes == ["pre: widened to an expansion of 1.75, 100% of pre+skip's parameters."]


def test_match_widens_pre_of_an_odd_width_to_the_budget():
    # 90 · 1.25 is rounded to 112.
    base = meta(
        "llama", hidden_size=90, num_hidden_layers=2, num_attention_heads=3, intermediate_size=90, vocab_size=64
    )
    budget = 2 * (2 * 112 * 90 + 90 * 90)
    assert reference_budget(base) == budget
    assert attach(base, "pre", 0, match=True).trainable_parameters == pytest.approx(budget, rel=0.02)


@pytest.mark.parametrize("method", ["skip", "pre+skip", "pre+lora", "lora", "full"])
def test_match_leaves_every_other_method_as_it_is(method):
    plain, matched = (attach(tiny_model("llama"), method, 0, match) for match in (False, True))
    assert matched.trainable_parameters == plain.trainable_parameters
    assert matched.notes == plain.notes
    assert matched.adapter == plain.adapter
