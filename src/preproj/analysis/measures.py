"""Per-layer measures of a trained adapter: weight norms, and what the layers do on held-out text."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn

from preproj.adapter.layer import PreProjLayer, adapted_sites
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
        norms), ``skip_to_attention`` (mean over tokens of ‖W_skip·x̃‖/‖attn_out‖) and ``pre_to_input`` (mean of
        ‖x̃ − x̂‖/‖x̂‖); None where the part is switched off.
    """
    adapter: str = model.active_adapter
    config = model.peft_config[adapter]
    sites = adapted_sites(model)
    meters = [_Meter(layer, adapter) for _, _, layer in sites]
    with _hooked([(attention, meter) for (_, attention, _), meter in zip(sites, meters, strict=True)]):
        for ids in texts:
            model(input_ids=torch.tensor([ids], device=model.device), use_cache=False)
    rows = []
    for index, ((site, _, layer), meter) in enumerate(zip(sites, meters, strict=True)):
        row: dict[str, Any] = {"layer": index, "site": site, **meter.means()}
        row |= {"skip_norm": None, "initial_skip_norm": None}
        if config.content_skip:
            weight: Tensor = layer.skip[adapter].get_parameter("weight")
            start = draw_initial_weight("skip", tuple(weight.shape), config.init_seed, site, config.skip_init_std)
            row["skip_norm"] = weight.float().norm().item()
            row["initial_skip_norm"] = start.norm().item()
        rows.append(row)
    return rows


class _Meter:
    """Sums the token-wise ratios of one layer while the model runs."""

    def __init__(self, layer: PreProjLayer, adapter: str):
        self.skip = layer.skip[adapter] if adapter in layer.skip else None  # noqa: SIM401  # ModuleDict has no get
        self.has_pre = adapter in layer.up
        self.tokens = 0
        self.skip_ratio = self.pre_ratio = 0.0

    def add(self, x_hat: Tensor, x_tilde: Tensor, attn_out: Tensor) -> None:
        self.tokens += x_hat.shape[:-1].numel()
        self.pre_ratio += _ratio(x_tilde - x_hat, x_hat)
        if self.skip is not None:
            self.skip_ratio += _ratio(self.skip(x_tilde.to(weight_dtype(self.skip))), attn_out)

    def means(self) -> dict[str, float | None]:
        return {
            "skip_to_attention": self.skip_ratio / self.tokens if self.skip is not None else None,
            "pre_to_input": self.pre_ratio / self.tokens if self.has_pre else None,
        }


def _ratio(part: Tensor, whole: Tensor) -> float:
    """Sum over tokens of ‖part‖/‖whole‖."""
    return (part.float().norm(dim=-1) / whole.float().norm(dim=-1)).double().sum().item()


@contextmanager
def _hooked(pairs: list[tuple[nn.Module, _Meter]]) -> Iterator[None]:
    """Let each meter see x̂, x̃ and attn_out of its attention module while the context is open."""
    handles = []
    for attention, meter in pairs:
        seen: dict[str, Tensor] = {}

        def before(module: nn.Module, args: tuple, kwargs: dict, seen: dict[str, Tensor] = seen) -> None:
            seen["x_hat"] = _hidden_states(args, kwargs)

        def after_ours(module: nn.Module, args: tuple, kwargs: dict, seen: dict[str, Tensor] = seen) -> None:
            seen["x_tilde"] = _hidden_states(args, kwargs)

        def output(
            module: nn.Module, args: tuple, out: Any, seen: dict[str, Tensor] = seen, meter: _Meter = meter
        ) -> None:
            meter.add(seen["x_hat"], seen["x_tilde"], out[0] if isinstance(out, tuple) else out)

        handles += [
            attention.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
            attention.register_forward_pre_hook(after_ours, with_kwargs=True),
            attention.register_forward_hook(output, prepend=True),
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hidden_states(args: tuple, kwargs: dict) -> Tensor:
    return args[0] if args else kwargs["hidden_states"]
