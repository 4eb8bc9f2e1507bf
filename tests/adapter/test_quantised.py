"""Bases whose weights are quantised: bitsandbytes, torchao and GGUF, each with the kernels it has for the CPU.

bitsandbytes and torchao are no packages of the development environment, because everything that imports PEFT beside
them starts seconds later and prints warnings; `make slow` installs them in a folder of their own.
"""

import gguf
import pytest
import torch
from datasets import Dataset
from life import IDS, KINDS, draw, logits, new_weights
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from tiny import tiny_of
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig, Trainer, TrainingArguments

from preproj import PreProjConfig
from preproj.adapter.devices import compute_dtype
from preproj.adapter.layer import adapted_sites

pytestmark = pytest.mark.quantised

BNB8 = BitsAndBytesConfig(load_in_8bit=True)
BNB4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")


def torchao8():
    from torchao.quantization import Int8WeightOnlyConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


def torchao4():
    from torchao.quantization import IntxWeightOnlyConfig
    from torchao.quantization.granularity import PerGroup

    return TorchAoConfig(IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)))


METHODS = {"bnb8": lambda: BNB8, "bnb4": lambda: BNB4, "torchao8": torchao8, "torchao4": torchao4}
CASES = [
    *((kind, how) for kind in KINDS for how in ("bnb8", "bnb4")),
    ("llama", "gguf"),
    *((kind, how) for kind in KINDS for how in ("torchao8", "torchao4")),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("bases")


def quantised(folder, kind, how, dtype=torch.float32):
    """Builds the same tiny quantised base each time."""
    if not (folder / kind).exists():
        plain = tiny_of(kind, torch.float32, intermediate_size=64)  # 4-bit groups are 32 long
        plain.save_pretrained(folder / kind)
        if kind == "llama":
            write_gguf(plain, folder / kind / "tiny.gguf")
    options = {"gguf_file": "tiny.gguf"} if how == "gguf" else {"quantization_config": METHODS[how]()}
    return AutoModelForCausalLM.from_pretrained(folder / kind, dtype=dtype, attn_implementation="eager", **options)


def write_gguf(model, file):
    """Writes a llama as llama.cpp does, the matrices of its blocks in 8 bits."""
    config, writer = model.config, gguf.GGUFWriter(file, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(config.vocab_size)])
    writer.add_token_merges([])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    q8 = gguf.GGMLQuantizationType.Q8_0
    for name, weight in model.state_dict().items():
        new = names.get_name(name, (".weight",))
        if ".layers." in name and weight.ndim == 2:
            writer.add_tensor(new, gguf.quants.quantize(weight.numpy(), q8), raw_dtype=q8)
        else:
            writer.add_tensor(new, weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gradients(model):
    """Computes the gradients of all new weights at one batch."""
    model.zero_grad()
    model(input_ids=IDS, labels=IDS).loss.backward()
    return {name: weight.grad.clone() for name, weight in new_weights(model).items()}


@pytest.mark.parametrize(("kind", "how"), CASES)
def test_a_fresh_adapter_is_the_quantised_base_exactly_and_in_float32(folder, kind, how):
    base = quantised(folder, kind, how)
    plain = logits(base)
    assert not torch.equal(plain, logits(tiny_of(kind, torch.float32, intermediate_size=64)))
    model = get_peft_model(base, PreProjConfig(skip_init_std=0))
    assert torch.equal(logits(model), plain)
    assert {weight.dtype for weight in new_weights(model).values()} == {torch.float32}


@pytest.mark.parametrize(("kind", "how"), CASES)
def test_prepared_for_training_it_lowers_the_loss_and_leaves_the_base_alone(folder, kind, how):
    base = prepare_model_for_kbit_training(
        quantised(folder, kind, how, torch.bfloat16), gradient_checkpointing_kwargs={"use_reentrant": False}
    )
    before = logits(base)
    model = get_peft_model(base, PreProjConfig()).train()
    optimizer = torch.optim.AdamW(list(new_weights(model).values()), 1e-2)
    losses = []
    for _ in range(5):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
    with model.eval().disable_adapter():  # bitsandbytes rounds otherwise in training mode
        assert torch.equal(logits(model), before)
    assert {name for name, weight in model.named_parameters() if weight.requires_grad} == set(new_weights(model))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize(("kind", "how"), CASES)
def test_gradient_checkpointing_changes_no_gradient(folder, kind, how, use_reentrant):
    base = quantised(folder, kind, how)
    model = get_peft_model(base, PreProjConfig()).train()
    draw(model)
    expected = gradients(model)
    base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    base.enable_input_require_grads()
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected[name])


