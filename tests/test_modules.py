"""The two equations and their start weights, against closed forms."""

import math

import pytest
import torch

from preproj import ContentSkip, PreProjection
from preproj.modules import draw_initial_weight


def test_pre_projection_is_the_equation():
    module = PreProjection(8).double()
    torch.nn.init.normal_(module.down.weight)
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    inner = x @ module.up.weight.T
    expected = x + (inner / (1 + torch.exp(-inner))) @ module.down.weight.T
    torch.testing.assert_close(module(x), expected, rtol=0, atol=1e-13)


def test_content_skip_is_the_equation():
    module = ContentSkip(8, init_std=1.0).double()
    attn_out, x_tilde = torch.randn(2, 2, 5, 8, dtype=torch.float64)
    torch.testing.assert_close(module(attn_out, x_tilde), attn_out + x_tilde @ module.skip.weight.T, rtol=0, atol=1e-13)


def test_modules_have_no_bias_and_the_papers_width():
    assert {name: tuple(p.shape) for name, p in PreProjection(768).named_parameters()} == {
        "up.weight": (960, 768),
        "down.weight": (768, 960),
    }
    assert {name: tuple(p.shape) for name, p in ContentSkip(768).named_parameters()} == {"skip.weight": (768, 768)}


def test_inner_width_is_rounded():
    assert PreProjection(10, expansion=1.25).up.weight.shape == (12, 10)  # 12.5 rounds to even, as Python does
    assert PreProjection(11, expansion=1.25).up.weight.shape == (14, 11)


def test_start_is_the_identity_bit_for_bit():
    x = torch.randn(3, 4, 16)
    assert torch.equal(PreProjection(16)(x), x)
    assert torch.equal(ContentSkip(16, init_std=0)(x, torch.randn_like(x)), x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_output_keeps_the_input_dtype_while_weights_stay_float32(dtype):
    x = torch.randn(3, 4, 16).to(dtype)
    module = PreProjection(16)
    torch.nn.init.normal_(module.down.weight)
    assert module(x).dtype == dtype
    assert module.up.weight.dtype == torch.float32
    assert ContentSkip(16)(x, x).dtype == dtype


def test_both_modules_commute_with_a_permutation_of_tokens():
    pre, skip = PreProjection(16).double(), ContentSkip(16, init_std=1.0).double()
    torch.nn.init.normal_(pre.down.weight)
    x, attn_out = torch.randn(2, 2, 9, 16, dtype=torch.float64)
    order = torch.randperm(9)
    torch.testing.assert_close(pre(x[:, order]), pre(x)[:, order], rtol=0, atol=1e-14)
    torch.testing.assert_close(skip(attn_out[:, order], x[:, order]), skip(attn_out, x)[:, order], rtol=0, atol=1e-14)


def test_fresh_skip_norm_is_the_papers_arithmetic():
    # ‖W‖_F of d × d entries with standard deviation s is s·d: 0.0768 at d = 768, as the docstring says.
    weight = draw_initial_weight("skip", (768, 768), seed=0, name="layer")
    assert weight.norm().item() == pytest.approx(1e-4 * 768, rel=0.01)
    assert weight.mean().abs().item() < 1e-6


def test_up_is_uniform_as_nn_linear_draws_it():
    weight = draw_initial_weight("up", (960, 768), seed=0, name="layer")
    bound = 1 / math.sqrt(768)
    assert weight.abs().max().item() <= bound
    assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.01)


def test_start_depends_on_seed_name_and_weight_alone():
    draw = draw_initial_weight
    first = draw("up", (4, 4), 0, "layers.0")
    torch.manual_seed(123)
    assert torch.equal(first, draw("up", (4, 4), 0, "layers.0"))
    assert not torch.equal(first, draw("up", (4, 4), 1, "layers.0"))
    assert not torch.equal(first, draw("up", (4, 4), 0, "layers.1"))
    assert not torch.equal(draw("skip", (4, 4), 0, "a", 1.0), draw("skip", (4, 4), 0, "b", 1.0))


def test_drawing_leaves_the_global_generator_alone():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    draw_initial_weight("up", (4, 4), 0, "x")
    assert torch.equal(torch.rand(3), expected)


def test_unknown_activation_is_refused():
    with pytest.raises(ValueError, match="activation is 'swish': expected one of silu, gelu, relu"):
        PreProjection(4, activation="swish")


def test_unknown_weight_is_refused():
    with pytest.raises(ValueError, match="expected one of 'up', 'down', 'skip', 'skip_a', 'skip_b'"):
        draw_initial_weight("gate", (2, 2), 0, "x")
