"""Weighted sums of content skips."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from preproj.adapter.config import PreProjConfig
from preproj.adapter.layer import PreProjLayer


def combined_config(
    loaded: dict[str, PreProjConfig], adapters: Sequence[str], weights: Sequence[float], combination_type: str
) -> PreProjConfig:
    """Return the configuration of a weighted sum of adapters.

    Args:
        loaded: the configuration of each loaded adapter.
        adapters: those to combine.
        weights: one number for each.
        combination_type: ``"linear"`` or ``"cat"``.

    Raises:
        ValueError: where the sum is not defined, or the arguments do not fit each other.
    """
    if unknown := [name for name in adapters if name not in loaded]:
        raise ValueError(
            f"adapters names {', '.join(map(repr, unknown))}: expected some of {', '.join(map(repr, loaded))}."
        )
    if not adapters or len(weights) != len(adapters) or not all(map(_is_finite, weights)):
        raise ValueError(
            f"weights is {list(weights)} for {len(adapters)} adapters: expected one finite number for each."
        )
    for name in adapters:
        if loaded[name].pre_projection or loaded[name].modules_to_save:
            part = "a pre-projection" if loaded[name].pre_projection else "modules_to_save"
            raise ValueError(
                f"adapter {name!r} has {part}, and only content skips have a weighted sum: the rest is not linear. "
                "Activate several adapters at once, or combine adapters with pre_projection=False."
            )
    ranks = [loaded[name].skip_rank for name in adapters]
    low = [rank for rank in ranks if rank is not None]
    fits = {"linear": not low, "cat": len(low) == len(ranks)}
    if not fits.get(combination_type):
        kinds = ", ".join("dense" if rank is None else f"of rank {rank}" for rank in ranks)
        raise ValueError(
            f"combination_type is {combination_type!r} and the skips are {kinds}: 'linear' adds dense ones, 'cat' "
            "joins the factors of those of low rank, and the two kinds do not mix."
        )
    return replace(loaded[adapters[0]], skip_rank=sum(low) or None)


def _is_finite(weight: object) -> bool:
    try:
        return math.isfinite(weight)  # type: ignore[arg-type]  # a tensor of one number will do
    except TypeError:
        return False


def check_same_layers(layers: Iterable[PreProjLayer], adapters: Sequence[str]) -> None:
    """Check that adapters act in the same layers.

    Raises:
        ValueError: with a layer in which one is missing.
    """
    for layer in layers:
        here = [name for name in adapters if layer.linears(name)]
        if here and len(here) < len(adapters):
            missing = next(name for name in adapters if name not in here)
            raise ValueError(
                f"adapters {here[0]!r} and {missing!r} act in different layers: {missing!r} has no skip at "
                f"{layer.name!r}. Only adapters of the same layers can be combined."
            )


@torch.no_grad()
def combine_skips(layer: PreProjLayer, adapters: Sequence[str], weights: Sequence[float], adapter_name: str) -> None:
    """Set an adapter's ``W_skip`` to the weighted sum of others', ``Σ wᵢ·Wᵢ``, or of low rank ``Σ (wᵢ·Bᵢ)·Aᵢ``.

    Args:
        layer: where they act.
        adapters: the adapters to combine.
        weights: the weight of each.
        adapter_name: the adapter that becomes the sum, in their dtype.
    """
    parts = [layer.linears(name) for name in adapters]
    last = "skip" if "skip" in parts[0] else "skip_b"
    scaled = [weight * part[last].weight for weight, part in zip(weights, parts, strict=True)]
    if last == "skip":
        sums = {"skip": torch.stack(scaled).sum(0)}
    else:
        sums = {"skip_a": torch.cat([part["skip_a"].weight for part in parts]), "skip_b": torch.cat(scaled, dim=1)}
    for what, linear in layer.linears(adapter_name).items():
        linear.weight.data = sums[what]
