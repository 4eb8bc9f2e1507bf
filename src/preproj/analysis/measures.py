"""Per-layer measures of a trained adapter: weight norms, and what the layers do on held-out text."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn

from preproj.adapter.config import PreProjConfig
from preproj.adapter.layer import PreProjLayer, adapted_sites
from preproj.adapter.sites import Site
from preproj.initial import draw_initial_weight
from preproj.modules import weight_dtype


@torch.inference_mode()
def measure_layers(model: PeftModel, texts: Iterable[list[int]]) -> list[dict[str, Any]]:
    """Measure every adapted attention module of a PEFT model with one active pre-projection adapter.

    Args:
        model: the model, in eval mode.
        texts: held-out token ids, one list a text; each is one forward pass.

    Returns:
        One row per layer, from the input up: ``layer``, ``site``, ``skip_norm`` and ``initial_skip_norm`` (Frobenius
        norms), ``skip_to_attention`` (mean over tokens of ‖W_skip·x̃‖/‖attn_out‖, where attn_out is what the block
        adds to its residual stream, after a norm or multiplier if it has one) and ``pre_to_input`` (mean of
        ‖x̃ − x̂‖/‖x̂‖); None where the part is switched off.
    """
    adapter: str = model.active_adapter
    config = model.peft_config[adapter]
    sites = adapted_sites(model)
    meters = [_Meter(layer, adapter) for _, _, layer in sites]
    with _hooked([(layer.site, meter) for (_, _, layer), meter in zip(sites, meters, strict=True)]):
        for ids in texts:
            model(input_ids=torch.tensor([ids], device=model.device), use_cache=False)
    rows = []
    for index, ((site, _, layer), meter) in enumerate(zip(sites, meters, strict=True)):
        row: dict[str, Any] = {"layer": index, "site": site, **meter.means()}
        row |= {"skip_norm": None, "initial_skip_norm": None}
        if config.content_skip:
            weights = {what: linear.weight.float() for what, linear in _skip_of(layer, adapter).items()}
            starts = [_start_of(what, weight, site, config) for what, weight in weights.items()]
            row["skip_norm"] = _product([*weights.values()]).norm().item()
            row["initial_skip_norm"] = _product(starts).norm().item()
        rows.append(row)
    return rows


def _skip_of(layer: PreProjLayer, adapter: str) -> dict[str, nn.Linear]:
    """Return W_skip as the linear maps that make it up, in the order they are applied: one, or two of low rank."""
    return {what: linear for what, linear in layer.linears(adapter).items() if what.startswith("skip")}


def _start_of(what: str, weight: Tensor, site: str, config: PreProjConfig) -> Tensor:
    """Draw the start of a weight again."""
    std = config.skip_init_std or 0.0
    return draw_initial_weight(what, tuple(weight.shape), config.init_seed, site, std, config.init_weights)


def _product(factors: list[Tensor]) -> Tensor:
    """Multiply the matrices of maps that are applied one after the other."""
    return factors[0] if len(factors) == 1 else factors[1] @ factors[0]


class _Meter:
    """Sums the token-wise ratios of one layer while the model runs."""

    def __init__(self, layer: PreProjLayer, adapter: str):
        self.skip = nn.Sequential(*_skip_of(layer, adapter).values())
        self.has_pre = adapter in layer.up
        self.tokens = 0
        self.skip_ratio = self.pre_ratio = 0.0

    def add(self, x_hat: Tensor, x_tilde: Tensor, attn_out: Tensor) -> None:
        self.tokens += x_hat.shape[:-1].numel()
        self.pre_ratio += _ratio(x_tilde - x_hat, x_hat)
        if self.skip:
            self.skip_ratio += _ratio(self.skip(x_tilde.to(weight_dtype(self.skip))), attn_out)

    def means(self) -> dict[str, float | None]:
        return {
            "skip_to_attention": self.skip_ratio / self.tokens if self.skip else None,
            "pre_to_input": self.pre_ratio / self.tokens if self.has_pre else None,
        }


def _ratio(part: Tensor, whole: Tensor) -> float:
    """Sum over tokens of ‖part‖/‖whole‖."""
    return (part.float().norm(dim=-1) / whole.float().norm(dim=-1)).double().sum().item()


@contextmanager
def _hooked(pairs: list[tuple[Site, _Meter]]) -> Iterator[None]:
    """Let each meter see x̂, x̃ and what attention adds to the residual stream while the context is open."""
    handles = []
    for site, meter in pairs:
        seen: dict[str, Tensor] = {}

        def before(module: nn.Module, args: tuple, kwargs: dict, site: Site = site, seen: dict = seen) -> None:
            seen["x_hat"] = site.hidden_states(args, kwargs)

        def after_ours(module: nn.Module, args: tuple, kwargs: dict, site: Site = site, seen: dict = seen) -> None:
            seen["x_tilde"] = site.hidden_states(args, kwargs)

        def output(
            module: nn.Module, args: tuple, out: Any, site: Site = site, seen: dict = seen, meter: _Meter = meter
        ) -> None:
            if seen:  # other branches may go through the same module
                branch = out[0] if isinstance(out, tuple | list) else out
                meter.add(attn_out=site.multiplier * branch, **seen)
                seen.clear()

        handles += [
            site.attention.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
            site.attention.register_forward_pre_hook(after_ours, with_kwargs=True),
            site.landing_module.register_forward_hook(output, prepend=True),
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
