"""torch.compile before and after the adapter, mostly with backends that trace but generate no code."""

import pytest
import torch
from life import IDS, KINDS, adapted, base_of, draw, logits
from peft import PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file
from tiny import IMAGE, SMALL, tiny_of
from torch._dynamo.utils import counters
from transformers import (
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    CompileConfig,
    Trainer,
    TrainingArguments,
)

from preproj import PreProjConfig
from preproj.adapter.layer import adapted_sites


@pytest.fixture(autouse=True)
def _forget_compiled_code():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def first_block(model):
    return next(name for name, _ in model.named_modules() if name.endswith((".layers.0", ".layer.0")))


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_afterwards_it_is_one_graph_with_the_same_numbers_and_saves_as_plain(kind, tmp_path):
    model = adapted(kind)

    def numbers(run):
        model.zero_grad()
        out = run(input_ids=IDS).logits
        out.square().mean().backward()
        return [out.detach(), *(weight.grad.clone() for weight in model.parameters() if weight.requires_grad)]

    expected = numbers(model)
    assert len(expected) == 7
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for ours, eager in zip(numbers(compiled), expected, strict=True):
        torch.testing.assert_close(ours, eager)
    compiled.save_pretrained(tmp_path)
    assert torch.equal(logits(PeftModel.from_pretrained(base_of(kind), tmp_path)), logits(model))


def test_compiled_afterwards_it_follows_set_adapter_and_disable_adapter():
    model = adapted("gemma2")
    model.add_adapter("other", PreProjConfig())
    draw(model, seed=1, adapter="other")
    plain = logits(base_of("gemma2"))
    compiled = torch.compile(model, backend="eager")
    for name in ("default", "other"):
        model.set_adapter(name)
        torch.testing.assert_close(logits(compiled), logits(model))
    with model.disable_adapter():
        torch.testing.assert_close(logits(compiled), plain)


@pytest.mark.parametrize("kind", KINDS)
def test_a_base_compiled_as_a_wrapper_is_refused_before_anything_changes(kind, tmp_path):
    adapted(kind).save_pretrained(tmp_path)
    base = base_of(kind)
    names = [name for name, _ in base.named_modules()]
    wrapped = torch.compile(base, backend="eager")
    sentence = r"The base model is wrapped by torch\.compile.*torch\.compile\(get_peft_model"
    with pytest.raises(ValueError, match=sentence):
        get_peft_model(wrapped, PreProjConfig())
    with pytest.raises(ValueError, match=sentence):
        PeftModel.from_pretrained(wrapped, tmp_path)
    assert [name for name, _ in base.named_modules()] == names


@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_block_is_refused_by_name(kind):
    base = base_of(kind)
    name = first_block(base)
    base.set_submodule(name, torch.compile(base.get_submodule(name), backend="eager"))
    with pytest.raises(ValueError, match=rf"'{name}' is wrapped by torch\.compile"):
        get_peft_model(base, PreProjConfig())


@pytest.mark.parametrize("targets", [None, ["self_attn"]])
def test_compiled_attention_is_refused_by_name(targets):
    base = base_of("llama")
    for layer in base.model.layers:
        layer.self_attn = torch.compile(layer.self_attn, backend="eager")
    with pytest.raises(ValueError, match=r"'model\.layers\.0\.self_attn' is wrapped by torch\.compile"):
        get_peft_model(base, PreProjConfig(target_modules=targets))


@pytest.mark.parametrize(
    ("kind", "part"), [("llama", "model"), ("gpt_neox", "block"), ("gemma2", "block"), ("bert", "model")]
)
def test_a_base_compiled_in_place_and_run_already_takes_the_adapter(kind, part, tmp_path):
    expected = logits(adapted(kind))
    base = base_of(kind)
    compiled = base if part == "model" else base.get_submodule(first_block(base))
    compiled.compile(backend="eager")
    logits(base)
    model = get_peft_model(base, PreProjConfig())
    draw(model)
    torch.testing.assert_close(logits(model), expected)
    assert not any("_orig_mod" in key for key in get_peft_model_state_dict(model))
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(logits(PeftModel.from_pretrained(base_of(kind), tmp_path)), expected)


