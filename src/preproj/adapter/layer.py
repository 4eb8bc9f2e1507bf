"""The tuner layer: a child of an attention module that acts through two hooks on it."""

from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from preproj.adapter.config import PreProjConfig
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
    hook adds ``W_skip · x̃`` to attention's output. With several active adapters the pre-projections apply one after
    the other, in the order of activation, and every skip reads the last x̃.

    Args:
        attention: the module to act on. Its first tensor argument (or ``hidden_states=``) is x̂,
            ``(batch, seq, hidden)``; it returns attn_out of that shape, alone or first in a tuple.
        hidden_size: width of x̂.
        name: path of the attention module in the base model; part of the key of the start weights.
    """

    active_adapters: list[str]  # a property of BaseTunerLayer
    adapter_layer_names = ("up", "down", "skip")
    other_param_names = ("activation",)

    def __init__(self, attention: nn.Module, hidden_size: int, name: str):
        super().__init__()
        self.up = nn.ModuleDict()
        self.down = nn.ModuleDict()
        self.skip = nn.ModuleDict()
        self.activation: dict[str, Any] = {}
        self.in_features = self.out_features = hidden_size
        self.name = name
        self._x_tilde: Tensor | None = None
        self._hooks = (
            attention.register_forward_pre_hook(self._enter_attention, with_kwargs=True),
            attention.register_forward_hook(self._leave_attention),
        )

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
            self.skip[adapter_name] = bias_free_linear(hidden, hidden, device)
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
        """Take the hooks off the attention module."""
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
            return None
        positional = bool(args) and isinstance(args[0], Tensor)
        x_tilde = args[0] if positional else kwargs["hidden_states"]
        for adapter in self.active_adapters:
            if adapter in self.up:
                x_tilde = pre_project(x_tilde, self.up[adapter], self.down[adapter], self.activation[adapter])
        self._x_tilde = x_tilde  # the tensor Q/K/V read too, so keeping it costs no memory
        if positional:
            return (x_tilde, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": x_tilde}

    def _leave_attention(self, attention: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Forward hook: add the content skip to attention's output."""
        x_tilde, self._x_tilde = self._x_tilde, None
        if x_tilde is None:
            return None
        attn_out = output[0] if isinstance(output, tuple) else output
        for adapter in self.active_adapters:
            if adapter in self.skip:
                attn_out = add_content_skip(attn_out, x_tilde, self.skip[adapter])
        return (attn_out, *output[1:]) if isinstance(output, tuple) else attn_out


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
