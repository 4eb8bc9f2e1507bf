"""Where attention computes, also while accelerate keeps its weights elsewhere."""

from itertools import chain

import torch
from torch import Tensor, nn

CHILD = "preproj"  # the name of our layer in an attention module


def base_weight(module: nn.Module) -> Tensor:
    """Return the first weight of the base in a module; GPTQ and its kin keep theirs as buffers."""
    weights = chain(module.named_parameters(), module.named_buffers())
    return next(weight for name, weight in weights if not name.startswith(f"{CHILD}."))


def compute_dtype(model: nn.Module, attention: nn.Module) -> torch.dtype:
    """Return the dtype an attention module computes in.

    That is its weights', or where they are quantised what bitsandbytes calls the compute dtype; where it is not said,
    the dtype of the first weight of the model, its embedding.
    """
    stored = base_weight(attention).dtype
    if _can_compute(stored):
        return stored
    stated = (getattr(part, "compute_dtype", None) for part in attention.modules())
    found = (weight.dtype for weight in model.parameters())
    return next(dtype for dtype in chain(stated, found) if dtype is not None and _can_compute(dtype))


def _can_compute(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize > 1  # one byte holds float8


def execution_device(module: nn.Module) -> torch.device | None:
    """Return where accelerate brings a module's inputs and weights in its forward, or None if it does not."""
    hook = getattr(module, "_hf_hook", None)
    for part in getattr(hook, "hooks", (hook,)):  # several of them are chained in a SequentialHook
        device = getattr(part, "execution_device", None)
        if device is not None:
            return torch.device(device)
    return None


def compute_device(attention: nn.Module) -> torch.device:
    """Return the device an attention module computes on.

    That is where its weights are or, where accelerate offloads them and leaves meta tensors in their place, where it
    brings them for a forward pass. A model that is on the meta device as a whole stays there.
    """
    device = base_weight(attention).device
    if device.type != "meta":
        return device
    return next((d for module in attention.modules() if (d := execution_device(module)) is not None), device)
