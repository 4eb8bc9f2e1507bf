"""Where attention sits, per architecture."""

import re

from torch import nn

# Architectures whose layout is checked against a naive computation of the whole model (tests/test_adapter.py).
ATTENTION_MODULES: dict[str, list[str]] = {
    "gpt2": ["attn"],
    "gpt_neox": ["attention"],  # Pythia: parallel residual, only the attention branch sees x̃
    "llama": ["self_attn"],
    "mistral": ["self_attn"],
    "phi": ["self_attn"],  # one norm feeds attention and MLP; the MLP keeps x̂
    "qwen2": ["self_attn"],
    "qwen3": ["self_attn"],
}


_LAYER_INDEX = re.compile(r"(?<=\.)\d+(?=\.)")


def hidden_size_of(attention: nn.Module) -> int | None:
    """Return the width of the hidden states that an attention module reads, or None if it is not attention.

    Attention has "attention" or "attn" in the name of its class and owns at least two linear maps (input and output
    projections) as direct children; the first of them reads the hidden states.
    """
    if not re.search(r"attention|attn", type(attention).__name__, re.IGNORECASE):
        return None
    widths = [width for child in attention.children() if (width := _in_features(child)) is not None]
    return widths[0] if len(widths) > 1 else None


def _in_features(module: nn.Module) -> int | None:
    """Return the input width of a linear map: ``nn.Linear`` and its quantised kin, or GPT-2's ``Conv1D``."""
    for attribute in ("in_features", "nx"):
        if isinstance(width := getattr(module, attribute, None), int):
            return width
    return None


def candidates(model: nn.Module) -> list[str]:
    """List the modules that look like attention, one entry per kind, with ``*`` for the layer index.

    Args:
        model: any model.

    Returns:
        Entries such as ``"model.layers.*.self_attn (LlamaAttention)"``.
    """
    found = {
        f"{_LAYER_INDEX.sub('*', name)} ({type(module).__name__})"
        for name, module in model.named_modules()
        if hidden_size_of(module) is not None
    }
    return sorted(found)
