"""What the skip and attention know of position: a permutation of the tokens, and the variance it explains."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn

from preproj.adapter.layer import PreProjLayer, adapted_sites
from preproj.analysis.branches import watched
from preproj.analysis.documents import first_windows
from preproj.analysis.weights import skip_of
from preproj.modules import pre_project, weight_dtype


@torch.inference_mode()
def permutation_deviation(model: PeftModel, ids: list[int]) -> list[float | None]:
    """Measure how far the skip is from commuting with a permutation of the tokens, x̂ being fixed.

    The skip of the x̃ that attention read in the model is put in another order, and compared with the skip of x̂ in
    that order. Position reaches the skip through x̂ alone, so nothing but round-off is left.

    Args:
        model: in eval mode, with one active adapter of ours.
        ids: token ids of one text.

    Returns:
        For each adapted attention module, from the input up, the largest deviation over the largest entry of the
        skip's output; None without a skip.
    """
    layers = [layer for _, _, layer in adapted_sites(model)]
    checks = [_PermutationCheck(layer, model.active_adapter) for layer in layers]
    with watched((layer.site, check) for layer, check in zip(layers, checks, strict=True)):
        model(input_ids=torch.tensor([ids], device=model.device))
    return [check.result() for check in checks]


@torch.inference_mode()
def measure_position(model: PeftModel, documents: Iterable[list[int]], window: int) -> dict[str, Any]:
    """Measure the share of the variance that position alone explains, over documents of equal length.

    One forward pass a document. Memory is that of three float64 sums a layer, ``(window, hidden)`` each, in main
    memory, whatever the number of documents. Each pass through a module that stands at several places (ALBERT) counts
    as a document.

    Args:
        model: in eval mode, with one active adapter of ours.
        documents: held-out token ids, one list a document.
        window: how many of a document's first tokens are read.

    Returns:
        ``window``, ``documents`` (measured), ``skipped`` (shorter than the window) and ``layers``, one row for each
        adapted attention module from the input up: ``layer``, ``site`` and :meth:`PositionVariance.omega_squared` of
        ``x_hat``, ``attn_out`` (what the block adds to its residual stream without the skip) and ``skip`` (W_skip·x̃;
        None without a skip).

    Raises:
        ValueError: if fewer than two documents fill the window.
    """
    texts, skipped = first_windows(documents, window)
    sites = adapted_sites(model)
    meters = [_Meter(layer, model.active_adapter) for _, _, layer in sites]
    with watched((layer.site, meter) for (_, _, layer), meter in zip(sites, meters, strict=True)):
        for ids in texts:
            model(input_ids=torch.tensor([ids], device=model.device))
    rows = [
        {"layer": index, "site": site, **meter.shares()}
        for index, ((site, _, _), meter) in enumerate(zip(sites, meters, strict=True))
    ]
    return {"window": window, "documents": len(texts), "skipped": skipped, "layers": rows}


class PositionVariance:
    """Sums over documents from which the variance of a vector that position explains is estimated.

    A vector at position p of document d is y_dp = μ + π_p + e_dp, with documents drawn independently; within a
    document the e_dp may be correlated in any way. Each sum of squares is summed over the entries of the vectors.
    """

    def __init__(self) -> None:
        self.documents = 0
        self._shift = self._by_position = torch.zeros(())
        self._squares = self._document_squares = 0.0

    def add(self, vectors: Tensor) -> None:
        """Add one document, ``(positions, hidden)``, of any dtype; every one has as many positions."""
        vectors = vectors.cpu().double()
        if not self.documents:
            self._shift = vectors[-1]  # so that a large mean does not cost digits
        vectors = vectors - self._shift
        self.documents += 1
        self._by_position = self._by_position + vectors
        self._squares += vectors.square().sum().item()
        self._document_squares += len(vectors) * vectors.mean(0).square().sum().item()

    def omega_squared(self) -> float | None:
        """Return ω², the share of the variance of a token's vector that its position alone explains.

        That is (1/P) Σ‖π_p‖² over the same plus the mean variance of e_dp, each replaced by its unbiased estimate. The
        plain R² of the per-position means is biased upwards by about 1/documents; this is not, but where position
        explains nothing it lies around zero and may be below. Documents are blocks, as in an analysis of variance of
        repeated measures: what a whole document has in common is no error of the differences between positions.

        Returns:
            At most 1; None for fewer than two documents, and where nothing varies.
        """
        if self.documents < 2:
            return None
        documents, positions = self.documents, len(self._by_position)
        means = self._by_position / documents
        grand = means.mean(0)
        of_mean = documents * positions * grand.square().sum().item()
        total = self._squares - of_mean
        between = documents * (means - grand).square().sum().item()
        residual = total - between - (self._document_squares - of_mean)
        by_position = (between - residual / (documents - 1)) / (documents * positions)
        rest = (total - between) / (positions * (documents - 1))
        return by_position / (by_position + rest) if by_position + rest > 0 else None


class _Meter:
    """The three vectors of one layer whose variance is measured."""

    def __init__(self, layer: PreProjLayer, adapter: str):
        self.skip = _skip(layer, adapter)
        self.sums = {"x_hat": PositionVariance(), "attn_out": PositionVariance(), "skip": PositionVariance()}

    def __call__(self, x_hat: Tensor, x_tilde: Tensor, attn_out: Tensor) -> None:
        self.sums["x_hat"].add(x_hat.flatten(0, -2))
        self.sums["attn_out"].add(attn_out.flatten(0, -2))
        if self.skip is not None:
            self.sums["skip"].add(self.skip(x_tilde).flatten(0, -2))

    def shares(self) -> dict[str, float | None]:
        return {name: sums.omega_squared() for name, sums in self.sums.items()}


class _PermutationCheck:
    """Compares one layer's skip before and after a permutation of its tokens."""

    def __init__(self, layer: PreProjLayer, adapter: str):
        self.skip, self.pre = _skip(layer, adapter), _pre(layer, adapter)
        self.deviation = self.largest = 0.0

    def __call__(self, x_hat: Tensor, x_tilde: Tensor, attn_out: Tensor) -> None:
        if self.skip is not None:
            x_hat, added = x_hat.flatten(0, -2), self.skip(x_tilde).flatten(0, -2)
            order = torch.randperm(len(x_hat), generator=torch.Generator().manual_seed(0)).to(x_hat.device)
            moved = self.skip(self.pre(x_hat[order]))
            self.deviation = max(self.deviation, (moved - added[order]).abs().max().item())
            self.largest = max(self.largest, added.abs().max().item())

    def result(self) -> float | None:
        return None if self.skip is None else self.deviation / (self.largest or 1.0)


def _skip(layer: PreProjLayer, adapter: str) -> Callable[[Tensor], Tensor] | None:
    """Return W_skip as a function, or None where the adapter has none."""
    skip = nn.Sequential(*skip_of(layer, adapter).values())
    return (lambda x_tilde: skip(x_tilde.to(weight_dtype(skip)))) if skip else None


def _pre(layer: PreProjLayer, adapter: str) -> Callable[[Tensor], Tensor]:
    """Return the pre-projection as a function, the identity where the adapter has none."""
    if adapter not in layer.up:
        return lambda x_hat: x_hat
    return lambda x_hat: pre_project(x_hat, layer.up[adapter], layer.down[adapter], layer.activation[adapter])
