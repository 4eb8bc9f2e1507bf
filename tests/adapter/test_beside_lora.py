"""LoRA beside us on one base: two PEFT models that train, save, load, switch and unload each by itself."""

import warnings

import peft
import pytest
import torch
from checks import TEXT, check_checkpointing, check_generation
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from tiny import tiny_of
from transformers import Trainer, TrainingArguments

from preproj import PreProjConfig
from preproj.adapter.layer import adapted_sites

IDS = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(0))
ARCHITECTURES = ["llama", "gpt_neox", "bert"]
TARGETS = {
    "llama": {
        "inside attention": ["q_proj", "k_proj", "v_proj", "o_proj"],
        "outside": ["gate_proj", "up_proj", "down_proj"],
        "embedding": ["embed_tokens", "lm_head"],
    },
    "gpt_neox": {
        "inside attention": ["query_key_value", "attention.dense"],
        "outside": ["dense_h_to_4h", "dense_4h_to_h"],
        "embedding": ["embed_in", "embed_out"],
    },
    "bert": {
        "inside attention": ["query", "key", "value", "attention.output.dense"],
        "outside": ["intermediate.dense", "cls.predictions.transform.dense"],
        "embedding": ["word_embeddings", "cls.predictions.decoder"],
    },
}
PLACES = ["inside attention", "outside", "all-linear", "embedding"]

orders = pytest.mark.parametrize("ours_first", [True, False], ids=["ours-first", "lora-first"])
architectures = pytest.mark.parametrize("model_type", ARCHITECTURES)
places = pytest.mark.parametrize("place", PLACES)


def ours_on(base, **options):
    name = options.pop("adapter_name", "default")
    return get_peft_model(base, PreProjConfig(init_weights=False, **options), adapter_name=name).eval()


def lora_on(base, place, **options):
    name = options.pop("adapter_name", "default")
    targets = TARGETS[base.config.model_type].get(place, place) if isinstance(place, str) else place
    config = LoraConfig(target_modules=targets, init_lora_weights=False, **options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return get_peft_model(base, config, adapter_name=name).eval()


def pair(model_type, ours_first, place="all-linear", **lora):
    """Both around one base, each with random weights and each under the name "default"."""
    base = tiny_of(model_type, tie_word_embeddings=False)
    if ours_first:
        ours = ours_on(base)
        return ours, lora_on(ours.get_base_model(), place, **lora)
    lora = lora_on(base, place, **lora)
    return ours_on(lora.get_base_model()), lora


def base_of(model_type):
    return tiny_of(model_type, tie_word_embeddings=False)


@torch.no_grad()
def logits(model):
    return model(input_ids=IDS).logits


def save_both(ours, lora, folder):
    """As docs/beside-lora.md does."""
    ours.save_pretrained(folder / "preproj")
    without_ours = {key: weight for key, weight in lora.state_dict().items() if ".preproj." not in key}
    lora.save_pretrained(folder / "lora", state_dict=without_ours)
    return folder / "preproj", folder / "lora"


@architectures
@places
@orders
def test_both_act_and_lora_merges_into_the_base_below_us(model_type, place, ours_first):
    merged = lora_on(base_of(model_type), place).merge_and_unload()
    alone = logits(merged)
    expected = logits(ours_on(merged))
    ours, lora = pair(model_type, ours_first, place)
    assert (expected - alone).abs().max() > 1e-3
    for model in (ours, lora, ours.get_base_model()):
        torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-6)  # a host's norm computes in float32
    lora.merge_and_unload()
    torch.testing.assert_close(logits(ours), expected, rtol=0, atol=1e-6)
    with ours.disable_adapter():
        torch.testing.assert_close(logits(ours), alone, rtol=0, atol=1e-6)


@architectures
@orders
def test_dora_beside_us_merges(model_type, ours_first):
    expected = logits(ours_on(lora_on(base_of(model_type), "all-linear", use_dora=True).merge_and_unload()))
    ours, lora = pair(model_type, ours_first, use_dora=True)
    torch.testing.assert_close(logits(ours), expected, rtol=0, atol=1e-6)
    lora.merge_and_unload()
    torch.testing.assert_close(logits(ours), expected, rtol=0, atol=1e-6)


