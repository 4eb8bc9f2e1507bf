"""PEFT's wrappers for tasks, and modules that are trained whole beside the adapter."""

import pytest
import torch
from life import IDS, KINDS, adapted, base_of, draw, logits, new_weights
from peft import PeftModel, get_peft_model
from peft.utils import ModulesToSaveWrapper
from tiny import tiny_of
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from preproj import PreProjConfig

CLASS = torch.tensor([0, 1])
AUTO = {
    "SEQ_CLS": AutoModelForSequenceClassification,
    "TOKEN_CLS": AutoModelForTokenClassification,
    "QUESTION_ANS": AutoModelForQuestionAnswering,
    "SEQ_2_SEQ_LM": AutoModelForSeq2SeqLM,
    "CAUSAL_LM": AutoModelForCausalLM,
    "FEATURE_EXTRACTION": AutoModel,
}
LABELS = {
    "SEQ_CLS": {"labels": CLASS},
    "TOKEN_CLS": {"labels": IDS % 2},
    "QUESTION_ANS": {"start_positions": CLASS, "end_positions": CLASS + 2},
    "SEQ_2_SEQ_LM": {"labels": IDS},
    "CAUSAL_LM": {"labels": IDS},
    "FEATURE_EXTRACTION": {},
}
HEADS = {"SEQ_CLS": ("classifier", "score"), "TOKEN_CLS": ("classifier", "score"), "QUESTION_ANS": ("qa_outputs",)}
CASES = [
    *((task, model) for task in ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS") for model in ("bert", "llama", "gpt_neox")),
    *(("SEQ_2_SEQ_LM", model) for model in ("bart", "t5")),
    *(("CAUSAL_LM", model) for model in ("llama", "gpt_neox", "gemma2")),
    *(("FEATURE_EXTRACTION", model) for model in ("bert", "llama", "gemma2")),
]


def task_base(task, model):
    besides = {"decoder_start_token_id": 0} if task == "SEQ_2_SEQ_LM" else {}
    return tiny_of(model, torch.float32, auto=AUTO[task], **besides)


def outputs(model, task):
    """Runs a task's model with its labels; returns the loss, or what stands for it, and all tensors."""
    out = model(input_ids=IDS, attention_mask=torch.ones_like(IDS), **LABELS[task])
    tensors = [value for value in out.values() if isinstance(value, torch.Tensor)]
    return (out.loss if "loss" in out else out.last_hidden_state.square().mean()), tensors


@pytest.mark.parametrize(("task", "kind"), CASES)
def test_a_task_wrapper_trains_and_saves_the_adapter_with_the_head(task, kind, tmp_path):
    model = get_peft_model(task_base(task, kind), PreProjConfig(task_type=task))
    draw(model)
    head = {name for name, _ in model.get_base_model().named_children()} & set(HEADS.get(task, ()))
    assert len(head) == (task in HEADS)
    loss, _ = outputs(model, task)
    loss.backward()
    trained = {name for name, weight in model.named_parameters() if weight.grad is not None}
    of_head = {
        name for name, _ in model.named_parameters() if any(f".{part}.modules_to_save." in name for part in head)
    }
    assert trained == {*new_weights(model), *of_head}
    assert bool(of_head) == (task in HEADS)

    optimizer = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], lr=0.1)
    optimizer.step()
    model.eval()
    _, expected = outputs(model, task)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(task_base(task, kind), tmp_path)
    assert type(loaded) is type(model)
    assert type(model) is not PeftModel
    _, tensors = outputs(loaded, task)
    for ours, theirs in zip(tensors, expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("task", "kind"), CASES)
def test_a_task_wrapper_starts_as_its_base(task, kind):
    base = task_base(task, kind)
    _, before = outputs(base, task)
    model = get_peft_model(base, PreProjConfig(task_type=task, skip_init_std=0)).eval()
    _, after = outputs(model, task)
    for ours, theirs in zip(after, before, strict=True):
        assert torch.equal(ours, theirs)


WHOLE = {
    "llama": ["lm_head", "norm"],
    "gpt_neox": ["final_layer_norm"],
    "gemma2": ["post_attention_layernorm"],  # where the skip lands
    "bert": ["transform"],
}


@pytest.mark.parametrize("kind", KINDS)
def test_modules_to_save_are_trained_saved_switched_and_taken_off_with_the_adapter(kind, tmp_path):
    plain = logits(base_of(kind))
    model = adapted(kind, modules_to_save=WHOLE[kind])
    wrappers = [module for module in model.modules() if isinstance(module, ModulesToSaveWrapper)]
    assert wrappers
    with torch.no_grad():
        for wrapper in wrappers:
            for weight in wrapper.modules_to_save["default"].parameters():
                weight.add_(0.1)
    changed = logits(model)
    with model.disable_adapter():
        assert torch.equal(logits(model), plain)
    assert torch.equal(logits(model), changed)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(PeftModel.from_pretrained(base_of(kind), tmp_path)), changed)
    low = PeftModel.from_pretrained(base_of(kind), tmp_path, low_cpu_mem_usage=True)
    assert torch.equal(logits(low), changed)
    bare = model.unload()
    assert not any(isinstance(module, ModulesToSaveWrapper) for module in bare.modules())


@pytest.mark.parametrize("kind", KINDS)
def test_two_adapters_keep_their_own_whole_modules(kind):
    model = adapted(kind, modules_to_save=WHOLE[kind])
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".modules_to_save.default." in name:
                weight.add_(0.1)
    first = logits(model)
    model.add_adapter("second", PreProjConfig(modules_to_save=WHOLE[kind]))
    draw(model, seed=0, adapter="second")
    assert torch.equal(logits(model), first)
    model.set_adapter("second")
    assert not torch.equal(logits(model), first)
    model.set_adapter("default")
    assert torch.equal(logits(model), first)
