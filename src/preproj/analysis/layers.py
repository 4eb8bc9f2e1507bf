"""The layer-by-layer analysis of a trained adapter: one pass over a text for every measure."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedTokenizerBase

from preproj.adapter.config import PreProjConfig
from preproj.adapter.layer import PreProjLayer, adapted_sites
from preproj.analysis.branches import watched
from preproj.analysis.function import MEASURES_OF_TOKENS, Meter
from preproj.analysis.token_classes import TOKEN_CLASSES, token_classes
from preproj.analysis.weights import pre_measures, skip_measures
from preproj.depth import depth

ALL = "all"
"""The class of every token."""

Text = Sequence[int] | Mapping[str, Any]
"""Token ids of one text, or what else the model is called with."""


@dataclass(frozen=True)
class Analysis:
    """What the layers of an adapter learned.

    Attributes:
        rows: one for each adapted attention module, from the input up, and token class: ``layer`` (counted among the
            adapted), ``site``, ``token_class``, ``tokens`` and the measures of docs/analysis.md. Those of the weights
            stand in the rows of the class ``all``, and are None in the others.
    """

    rows: list[dict[str, Any]]

    @property
    def layers(self) -> list[dict[str, Any]]:
        """One row a layer, over all tokens."""
        return [row for row in self.rows if row["token_class"] == ALL]

    @property
    def token_classes(self) -> list[dict[str, Any]]:
        """One row for each layer and class of tokens, without the measures of the weights."""
        keys = ("layer", "site", "token_class", "tokens", *MEASURES_OF_TOKENS)
        return [{key: row[key] for key in keys} for row in self.rows if row["token_class"] != ALL]

    def depth(self, model: str = "") -> list[dict[str, Any]]:
        """Return how each measure changes with depth, see :func:`preproj.depth.depth`."""
        return depth(self.rows, model)


@torch.inference_mode()
def analyze(model: PeftModel, texts: Iterable[Text], tokenizer: PreTrainedTokenizerBase | None = None) -> Analysis:
    """Measure every layer of the active pre-projection adapter, in one pass over a text.

    Args:
        model: in eval mode.
        texts: held-out texts, each one forward pass: token ids, or a mapping of what the model is called with.
        tokenizer: of the model, to measure by class of token too, where a text is token ids.

    Raises:
        ValueError: if the model trains, has no single active adapter of ours, sees no token, or has or computes numbers
            that are not finite.
    """
    adapter = _active_adapter(model)
    layers = [layer for _, _, layer in adapted_sites(model)]
    _check_weights(layers, adapter)
    classes = (ALL, *(TOKEN_CLASSES if tokenizer else ()))
    meters = [Meter(layer, adapter, len(classes)) for layer in layers]
    takes_use_cache = "use_cache" in inspect.signature(model.get_base_model().forward).parameters
    with watched((layer.site, meter) for layer, meter in zip(layers, meters, strict=True)):
        for text in texts:
            inputs = text if isinstance(text, Mapping) else {"input_ids": torch.tensor([text], device=model.device)}
            membership = None
            if tokenizer and not isinstance(text, Mapping):
                membership = torch.nn.functional.pad(token_classes(tokenizer, text), (1, 0), value=True)
            for meter in meters:
                meter.membership = membership
            model(**inputs, **({"use_cache": False} if takes_use_cache else {}))
    if not any(meter.tokens[0] for meter in meters):
        raise ValueError("no token went through the adapted layers: give at least one text with a token.")
    for layer, meter in zip(layers, meters, strict=True):
        if not meter.is_finite():
            raise ValueError(f"what {layer.name!r} computes is not finite: load the model in float32.")
    config = model.peft_config[adapter]
    rows: list[dict[str, Any]] = []
    for index, (layer, meter) in enumerate(zip(layers, meters, strict=True)):
        weights = skip_measures(layer, adapter, config) | pre_measures(layer, adapter, meter.slopes())
        for token_class, tokens, measures in zip(classes, meter.tokens.tolist(), meter.measures(), strict=True):
            row = {"layer": index, "site": layer.name, "token_class": token_class, "tokens": int(tokens)}
            rows.append(row | (weights if token_class == ALL else dict.fromkeys(weights)) | measures)
    return Analysis(rows)


def _active_adapter(model: PeftModel) -> str:
    """Return the name of the adapter to measure."""
    if model.get_base_model().training:
        raise ValueError("the model is in training mode: call eval() first.")
    active = model.active_adapters
    if len(active) != 1 or not isinstance(model.peft_config[active[0]], PreProjConfig):
        raise ValueError(
            f"the active adapters are {', '.join(active)}: expected one, of pre-projection or content skip."
        )
    return active[0]


def _check_weights(layers: list[PreProjLayer], adapter: str) -> None:
    for layer in layers:
        for linear in layer.linears(adapter).values():
            if not linear.weight.isfinite().all():
                raise ValueError(f"a weight of {layer.name!r} is not finite, so there is nothing to measure.")
