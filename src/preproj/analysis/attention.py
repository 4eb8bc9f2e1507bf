"""How attention spreads over the tokens, with an adapter and without."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from preproj.adapter.layer import adapted_sites
from preproj.analysis.documents import first_windows


@torch.inference_mode()
def measure_attention(model: PeftModel, documents: Iterable[list[int]], window: int) -> dict[str, Any]:
    """Measure the entropy of attention and how far back it looks, in each layer, with the adapter and without.

    The model runs with eager attention, the one whose modules return their weights, where transformers can switch to
    it. Each layer's weights are reduced as soon as they are there, one head at a time.

    Args:
        model: in eval mode, with one active adapter of ours.
        documents: held-out token ids, one list a document; each is two forward passes.
        window: how many of a document's first tokens are read.

    Returns:
        ``window``, ``documents`` (measured), ``skipped`` (shorter than the window) and ``layers``, one row for each
        adapted attention module from the input up: ``layer``, ``site``, ``entropy`` (nats) and ``distance`` (tokens
        between a token and what it attends to, weighted by attention), means over heads, tokens and documents, and
        ``base_entropy`` and ``base_distance`` with the adapter disabled; None where attention returns no weights. A
        share that attention gives to no token (the sinks of GPT-OSS) is left out.

    Raises:
        ValueError: if fewer than two documents fill the window.
    """
    texts, skipped = first_windows(documents, window)
    with _eager(model.get_base_model()):
        ours = _spreads(model, texts)
        with _disabled(model):
            base = _spreads(model, texts)
    rows = [
        {
            "layer": index,
            "site": site,
            "entropy": own.entropy,
            "distance": own.distance,
            "base_entropy": other.entropy,
            "base_distance": other.distance,
        }
        for index, ((site, _, _), own, other) in enumerate(zip(adapted_sites(model), ours, base, strict=True))
    ]
    return {"window": window, "documents": len(texts), "skipped": skipped, "layers": rows}


class _Spread:
    """Forward hook of an attention module: sums entropy and distance over heads and tokens."""

    def __init__(self) -> None:
        self.queries = 0
        self._entropy = self._distance = 0.0

    def __call__(self, attention: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        weights = output[1] if isinstance(output, tuple | list) and len(output) > 1 else None
        if not isinstance(weights, Tensor) or weights.ndim != 4:  # (batch, heads, queries, keys)
            return
        queries, keys = (torch.arange(size, device=weights.device) for size in weights.shape[-2:])
        distance = (queries[:, None] - keys).abs()
        heads = weights.flatten(0, 1)
        self.queries += heads.shape[:2].numel()
        self._entropy += sum(torch.special.entr(head.float()).sum() for head in heads).item()
        self._distance += sum((head.float() * distance).sum() for head in heads).item()

    @property
    def entropy(self) -> float | None:
        """Mean entropy in nats."""
        return self._entropy / self.queries if self.queries else None

    @property
    def distance(self) -> float | None:
        """Mean distance in tokens."""
        return self._distance / self.queries if self.queries else None


def _spreads(model: PeftModel, texts: list[list[int]]) -> list[_Spread]:
    """Run the texts and return what each adapted attention module did."""
    spreads = []
    with ExitStack() as stack:
        for _, attention, _ in adapted_sites(model):
            spreads.append(_Spread())
            stack.enter_context(attention.register_forward_hook(spreads[-1]))
        for ids in texts:
            model(input_ids=torch.tensor([ids], device=model.device))
    return spreads


@contextmanager
def _disabled(model: PeftModel) -> Iterator[None]:
    """Disable the adapter while the context is open; PEFT leaves its weights trainable then, even if they were not."""
    before = [(weight, weight.requires_grad) for weight in model.parameters()]
    try:
        with model.disable_adapter():
            yield
    finally:
        for weight, trains in before:
            weight.requires_grad_(trains)


@contextmanager
def _eager(base: nn.Module) -> Iterator[None]:
    """Have a model of transformers compute attention eagerly while the context is open, if it can switch."""
    parts = [module for module in base.modules() if isinstance(module, PreTrainedModel)]
    before = [(config, config._attn_implementation) for part in parts for config in _configs(part.config)]
    try:
        for part in parts[:1]:  # the whole, which tells its parts
            part.set_attn_implementation("eager")
        yield
    finally:
        for config, implementation in before:  # from the outside in: a configuration tells those inside it
            config._attn_implementation = implementation


def _configs(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    yield config
    for name in config.sub_configs:
        if isinstance(inner := getattr(config, name, None), PreTrainedConfig):
            yield from _configs(inner)
