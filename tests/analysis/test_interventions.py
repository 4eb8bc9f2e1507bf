"""Ablations against weights zeroed by hand, whole models in plain torch, and closed forms."""

import copy
import math

import pytest
import torch
from checks import shake
from naive import naive_logits, tiny_model
from peft import get_peft_model
from tiny import tiny_of
from torch import nn
from transformers import AutoModelForMaskedLM

from preproj import PreProjConfig
from preproj.adapter.layer import adapted_sites
from preproj.analysis.interventions import ablated, layer_groups, measure_ablations

LAST = {"skip": ("skip", "skip_b"), "pre_projection": ("down",)}
WINDOW = 12
TEXTS = torch.randint(3, 64, (5, WINDOW), generator=torch.Generator().manual_seed(0)).tolist()
IDS = torch.tensor(TEXTS)


def shaken(base, config=None, dtype=None):
    """An adapter with weights of its own in every layer."""
    model = get_peft_model(base, config or PreProjConfig()).eval()
    for _, _, layer in adapted_sites(model):
        shake(layer)
        layer.to(dtype)
    return model


def hook_counts(model):
    return [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()]


def zero(model, part, layers, adapters=("default",)):
    sites = adapted_sites(model)
    with torch.no_grad():
        for index in layers:
            for what in LAST[part]:
                for adapter in adapters:
                    if adapter in getattr(sites[index][2], what):
                        getattr(sites[index][2], what)[adapter].weight.zero_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("rank", [None, 3])
@pytest.mark.parametrize("part", LAST)
@pytest.mark.parametrize("host", ["llama", "gpt_neox", "gemma2", "gpt2", "granite", "bloom", "bert"])
@torch.no_grad()
def test_an_ablated_model_is_the_one_with_that_weight_zeroed_by_hand(host, part, rank, dtype):
    base, config = tiny_of(host, dtype=torch.float32), PreProjConfig(skip_rank=rank)
    shake(base)
    by_hand = shaken(copy.deepcopy(base), config, dtype)
    model = shaken(base, config, dtype)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    intact = model(IDS).logits
    with ablated(model, part, [1]):
        found = model(IDS).logits
    zero(by_hand, part, [1])
    assert torch.equal(found, by_hand(IDS).logits)
    assert not torch.equal(found, intact)
    assert torch.equal(model(IDS).logits, intact)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


@torch.no_grad()
def test_a_shared_module_is_ablated_at_each_of_its_places():
    base = tiny_of("albert", auto=AutoModelForMaskedLM)
    by_hand, model = shaken(copy.deepcopy(base)), shaken(base)
    zero(by_hand, "skip", [0])
    with ablated(model, "skip", [0]):
        assert torch.equal(model(IDS).logits, by_hand(IDS).logits)


def perplexity_by_hand(base, weights):
    """Of whole models written out in plain torch."""
    log_probabilities = naive_logits(base, IDS, weights)[:, :-1].log_softmax(-1)
    return math.exp(-log_probabilities.gather(-1, IDS[:, 1:, None]).mean().item())


