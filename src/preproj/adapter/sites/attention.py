"""Which modules of a model are self-attention."""

import inspect
import re
from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedModel

_LAYER_INDEX = re.compile(r"(?<=\.)\d+(?=\.)")
_CROSS = re.compile(r"cross|encoder_attn|encdec", re.IGNORECASE)
# Mixers without softmax attention carry "attention" in their names too.
_LINEAR = re.compile(r"linearattention|lightning|delta|mamba|rwkv", re.IGNORECASE)
_OUTPUT = re.compile(r"^(o|out|output|c)_?proj\w*$|^dense$|^out_lin$|^wo$|^o$", re.IGNORECASE)
_OTHER_MODALITY = re.compile(r"vision|visual|image|audio|speech", re.IGNORECASE)


def hidden_size_of(attention: nn.Module) -> int | None:
    """Return the width of the hidden states that an attention module reads, or None if it is not attention.

    Attention has a class named so and owns linear maps (input and output projections), as children or a level deeper.
    The first of them reads the hidden states.
    """
    if not _is_named_attention(attention):
        return None
    widths = [width for _, child in _linear_children(attention) if (width := in_features(child)) is not None]
    return widths[0] if widths else None


def out_size_of(attention: nn.Module) -> int | None:
    """Return the width of what an attention module returns: that of its output projection, or of what it reads."""
    outputs = [child for name, child in _linear_children(attention) if _OUTPUT.match(name)]
    return out_features(outputs[-1]) if outputs else hidden_size_of(attention)


def _linear_children(attention: nn.Module) -> list[tuple[str, nn.Module]]:
    direct = [(name, child) for name, child in attention.named_children() if in_features(child) is not None]
    if len(direct) > 1:
        return direct
    return direct + [
        (name, module)
        for name, child in attention.named_children()
        for module in child.children()
        if in_features(module) is not None
    ]


def is_sequence_first(attention: nn.Module) -> bool:
    """Whether a module takes ``(seq, batch, hidden)``, as torch's own attention and what follows fairseq do."""
    if any(isinstance(part, nn.MultiheadAttention) and not part.batch_first for part in attention.modules()):
        return True
    try:
        source = inspect.getsource(type(attention).forward)
    except (OSError, TypeError):
        return False
    found = re.search(r"\w*len\w*, (bsz|batch\w*)(, \w+)? = \w+\.(size\(\)|shape)", source)
    return found is not None and "transpose(0, 1)" not in source[: found.start()]


def in_features(module: nn.Module) -> int | None:
    """Return the input width of a linear map: ``nn.Linear`` and its quantised kin, or GPT-2's ``Conv1D``."""
    return _width(module, "in_features", "nx")


def out_features(module: nn.Module) -> int | None:
    """Return the output width of a linear map."""
    return _width(module, "out_features", "nf")


def _width(module: nn.Module, *attributes: str) -> int | None:
    return next((width for a in attributes if isinstance(width := getattr(module, a, None), int)), None)


def _is_named_attention(module: nn.Module) -> bool:
    model = type(module).__module__.rpartition("modeling_")[2].replace("_", "")
    name = type(module).__name__.lower()
    if model == "kimilinear":  # whose attention is not linear
        name = name.removeprefix(model)
    return bool(re.search(r"attention|attn|MLA$", name, re.IGNORECASE)) and not _LINEAR.search(name)


def looks_like_attention(module: nn.Module) -> bool:
    """Whether a module is named as attention and built as attention, and holds no such module itself."""
    if hidden_size_of(module) is None:
        return False
    return not any(looks_like_attention(inner) for inner in module.modules() if inner is not module)


def self_attention(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Walk the self-attention modules of a model, each once, without cross-attention and other modalities.

    Yields:
        ``(path, module)``.
    """
    foreign = tuple(f"{name}." for name, part in model.named_modules() if _is_other_modality(model, part))
    language = tuple(f"{name}." for name, part in model.named_modules() if _is_language_model(model, part))
    for name, module in model.named_modules():
        if name.startswith(foreign) or (language and not name.startswith(language)):
            continue
        if looks_like_attention(module) and not _CROSS.search(f"{name} {type(module).__name__}"):
            yield name, module


def _is_other_modality(model: nn.Module, part: nn.Module) -> bool:
    """Whether a part of a model is a model of its own for images or sound, inside one for something else."""
    if part is model or not isinstance(model, PreTrainedModel) or not isinstance(part, PreTrainedModel):
        return False
    if part.config.model_type == model.config.model_type:
        return False
    if part.main_input_name != "input_ids":
        return part.main_input_name != model.main_input_name
    if model.main_input_name != "input_ids":  # then that of the part is only the default
        return False
    return bool(_OTHER_MODALITY.search(part.config.model_type) and not _OTHER_MODALITY.search(model.config.model_type))


def _is_language_model(model: nn.Module, part: nn.Module) -> bool:
    """Whether a part of a model for text and more is its language model."""
    if not isinstance(model, PreTrainedModel) or not isinstance(part, PreTrainedModel):
        return False
    text = getattr(model.config, "text_config", None)
    return text is not None and part is not model and part.config.model_type == text.model_type


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
        if looks_like_attention(module)
    }
    return sorted(found)
