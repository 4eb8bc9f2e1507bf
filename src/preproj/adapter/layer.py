"""The tuner layer: a child of an attention module that acts through hooks where x̂ enters and the branch ends."""

from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from preproj.adapter.config import PreProjConfig
from preproj.adapter.sites import Site
from preproj.initial import draw_initial_weight
from preproj.modules import (
    activation_function,
    add_content_skip,
    bias_free_linear,
    pre_project,
)


class PreProjLayer(nn.Module, BaseTunerLayer):
    """Pre-projection and content skip around one attention module.

    The layer becomes the child ``preproj`` of the attention module, so no key of the base model changes and other
    adapters inside attention are left alone. A forward pre-hook turns x̂ into x̃ where it enters attention; a forward
    hook adds ``W_skip · x̃`` to the output of the site's landing module, which is attention itself or, for example, the
    norm after it. With several active adapters the pre-projections apply one after the other, in the order of
    activation, and every skip reads the last x̃.

    Args:
        site: where to act; its ``name`` is part of the key of the start weights.
    """

    active_adapters: list[str]  # a property of BaseTunerLayer
    adapter_layer_names = ("up", "down", "skip")
    other_param_names = ("activation",)

    def __init__(self, site: Site):
        super().__init__()
        self.up = nn.ModuleDict()
        self.down = nn.ModuleDict()
        self.skip = nn.ModuleDict()
        self.activation: dict[str, Any] = {}
        self.in_features, self.out_features = site.width, site.out_width
        self.name = site.name
        self._arguments, self._multiplier = site.arguments, site.multiplier
        # One x̃ (None while disabled) for each call of attention whose branch has not ended; calls may nest.
        self._x_tildes: list[Tensor | None] = []
        self._hooks = [
            site.attention.register_forward_pre_hook(self._enter_attention, with_kwargs=True),
            site.landing_module.register_forward_hook(self._end_branch, always_call=True),
        ]
        if site.landing_module is not site.attention:
            self._hooks.append(site.attention.register_forward_hook(self._forget_after_error, always_call=True))

    def update_layer(self, adapter_name: str, config: PreProjConfig, device: torch.device) -> None:
        """Add one adapter with its start weights, in float32 on ``device`` (not drawn on the meta device).

        Args:
            adapter_name: PEFT's name of the adapter.
            config: its configuration.
            device: where attention's weights are.
        """
        hidden, inner = self.in_features, round(config.expansion * self.in_features)
        if config.pre_projection:
            self.up[adapter_name] = bias_free_linear(hidden, inner, device)
            self.down[adapter_name] = bias_free_linear(inner, hidden, device)
            self.activation[adapter_name] = activation_function(config.activation)
        if config.content_skip:
            self.skip[adapter_name] = bias_free_linear(hidden, self.out_features, device)
        self.reset_parameters(adapter_name, config)
        self.set_adapter(self.active_adapters)  # type: ignore[operator]  # peft has no types

    @torch.no_grad()
    def reset_parameters(self, adapter_name: str, config: PreProjConfig) -> None:
        """Set the adapter's weights to their start, which depends on ``init_seed`` and the layer's name alone."""
        for what in self.adapter_layer_names:
            linears = getattr(self, what)
            if adapter_name in linears and not linears[adapter_name].weight.is_meta:
                weight = linears[adapter_name].weight
                start = draw_initial_weight(
                    what, tuple(weight.shape), config.init_seed, self.name, config.skip_init_std
                )
                weight.copy_(start)

    def remove(self) -> None:
        """Take the hooks off the base model."""
        for hook in self._hooks:
            hook.remove()

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Refuse: see :data:`CANNOT_MERGE`."""
        raise NotImplementedError(CANNOT_MERGE)

    def unmerge(self) -> None:
        """Refuse: see :data:`CANNOT_MERGE`."""
        raise NotImplementedError(CANNOT_MERGE)

    def _enter_attention(
        self, attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Forward pre-hook: hand attention x̃ in place of x̂."""
        if self.disable_adapters:
            self._x_tildes.append(None)
            return None
        position, name = self._arguments[0]
        x_tilde = args[position] if position < len(args) else kwargs[name]
        for adapter in self.active_adapters:
            if adapter in self.up:
                x_tilde = pre_project(x_tilde, self.up[adapter], self.down[adapter], self.activation[adapter])
        self._x_tildes.append(x_tilde)  # the tensor Q/K/V read too, so keeping it costs no memory
        positional, named = list(args), dict(kwargs)
        for position, name in self._arguments:
            if position < len(args):
                positional[position] = x_tilde
            else:
                named[name] = x_tilde
        return tuple(positional), named

    def _end_branch(self, landing: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Forward hook: add the content skip to the branch; after an error (no output) only forget x̃."""
        if not self._x_tildes:
            return None
        x_tilde = self._x_tildes.pop()
        if x_tilde is None or output is None:
            return None
        several = isinstance(output, tuple | list)
        branch = output[0] if several else output
        for adapter in self.active_adapters:
            if adapter in self.skip:
                branch = add_content_skip(branch, x_tilde, self.skip[adapter], self._multiplier)
        return type(output)((branch, *output[1:])) if several else branch

    def _forget_after_error(self, attention: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Forward hook: forget x̃ where attention failed, so that its branch never ends."""
        if output is None and self._x_tildes:
            self._x_tildes.pop()


def adapted_sites(model: nn.Module) -> list[tuple[str, nn.Module, PreProjLayer]]:
    """List the adapted attention modules in the order of the model.

    Returns:
        ``(name in the base model, attention module, our layer)`` for each.
    """
    return [
        (layer.name, attention, layer)
        for attention in model.modules()
        for layer in attention.children()
        if isinstance(layer, PreProjLayer)
    ]


CANNOT_MERGE = (
    "A pre-projection adapter cannot be merged into the base weights: SiLU is not linear, and the content skip goes "
    "around attention. Keep the adapter loaded, or call unload() to get the base model back without it."
)
