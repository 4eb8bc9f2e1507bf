"""The methods under comparison: what each adds to the frozen base."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from peft import LoraConfig, PeftConfig, PeftModel, TaskType, get_peft_model
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedModel

from preproj.adapter import PreProjConfig
from preproj.cost import input_projections, matching_lora, meta_model, new_parameters
from preproj.probe.errors import RecipeError

BESIDE = "beside"
"""Name of the LoRA beside a pre-projection, and so, as PEFT saves it, of its folder in the other's."""


@dataclass(frozen=True)
class Attached:
    """A base model with one method on it.

    Attributes:
        model: the model to train and evaluate: the last of ``adapters``, or the base itself for ``none``.
        trainable_parameters: number of new, trained parameters.
        total_parameters: base plus new.
        adapters: the PEFT models around the base, one for each adapter of the method.
        adapter: PEFT type, target modules and (LoRA) rank, and the same of a second adapter as ``beside``; None for
            ``none``.
        notes: sentences a reader of the result must see.
    """

    model: PreTrainedModel | PeftModel
    trainable_parameters: int
    total_parameters: int
    adapters: tuple[PeftModel, ...] = ()
    adapter: dict | None = None
    notes: list[str] = field(default_factory=list)

    def save(self, folder: Path) -> None:
        """Write every adapter: the first into ``folder``, LoRA beside it into ``folder/beside``."""
        for model in self.adapters:
            # PEFT 0.21 takes the weights of every method on the base, not only of the adapter's own.
            own = {key: weight for key, weight in model.state_dict().items() if model.base_model.prefix in key}
            model.save_pretrained(str(folder), state_dict=own)

    def load(self, folder: Path) -> None:
        """Read the weights back that :meth:`save` wrote; see :func:`load_trained`."""
        for model in self.adapters:
            name = model.active_adapter
            load_trained(model, folder if name == "default" else folder / name, name)


def attach(base: PreTrainedModel, method: str, seed: int) -> Attached:
    """Freeze ``base`` and put ``method`` on it, its start weights drawn from ``seed``.

    Args:
        base: the causal language model; changed in place.
        method: one of :data:`preproj.probe.recipe.METHODS`.
        seed: start of the new weights.
    """
    if method == "none":
        base.requires_grad_(False)
        return Attached(base, 0, _count(base))
    shell = meta_model(base)
    configs = method_configs(shell, method, seed)
    torch.manual_seed(seed)  # LoRA draws its start from the global generator
    adapters = tuple(get_peft_model(base, config, name) for name, config in configs.items())
    for model in adapters:
        model.set_adapter(model.active_adapter)  # older versions of PEFT freeze the first when the second comes
    trainable, total = adapters[-1].get_nb_trainable_parameters()
    first, *second = map(_describe, adapters)
    adapter = first | ({"beside": second[0]} if second else {})
    notes = [*_size_note(method, trainable, reference_budget(shell)), *_overcomplete_note(base)]
    return Attached(adapters[-1], trainable, total, adapters, adapter, notes)


def method_configs(shell: PreTrainedModel, method: str, seed: int) -> dict[str, PeftConfig]:
    """Return the adapters of a method by their names, in the order they are put on.

    LoRA has alpha = r and the rank whose parameters come closest to a budget: alone that of ``pre+skip``, beside a
    pre-projection that of the content skip. ``lora-qkv`` adapts attention's input projections only, as the paper
    does, every other LoRA all linear layers of the blocks.

    Args:
        shell: a model of the base's shape, of :func:`preproj.cost.meta_model`.
        method: one of :data:`preproj.probe.recipe.METHODS`, not ``none``.
        seed: start of the new weights.

    Raises:
        ValueError: if the method does not fit this architecture.
    """
    parts = method.split("+")
    configs: dict[str, PeftConfig] = {}
    if parts[0] in {"pre", "skip"}:
        configs["default"] = PreProjConfig(
            task_type=TaskType.CAUSAL_LM,
            pre_projection="pre" in parts,
            content_skip="skip" in parts,
            init_seed=seed,
        )
    if parts[-1].startswith("lora"):
        budget = new_parameters(shell, PreProjConfig(pre_projection=False)) if configs else reference_budget(shell)
        targets = input_projections(shell) if method == "lora-qkv" else "all-linear"
        rank = matching_lora(shell, targets, budget).rank
        lora = LoraConfig(task_type=TaskType.CAUSAL_LM, r=rank, lora_alpha=rank, target_modules=targets)
        configs[BESIDE if configs else "default"] = lora
    return configs


def load_trained(model: PeftModel, folder: Path, name: str = "default") -> None:
    """Load the weights saved in ``folder`` into the adapter that a model has; they stay trainable.

    Raises:
        RecipeError: if the folder does not hold exactly the weights of the adapter.
    """
    try:
        result = model.load_adapter(str(folder), name, is_trainable=True)
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        last_line = str(error).strip().split("\n")[-1].strip().rstrip(".")
        raise RecipeError(f"{folder} cannot be loaded: {last_line}. Remove {folder.parent} and repeat.") from error
    for kind, keys in (("lacks", result.missing_keys), ("has besides", result.unexpected_keys)):
        if keys:
            more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
            raise RecipeError(
                f"{folder} is not this method's adapter: it {kind} {keys[0]}{more}. Remove {folder.parent} and repeat."
            )


def reference_budget(shell: PreTrainedModel) -> int:
    """Return the parameters that ``pre+skip`` adds to a model of this shape: the budget LoRA is matched to."""
    return new_parameters(shell, PreProjConfig())


def _describe(model: PeftModel) -> dict:
    config = model.peft_config[model.active_adapter]
    described = {"type": config.peft_type.value, "target_modules": sorted(config.target_modules)}
    return described | ({"rank": config.r} if isinstance(config, LoraConfig) else {})


def _count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _size_note(method: str, trainable: int, budget: int) -> list[str]:
    size = f"{trainable / budget:.0%} of pre+skip's parameters"
    if method in {"pre", "skip"}:
        return [f"{method}: an ablation at its natural size, {size}."]
    if method == "pre+skip+lora":
        return [f"{method}: over budget, {size}."]
    return []


def _overcomplete_note(model: nn.Module) -> list[str]:
    """Say where LoRA's two factors hold more parameters than the dense matrix they change."""
    names, rank = set(), 0
    for name, module in model.named_modules():
        if hasattr(module, "lora_A"):
            rows, columns = module.in_features, module.out_features
            (rank,) = module.r.values()
            if rank * (rows + columns) > rows * columns:
                names.add(name.rsplit(".", 1)[-1])
    if not names:
        return []
    return [
        f"LoRA at rank {rank} has more parameters than the dense matrix it changes in "
        f"{', '.join(sorted(names))}: its low-rank form restricts nothing there."
    ]
