"""What held-out perplexity owes to each layer: parts of a trained adapter switched off, alone and in groups."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from torch import Tensor, nn

from preproj.adapter.layer import PreProjLayer, adapted_sites
from preproj.analysis.documents import first_windows
from preproj.statistics import contrast, perplexity

PARTS = {"skip": ("skip", "skip_b"), "pre_projection": ("down",)}
"""What can be switched off, and the linear map that it ends in."""
CHUNK = 256  # tokens whose log-probabilities are held at once


@contextmanager
def ablated(model: PeftModel, part: str, layers: Iterable[int]) -> Iterator[None]:
    """Switch a part of the active adapters off in some layers while the context is open.

    The last linear map of the part gives zeros, as if its weight were zero: without the skip nothing is added to
    attn_out; without the pre-projection x̃ = x̂ (in the adapter's dtype), for attention and for the skip. The weights
    are neither changed nor copied, and the hooks are taken off after an error too.

    Args:
        model: with adapters of ours; those that are not active stay as they are.
        part: a key of :data:`PARTS`.
        layers: indices into the adapted attention modules, from the input up.
    """
    sites = adapted_sites(model)
    with ExitStack() as stack:
        for index in layers:
            for linear in _ends(sites[index][2], part):
                stack.enter_context(linear.register_forward_hook(_zeros))
        yield


def layer_groups(layers: int) -> dict[str, list[int]]:
    """Part the layers by relative depth: a layer lies where its middle lies, (index + ½) / layers.

    Args:
        layers: number of layers.

    Returns:
        ``early``: the first third, below 1/3; ``late``: the last quarter, from 3/4 on; ``middle``: what is between;
        ``all``. With 12 layers 0-3, 4-8 and 9-11, with 24 layers 0-7, 8-17 and 18-23. With one or two layers a group
        is empty.
    """
    groups: dict[str, list[int]] = {"early": [], "middle": [], "late": [], "all": list(range(layers))}
    for index in range(layers):
        depth = (index + 0.5) / layers
        groups["early" if depth < 1 / 3 else "late" if depth >= 3 / 4 else "middle"].append(index)
    return groups


@torch.inference_mode()
def measure_ablations(model: PeftModel, documents: Iterable[list[int]], window: int) -> dict[str, Any]:
    """Measure perplexity without each layer's skip, without its pre-projection, and without those of layer groups.

    One forward pass a document for the intact model, and one for each ablation.

    Args:
        model: a causal language model in eval mode, with one active adapter of ours.
        documents: held-out token ids, one list a document.
        window: how many of a document's first tokens are read; each but the first is scored.

    Returns:
        ``window``, ``documents`` (measured), ``skipped`` (shorter than the window), ``perplexity`` of the intact model
        and ``ablations``: for each ``part`` that the adapter has, one row for each layer (``group`` is None) and each
        group of :func:`layer_groups` that is not empty, with ``layers``, ``perplexity`` and the difference from the
        intact model as :func:`preproj.statistics.contrast` gives it: ``value``, ``low``, ``high``, ``standard_error``
        and ``detectable``, paired over documents.

    Raises:
        ValueError: if fewer than two documents fill the window.
    """
    texts, skipped = first_windows(documents, window)
    tokens = np.full(len(texts), window - 1)
    intact = _losses(model, texts)
    rows = []
    for part, group, layers in _ablations(model):
        with ablated(model, part, layers):
            losses = _losses(model, texts)
        rows.append(
            {
                "part": part,
                "group": group,
                "layers": layers,
                "perplexity": float(perplexity(losses, tokens)),
                **contrast("perplexity", [(1, losses), (-1, intact)], tokens),
            }
        )
    return {
        "window": window,
        "documents": len(texts),
        "skipped": skipped,
        "perplexity": float(perplexity(intact, tokens)),
        "ablations": rows,
    }


def _ablations(model: PeftModel) -> Iterator[tuple[str, str | None, list[int]]]:
    """Yield part, name of the group (None for one layer) and layers, where the active adapter has the part."""
    sites = adapted_sites(model)
    for part in PARTS:
        having = [index for index, (_, _, layer) in enumerate(sites) if _ends(layer, part)]
        yield from ((part, None, [index]) for index in having)
        for group, members in layer_groups(len(sites)).items():
            if layers := [index for index in members if index in having]:
                yield part, group, layers


def _ends(layer: PreProjLayer, part: str) -> list[nn.Linear]:
    """Return the linear map that a part ends in, of each active adapter that has the part here."""
    maps = [layer.linears(adapter) for adapter in layer.active_adapters]
    return [linears[what] for linears in maps for what in PARTS[part] if what in linears]


def _zeros(linear: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    return torch.zeros_like(output)


def _losses(model: PeftModel, texts: Sequence[list[int]]) -> np.ndarray:
    """Return the negative log-likelihood (nats) of each text's tokens after the first, ``(texts,)``."""
    return np.array([_loss(model, torch.tensor([ids], device=model.device)) for ids in texts])


def _loss(model: PeftModel, ids: Tensor) -> float:
    logits = model(input_ids=ids).logits[0, :-1]
    pairs = zip(logits.split(CHUNK), ids[0, 1:].to(logits.device).split(CHUNK), strict=True)
    wide = torch.promote_types(logits.dtype, torch.float32)
    return sum(nn.functional.cross_entropy(part.to(wide), target, reduction="sum").item() for part, target in pairs)
