"""An optimiser in which the pre-projection learns at a rate of its own."""

import math
from typing import Any

from torch import nn
from torch.optim import Optimizer


def create_optimizer(
    model: nn.Module, optimizer_cls: type[Optimizer], *, lr: float, pre_lr_ratio: float, **kwargs: Any
) -> Optimizer:
    """Make an optimiser over a model's trainable weights, for ``Trainer(..., optimizers=(optimizer, None))``.

    The pre-projection wants a much lower rate than the content skip or LoRA beside it (docs/size-and-learning-rate.md).
    Call it after the adapters are on the model and, with FSDP, let the Trainer wrap the model first.

    Args:
        model: with a pre-projection, alone or beside other adapters.
        optimizer_cls: such as ``torch.optim.AdamW``.
        lr: learning rate of everything but the pre-projection.
        pre_lr_ratio: rate of ``W_up`` and ``W_down`` over ``lr``; 0.03 is a start.
        kwargs: further options of the optimiser.

    Raises:
        ValueError: if ``pre_lr_ratio`` is no number above 0, or the model has no trainable weight.
    """
    if isinstance(pre_lr_ratio, bool) or not isinstance(pre_lr_ratio, int | float) or not 0 < pre_lr_ratio < math.inf:
        raise ValueError(f"pre_lr_ratio is {pre_lr_ratio!r}: expected a number above 0, such as 0.03.")
    trainable = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    if not trainable:
        raise ValueError("the model has no trainable weight: put an adapter on it before the optimiser is made.")
    pre = [weight for name, weight in trainable if _is_pre_projection(name)]
    others = [weight for name, weight in trainable if not _is_pre_projection(name)]
    groups = [{"params": others, "lr": lr}, {"params": pre, "lr": lr * pre_lr_ratio}]
    return optimizer_cls([group for group in groups if group["params"]], **kwargs)


def _is_pre_projection(name: str) -> bool:
    return ".preproj.up." in name or ".preproj.down." in name
