"""The tuner: puts a :class:`PreProjLayer` at every attention module of a model."""

import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch
from peft import PeftConfig
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer, set_adapter
from peft.utils.other import AuxiliaryTrainingWrapper, get_pattern_key
from torch import nn

from preproj.adapter.combination import check_same_layers, combine_skips, combined_config
from preproj.adapter.config import PreProjConfig, inner_size
from preproj.adapter.devices import CHILD, compute_dtype
from preproj.adapter.layer import BASE, CANNOT_MERGE, PreProjLayer, adapted_sites, drop_hooks
from preproj.adapter.sharded import refuse_pieces
from preproj.adapter.sites import NotUnderstoodError, Site, hidden_size_of, name_one_of, own_site, site_of, sites

INPUTS = ("input_ids", "inputs", "inputs_embeds", "pixel_values", "input_values", "input_features")


class PreProjModel(BaseTuner):
    """Pre-projection and content skip in a model, as PEFT's ``get_peft_model`` builds it.

    Raises:
        ValueError: where no attention module is found or a named one is not attention; the sentence lists the
            candidates found in the model.
    """

    prefix = f"{CHILD}."
    tuner_layer_cls = PreProjLayer

    def __init__(
        self, model: nn.Module, peft_config: PeftConfig | dict[str, PeftConfig], adapter_name: str, **kwargs: Any
    ):
        if isinstance(peft_config, PeftConfig):  # injected: the host model keeps one dictionary for all its adapters
            super().__init__(model, peft_config, adapter_name, **kwargs)
        else:
            # All tuners of a base share the dictionary PEFT keeps on it, and overwrite each other's adapters in it.
            others = model.__dict__.pop("peft_config", None)
            try:
                super().__init__(model, peft_config, adapter_name, **kwargs)
            finally:
                model.__dict__.pop("peft_config", None)
                if others is not None:
                    model.peft_config = others

    def _prepare_adapter_config(self, peft_config: PreProjConfig, model_config: dict) -> PreProjConfig:
        _refuse_compiled(self.model)
        if peft_config.target_modules is None:
            found = [site.name for site in sites(self.model)]
            targets = _shortest_suffixes(found, self.model)
            if targets == set(found):  # PEFT's rule for layers reads endings, and takes a whole path at its word
                by_ending = replace(peft_config, target_modules=[name.rpartition(".")[2] for name in found])
                targets = {name for name in found if self._check_target_module_exists(by_ending, name)}
            peft_config.target_modules = targets  # type: ignore[assignment]
        return peft_config

    def _prepare_model(self, peft_config: PreProjConfig, model: nn.Module) -> None:
        """Find and check every site before anything changes."""
        targets = [
            (name, module)
            for name, module in model.named_modules()
            if not isinstance(module, BaseTunerLayer) and self._check_target_module_exists(peft_config, name)
        ]
        if not targets:
            _refuse_no_match(peft_config, name_one_of(model))
        for name, module in targets:
            if hidden_size_of(module) is None:
                raise ValueError(
                    f"target_modules match {name!r} ({type(module).__name__}), which is not an attention module. "
                    f"{name_one_of(model)}"
                )
        self._sites = {name: self._site(name, module) for name, module in targets}
        self._check_expansions(peft_config)
        self._check_layers(peft_config)

    def _check_layers(self, config: PreProjConfig) -> None:
        layers = config.layers_to_transform
        asked = {layers} if isinstance(layers, int) else set(layers or [])
        found = {int(index) for name in self._sites for index in re.findall(r"\.(\d+)\.", f".{name}.")[:1]}
        if missing := sorted(asked - found):
            raise ValueError(
                f"layers_to_transform names {missing}, where this model has no attention to adapt: it is in the layers "
                f"{sorted(found)}."
            )

    def _check_expansions(self, config: PreProjConfig) -> None:
        if config.pre_projection:
            for site in self._sites.values():
                inner_size(config, site.name, site.width)
        for key in config.expansion_pattern:
            if all(get_pattern_key([key], name) != key for name in self._sites):
                raise ValueError(
                    f"expansion_pattern names {key!r}, which is none of the adapted modules: {', '.join(self._sites)}."
                )

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
            # A state dict given to PEFT decides in place of the configuration, and may hold more modules.
            layer = PreProjLayer(self._sites.get(current_key) or self._site(current_key, target))
            target.add_module(CHILD, layer)
        layer.update_layer(adapter_name, peft_config)

    def _mark_only_adapters_as_trainable(self, model: nn.Module) -> None:
        """Freeze the base; beside another method it is frozen already, and PEFT 0.18 would freeze that one too."""
        if all(isinstance(module, PreProjLayer) for module in model.modules() if isinstance(module, BaseTunerLayer)):
            super()._mark_only_adapters_as_trainable(model)

    @classmethod
    def _get_adapter_state_dict(
        cls,
        model: nn.Module,
        config: PeftConfig,
        adapter_name: str,
        state_dict: dict[str, torch.Tensor],
        unwanted_adapter_names: list[str],
    ) -> dict[str, torch.Tensor]:
        """Select our weights to save, all whole.

        PEFT's own choice takes those of every method on the base, and finds none in blocks that FSDP1 wrapped.
        """
        ours = {key: weight for key, weight in state_dict.items() if f".{cls.prefix}" in key}
        refuse_pieces(ours)
        return ours

    def _cast_adapter_dtype(self, adapter_name: str, autocast_adapter_dtype: bool = True) -> None:
        """Have the adapter in float32, beside a float64 base in float64, or without autocast as attention computes."""
        for _, attention, layer in adapted_sites(self.model):
            dtype = compute_dtype(self.model, attention)
            if autocast_adapter_dtype and dtype != torch.float64:
                dtype = torch.float32
            for linear in layer.linears(adapter_name).values():
                linear.to(dtype)

    def add_weighted_adapter(
        self, adapters: Sequence[str], weights: Sequence[float], adapter_name: str, combination_type: str = "linear"
    ) -> None:
        """Add an adapter whose content skip is the weighted sum of others', in each layer and exactly.

        Args:
            adapters: names of loaded adapters without a pre-projection.
            weights: one number for each, of any sign.
            adapter_name: name of the sum.
            combination_type: ``"linear"`` adds dense skips; ``"cat"`` joins the factors of skips of low rank, so that
                the sum has the sum of their ranks.

        Raises:
            ValueError: where the sum is not defined, or the arguments do not fit each other; nothing changes then.
        """
        if adapter_name in self.peft_config:
            raise ValueError(f"adapter_name is {adapter_name!r}, which is loaded already: choose another.")
        config = combined_config(self.peft_config, adapters, weights, combination_type)
        check_same_layers([layer for _, _, layer in adapted_sites(self.model)], adapters)
        self.peft_config[adapter_name] = config
        try:
            self.inject_adapter(self.model, adapter_name)
        except Exception:
            del self.peft_config[adapter_name]
            raise
        for _, _, layer in adapted_sites(self.model):
            if layer.linears(adapter_name):
                combine_skips(layer, adapters, weights, adapter_name)

    def set_adapter(self, adapter_name: str | list[str], inference_mode: bool = False) -> None:
        """Make adapters of ours the active ones; another method beside us keeps its own.

        Raises:
            ValueError: where one is not loaded: without it every adapter would be switched off.
        """
        names = [adapter_name] if isinstance(adapter_name, str) else adapter_name
        if unknown := [name for name in names if name not in self.peft_config]:
            raise ValueError(
                f"Adapter {', '.join(map(repr, unknown))} not found: expected some of "
                f"{', '.join(map(repr, self.peft_config))}."
            )
        for _, _, layer in adapted_sites(self.model):
            layer.set_adapter(adapter_name, inference_mode=inference_mode)  # type: ignore[operator]
        for _, wrapper in self._wrappers():
            set_adapter(wrapper, adapter_name, inference_mode=inference_mode)
        self.active_adapter = adapter_name

    def enable_adapter_layers(self) -> None:
        """Switch our layers on; another method beside us keeps its own state."""
        self._switch(enabled=True)

    def disable_adapter_layers(self) -> None:
        """Switch our layers off; another method beside us keeps its own state."""
        self._switch(enabled=False)

    def _switch(self, enabled: bool) -> None:
        for _, _, layer in adapted_sites(self.model):
            layer.enable_adapters(enabled)  # type: ignore[operator]  # peft has no types
        for _, wrapper in self._wrappers():
            wrapper.enable_adapters(enabled)

    def _wrappers(self) -> list[tuple[str, AuxiliaryTrainingWrapper]]:
        """List PEFT's wrappers of the modules that our adapters train whole."""
        saved = {name for config in self.peft_config.values() for name in config.modules_to_save or []}
        return [
            (name, module)
            for name, module in self.model.named_modules()
            if isinstance(module, AuxiliaryTrainingWrapper) and name.endswith(tuple(saved))  # PEFT's rule too
        ]

    @contextmanager
    def _enable_peft_forward_hooks(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Send each sample of a mixed batch through its own adapter: ``adapter_names`` names one per sample."""
        names = kwargs.get("adapter_names")
        if names is None:
            yield
            return
        if isinstance(names, str):
            raise ValueError(f"adapter_names is {names!r}: expected a list with one name per sample.")
        if self.training:
            raise ValueError("Cannot pass `adapter_names` when the model is in training mode: call eval() first.")
        unknown = sorted(set(names) - {BASE, *self.peft_config})
        if unknown:
            raise ValueError(
                f"adapter_names holds {', '.join(map(repr, unknown))}: expected {BASE!r} or one of "
                f"{', '.join(map(repr, self.peft_config))}."
            )
        inputs = [*args, *(kwargs.get(name) for name in INPUTS), *kwargs.values()]
        batch = next((len(given) for given in inputs if isinstance(given, torch.Tensor)), len(names))
        if batch != len(names):
            raise ValueError(
                "Length of `adapter_names` should be the same as the number of inputs, but got "
                f"{len(names)} names for a batch of {batch}: give one name per sample."
            )
        layers = [layer for _, _, layer in adapted_sites(self.model)]
        handles = [
            module.register_forward_pre_hook(partial(_tell_names, names), with_kwargs=True)
            for _, module in self._wrappers()
        ]
        try:
            for layer in layers:
                layer.mixed_batch.set(list(names))
            yield
        finally:
            for layer in layers:
                layer.mixed_batch.set(None)
            for handle in handles:
                handle.remove()

    def _check_merge_allowed(self) -> None:
        raise NotImplementedError(CANNOT_MERGE)

    def merge_adapter(self, *args: Any, **kwargs: Any) -> None:
        """Refuse, with what to do instead."""
        raise NotImplementedError(CANNOT_MERGE)

    def _unload_and_optionally_merge(self, merge: bool = True, **kwargs: Any) -> nn.Module:
        """Take our layers and hooks off the model again, and leave other methods in place."""
        if merge:
            raise NotImplementedError(CANNOT_MERGE)
        for _, attention, layer in adapted_sites(self.model):
            layer.remove()
            delattr(attention, CHILD)
        for name, wrapper in self._wrappers():
            parent, _, child = name.rpartition(".")
            trained = wrapper.unload_and_optionally_merge_module(merge=False, safe_merge=False, adapter_names=None)
            setattr(self.model.get_submodule(parent), child, trained)
        drop_hooks(self.model)
        return self.model


def _tell_names(
    names: Sequence[str], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward pre-hook: tell PEFT's wrapper of a fully trained module the adapters of its samples."""
    repeats = len(args[0]) // len(names)
    return args, kwargs | {"adapter_names": [name for name in names for _ in range(repeats)]}


def _refuse_no_match(config: PreProjConfig, candidates: str) -> NoReturn:
    """Raise with what was asked for, and with what may be wrong with it."""
    targets = config.target_modules
    if targets == "all-linear":
        raise ValueError(
            "target_modules='all-linear' means every linear layer, but preproj acts on whole attention modules. "
            f"{candidates}"
        )
    if not targets:
        raise ValueError(f"target_modules is empty: leave it out to adapt every self-attention module. {candidates}")
    others = {name: getattr(config, name) for name in ("exclude_modules", "layers_to_transform", "layers_pattern")}
    listed = repr(targets) if isinstance(targets, str) else ", ".join(map(repr, sorted(targets)))
    asked = listed + "".join(f", {name} {value!r}" for name, value in others.items() if value)
    hint = f"One string is a regular expression for whole paths: give a list, [{listed}], to match their ends. "
    raise ValueError(
        f"target_modules {asked} match nothing in this model. {hint if isinstance(targets, str) else ''}{candidates}"
    )


def _refuse_compiled(model: nn.Module) -> None:
    """Raise for a model with a part that ``torch.compile`` wrapped, whose name would go into the adapter's keys."""
    for name, _ in model.named_modules():
        path, _, last = name.rpartition(".")
        if last == "_orig_mod":
            raise ValueError(
                f"{repr(path) if path else 'The base model'} is wrapped by torch.compile, so the adapter's keys would "
                "not fit the plain model. Add the adapter first and compile the result, torch.compile(get_peft_model("
                "base, config)), or compile in place with base.compile()."
            )


def _shortest_suffixes(names: list[str], model: nn.Module) -> set[str]:
    """Return the shortest path endings that pick exactly these modules, such as ``{"self_attn"}``."""
    paths = [name for name, _ in model.named_modules()]
    for length in range(1, max(name.count(".") for name in names) + 1):
        endings = {".".join(name.split(".")[-length:]) for name in names}
        if [p for p in paths if p.endswith(tuple(f".{ending}" for ending in endings))] == names:
            return endings
    return set(names)