def dequantised(module):
    """Returns a linear layer with the weights that a quantised one computes with."""
    if type(module).__name__ == "Linear4bit":
        from bitsandbytes.functional import dequantize_4bit

        weight = dequantize_4bit(module.weight.data, module.weight.quant_state)
    elif hasattr(module.weight, "dequantize") and type(module.weight) is not nn.Parameter:
        weight = module.weight.dequantize()
    else:
        weight = module.weight
    linear = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None)
    linear.weight = nn.Parameter(weight.detach().clone(), requires_grad=False)
    if module.bias is not None:
        linear.bias = nn.Parameter(module.bias.detach().clone(), requires_grad=False)
    return linear


@pytest.mark.parametrize(("kind", "how"), [case for case in CASES if "bnb8" not in case and "gguf" not in case])
def test_it_computes_as_on_the_same_weights_unpacked(folder, kind, how):
    """Not bitsandbytes in 8 bits, which rounds what it multiplies them with too."""
    base = quantised(folder, kind, how)
    unpacked = quantised(folder, kind, how)
    for name, module in list(unpacked.named_modules()):
        if isinstance(module, nn.Linear):
            unpacked.set_submodule(name, dequantised(module))
    model, reference = (get_peft_model(each, PreProjConfig()) for each in (base, unpacked))
    for each in (model, reference):
        draw(each)
    torch.testing.assert_close(logits(model), logits(reference))
    expected = gradients(reference)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected[name])


@pytest.mark.parametrize(("kind", "how"), CASES)
def test_a_saved_adapter_loads_onto_the_quantised_base(folder, kind, how, tmp_path):
    model = get_peft_model(quantised(folder, kind, how), PreProjConfig())
    draw(model)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(quantised(folder, kind, how), tmp_path)
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize(("kind", "how"), CASES)
def test_an_adapter_of_a_quantised_base_loads_onto_the_plain_one_whole(folder, kind, how, tmp_path):
    model = get_peft_model(quantised(folder, kind, how), PreProjConfig())
    draw(model)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(tiny_of(kind, torch.float32, intermediate_size=64), tmp_path)
    weights = new_weights(loaded)
    assert weights.keys() == new_weights(model).keys()
    assert all(torch.equal(weights[name], weight) for name, weight in new_weights(model).items())
    quantised_logits, plain_logits = logits(model), logits(loaded)
    assert (quantised_logits - plain_logits).abs().mean() < 0.2 * plain_logits.abs().mean()


@pytest.mark.parametrize(("kind", "how"), CASES)
def test_merging_into_a_quantised_base_is_refused(folder, kind, how):
    model = get_peft_model(quantised(folder, kind, how), PreProjConfig())
    with pytest.raises(NotImplementedError, match="cannot be merged"):
        model.merge_and_unload()


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_without_autocast_new_weights_take_the_stated_compute_dtype(folder, compute, double):
    quantised(folder, "llama", "bnb4")
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=compute, bnb_4bit_use_double_quant=double)
    base = AutoModelForCausalLM.from_pretrained(folder / "llama", quantization_config=config, dtype=torch.bfloat16)
    model = get_peft_model(base, PreProjConfig(), autocast_adapter_dtype=False)
    assert {weight.dtype for weight in new_weights(model).values()} == {compute}
    assert logits(model).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "how"), [case for case in CASES if "bnb4" not in case])