@architectures
@places
@orders
def test_both_train_and_nothing_else(model_type, place, ours_first):
    ours, lora = pair(model_type, ours_first, place)
    if ours_first:
        ours.set_adapter("default")  # PEFT 0.18 freezes the first of two methods when the second comes
    model = (lora if ours_first else ours).train()
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    optimizer = torch.optim.AdamW([w for w in model.parameters() if w.requires_grad], lr=1e-3)
    model(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()
    moved = {name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])}
    assert moved == {name for name in before if ".preproj." in name or "lora_" in name}
    assert sum(".preproj." in name for name in moved) == 3 * len(adapted_sites(model))
    assert sum("lora_" in name for name in moved) == 2 * sum(isinstance(m, LoraLayer) for m in model.modules())


def test_lora_on_all_linear_layers_leaves_ours_alone():
    _, lora = pair("llama", ours_first=True)
    layers = {name for name, module in lora.named_modules() if isinstance(module, LoraLayer)}
    assert len(layers) == 14  # seven in each of two blocks
    assert not any("preproj" in name for name in layers)
    ours_on(other := base_of("llama"))
    lora_on(other, ["up", "down", "skip", "q_proj"])  # endings of our own layers' names
    assert not any("preproj" in name for name, module in other.named_modules() if isinstance(module, LoraLayer))


def test_a_pattern_that_takes_our_layer_for_a_target_is_refused():
    ours = ours_on(base_of("llama"))
    with pytest.raises(ValueError, match="Target module PreProjLayer"):
        get_peft_model(ours.get_base_model(), LoraConfig(target_modules=".*proj"))
    ours = ours_on(base_of("llama"))
    lora = get_peft_model(ours.get_base_model(), LoraConfig(target_modules=".*proj", exclude_modules=".*preproj"))
    assert sum(isinstance(module, LoraLayer) for module in lora.modules()) == 14


@architectures
@places
@orders
def test_each_saves_alone_and_loads_alone_and_both_load_as_a_pair(model_type, place, ours_first, tmp_path):
    ours, lora = pair(model_type, ours_first, place)
    both = logits(ours)
    with ours.disable_adapter():
        lora_alone = logits(ours)
    folder_ours, folder_lora = save_both(ours, lora, tmp_path)
    assert all(".preproj." in key for key in load_file(folder_ours / "adapter_model.safetensors"))
    assert not any("preproj" in key for key in load_file(folder_lora / "adapter_model.safetensors"))
    lora.unload()
    ours_alone = logits(ours)
    assert len({tensor.sum().item() for tensor in (both, lora_alone, ours_alone)}) == 3

    assert torch.equal(logits(PeftModel.from_pretrained(base_of(model_type), folder_ours)), ours_alone)
    assert torch.equal(logits(PeftModel.from_pretrained(base_of(model_type), folder_lora)), lora_alone)
    for folders in ((folder_ours, folder_lora), (folder_lora, folder_ours)):
        base = base_of(model_type)
        for folder in folders:
            loaded = PeftModel.from_pretrained(base, folder)
        assert torch.equal(logits(loaded), both)


@orders
def test_a_plain_save_of_lora_is_harmless_where_ours_loads_last(ours_first, tmp_path):
    """PEFT 0.21 writes the weights of every method on the base into the file of each."""
    ours, lora = pair("llama", ours_first)
    both = logits(ours)
    ours.save_pretrained(tmp_path / "preproj")
    lora.save_pretrained(tmp_path / "lora")
    ours.unload()
    lora_alone = logits(lora)
    loaded = PeftModel.from_pretrained(base_of("llama"), tmp_path / "lora")
    assert torch.equal(logits(loaded), lora_alone)
    assert torch.equal(logits(PeftModel.from_pretrained(loaded.get_base_model(), tmp_path / "preproj")), both)


def test_both_go_on_training_after_loading(tmp_path):
    ours, lora = pair("llama", ours_first=False)
    folder_ours, folder_lora = save_both(ours, lora, tmp_path)
    lora = PeftModel.from_pretrained(base_of("llama"), folder_lora, is_trainable=True)
    ours = PeftModel.from_pretrained(lora.get_base_model(), folder_ours, is_trainable=True)
    trained = {name for name, weight in ours.named_parameters() if weight.requires_grad}
    assert trained == {name for name, _ in ours.named_parameters() if ".preproj." in name or "lora_" in name}


