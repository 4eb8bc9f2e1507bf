"""Methods: what trains, how much, and LoRA's rank."""

import pytest
import torch
from naive import tiny_model
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from preproj.analysis.measures import measure_layers
from preproj.probe.errors import RecipeError
from preproj.probe.methods import attach, load_trained, reference_budget

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
    assert len(measure_layers(attached.adapters[0], [ids[0].tolist()])) == 2


@pytest.mark.parametrize("method", ["pre+skip", "lora", "pre+lora", "pre+skip+lora"])
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
    if "+lora" in method:
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


@pytest.mark.parametrize("method", ["pre+skip", "lora"])
def test_a_trained_adapter_is_loaded_whole_or_not_at_all(method, tmp_path):
    trained = attach(tiny_model("llama"), method, 1).model
    folder = tmp_path / "cell" / "adapter"
    trained.save_pretrained(folder)
    model = attach(tiny_model("llama"), method, 0).model
    load_trained(model, folder)
    for name, weight in trained.named_parameters():
        assert torch.equal(model.get_parameter(name), weight), name

    file = folder / "adapter_model.safetensors"
    whole = load_file(file)
    key = sorted(whole)[0]
    save_file({k: v for k, v in whole.items() if k != key}, file)
    with pytest.raises(RecipeError, match=r"not this method's adapter: it lacks .*Remove .*cell and repeat"):
        load_trained(model, folder)
    save_file(whole | {f"{key}.more": whole[key].clone()}, file)
    with pytest.raises(RecipeError, match=r"it has besides .*\.more"):
        load_trained(model, folder)
    save_file(whole | {key: whole[key][:1].clone()}, file)
    with pytest.raises(RecipeError, match="cannot be loaded: size mismatch for"):
        load_trained(model, folder)
    file.write_bytes(b"half")
    with pytest.raises(RecipeError, match="cannot be loaded"):
        load_trained(model, folder)
