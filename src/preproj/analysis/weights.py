"""How large and how rich the weights of a layer are."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from preproj.adapter.config import PreProjConfig
from preproj.adapter.layer import PreProjLayer
from preproj.initial import draw_initial_weight

Row = dict[str, float | None]


def skip_of(layer: PreProjLayer, adapter: str) -> dict[str, nn.Linear]:
    """Return W_skip as the linear maps that make it up, in the order they are applied: one, or two of low rank."""
    return {what: linear for what, linear in layer.linears(adapter).items() if what.startswith("skip")}


def skip_measures(layer: PreProjLayer, adapter: str, config: PreProjConfig) -> Row:
    """Measure W_skip, its start W_skip⁰ (drawn again from the stored seed) and W_skip − W_skip⁰; None without a skip.

    A skip of low rank is measured as the product of its factors.
    """
    maps = skip_of(layer, adapter)
    if not maps:
        return {**matrix_measures("skip", None), **matrix_measures("skip_change", None), "initial_skip_norm": None}
    now = _product([linear.weight for linear in maps.values()])
    start = _product([_start_of(what, linear.weight, layer.name, config) for what, linear in maps.items()])
    return {
        **matrix_measures("skip", now),
        **matrix_measures("skip_change", now - start),
        "initial_skip_norm": start.norm().item(),
    }


def pre_measures(layer: PreProjLayer, adapter: str, slopes: Tensor | None) -> Row:
    """Measure the linearised pre-projection; None without one.

    Args:
        layer: of one attention module.
        adapter: its name.
        slopes: E[σ′(W_up · x̂)] over the tokens of a text, ``(inner,)``.
    """
    if slopes is None:
        return matrix_measures("pre", None)
    maps = layer.linears(adapter)
    return matrix_measures("pre", linearised(maps["up"].weight, maps["down"].weight, slopes))


def linearised(up: Tensor, down: Tensor, slopes: Tensor) -> Tensor:
    """Return W_down · diag(E[σ′(W_up · x̂)]) · W_up, the mean Jacobian of x̃ − x̂ over tokens.

    Args:
        up: W_up, ``(inner, hidden)``.
        down: W_down, ``(hidden, inner)``.
        slopes: E[σ′(W_up · x̂)], ``(inner,)``.

    Returns:
        ``(hidden, hidden)``, in float32 or wider.
    """
    up, down = wide(up), wide(down)
    return down @ (slopes.to(up)[:, None] * up)


def slope_of(activation: Callable[[Tensor], Tensor], inner: Tensor) -> Tensor:
    """Return σ′ at every number of a tensor: SiLU's in closed form, another's by autograd."""
    if activation is nn.functional.silu:
        sigmoid = inner.sigmoid()
        return sigmoid * (1 + inner * (1 - sigmoid))
    with torch.inference_mode(False), torch.enable_grad():
        point = inner.clone().requires_grad_()
        (slope,) = torch.autograd.grad(activation(point).sum(), point)
    return slope


def matrix_measures(name: str, matrix: Tensor | None) -> Row:
    """Return four measures of a matrix under keys that begin with ``name``; None for each where there is no matrix.

    ``norm`` is Frobenius's, ``spectral_norm`` the largest singular value, ``mean_row_norm`` the mean norm of the rows
    (what one output reads), and ``effective_rank`` the exponential of the entropy of the singular values divided by
    their sum (Roy and Vetterli 2007), None for a matrix of zeros.
    """
    if matrix is None:
        return {f"{name}_{what}": None for what in ("norm", "spectral_norm", "mean_row_norm", "effective_rank")}
    singular = torch.linalg.svdvals(matrix)
    return {
        f"{name}_norm": matrix.norm().item(),
        f"{name}_spectral_norm": singular[0].item(),
        f"{name}_mean_row_norm": matrix.norm(dim=1).mean().item(),
        f"{name}_effective_rank": _effective_rank(singular),
    }


def wide(tensor: Tensor) -> Tensor:
    """Return a tensor in float32, or as it is in float64."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _effective_rank(singular: Tensor) -> float | None:
    if singular[0] == 0:
        return None
    share = singular / singular.sum()
    return torch.special.entr(share).sum().exp().item()


def _product(factors: list[Tensor]) -> Tensor:
    """Multiply the matrices of maps that are applied one after the other."""
    first, *second = map(wide, factors)
    return second[0] @ first if second else first


def _start_of(what: str, weight: Tensor, site: str, config: PreProjConfig) -> Tensor:
    """Draw the start of a weight again, rounded to the dtype it was trained in."""
    std = config.skip_init_std or 0.0
    return draw_initial_weight(what, tuple(weight.shape), config.init_seed, site, std, config.init_weights).to(weight)
