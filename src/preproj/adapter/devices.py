"""Where attention computes, also while accelerate keeps its weights elsewhere."""

import torch
from torch import Tensor, nn

CHILD = "preproj"  # the name of our layer in an attention module


def base_weight(attention: nn.Module) -> Tensor:
    """Return a weight of the base attention, a floating-point one if there is one, for its device and dtype."""
    weights = [weight for name, weight in attention.named_parameters() if not name.startswith(f"{CHILD}.")]
    return next((weight for weight in weights if weight.is_floating_point()), weights[0])


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