@pytest.mark.parametrize("rank", [None, 3])
@pytest.mark.parametrize("host", ["llama", "gpt_neox", "gpt2"])
@torch.no_grad()
def test_every_ablation_is_the_perplexity_of_a_model_written_out_without_the_part(host, rank):
    base = tiny_model(host, num_hidden_layers=4)
    untouched = copy.deepcopy(base)
    model = shaken(base, PreProjConfig(skip_rank=rank))
    weights = []
    for _, _, layer in adapted_sites(model):
        maps = {what: linear.weight for what, linear in layer.linears("default").items()}
        skip = maps["skip"] if rank is None else maps["skip_b"] @ maps["skip_a"]
        weights.append({"up": maps["up"], "down": maps["down"], "skip": skip})
    found = measure_ablations(model, TEXTS, WINDOW)

    intact = perplexity_by_hand(untouched, weights)
    assert found["perplexity"] == pytest.approx(intact, rel=1e-9)
    rows = {(row["part"], row["group"], *row["layers"]): row for row in found["ablations"]}
    groups = [(None, [i]) for i in range(4)]
    groups += [("early", [0]), ("middle", [1, 2]), ("late", [3]), ("all", [0, 1, 2, 3])]
    assert set(rows) == {(part, group, *layers) for part in LAST for group, layers in groups}
    for (part, _, *layers), row in rows.items():
        gone = {"skip": {"skip": None}, "pre_projection": {"up": None, "down": None}}[part]
        without = [own | gone if index in layers else own for index, own in enumerate(weights)]
        expected = perplexity_by_hand(untouched, without)
        assert row["perplexity"] == pytest.approx(expected, rel=1e-9)
        assert row["value"] == pytest.approx(expected - intact, abs=1e-7)
        assert row["low"] <= row["value"] <= row["high"]


@torch.no_grad()
def test_a_planted_layer_changes_the_loss_by_the_known_amount():
    """A stream of ones to which layer l adds a_l: the one token's logit is 1 + Σ a_l, all others are 0."""
    amounts = [0.5, 2.0, -0.25]
    base = tiny_of("llama", rms_norm_eps=0.0, num_hidden_layers=3, tie_word_embeddings=False)
    for name, weight in base.named_parameters():
        weight.fill_(float(name.endswith(("embed_tokens.weight", "norm.weight", "layernorm.weight"))))
    base.model.norm = nn.Identity()
    base.lm_head.weight[5] = 1 / 32
    model = get_peft_model(base, PreProjConfig()).eval()
    for (_, _, layer), amount in zip(adapted_sites(model), amounts, strict=True):
        layer.skip["default"].weight.copy_(amount * torch.eye(32))
    found = measure_ablations(model, [[5] * WINDOW] * 3, WINDOW)

    def expected(total):
        return 1 + 63 * math.exp(-(1 + total))

    assert found["perplexity"] == pytest.approx(expected(2.25), rel=1e-7)
    for row in found["ablations"]:
        total = 2.25 - sum(amounts[index] for index in row["layers"]) * (row["part"] == "skip")
        difference = expected(total) - expected(2.25)
        assert row["perplexity"] == pytest.approx(expected(total), rel=1e-7)
        assert [row[name] for name in ("value", "low", "high")] == pytest.approx([difference] * 3, abs=1e-5)
    assert {row["group"] for row in found["ablations"]} == {None, "early", "middle", "late", "all"}


@torch.no_grad()
def test_the_interval_of_two_documents_spans_all_that_resampling_can_draw():
    """Two documents are drawn as (1, 1), (1, 2) or (2, 2), each in at least a quarter of the resamples."""
    model = shaken(tiny_of("llama"))
    texts = TEXTS[:2]
    rows = measure_ablations(model, texts, WINDOW)["ablations"]

    def differences(part, layers):
        losses = []
        for gone in ([], layers):
            with ablated(model, part, gone):
                logits = model(torch.tensor(texts)).logits[:, :-1]
            targets = torch.tensor(texts)[:, 1:]
            losses.append(
                [nn.functional.cross_entropy(own, to).item() for own, to in zip(logits, targets, strict=True)]
            )
        draws = [(0, 0), (0, 1), (1, 1)]
        intact, without = ([math.exp((own[i] + own[j]) / 2) for i, j in draws] for own in losses)
        return [b - a for a, b in zip(intact, without, strict=True)]

    assert len(rows) == 10
    for row in rows:
        possible = differences(row["part"], row["layers"])
        assert (row["low"], row["high"]) == pytest.approx((min(possible), max(possible)), abs=1e-6)
        assert row["value"] == pytest.approx(possible[1], abs=1e-6)