def blocks(model):
    return [module for name, module in model.named_modules() if name.endswith((".0", ".1")) and ".layer" in name]


def graphs_of_blocks(model):
    """Compiles each block by itself, and counts the graphs after each step of training."""
    torch._dynamo.reset()
    counters.clear()
    model.enable_input_require_grads()
    for block in blocks(model):
        block.compile(backend="eager", fullgraph=True)
    made = []
    for length in (9, 7, 5):
        model(input_ids=IDS[:, :length], use_cache=False).logits.square().mean().backward()
        made.append(counters["stats"]["unique_graphs"])
    return made


@pytest.mark.slow
def test_blocks_compiled_one_by_one_share_their_code_as_without_the_adapter():
    host = graphs_of_blocks(base_of("llama"))
    assert host == [1, 2, 2]
    assert graphs_of_blocks(adapted("llama")) == host


@pytest.mark.slow
def test_blocks_with_a_norm_after_attention_each_have_their_own_code():
    """As the page says: torch guards on the number of a hook that runs after errors too."""
    assert graphs_of_blocks(adapted("gemma2"))[0] == len(blocks(base_of("gemma2"))) == 2


@pytest.mark.parametrize("part", ["self_attn", "post_attention_layernorm"])
def test_a_part_that_is_compiled_alone_hands_x_tilde_over(part):
    model = adapted("gemma2")
    expected = logits(model)
    compiled = [module for name, module in model.named_modules() if name.endswith(f".{part}")]
    assert len(compiled) == 2
    for module in compiled:
        module.compile(backend="eager")
    for _ in range(2):
        torch.testing.assert_close(logits(model), expected)
    layers = [layer for _, _, layer in adapted_sites(model)]
    assert not any(layer._waiting.get() for layer in layers)


def test_a_graph_that_breaks_inside_attention_keeps_the_skip():
    model = adapted("gemma2")
    expected = logits(model)
    attention = adapted_sites(model)[0][1]
    forward = attention.forward

    def breaking(*args, **kwargs):
        torch._dynamo.graph_break()
        return forward(*args, **kwargs)

    attention.forward = breaking
    model.compile(backend="eager")
    for _ in range(2):
        torch.testing.assert_close(logits(model), expected)


@pytest.mark.parametrize("how", ["base", "model"])
def test_a_mixed_batch_goes_through_compiled_code(how):
    model = adapted("llama").eval()
    model.add_adapter("other", PreProjConfig())
    draw(model, seed=1, adapter="other")
    names = ["other", "__base__"]
    with torch.no_grad():
        expected, plain = model(input_ids=IDS, adapter_names=names).logits, model(input_ids=IDS).logits
        (model.get_base_model() if how == "base" else model).compile(backend="eager")
        for _ in range(2):
            torch.testing.assert_close(model(input_ids=IDS, adapter_names=names).logits, expected)
            torch.testing.assert_close(model(input_ids=IDS).logits, plain)


def test_compiled_in_place_afterwards_it_saves_as_plain(tmp_path):
    model = adapted("gpt_neox")
    expected = logits(model)
    model.compile(backend="eager", fullgraph=True)
    torch.testing.assert_close(logits(model), expected)
    model.save_pretrained(tmp_path)
    assert not any("_orig_mod" in key for key in load_file(tmp_path / "adapter_model.safetensors"))
    assert torch.equal(logits(PeftModel.from_pretrained(base_of("gpt_neox"), tmp_path)), expected)


def test_the_trainers_torch_compile_saves_a_good_adapter(tmp_path):
    model = adapted("gpt_neox")
    start = logits(model)
    arguments = TrainingArguments(
        str(tmp_path), max_steps=2, learning_rate=1e-2, logging_steps=1, report_to=[], save_steps=2, use_cpu=True,
        disable_tqdm=True, torch_compile=True, torch_compile_backend="eager",
    )  # fmt: skip
    counters.clear()
    Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in IDS]).train()
    assert counters["stats"]["unique_graphs"]
    saved = tmp_path / "checkpoint-2"
    assert not any("_orig_mod" in key for key in load_file(saved / "adapter_model.safetensors"))
    trained = logits(PeftModel.from_pretrained(base_of("gpt_neox"), saved))
    assert not torch.allclose(trained, start)
    torch.testing.assert_close(trained, logits(model.eval()))


