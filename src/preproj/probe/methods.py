"""The methods under comparison: what of each trains."""

import warnings
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, TaskType, get_peft_model
from torch import nn
from transformers import PreTrainedModel

from preproj.adapter import PreProjConfig
from preproj.adapter.layer import adapted_sites
from preproj.cost import input_projection_paths, input_projections, matching_lora, meta_model, new_parameters
from preproj.probe.attached import Attached
from preproj.probe.method import LORAS, Method, parse_method

BESIDE = "beside"
"""Name of the LoRA beside a pre-projection, and so, as PEFT saves it, of its folder in the other's."""
SAME_SIZE = 0.02
"""Trainable parameters that differ by more are no equal budget."""


def attach(base: PreTrainedModel, name: str, seed: int, match: bool = False) -> Attached:
    """Freeze ``base`` and put a method on it, its start weights drawn from ``seed``.

    Args:
        base: the causal language model; changed in place.
        name: of the method, see :func:`preproj.probe.method.parse_method`.
        seed: start of the new weights.
        match: whether ``pre`` is widened to the parameters of ``pre+skip``.

    Raises:
        ValueError: if the method does not fit this architecture.
    """
    method = parse_method(name)
    base.requires_grad_(False)
    if method == Method():
        return Attached(base, 0, _count(base))
    shell = meta_model(base)
    budget = reference_budget(shell)
    if method.base:
        _unfreeze(base, shell, method.base)
        trainable = _count(base, trained=True)
        return Attached(base, trainable, _count(base), notes=_size_notes(name, trainable, budget))
    configs = _configs(shell, method, budget, seed, match)
    torch.manual_seed(seed)  # LoRA draws its start from the global generator
    with warnings.catch_warnings():
        # Of a pair the second goes beside the first on purpose.
        warnings.filterwarnings("ignore", "You are trying to modify a model with PEFT for a second time")
        adapters = tuple(get_peft_model(base, config, name) for name, config in configs.items())
    for model in adapters:
        model.set_adapter(model.active_adapter)  # older versions of PEFT freeze the first when the second comes
    trainable, total = adapters[-1].get_nb_trainable_parameters()
    first, *second = map(_describe, adapters)
    adapter = first | ({"beside": second[0]} if second else {})
    notes = [*_size_notes(name, trainable, budget, first.get("expansion")), *_overcomplete_notes(base, method)]
    return Attached(adapters[-1], trainable, total, adapters, adapter, notes)


def _configs(shell: PreTrainedModel, method: Method, budget: int, seed: int, match: bool) -> dict[str, PeftConfig]:
    """Return the adapters of a method by their names, in the order they are put on."""
    configs: dict[str, PeftConfig] = {}
    if method.pre or method.skip:
        configs["default"] = PreProjConfig(
            task_type=TaskType.CAUSAL_LM,
            pre_projection=method.pre,
            content_skip=method.skip,
            skip_rank=method.skip_rank,
            expansion=_matching_expansion(shell) if match and method == Method(pre=True) else PreProjConfig.expansion,
            init_seed=seed,
        )
    if method.lora:
        configs[BESIDE if configs else "default"] = _lora_config(shell, method, budget, configs.get("default"))
    return configs


def _lora_config(shell: PreTrainedModel, method: Method, budget: int, ours: PeftConfig | None) -> LoraConfig:
    """Return LoRA, or one of its kind, with alpha = r.

    Without a rank in the method's name it has the one whose parameters come closest to what is left of the budget;
    where nothing is left, as beside ``pre+skip`` itself, to those of the dense skip. ``lora-qkv`` adapts attention's
    input projections only, as the paper does, the others all linear layers of the blocks.
    """
    targets = input_projections(shell) if method.lora == "lora-qkv" else "all-linear"
    use_dora = method.lora == "dora"
    rank = method.lora_rank
    if rank is None:
        left = budget - (new_parameters(shell, ours) if ours else 0)
        if left <= 0:
            left = new_parameters(shell, PreProjConfig(pre_projection=False))
        rank = matching_lora(shell, targets, left, use_dora=use_dora).rank
    return LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=rank,
        lora_alpha=rank,
        target_modules=targets,
        use_dora=use_dora,
        use_rslora=method.lora == "rslora",
    )


def _matching_expansion(shell: PreTrainedModel) -> float:
    """Return the expansion at which ``pre`` has the parameters of ``pre+skip``: 1.75 where the skip is d × d."""
    skip = new_parameters(shell, PreProjConfig(pre_projection=False))
    per_expansion = new_parameters(shell, PreProjConfig(expansion=1.0, content_skip=False))
    return PreProjConfig.expansion + skip / per_expansion


def _unfreeze(base: PreTrainedModel, shell: PreTrainedModel, which: str) -> None:
    """Let weights of the base train: all, or those (not the biases) of attention's input projections."""
    if which == "full":
        base.requires_grad_(True)
        return
    for path in input_projection_paths(shell):
        base.get_submodule(path).weight.requires_grad_(True)


def reference_budget(shell: PreTrainedModel) -> int:
    """Return the parameters that ``pre+skip`` adds to a model of this shape: the budget others are matched to."""
    return new_parameters(shell, PreProjConfig())


def _describe(model: PeftModel) -> dict:
    config = model.peft_config[model.active_adapter]
    described = {"type": config.peft_type.value, "target_modules": sorted(config.target_modules)}
    if not isinstance(config, LoraConfig):
        widened = {"expansion": config.expansion} if config.expansion != PreProjConfig.expansion else {}
        return described | widened | ({"skip_rank": config.skip_rank} if config.skip_rank else {})
    return described | {"rank": config.r} | {kind: True for kind in ("use_dora", "use_rslora") if getattr(config, kind)}


def _count(model: nn.Module, trained: bool = False) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad or not trained)


def _size_notes(name: str, trainable: int, budget: int, widened: float | None = None) -> list[str]:
    """Say where a method has not the parameters of ``pre+skip``, or was changed to have them."""
    size = f"{trainable / budget:.0%} of pre+skip's parameters"
    if widened:
        return [f"{name}: widened to an expansion of {widened:g}, {size}."]
    if name in {"pre", "skip"}:
        return [f"{name}: an ablation at its natural size, {size}."]
    if abs(trainable - budget) <= SAME_SIZE * max(trainable, budget):
        return []
    return [f"{name}: {'over budget, ' if trainable > budget else ''}{size}."]


def _overcomplete_notes(model: nn.Module, method: Method) -> list[str]:
    """Say where two factors hold more parameters than the dense matrix that they change, or stand for."""
    notes = []
    skip_rank = method.skip_rank
    if skip_rank and any(_overcomplete(skip_rank, layer) for _, _, layer in adapted_sites(model)):
        notes.append(
            f"The skip at rank {skip_rank} has more parameters than a dense one: its low-rank form restricts nothing."
        )
    names, rank = set(), 0
    for name, module in model.named_modules():
        if hasattr(module, "lora_A"):
            (rank,) = module.r.values()
            if _overcomplete(rank, module):
                names.add(name.rsplit(".", 1)[-1])
    if method.lora and names:
        notes.append(
            f"{LORAS[method.lora]} at rank {rank} has more parameters than the dense matrix it changes in "
            f"{', '.join(sorted(names))}: its low-rank form restricts nothing there."
        )
    return notes


def _overcomplete(rank: int, layer: Any) -> bool:
    rows, columns = layer.in_features, layer.out_features
    return rank * (rows + columns) > rows * columns
