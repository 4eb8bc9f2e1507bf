"""The tuner: puts a :class:`PreProjLayer` at every attention module of a model."""

import warnings
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn

from preproj.adapter.config import PreProjConfig
from preproj.adapter.layer import CANNOT_MERGE, PreProjLayer, adapted_sites
from preproj.adapter.sites import NotUnderstoodError, Site, hidden_size_of, name_one_of, own_site, site_of, sites

CHILD = "preproj"


class PreProjModel(BaseTuner):
    """Pre-projection and content skip in a model, as PEFT's ``get_peft_model`` builds it.

    Raises:
        ValueError: where no attention module is found or a named one is not attention; the sentence lists the
            candidates found in the model.
    """

    prefix = f"{CHILD}."
    tuner_layer_cls = PreProjLayer

    def _prepare_adapter_config(self, peft_config: PreProjConfig, model_config: dict) -> PreProjConfig:
        if peft_config.target_modules is None:
            found = [site.name for site in sites(self.model)]
            peft_config.target_modules = _shortest_suffixes(found, self.model)  # type: ignore[assignment]
        return peft_config

    def _prepare_model(self, peft_config: PreProjConfig, model: nn.Module) -> None:
        """Find and check every site before anything changes."""
        targets = [
            (name, module)
            for name, module in model.named_modules()
            if not isinstance(module, BaseTunerLayer) and self._check_target_module_exists(peft_config, name)
        ]
        if not targets:
            raise ValueError(
                f"target_modules {_listed(peft_config.target_modules)} match nothing in this model. "
                f"{name_one_of(model)}"
            )
        for name, module in targets:
            if hidden_size_of(module) is None:
                raise ValueError(
                    f"target_modules match {name!r} ({type(module).__name__}), which is not an attention module. "
                    f"{name_one_of(model)}"
                )
        self._sites = {name: self._site(name, module) for name, module in targets}

    def _site(self, name: str, attention: nn.Module) -> Site:
        try:
            return site_of(self.model, name, attention)
        except NotUnderstoodError as error:
            model_type = self.get_model_config(self.model).get("model_type")
            warnings.warn(
                f"The layout of {model_type!r} models is not verified by preproj ({error}): the content skip is added "
                f"to the output of {name!r}. If the block normalises, scales or gates that output before the residual "
                "sum, the result differs from out = x + attn_out + W_skip·x̃.",
                stacklevel=2,
            )
            return own_site(name, attention)

    def _create_and_replace(
        self,
        peft_config: PreProjConfig,
        adapter_name: str,
        target: nn.Module,
        target_name: str,
        parent: nn.Module,
        current_key: str,
        **optional_kwargs: Any,
    ) -> None:
        layer = getattr(target, CHILD, None)
        if layer is None:
            layer = PreProjLayer(self._sites[current_key])
            target.add_module(CHILD, layer)
        layer.update_layer(adapter_name, peft_config, _weight_of(target).device)

    def _cast_adapter_dtype(self, adapter_name: str, autocast_adapter_dtype: bool = True) -> None:
        """Keep the float32 start weights (exact), or follow the base's dtype without autocast."""
        for _, attention, layer in adapted_sites(self.model):
            dtype = _weight_of(attention).dtype
            if not autocast_adapter_dtype or dtype == torch.float64:
                for linears in (layer.up, layer.down, layer.skip):
                    if adapter_name in linears:
                        linears[adapter_name].to(dtype)

    def enable_adapter_layers(self) -> None:
        """Switch our layers on; another method beside us keeps its own state."""
        self._switch(enabled=True)

    def disable_adapter_layers(self) -> None:
        """Switch our layers off; another method beside us keeps its own state."""
        self._switch(enabled=False)

    def _switch(self, enabled: bool) -> None:
        for module in self.model.modules():
            if isinstance(module, self.tuner_layer_cls | AuxiliaryTrainingWrapper):
                module.enable_adapters(enabled)  # type: ignore[operator]  # peft has no types

    @contextmanager
    def _enable_peft_forward_hooks(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("adapter_names") is not None:
            raise ValueError("preproj does not support adapter_names (mixed batches): use set_adapter instead.")
        yield

    def _check_merge_allowed(self) -> None:
        raise NotImplementedError(CANNOT_MERGE)

    def merge_adapter(self, *args: Any, **kwargs: Any) -> None:
        """Refuse, with what to do instead."""
        raise NotImplementedError(CANNOT_MERGE)

    def _unload_and_optionally_merge(self, merge: bool = True, **kwargs: Any) -> nn.Module:
        """Take our layers and hooks off the model again, and leave other adapters in place."""
        if merge:
            raise NotImplementedError(CANNOT_MERGE)
        for _, attention, layer in adapted_sites(self.model):
            layer.remove()
            delattr(attention, CHILD)
        return super()._unload_and_optionally_merge(merge=False, **kwargs)


def _weight_of(attention: nn.Module) -> torch.Tensor:
    """Return a floating-point weight of the base attention, for its device and dtype."""
    weights = [p for name, p in attention.named_parameters() if not name.startswith(PreProjModel.prefix)]
    return next((w for w in weights if w.is_floating_point()), weights[0])


def _listed(targets: Any) -> str:
    return repr(targets) if isinstance(targets, str) else ", ".join(map(repr, sorted(targets)))


def _shortest_suffixes(names: list[str], model: nn.Module) -> set[str]:
    """Return the shortest path endings that pick exactly these modules, such as ``{"self_attn"}``."""
    paths = [name for name, _ in model.named_modules()]
    for length in range(1, max(name.count(".") for name in names) + 1):
        endings = {".".join(name.split(".")[-length:]) for name in names}
        if [p for p in paths if p.endswith(tuple(f".{ending}" for ending in endings))] == names:
            return endings
    return set(names)
