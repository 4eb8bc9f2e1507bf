"""Models for the tests of the adapter's life: four kinds of blocks, new weights that act."""

from typing import Any

import torch
from peft import PeftModel, get_peft_model
from tiny import tiny_of
from torch import nn
from transformers import PreTrainedModel

from preproj import PreProjConfig
from preproj.adapter.layer import adapted_sites

# plain, parallel residual, norm after attention, residual and norm inside the module
KINDS = ("llama", "gpt_neox", "gemma2", "bert")
IDS = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(0))


def base_of(kind: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Builds the same tiny base each time."""
    return tiny_of(kind, dtype)


def adapted(kind: str, dtype: torch.dtype = torch.float32, seed: int = 0, **config: Any) -> PeftModel:
    """Builds an adapted base whose new weights are drawn anew, so that all of them act."""
    model = get_peft_model(base_of(kind, dtype), PreProjConfig(**config))
    draw(model, seed)
    return model


def draw(model: nn.Module, seed: int = 0, adapter: str = "default") -> None:
    """Draws every new weight of an adapter anew."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, _, layer in adapted_sites(model):
            for linear in layer.linears(adapter).values():
                linear.weight.copy_(0.2 * torch.randn(linear.weight.shape, generator=generator))


def new_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the adapter's weights by name."""
    return {name: weight for name, weight in model.named_parameters() if ".preproj." in name}


def logits(model: nn.Module) -> torch.Tensor:
    """Computes the logits of one batch, without gradients."""
    with torch.no_grad():
        return model(input_ids=IDS).logits
