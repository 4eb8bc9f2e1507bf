"""The families of models that the sweep examines, and what each is fed."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from checks import IDS, TEXT, Inputs
from tiny import IMAGE, SMALL
from transformers import (
    AutoBackbone,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
)
from transformers.models.auto import modeling_auto as auto

PIXELS = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
BESIDE_PIXELS = {
    "imagegpt": TEXT,  # whose pixels are tokens
    "shieldgemma2": TEXT,
    "siglip2": {
        "pixel_values": PIXELS.reshape(2, 16, -1),  # patches
        "pixel_attention_mask": torch.ones(2, 16, dtype=torch.long),
        "spatial_shapes": torch.tensor([[4, 4], [4, 4]]),
    },
    "perceiver": {"inputs": PIXELS},
}


@dataclass(frozen=True)
class Family:
    """Model types that are built and fed alike.

    Args:
        title: what they are called, in the plural.
        auto: the class that builds them, for each type.
        small: the numbers they are built from.
        inputs: what a model of a type is called with, in its dtype.
        generates: whether they generate text, with a cache.
    """

    title: str
    auto: dict[str, Any]
    small: dict[str, Any]
    inputs: Callable[[str, PreTrainedModel], Inputs]
    generates: bool = False


def _text(model_type: str, model: PreTrainedModel) -> Inputs:
    return TEXT


def _masked(model_type: str, model: PreTrainedModel) -> Inputs:
    return TEXT if "use_cache" in inspect.signature(model.forward).parameters else {"input_ids": IDS}


def _two_texts(model_type: str, model: PreTrainedModel) -> Inputs:
    takes_two = "decoder_input_ids" in inspect.signature(model.forward).parameters
    return TEXT | ({"decoder_input_ids": IDS[:, :5]} if takes_two else {})


def _image(model_type: str, model: PreTrainedModel) -> Inputs:
    given = BESIDE_PIXELS.get(model_type, {"pixel_values": PIXELS})
    return {name: v.to(model.dtype) if v is PIXELS else v for name, v in given.items()}


def _all(names: dict[str, Any], cls: Any) -> dict[str, Any]:
    return dict.fromkeys(sorted(names), cls)


FAMILIES = (
    Family("causal language models", _all(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, AutoModelForCausalLM),
           SMALL | {"is_decoder": True}, _text, generates=True),
    Family("masked language models", _all(auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, AutoModelForMaskedLM),
           SMALL, _masked),
    Family("sequence-to-sequence language models",
           _all(auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, AutoModelForSeq2SeqLM),
           SMALL, _two_texts, generates=True),
    Family("image models", _all(auto.MODEL_FOR_BACKBONE_MAPPING_NAMES, AutoBackbone)
           | _all(auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES, AutoModelForImageClassification),
           SMALL | IMAGE, _image),
)  # fmt: skip
