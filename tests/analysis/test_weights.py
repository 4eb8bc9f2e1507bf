"""Measures of weights against planted matrices and autograd."""

import math
from typing import Any

import pytest
import torch
from checks import shake
from naive import tiny_model
from peft import get_peft_model

from preproj import PreProjConfig
from preproj.adapter.layer import adapted_sites
from preproj.analysis import analyze
from preproj.analysis.weights import matrix_measures
from preproj.modules import ACTIVATIONS, pre_project

WIDTH = 32
TEXTS = torch.randint(0, 64, (3, 12), generator=torch.Generator().manual_seed(0)).tolist()


def rotation(seed: int) -> torch.Tensor:
    noise = torch.randn(WIDTH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return torch.linalg.qr(noise).Q


def planted(*singular: float) -> torch.Tensor:
    """A matrix with these singular values, and zeros."""
    values = torch.zeros(WIDTH, dtype=torch.float64)
    values[: len(singular)] = torch.tensor(singular)
    return rotation(1) @ values.diag() @ rotation(2)


def adapted(**config: Any) -> tuple[Any, Any]:
    """A tiny adapted Llama and the layer of its first attention."""
    model = get_peft_model(tiny_model("llama"), PreProjConfig(**config))
    return model, adapted_sites(model)[0][2]


@torch.no_grad()
def test_four_measures_of_a_planted_skip():
    model, layer = adapted()
    layer.skip["default"].weight.copy_(planted(3, 1))
    row = analyze(model, TEXTS).layers[0]
    assert row["skip_norm"] == pytest.approx(math.sqrt(10))
    assert row["skip_spectral_norm"] == pytest.approx(3)
    assert row["skip_mean_row_norm"] == pytest.approx(sum(math.hypot(*r) for r in planted(3, 1).tolist()) / WIDTH)
    assert row["skip_effective_rank"] == pytest.approx(math.exp(-0.75 * math.log(0.75) - 0.25 * math.log(0.25)))


@pytest.mark.parametrize("rank", [1, 5, WIDTH])
def test_equal_singular_values_have_their_number_as_effective_rank(rank):
    assert matrix_measures("m", planted(*[0.2] * rank))["m_effective_rank"] == pytest.approx(rank)


def test_a_matrix_of_zeros_has_no_effective_rank():
    found = matrix_measures("m", torch.zeros(3, 4))
    assert found == {"m_norm": 0, "m_spectral_norm": 0, "m_mean_row_norm": 0, "m_effective_rank": None}


@torch.no_grad()
def test_the_change_is_measured_from_the_start_that_the_seed_gives():
    model, layer = adapted(init_seed=4, skip_init_std=0.1)
    start = layer.skip["default"].weight.norm().item()
    layer.skip["default"].weight += planted(2, 2, 2)
    row = analyze(model, TEXTS).layers[0]
    assert row["initial_skip_norm"] == pytest.approx(start)
    assert row["skip_change_norm"] == pytest.approx(math.sqrt(12))
    assert row["skip_change_spectral_norm"] == pytest.approx(2)
    assert row["skip_change_effective_rank"] == pytest.approx(3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fresh_adapter_has_not_changed_in_any_dtype(dtype):
    model = get_peft_model(tiny_model("llama").to(dtype), PreProjConfig(), autocast_adapter_dtype=False)
    assert adapted_sites(model)[0][2].skip["default"].weight.dtype == dtype
    row = analyze(model, TEXTS).layers[0]
    assert row["skip_change_norm"] == 0
    assert row["initial_skip_norm"] == row["skip_norm"] > 0


@torch.no_grad()
def test_a_skip_of_low_rank_is_measured_as_the_product_of_its_factors():
    model, layer = adapted(skip_rank=2)
    first, second = torch.zeros(2, WIDTH), torch.zeros(WIDTH, 2)
    first[0, 3], first[1, 7], second[5, 0], second[6, 1] = 2, 1, 3, 1  # entries 6 and 1 of the product
    layer.skip_a["default"].weight.copy_(first)
    layer.skip_b["default"].weight.copy_(second)
    row = analyze(model, TEXTS).layers[0]
    assert (row["skip_norm"], row["skip_spectral_norm"]) == pytest.approx((math.sqrt(37), 6))
    assert row["skip_mean_row_norm"] == pytest.approx(7 / WIDTH)
    assert row["skip_change_norm"] == row["skip_norm"]  # the start is zero
    assert row["initial_skip_norm"] == 0


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_linearised_pre_projection_is_the_mean_jacobian(activation):
    model, layer = adapted(activation=activation)
    shake(layer, 0.3)
    row = analyze(model, TEXTS).layers[0]
    inputs: list[torch.Tensor] = []
    with adapted_sites(model)[0][1].register_forward_pre_hook(
        lambda m, a, k: inputs.extend(k["hidden_states"][0].detach()), with_kwargs=True, prepend=True
    ):
        for ids in TEXTS:
            model(torch.tensor([ids]))

    def change(x: torch.Tensor) -> torch.Tensor:
        return pre_project(x, layer.up["default"], layer.down["default"], ACTIVATIONS[activation]) - x

    assert len(inputs) == 36
    mean = torch.stack([torch.autograd.functional.jacobian(change, x) for x in inputs]).mean(0)
    assert row["pre_norm"] == pytest.approx(torch.linalg.matrix_norm(mean).item())
    assert row["pre_spectral_norm"] == pytest.approx(torch.linalg.matrix_norm(mean, ord=2).item())
    assert row["pre_mean_row_norm"] == pytest.approx(mean.square().sum(1).sqrt().mean().item())


@torch.no_grad()
def test_a_pre_projection_that_is_a_multiple_of_x_is_measured_as_that():
    """σ = ReLU, W_up = (1, -1) and W_down = 0.3·(1, -1): x̃ = 1.3·x̂ for every x̂."""
    model, layer = adapted(activation="relu", expansion=2.0)
    both = torch.cat([torch.eye(WIDTH), -torch.eye(WIDTH)])
    layer.up["default"].weight.copy_(both)
    layer.down["default"].weight.copy_(0.3 * both.T)
    row = analyze(model, TEXTS).layers[0]
    assert row["pre_to_input"] == pytest.approx(0.3)
    assert row["pre_norm"] == pytest.approx(0.3 * math.sqrt(WIDTH))
    assert (row["pre_spectral_norm"], row["pre_mean_row_norm"]) == pytest.approx((0.3, 0.3))
    assert row["pre_effective_rank"] == pytest.approx(WIDTH)
