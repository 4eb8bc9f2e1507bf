"""The tuner layer: a child of an attention module that acts through hooks where x̂ enters and the branch ends."""

from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from preproj.adapter.config import PreProjConfig, inner_size
from preproj.adapter.devices import compute_device, execution_device
from preproj.adapter.sites import Site
from preproj.adapter.thread import PerThread
from preproj.initial import WEIGHTS, draw_initial_weight
from preproj.modules import (
    activation_function,
    add_content_skip,
    bias_free_linear,
    pre_project,
)

BASE = "__base__"  # PEFT's name for no adapter, in a mixed batch


class PreProjLayer(nn.Module, BaseTunerLayer):
    """Pre-projection and content skip around one attention module.

    The layer becomes the child ``preproj`` of the attention module, so no key of the base model changes and other
    adapters inside attention are left alone. A forward pre-hook turns x̂ into x̃ where it enters attention; a forward
    hook adds ``W_skip · x̃`` to the output of the site's landing module, which is attention itself or, for example, the
    norm after it. With several active adapters the pre-projections apply one after the other, in the order of
    activation, and every skip reads the last x̃.

    Args:
        site: where to act; its ``name`` is part of the key of the start weights.

    Attributes:
        mixed_batch: for a batch whose samples go through different adapters, in the thread that runs it, the adapter's
            name of each sample, or ``"__base__"``; else every active adapter acts on the whole batch.
    """

    active_adapters: list[str]  # a property of BaseTunerLayer
    adapter_layer_names = WEIGHTS
    other_param_names = ("activation",)

    def __init__(self, site: Site):
        super().__init__()
        self.up, self.down = nn.ModuleDict(), nn.ModuleDict()
        self.skip, self.skip_a, self.skip_b = nn.ModuleDict(), nn.ModuleDict(), nn.ModuleDict()
        self.activation: dict[str, Any] = {}
        self.in_features, self.out_features = site.width, site.out_width
        self.name = site.name
        self.mixed_batch = PerThread()
        self.site = site
        # Where the branch ends in another module: a stack of x̃ (with x̂, where that is the residual too; None while
        # disabled), one for each call of attention whose branch has not ended; calls may nest.
        self._waiting = PerThread()
        attention = site.attention
        self._hooks = [attention.register_forward_pre_hook(self._enter_attention, with_kwargs=True)]
        if site.landing_module is attention:
            self._landing_hook = attention.register_forward_hook(self._leave_attention, with_kwargs=True)
        else:
            self._hooks.append(attention.register_forward_hook(self._forget_after_error, always_call=True))
            self._land_on(site.landing_module)

    def get_base_layer(self) -> nn.Module:
        """Return the attention module this layer is a child of."""
        return self.site.attention

    def _get_base_layer_device_and_dtype(self, base_layer: nn.Module) -> tuple[torch.device, None]:
        """Return where the adapter belongs; its dtype is not the base's (see ``PreProjModel._cast_adapter_dtype``)."""
        return compute_device(base_layer), None

    def update_layer(self, adapter_name: str, config: PreProjConfig) -> None:
        """Add one adapter with its start weights, in float32 where attention computes (not drawn on the meta device).

        Args:
            adapter_name: PEFT's name of the adapter.
            config: its configuration.
        """
        hidden, out = self.in_features, self.out_features
        device = compute_device(self.get_base_layer())
        if config.pre_projection:
            inner = inner_size(config, self.name, hidden)
            self.up[adapter_name] = bias_free_linear(hidden, inner, device)
            self.down[adapter_name] = bias_free_linear(inner, hidden, device)
            self.activation[adapter_name] = activation_function(config.activation)
        if config.content_skip:
            if config.skip_rank is None:
                self.skip[adapter_name] = bias_free_linear(hidden, out, device)
            else:
                self.skip_a[adapter_name] = bias_free_linear(hidden, config.skip_rank, device)
                self.skip_b[adapter_name] = bias_free_linear(config.skip_rank, out, device)
        self.reset_parameters(adapter_name, config)
        self.set_adapter(self.active_adapters)  # type: ignore[operator]  # peft has no types

    @torch.no_grad()
    def reset_parameters(self, adapter_name: str, config: PreProjConfig) -> None:
        """Set the adapter's weights to their start, which depends on ``init_seed`` and the layer's name alone."""
        for what, linear in self.linears(adapter_name).items():
            if not linear.weight.is_meta:
                shape, std = tuple(linear.weight.shape), config.skip_init_std or 0.0
                start = draw_initial_weight(what, shape, config.init_seed, self.name, std, config.init_weights)
                linear.weight.copy_(start)

    def linears(self, adapter_name: str) -> dict[str, nn.Linear]:
        """Return the linear maps an adapter has here, by name: a selection of ``WEIGHTS``."""
        return {what: getattr(self, what)[adapter_name] for what in WEIGHTS if adapter_name in getattr(self, what)}

    def remove(self) -> None:
        """Take the hooks off the base model."""
        for hook in [*self._hooks, self._landing_hook]:
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
        elsewhere = self.site.landing_module is not attention
        if self.disable_adapters:
            if elsewhere:
                self._push(None)
            return None
        # To where accelerate brings it in attention's own forward, after this.
        x_hat = x_tilde = self.site.hidden_states(args, kwargs).to(execution_device(attention))
        for adapter, rows in self._who_acts(x_tilde):
            if adapter in self.up:
                pre = (self.up[adapter], self.down[adapter], self.activation[adapter])
                if rows is None:
                    x_tilde = pre_project(x_tilde, *pre)
                else:
                    x_tilde = x_tilde.index_copy(0, rows, pre_project(x_tilde[rows], *pre))
        if elsewhere:
            if self.site.landing_module is not self._landed[0]:
                self._move_to(self.site.landing_module)
            # The tensors Q/K/V and the residual sum read too, so keeping them costs no memory.
            self._push((x_tilde, x_hat if self.site.is_residual else None))
        positional, named = list(args), dict(kwargs)
        for position, name in self.site.arguments:
            if position < len(args):
                positional[position] = x_tilde
            else:
                named[name] = x_tilde
        return tuple(positional), named

    def _leave_attention(self, attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Forward hook of attention, where the branch ends there: add the content skip. x̃ is what attention read."""
        if self.disable_adapters:
            return None
        return self._with_skip(output, self.site.hidden_states(args, kwargs), None)

    def _end_branch(self, landing: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Forward hook of another landing module: add the content skip; after an error only forget x̃."""
        waiting = self._pop()
        if waiting is None or output is None:
            return None
        return self._with_skip(output, *waiting)

    def _with_skip(self, output: Any, x_tilde: Tensor, x_hat: Tensor | None) -> Any:
        """Return the landing module's output with ``W_skip · x̃`` added to its first tensor."""
        several = isinstance(output, tuple | list)
        branch = output[0] if several else output
        if x_hat is not None:  # attention adds x̃ in its place
            branch = branch + (x_hat - x_tilde)
        for adapter, rows in self._who_acts(x_tilde):
            skip = [linear for what, linear in self.linears(adapter).items() if what.startswith("skip")]
            if not skip:
                continue
            if rows is None:
                branch = add_content_skip(branch, x_tilde, *skip, multiplier=self.site.multiplier)
            else:
                added = add_content_skip(branch[rows], x_tilde[rows], *skip, multiplier=self.site.multiplier)
                branch = branch.index_copy(0, rows, added)
        if not several:
            return branch
        parts = (branch, *output[1:])
        return type(output)(*parts) if hasattr(output, "_fields") else type(output)(parts)

    def _forget_after_error(self, attention: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Forward hook: forget x̃ where attention failed, so that its branch never ends."""
        if output is None:
            self._pop()

    def _push(self, waiting: tuple[Tensor, Tensor | None] | None) -> None:
        """Keep the x̃ of a call of attention until its branch ends; None while disabled."""
        self._waiting.set([*(self._waiting.get() or []), waiting])

    def _pop(self) -> tuple[Tensor, Tensor | None] | None:
        """Take the x̃ of the innermost call of attention whose branch has not ended, if there is one."""
        waiting = self._waiting.get()
        if not waiting:
            return None
        self._waiting.set(waiting[:-1] or None)
        return waiting[-1]

    def _who_acts(self, hidden_states: Tensor) -> list[tuple[str, Tensor | None]]:
        """List the adapters that act, each with its rows of the batch; None for all.

        Generation with beams repeats each sample, encoders see it once: the names are repeated to fit.
        """
        samples = self.mixed_batch.get()
        if samples is None:
            return [(adapter, None) for adapter in self.active_adapters]
        repeats, rest = divmod(len(hidden_states), len(samples))
        if rest or self.site.sequence_first:
            raise ValueError(
                f"adapter_names does not work in this model: the first dimension of what {self.name!r} reads is not "
                "the batch. Use set_adapter, one adapter after the other."
            )
        names = [name for name in samples for _ in range(repeats)]
        device = hidden_states.device
        return [
            (adapter, torch.tensor([row for row, name in enumerate(names) if name == adapter], device=device))
            for adapter in dict.fromkeys(names)
            if adapter != BASE
        ]

    def _land_on(self, landing: nn.Module) -> None:
        self._landed = (landing,)  # in a tuple, so that it does not become a child
        self._landing_hook = landing.register_forward_hook(self._end_branch, always_call=True)

    @torch.compiler.disable
    def _move_to(self, landing: nn.Module) -> None:
        """Follow the landing place where another method has put a layer of its own there, or taken it away."""
        self._landing_hook.remove()
        drop_hooks(landing)
        self._land_on(landing)


def drop_hooks(module: nn.Module) -> None:
    """Take every hook of our layers off a module: one that PEFT copied, for ``modules_to_save``, has copies of them."""
    for part in module.modules():
        for key, hook in list(part._forward_hooks.items()):
            if isinstance(getattr(hook, "__self__", None), PreProjLayer):
                del part._forward_hooks[key]


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