@architectures
@orders
def test_each_switches_off_alone(model_type, ours_first):
    ours, lora = pair(model_type, ours_first)
    both = logits(ours)
    lora_alone = logits(lora_on(base_of(model_type), "all-linear"))
    ours_alone = logits(ours_on(base_of(model_type)))
    plain = logits(base_of(model_type))
    trained = [name for name, weight in lora.named_parameters() if weight.requires_grad]
    with ours.disable_adapter():
        assert torch.equal(logits(lora), lora_alone)
    assert torch.equal(logits(lora), both)
    with lora.disable_adapter():
        assert torch.equal(logits(lora), plain)  # the host's switch turns every method off
        ours.enable_adapter_layers()
        assert torch.equal(logits(lora), ours_alone)
    assert torch.equal(logits(lora), both)
    lora.base_model.set_adapter([])
    assert torch.equal(logits(ours), ours_alone)
    lora.base_model.set_adapter("default")
    assert torch.equal(logits(ours), both)
    ours.set_adapter("default")
    assert {*trained} <= {name for name, weight in lora.named_parameters() if weight.requires_grad}


@architectures
@orders
def test_each_unloads_alone_and_can_come_back(model_type, ours_first):
    ours, lora = pair(model_type, ours_first)
    both = logits(ours)
    base = ours.unload()
    assert torch.equal(logits(base), logits(lora_on(base_of(model_type), "all-linear")))
    assert isinstance(base.peft_config["default"], LoraConfig)
    assert torch.equal(logits(ours_on(base)), both)

    ours, lora = pair(model_type, ours_first)
    base = lora.unload()
    assert torch.equal(logits(ours), logits(ours_on(base_of(model_type))))
    assert isinstance(ours.peft_config["default"], PreProjConfig)
    assert torch.equal(logits(lora_on(base, "all-linear")), both)


@orders
def test_one_warning_of_pefts_is_shown(ours_first):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pair("llama", ours_first)
    shown = [str(w.message) for w in caught if w.category is UserWarning]
    assert len(shown) == 1
    assert shown[0].startswith("You are trying to modify a model with PEFT for a second time.")


@orders
def test_generation_and_checkpointing_as_with_one_method(ours_first):
    ours, lora = pair("llama", ours_first)
    ours.set_adapter("default")
    assert torch.equal(ours.generate(input_ids=IDS, max_length=14), lora.generate(input_ids=IDS, max_length=14))
    check_checkpointing(ours, TEXT, lambda model: [w for w in model.parameters() if w.requires_grad])
    check_generation(ours.float())  # in float64 the host alone differs with left padding


@orders
def test_the_trainer_trains_both_and_saves_the_one_it_is_given(ours_first, tmp_path):
    ours, _ = pair("llama", ours_first)
    ours.set_adapter("default")
    before = {name: weight.clone() for name, weight in ours.named_parameters() if weight.requires_grad}
    arguments = TrainingArguments(tmp_path, max_steps=1, learning_rate=1e-3, report_to=[], use_cpu=True)
    Trainer(ours, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in IDS]).train()
    assert len(before) == 34
    assert all(not torch.equal(weight, before[name]) for name, weight in ours.named_parameters() if name in before)
    saved = load_file(tmp_path / "checkpoint-1" / "adapter_model.safetensors")
    assert len(saved) == 6
    assert all(".preproj." in key for key in saved)


@pytest.mark.parametrize("owner", ["ours", "lora"])
@orders
def test_a_module_that_one_of_both_trains_whole(owner, ours_first, tmp_path):
    head = {"modules_to_save": ["lm_head"]}

    def ours_of(base):
        return ours_on(base, adapter_name="ours", **(head if owner == "ours" else {}))

    def lora_of(base):
        return lora_on(base, "inside attention", adapter_name="lora", **(head if owner == "lora" else {}))

    base = base_of("llama")
    ours, lora = (ours_of(base), lora_of(base)) if ours_first else (lora_of(base), ours_of(base))[::-1]
    if owner == "ours":
        ours.set_adapter("ours")  # where LoRA came second, it switched our head off
    assert base.lm_head.active_adapters == [owner]
    with torch.no_grad():
        base.lm_head.modules_to_save[owner].weight.mul_(2)
    both = logits(ours)

    with lora.disable_adapter():
        ours.enable_adapter_layers()
        torch.testing.assert_close(
            logits(ours), logits(ours_on(base_of("llama"))) * (2 if owner == "ours" else 1), rtol=0, atol=1e-12
        )
    with ours.disable_adapter():
        torch.testing.assert_close(
            logits(ours),
            logits(lora_on(base_of("llama"), "inside attention")) * (2 if owner == "lora" else 1),
            rtol=0,
            atol=1e-12,
        )
    assert torch.equal(logits(ours), both)

    folder_ours, folder_lora = save_both(ours, lora, tmp_path)
    fresh = base_of("llama")
    PeftModel.from_pretrained(fresh, folder_lora / "lora", adapter_name="lora")
    loaded = PeftModel.from_pretrained(fresh, folder_ours / "ours", adapter_name="ours")
    assert torch.equal(logits(loaded), both)
    assert torch.equal(fresh.lm_head.original_module.weight, base_of("llama").lm_head.weight)


