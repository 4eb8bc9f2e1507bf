"""What the skip and the pre-projection of a layer do to the tokens of a text."""

from typing import Any

import torch
from torch import Tensor, nn

from preproj.adapter.layer import PreProjLayer
from preproj.analysis.weights import Row, skip_of, slope_of, wide
from preproj.modules import weight_dtype

MEASURES_OF_TOKENS = ("skip_to_attention", "skip_cosine", "skip_share", "pre_to_input")


class Meter:
    """Sums over the tokens that pass through one layer, for each class of tokens; their size is fixed.

    With s = W_skip·x̃ and u = attn_out + s, the measures are

    * ``skip_to_attention``: mean of ‖s‖/‖attn_out‖,
    * ``skip_cosine``: mean cosine of the angle between s and attn_out,
    * ``skip_share``: Σ⟨s, u⟩ / Σ⟨u, u⟩, the skip's share of what the branch adds to the residual stream,
    * ``pre_to_input``: mean of ‖x̃ − x̂‖/‖x̂‖.

    A token whose denominator is zero counts in no mean.

    Args:
        layer: of one attention module.
        adapter: the adapter's name.
        classes: number of token classes; the first holds every token.

    Attributes:
        membership: which classes each token of the text belongs to, ``(tokens, classes)``. None, or another number of
            tokens than the layer sees (windows, padding): the first class only.
        tokens: seen so far, ``(classes,)``.
    """

    def __init__(self, layer: PreProjLayer, adapter: str, classes: int):
        self.skip = nn.Sequential(*skip_of(layer, adapter).values())
        self.up = layer.linears(adapter).get("up")
        self.activation: Any = layer.activation.get(adapter)
        self.membership: Tensor | None = None
        self.device = next(layer.parameters()).device
        self.tokens = self._zeros(classes)
        self._sums = {name: self._zeros(classes, 2) for name in MEASURES_OF_TOKENS}
        self._slopes = self._zeros(self.up.out_features if self.up is not None else 0)

    def __call__(self, x_hat: Tensor, x_tilde: Tensor, attn_out: Tensor) -> None:
        """Add the tokens of one pass through the branch, each argument ``(..., hidden)``."""
        x_hat, x_tilde, attn_out = (t.to(self.device).flatten(0, -2) for t in (x_hat, x_tilde, attn_out))
        parts: dict[str, tuple[Tensor, Tensor]] = {}
        if self.skip:
            parts |= _skip_parts(wide(self.skip(x_tilde.to(weight_dtype(self.skip)))), wide(attn_out))
        if self.up is not None:
            parts["pre_to_input"] = _fraction(wide(x_tilde - x_hat).norm(dim=-1), wide(x_hat).norm(dim=-1))
            inner = wide(self.up(x_hat.to(weight_dtype(self.up))))
            self._slopes += slope_of(self.activation, inner).sum(0, dtype=torch.float64)
        classes = self._classes(len(x_hat))
        self.tokens += classes.sum(0)
        for name, (above, below) in parts.items():
            self._sums[name] += classes.T @ torch.stack((above, below), dim=-1).double()

    def measures(self) -> list[Row]:
        """Return the measures of each class; None where the part is switched off or no token counts."""
        sums = {name: kept.tolist() for name, kept in self._sums.items()}
        return [
            {name: above / below if below else None for name, (above, below) in zip(sums, row, strict=True)}
            for row in zip(*sums.values(), strict=True)
        ]

    def is_finite(self) -> bool:
        """Return whether every number that was summed is finite."""
        return all(bool(kept.isfinite().all()) for kept in (*self._sums.values(), self._slopes))

    def slopes(self) -> Tensor | None:
        """Return E[σ′(W_up · x̂)] over all tokens, ``(inner,)``; None without a pre-projection or a token."""
        return self._slopes / self.tokens[0] if self.up is not None and self.tokens[0] else None

    def _classes(self, tokens: int) -> Tensor:
        if self.membership is not None and len(self.membership) == tokens:
            return self.membership.to(self.device, torch.float64)
        return torch.eye(1, len(self.tokens), dtype=torch.float64, device=self.device).expand(tokens, -1)

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64, device=self.device)


def _skip_parts(skip: Tensor, attn_out: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Return numerator and denominator of each of the skip's measures, for each token."""
    update = attn_out + skip
    sizes = skip.norm(dim=-1), attn_out.norm(dim=-1)
    return {
        "skip_to_attention": _fraction(*sizes),
        "skip_cosine": _fraction((skip * attn_out).sum(-1), sizes[0] * sizes[1]),
        "skip_share": ((skip * update).sum(-1), update.square().sum(-1)),
    }


def _fraction(above: Tensor, below: Tensor) -> tuple[Tensor, Tensor]:
    """Return a quotient for each token with the weight 1 that it has in a mean; both 0 where it is none."""
    defined = below != 0
    return torch.where(defined, above / below, 0.0), defined
