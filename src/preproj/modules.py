"""The two equations of the method, in plain torch.

    x̃   = x̂ + W_down · σ(W_up · x̂)            pre-projection, between the norm and Q/K/V
    out = x + attn_out + W_skip · x̃            content skip, around attention

``x`` is the residual stream, ``x̂ = norm(x)`` the output of the block's own norm, ``attn_out`` the output of the
attention branch and σ is SiLU (Shinde 2026, arXiv 2604.10791). Neither equation knows positions: RoPE comes later,
inside attention. So both commute with every permutation of the tokens, and neither adds to the K/V cache.

Everything else in this package is a way to put these two functions in the right place.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from preproj.initial import draw_initial_weight

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": nn.functional.silu,
    "gelu": nn.functional.gelu,
    "relu": nn.functional.relu,
}


def pre_project(
    hidden_states: Tensor, up: nn.Module, down: nn.Module, activation: Callable[[Tensor], Tensor]
) -> Tensor:
    """Pre-projection: ``x̃ = x̂ + W_down · σ(W_up · x̂)``.

    Args:
        hidden_states: x̂, the normed hidden states, ``(..., hidden)``.
        up: ``W_up`` as a module, hidden to ``round(expansion · hidden)``.
        down: ``W_down`` as a module, back to hidden.
        activation: σ.

    Returns:
        x̃, same shape and dtype as ``hidden_states``; computed in the dtype of the weights.
    """
    x = hidden_states.to(weight_dtype(up))
    return (x + down(activation(up(x)))).to(hidden_states.dtype)


def add_content_skip(attn_out: Tensor, x_tilde: Tensor, *skip: nn.Module, multiplier: float = 1.0) -> Tensor:
    """Content skip: ``attn_out + W_skip · x̃``; the host block adds the residual ``x``.

    Args:
        attn_out: output of the attention branch, ``(..., hidden)``.
        x_tilde: the pre-projected hidden states the attention branch saw, ``(..., hidden)``.
        skip: ``W_skip`` as a module, hidden to hidden; or its two factors of low rank, the first applied first.
        multiplier: what the host block multiplies its branch by before the residual sum (Granite). The skip is
            divided by it, so that it joins the residual stream unscaled.

    Returns:
        The branch's new output, same shape and dtype as ``attn_out``.
    """
    added = x_tilde.to(weight_dtype(skip[0]))
    for linear in skip:
        added = linear(added)
    if multiplier != 1.0:
        added = added / multiplier
    return attn_out + added.to(attn_out.device, attn_out.dtype)


class PreProjection(nn.Module):
    """Pre-projection as a module: identity at the start, because ``W_down`` is zero.

    Args:
        hidden_size: width of the hidden states.
        expansion: the inner width is ``round(expansion · hidden_size)``; the paper uses 1.25.
        activation: a key of ``ACTIVATIONS``.
        seed: start of ``W_up``, see :func:`draw_initial_weight`.
        name: distinguishes layers that share a seed.

    Raises:
        ValueError: for another activation, or an expansion that leaves no inner width.
    """

    def __init__(
        self,
        hidden_size: int,
        expansion: float = 1.25,
        activation: str = "silu",
        seed: int = 0,
        name: str = "",
    ):
        super().__init__()
        inner_size = round(expansion * hidden_size)
        if inner_size < 1:
            raise ValueError(f"expansion {expansion} of {hidden_size} leaves an inner width of {inner_size}: raise it.")
        self.up = bias_free_linear(hidden_size, inner_size)
        self.down = bias_free_linear(inner_size, hidden_size)
        self.activation = activation_function(activation)
        with torch.no_grad():
            self.up.weight.copy_(draw_initial_weight("up", tuple(self.up.weight.shape), seed, name))
            self.down.weight.zero_()

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return x̃ for x̂, both ``(..., hidden)``."""
        return pre_project(hidden_states, self.up, self.down, self.activation)


class ContentSkip(nn.Module):
    """Content skip as a module.

    Args:
        hidden_size: width of the hidden states.
        init_std: standard deviation of ``W_skip`` at the start; 0 makes the module an exact no-op.
        seed: start of ``W_skip``, see :func:`draw_initial_weight`.
        name: distinguishes layers that share a seed.
    """

    def __init__(self, hidden_size: int, init_std: float = 1e-4, seed: int = 0, name: str = ""):
        super().__init__()
        self.skip = bias_free_linear(hidden_size, hidden_size)
        with torch.no_grad():
            self.skip.weight.copy_(draw_initial_weight("skip", (hidden_size, hidden_size), seed, name, init_std))

    def forward(self, attn_out: Tensor, x_tilde: Tensor) -> Tensor:
        """Return ``attn_out + W_skip · x̃``, all ``(..., hidden)``."""
        return add_content_skip(attn_out, x_tilde, self.skip)


def bias_free_linear(in_features: int, out_features: int, device: torch.device | None = None) -> nn.Linear:
    """Return a float32 ``nn.Linear`` without bias whose weight is not drawn yet.

    Its weight stays on the meta device inside accelerate's ``init_empty_weights``, which watches parameters being
    registered.
    """
    linear = nn.Linear(in_features, out_features, bias=False, device="meta", dtype=torch.float32)
    linear.weight = nn.Parameter(torch.empty_like(linear.weight, device=device or "cpu"))
    return linear


def activation_function(name: str) -> Callable[[Tensor], Tensor]:
    """Return σ by its name.

    Raises:
        ValueError: if ``name`` is not a key of ``ACTIVATIONS``.
    """
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ValueError(f"activation is {name!r}: expected one of {', '.join(ACTIVATIONS)}.")
    return ACTIVATIONS[name]


def weight_dtype(module: nn.Module) -> torch.dtype:
    """Return the dtype a linear map computes in."""
    return next(module.parameters()).dtype