def test_where_no_compute_dtype_is_stated_they_take_that_of_the_model(folder, kind, how, dtype):
    model = get_peft_model(quantised(folder, kind, how, dtype), PreProjConfig(), autocast_adapter_dtype=False)
    assert {weight.dtype for weight in new_weights(model).values()} == {dtype}
    draw(model)
    assert logits(model).isfinite().all()


@pytest.mark.parametrize("how", ["bnb8", "bnb4"])
def test_beside_lora_on_a_quantised_base_they_do_not_take_loras_dtype(folder, how):
    base = get_peft_model(quantised(folder, "llama", how, torch.bfloat16), LoraConfig(target_modules=["q_proj"]))
    model = get_peft_model(base.base_model.model, PreProjConfig(), autocast_adapter_dtype=False)
    expected = torch.float32 if how == "bnb4" else torch.bfloat16  # bnb_4bit_compute_dtype is float32 unless stated
    assert {weight.dtype for weight in new_weights(model).values()} == {expected}
    assert {weight.dtype for name, weight in model.named_parameters() if ".lora_" in name} == {torch.float32}


def as_float8(linear):
    linear.weight = nn.Parameter(linear.weight.data.to(torch.float8_e4m3fn), requires_grad=False)


def as_buffer(linear):
    packed = linear.weight.data.to(torch.int32)
    del linear.weight
    linear.register_buffer("qweight", packed)


@pytest.mark.parametrize("pack", [as_float8, as_buffer])
def test_weights_of_eight_bit_floats_and_weights_in_buffers_give_no_dtype(pack):
    """As the fp8 methods and GPTQ keep them, whose kernels need a GPU."""
    base = tiny_of("llama", torch.bfloat16)
    for name, module in list(base.named_modules()):
        if name.endswith("_proj"):
            pack(module)
    assert all(compute_dtype(base, layer.self_attn) == torch.bfloat16 for layer in base.model.layers)
    for autocast, dtype in ((True, torch.float32), (False, torch.bfloat16)):
        model = get_peft_model(base, PreProjConfig(), autocast_adapter_dtype=autocast)
        assert {weight.dtype for weight in new_weights(model).values()} == {dtype}
        assert len(adapted_sites(model)) == 2
        model.unload()


def train(base, folder):
    """Trains an adapter for three steps with transformers' Trainer, and returns the model and its losses."""
    model = get_peft_model(base, PreProjConfig())
    data = Dataset.from_dict({"input_ids": IDS.tolist(), "labels": IDS.tolist()})
    arguments = TrainingArguments(
        str(folder), max_steps=3, learning_rate=1e-2, lr_scheduler_type="constant", logging_steps=1, report_to=[],
        save_strategy="no", disable_tqdm=True, use_cpu=True, gradient_checkpointing=True,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=data)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("how", ["bnb8", "bnb4", "torchao8"])
def test_transformers_trainer_takes_it(folder, how, tmp_path):
    losses = train(prepare_model_for_kbit_training(quantised(folder, "llama", how)), tmp_path)
    assert losses[2] < losses[1] < losses[0]


@pytest.mark.parametrize("how", ["gguf", "torchao4"])
def test_transformers_trainer_refuses_what_it_counts_as_untrainable(folder, how, tmp_path):
    with pytest.raises(ValueError, match="that quantization method do not support training"):
        train(quantised(folder, "llama", how), tmp_path)


def test_a_gguf_base_is_plain_once_it_forgets_where_it_came_from(folder, tmp_path):
    base = quantised(folder, "llama", "gguf")
    base.hf_quantizer, base.is_quantized = None, False
    del base.config.quantization_config
    losses = train(base, tmp_path / "trained")
    assert losses[2] < losses[1] < losses[0]
    base.save_pretrained(tmp_path / "plain")
