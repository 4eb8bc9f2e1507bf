"""Models in plain torch for PEFT's tests of custom models, whose own have no attention.

They answer to the names of the host's models: `lin0` is attention here, `lin1` a linear layer.
"""

from typing import Any

import torch
from torch import Tensor, nn

from preproj.adapter import PreProjLayer

WIDTH = 16
HANDED_ON = ("active_adapters", "adapter_layer_names", *PreProjLayer.adapter_layer_names)
HANDED_ON += ("other_param_names", *PreProjLayer.other_param_names)


class Attention(nn.Module):
    """Self-attention with one head.

    The host asks the target of an adapter for its adapters, because its own tuner layers stand in the target's place.
    Ours is the target's child, so such questions are handed on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(nn.functional.scaled_dot_product_attention(*self.qkv(x).chunk(3, dim=-1)))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name not in HANDED_ON:
                raise
            return getattr(super().__getattr__("preproj"), name)


class Plain(nn.Module):
    """A block with its norm before attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.lin0, self.lin1 = nn.LayerNorm(WIDTH), Attention(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.lin0(self.norm(x))
        return x + self.lin1(x)


class Parallel(Plain):
    """A block whose two branches share the norm and the sum."""

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        return x + self.lin0(normed) + self.lin1(normed)


class NormAfter(Plain):
    """A block with its norm after the sum."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x + self.lin0(x))
        return x + self.lin1(x)


BLOCKS = {"Plain": Plain, "Parallel": Parallel, "NormAfter": NormAfter}


class Classifier(nn.Module):
    """Log-probabilities of two classes for each row of token numbers."""

    def __init__(self, block: type[Plain] = Plain, layers: int = 2) -> None:
        super().__init__()
        self.emb = nn.Embedding(90, WIDTH)
        self.layers = nn.ModuleList(block() for _ in range(layers))
        self.out = nn.Linear(WIDTH, 2)

    def forward(self, X: Tensor) -> Tensor:
        x = self.emb(X)
        for layer in self.layers:
            x = layer(x)
        return self.out(x.mean(dim=1)).log_softmax(dim=-1)


def from_pretrained(model_id: str, dtype: torch.dtype | None = None) -> Classifier:
    """Builds the model of a name in :data:`BLOCKS`, always with the same weights."""
    torch.manual_seed(0)
    return Classifier(BLOCKS[model_id]).to(dtype or torch.float32)