@torch.no_grad()
def test_only_active_adapters_are_ablated():
    models = [shaken(tiny_of("llama")) for _ in range(3)]
    for model in models:
        model.add_adapter("other", PreProjConfig(skip_rank=2))
        for _, _, layer in adapted_sites(model):
            for linear in layer.linears("other").values():
                shake(linear, 0.3)
    model, own, both = models
    zero(own, "skip", [0])
    zero(both, "skip", [0], adapters=("default", "other"))
    with ablated(model, "skip", [0]):
        assert torch.equal(model(IDS).logits, own(IDS).logits)
        model.set_adapter("other")
        own.set_adapter("other")
        assert torch.equal(model(IDS).logits, own(IDS).logits)
    for each in (model, both):
        each.base_model.set_adapter(["default", "other"])
    with ablated(model, "skip", [0]):
        assert torch.equal(model(IDS).logits, both(IDS).logits)


def test_a_part_that_the_adapter_lacks_has_no_rows():
    config = PreProjConfig(content_skip=False, layers_to_transform=[1])
    rows = measure_ablations(shaken(tiny_of("llama"), config), TEXTS, WINDOW)["ablations"]
    assert [(row["part"], row["group"], row["layers"]) for row in rows] == [
        ("pre_projection", None, [0]),  # counted among the adapted
        ("pre_projection", "middle", [0]),
        ("pre_projection", "all", [0]),
    ]


def test_each_ablation_is_one_pass_a_document():
    model = shaken(tiny_of("llama"))
    shapes = []
    model.get_base_model().register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    rows = measure_ablations(model, TEXTS, WINDOW)["ablations"]
    assert shapes == [(1, WINDOW)] * len(TEXTS) * (1 + len(rows))


def test_layers_are_parted_by_the_depth_of_their_middle():
    def parts(layers):
        return [*layer_groups(layers).values()]

    assert parts(12) == [[*range(4)], [*range(4, 9)], [*range(9, 12)], [*range(12)]]
    assert parts(24) == [[*range(8)], [*range(8, 18)], [*range(18, 24)], [*range(24)]]
    assert parts(3) == [[0], [1], [2], [0, 1, 2]]
    assert parts(2) == [[0], [], [1], [0, 1]]
    assert parts(1) == [[], [0], [], [0]]


def test_short_documents_are_skipped_and_counted_and_long_ones_cut():
    model = shaken(tiny_of("llama"))
    texts = [TEXTS[0] + [7, 7], TEXTS[1][:-1], *TEXTS[1:3], []]
    found = measure_ablations(model, texts, WINDOW)
    assert (found["window"], found["documents"], found["skipped"]) == (WINDOW, 3, 2)
    assert found["perplexity"] == measure_ablations(model, TEXTS[:3], WINDOW)["perplexity"]


def test_too_little_text_is_refused():
    model = shaken(tiny_of("llama"))
    with pytest.raises(ValueError, match=r"^1 of 3 documents have 12 tokens: expected at least 2\. Give longer"):
        measure_ablations(model, [TEXTS[0], [4], [5]], WINDOW)
    with pytest.raises(ValueError, match=r"^window is 1: expected at least 2 tokens\."):
        measure_ablations(model, TEXTS, 1)


@torch.no_grad()
def test_after_an_error_no_hook_is_left_and_the_model_is_whole():
    model = shaken(tiny_of("gemma2"))
    before, intact = hook_counts(model), model(IDS).logits
    with pytest.raises(IndexError), ablated(model, "skip", [0, 1]):
        model(torch.tensor([[99]]))  # no such token
    assert hook_counts(model) == before
    with pytest.raises(IndexError):
        measure_ablations(model, [[99] * WINDOW] * 2, WINDOW)
    with pytest.raises(IndexError), ablated(model, "skip", [0, 7]):
        pass  # no such layer, after the first was hooked
    assert hook_counts(model) == before
    assert torch.equal(model(IDS).logits, intact)