CAUSAL = {"task_type": TaskType.CAUSAL_LM}
TWO = {"target_modules": ["q_proj", "down_proj"]}
OTHERS = {
    "ia3": lambda: peft.IA3Config(
        target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], init_ia3_weights=False
    ),
    "loha": lambda: peft.LoHaConfig(**TWO, init_weights=False),
    "lokr": lambda: peft.LoKrConfig(**TWO, init_weights=False),
    "adalora": lambda: peft.AdaLoraConfig(**TWO, total_step=10, init_lora_weights=False),
    "oft": lambda: peft.OFTConfig(**TWO, r=0, oft_block_size=8, init_weights=False),
    "vera": lambda: peft.VeraConfig(target_modules=["q_proj"], init_weights=False),
    "hra": lambda: peft.HRAConfig(**TWO, init_weights=False),
    "ln tuning": lambda: peft.LNTuningConfig(target_modules=["input_layernorm"]),
    "trainable tokens": lambda: peft.TrainableTokensConfig(token_indices=[3, 4], init_weights=False),
    "prompt tuning": lambda: peft.PromptTuningConfig(num_virtual_tokens=3, **CAUSAL),
    "p-tuning": lambda: peft.PromptEncoderConfig(num_virtual_tokens=3, encoder_hidden_size=16, **CAUSAL),
    "prefix tuning": lambda: peft.PrefixTuningConfig(num_virtual_tokens=3, **CAUSAL),
}


@pytest.mark.parametrize("name", OTHERS)
@orders
def test_other_methods_beside_us(name, ours_first):
    def other_on(base):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            return get_peft_model(base, OTHERS[name]()).eval()

    base = tiny_of("llama", dtype=torch.float32)
    if ours_first:
        ours = ours_on(base)
        other = other_on(base)
        ours.set_adapter("default")
    else:
        other = other_on(base)
        ours = ours_on(base)
    alone = logits(other_on(tiny_of("llama", dtype=torch.float32)))
    both = logits(other)
    assert (both - alone).abs().max() > 1e-3
    other.train()(input_ids=IDS).logits.pow(2).mean().backward()
    trained = {n: w for n, w in other.named_parameters() if w.requires_grad}
    assert sum(".preproj." in n for n in trained) == 6
    assert len(trained) > 6
    assert all(torch.count_nonzero(w.grad) for w in trained.values())
    other.eval()
    with ours.disable_adapter():
        assert torch.equal(logits(other), alone)
    ours.unload()
    assert torch.equal(logits(other), alone)


def test_adaption_prompts_stand_around_attention_and_are_refused_below_us():
    config = peft.AdaptionPromptConfig(adapter_len=3, adapter_layers=2, **CAUSAL)
    base = get_peft_model(tiny_of("llama"), config).get_base_model()
    with pytest.raises(ValueError, match=r"cannot place the content skip at 'model\.layers\.0\.self_attn\.model'"):
        get_peft_model(base, PreProjConfig())


def test_one_peft_model_holds_one_method():
    with pytest.raises(ValueError, match="'PREPROJ' is not compatible with the `PeftMixedModel`"):
        get_peft_model(base_of("llama"), PreProjConfig(), mixed=True)
    with pytest.raises(ValueError, match="Cannot combine adapters with different peft types"):
        ours_on(base_of("llama")).add_adapter("lora", LoraConfig(target_modules=["q_proj"]))
