"""One model in several threads at once: every call sees its own x̃ and its own mixed batch."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from peft import get_peft_model
from tiny import tiny_of

from preproj import PreProjConfig
from preproj.adapter.layer import adapted_sites

KINDS = ("llama", "gemma2", "bert", "albert")  # the skip lands on attention, a norm, a projection, inside attention


def adapted(kind):
    return get_peft_model(tiny_of(kind, torch.float32), PreProjConfig(init_weights=False)).eval()


def ids(seed):
    return torch.randint(3, 60, (2, 20), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", KINDS)
def test_threads_get_what_they_would_get_alone(kind):
    if kind == "albert":
        from transformers import AutoModelForMaskedLM

        base = tiny_of(kind, torch.float32, AutoModelForMaskedLM)
        model = get_peft_model(base, PreProjConfig(init_weights=False)).eval()
    else:
        model = adapted(kind)
    inputs = [ids(seed) for seed in range(4)]
    with torch.no_grad():
        alone = [model(one).logits for one in inputs]

    def work(number):
        with torch.no_grad():
            return all(torch.equal(model(inputs[number]).logits, alone[number]) for _ in range(40))

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [True] * 4


def test_a_mixed_batch_in_one_thread_leaves_another_alone():
    model = adapted("llama")
    first, second = ids(0), ids(1)
    names = ["default", "__base__"]
    with torch.no_grad():
        plain, mixed = model(first).logits, model(second, adapter_names=names).logits
    assert not torch.equal(mixed, model(second).logits)

    def work(number):
        with torch.no_grad():
            if number:
                return all(torch.equal(model(second, adapter_names=names).logits, mixed) for _ in range(40))
            return all(torch.equal(model(first).logits, plain) for _ in range(40))

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, range(2))) == [True, True]


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_an_interrupt_inside_attention_leaves_a_model_that_runs_and_copies(kind):
    model = adapted(kind).train()
    expected = model(ids(0)).logits
    _, attention, _ = adapted_sites(model)[0]

    def interrupt(*_):
        raise KeyboardInterrupt

    hook = attention.register_forward_hook(interrupt, prepend=True)
    with pytest.raises(KeyboardInterrupt):
        model(ids(0))
    hook.remove()
    assert torch.equal(model(ids(0)).logits, expected)
    assert torch.equal(copy.deepcopy(model)(ids(0)).logits, expected)
    assert torch.equal(pickle.loads(pickle.dumps(model))(ids(0)).logits, expected)
