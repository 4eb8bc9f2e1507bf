"""The methods under comparison: what each adds to the frozen base."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from peft import LoraConfig, PeftConfig, PeftModel, TaskType, get_peft_model
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from preproj.adapter import PreProjConfig
from preproj.adapter.layer import adapted_sites
from preproj.probe.errors import RecipeError

# Names of attention's input projections in the architectures preproj knows.
INPUT_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "query_key_value", "c_attn")


@dataclass(frozen=True)
class Attached:
    """A base model with one method on it.

    Attributes:
        model: the PEFT model, or the base itself for ``none``.
        trainable_parameters: number of new, trained parameters.
        total_parameters: base plus new.
        adapter: PEFT type, target modules and (LoRA) rank; None for ``none``.
        notes: sentences a reader of the result must see.
    """

    model: PreTrainedModel | PeftModel
    trainable_parameters: int
    total_parameters: int
    adapter: dict | None = None
    notes: list[str] = field(default_factory=list)


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
    budget = reference_budget(base)
    config: PeftConfig
    if method.startswith("lora"):
        config = lora_config(base, method, budget)
    else:
        parts = method.split("+")
        config = PreProjConfig(
            task_type=TaskType.CAUSAL_LM,
            pre_projection="pre" in parts,
            content_skip="skip" in parts,
            init_seed=seed,
        )
    torch.manual_seed(seed)  # LoRA draws its start from the global generator
    model = get_peft_model(base, config)
    trainable, total = model.get_nb_trainable_parameters()
    adapter = {"type": config.peft_type.value, "target_modules": sorted(model.peft_config["default"].target_modules)}
    if isinstance(config, LoraConfig):
        adapter["rank"] = config.r
    notes = [*_size_note(method, trainable, budget), *_overcomplete_note(model, config)]
    return Attached(model, trainable, total, adapter, notes)


def load_trained(model: PeftModel, folder: Path) -> None:
    """Load the weights saved in ``folder`` into the adapter that a model has.

    Raises:
        RecipeError: if the folder does not hold exactly the weights of the adapter.
    """
    try:
        result = model.load_adapter(str(folder), "default")
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        last_line = str(error).strip().split("\n")[-1].strip().rstrip(".")
        raise RecipeError(f"{folder} cannot be loaded: {last_line}. Remove {folder.parent} and repeat.") from error
    for kind, keys in (("lacks", result.missing_keys), ("has besides", result.unexpected_keys)):
        if keys:
            more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
            raise RecipeError(
                f"{folder} is not this method's adapter: it {kind} {keys[0]}{more}. Remove {folder.parent} and repeat."
            )


def reference_budget(base: PreTrainedModel) -> int:
    """Return the parameters that ``pre+skip`` adds to ``base``: the budget LoRA is matched to."""
    shell = get_peft_model(_shell(base), PreProjConfig())
    return shell.get_nb_trainable_parameters()[0]


def lora_config(base: PreTrainedModel, method: str, budget: int) -> LoraConfig:
    """Return the LoRA configuration whose parameters come closest to ``budget``, with alpha = r.

    ``lora`` adapts all linear layers of the blocks, ``lora-qkv`` attention's input projections only, as the paper
    does.
    """
    targets: str | list[str] = "all-linear"
    if method == "lora-qkv":
        shell = get_peft_model(_shell(base), PreProjConfig())
        attention_children = {
            name for _, attention, _ in adapted_sites(shell) for name, _ in attention.named_children()
        }
        targets = [name for name in INPUT_PROJECTIONS if name in attention_children]

    def config(rank: int) -> LoraConfig:
        return LoraConfig(task_type=TaskType.CAUSAL_LM, r=rank, lora_alpha=rank, target_modules=targets)

    per_rank, _ = get_peft_model(_shell(base), config(1)).get_nb_trainable_parameters()
    return config(max(1, round(budget / per_rank)))


def _shell(base: PreTrainedModel) -> PreTrainedModel:
    """Return a model of the same shape on the meta device, to count parameters on."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(base.config)


def _count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _size_note(method: str, trainable: int, budget: int) -> list[str]:
    if method not in {"pre", "skip"}:
        return []
    return [f"{method}: an ablation at its natural size, {trainable / budget:.0%} of pre+skip's parameters."]


def _overcomplete_note(model: nn.Module, config: PeftConfig) -> list[str]:
    """Say where LoRA's two factors hold more parameters than the dense matrix they change."""
    if not isinstance(config, LoraConfig):
        return []
    names = set()
    for name, module in model.named_modules():
        if hasattr(module, "lora_A"):
            rows, columns = module.in_features, module.out_features
            if config.r * (rows + columns) > rows * columns:
                names.add(name.rsplit(".", 1)[-1])
    if not names:
        return []
    return [
        f"LoRA at rank {config.r} has more parameters than the dense matrix it changes in "
        f"{', '.join(sorted(names))}: its low-rank form restricts nothing there."
    ]