@pytest.mark.slow
def test_generated_code_trains_to_the_numbers_of_eager_code():
    def losses(compiled):
        model = adapted("gpt_neox").train()
        optimizer = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], 0.1)
        run = torch.compile(model, fullgraph=True) if compiled else model
        found = []
        for _ in range(5):
            loss = run(input_ids=IDS, labels=IDS, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        return torch.stack(found), logits(model)

    eager, compiled = losses(False), losses(True)
    torch.testing.assert_close(compiled, eager)
    assert compiled[0][-1] < compiled[0][0]


# One for each kind of block, and latent attention, an encoder with a decoder, and windows.
HOSTS = {
    "llama": {}, "cohere": {}, "gpt_neox": {}, "gemma2": {}, "olmo2": {}, "granite": {}, "bloom": {}, "bert": {},
    "deepseek_v3": {}, "albert": {"auto": AutoModelForMaskedLM}, "t5": {"auto": AutoModelForSeq2SeqLM},
    "dinov2": {"auto": AutoModelForImageClassification, "small": SMALL | IMAGE},
    "swin": {"auto": AutoModelForImageClassification, "small": SMALL | IMAGE},
}  # fmt: skip


def host_of(host, with_adapter):
    model = tiny_of(host, torch.float32, **HOSTS[host])
    if not with_adapter:
        return model
    model = get_peft_model(model, PreProjConfig())
    draw(model)
    return model


def graphs(host, with_adapter):
    """Trains at several lengths, evaluates and trains on, as full graphs; counts the graphs made after each step."""
    torch._dynamo.reset()
    counters.clear()
    model = host_of(host, with_adapter)
    base = model.get_base_model() if with_adapter else model
    compiled, made = torch.compile(model, backend="eager", fullgraph=True), []
    for train, length in ((True, 9), (True, 7), (True, 6), (False, 9), (True, 7)):
        model.train(train)
        with torch.set_grad_enabled(train):
            out = compiled(**inputs_of(base, length)).logits
        if train:
            out.square().mean().backward()
        made.append(counters["stats"]["unique_graphs"])
    return made


def inputs_of(base, length):
    if base.main_input_name == "pixel_values":
        return {"pixel_values": torch.randn(length, 3, 32, 32, generator=torch.Generator().manual_seed(0))}
    ids = IDS[:, :length]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if base.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids[:, :-1]
    return inputs | ({"use_cache": False} if base.can_generate() else {})


@pytest.mark.slow
@pytest.mark.parametrize("host", HOSTS)
def test_every_kind_trains_as_the_full_graphs_that_the_host_makes_alone(host):
    assert graphs(host, with_adapter=True) == graphs(host, with_adapter=False)


def generated(host, with_adapter, compiled):
    """Generates with a static cache at two lengths; returns the tokens, and the graphs made after each."""
    torch._dynamo.reset()
    counters.clear()
    model, made, tokens = host_of(host, with_adapter), [], []
    options = {"cache_implementation": "static", "max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    if host == "t5":
        options["decoder_start_token_id"] = 1
    if compiled:
        options["compile_config"] = CompileConfig(backend="eager", mode=None, fullgraph=True)
        options["compile_config"]._compile_all_devices = True  # transformers compiles on GPUs alone otherwise
    else:
        options["disable_compile"] = True
    for length in (9, 6):
        ids = IDS[:, :length]
        tokens.append(model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options))
        made.append(counters["stats"]["unique_graphs"])
    return tokens, made


@pytest.mark.slow
@pytest.mark.parametrize("host", [host for host in HOSTS if host not in ("albert", "dinov2", "swin")])
def test_every_kind_generates_the_eager_tokens_from_the_full_graphs_that_the_host_makes_alone(host):
    eager, none = generated(host, with_adapter=True, compiled=False)
    tokens, made = generated(host, with_adapter=True, compiled=True)
    assert none == [0, 0]
    assert made[-1]
    assert all(torch.equal(ours, expected) for ours, expected in zip(tokens, eager, strict=True))
    assert made == generated(host, with_adapter=False, compiled=True)[1]
