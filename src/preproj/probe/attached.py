"""A base model with one method on it, and the files its trained weights are kept in."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from peft import PeftModel
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from preproj.probe.errors import RecipeError

WEIGHTS = "weights.safetensors"
"""File of a method that trains weights of the base itself: those weights, under their names in the base."""


@dataclass(frozen=True)
class Attached:
    """A base model with one method on it.

    Attributes:
        model: the model to train and evaluate: the last of ``adapters``, or the base itself where there is none.
        trainable_parameters: number of trained parameters.
        total_parameters: base plus new.
        adapters: the PEFT models around the base, one for each adapter of the method.
        adapter: PEFT type, target modules and (LoRA) rank, and the same of a second adapter as ``beside``; None where
            there is none.
        notes: sentences a reader of the result must see.
    """

    model: PreTrainedModel | PeftModel
    trainable_parameters: int
    total_parameters: int
    adapters: tuple[PeftModel, ...] = ()
    adapter: dict | None = None
    notes: list[str] = field(default_factory=list)

    def save(self, folder: Path, gathered: dict[str, Tensor] | None = None) -> None:
        """Write every adapter: the first into ``folder``, LoRA beside it into ``folder/beside``.

        Without an adapter, write the trained weights of the base into ``folder/weights.safetensors``.

        Args:
            folder: where to.
            gathered: the whole weights of ``model`` by name, where it is sharded over processes.
        """
        for model in self.adapters:
            # PEFT 0.21 takes the weights of every method on the base, not only of the adapter's own.
            weights = model.state_dict() if gathered is None else gathered
            own = {key: weight for key, weight in weights.items() if model.base_model.prefix in key}
            model.save_pretrained(str(folder), state_dict=own)
        if not self.adapters:
            folder.mkdir(parents=True, exist_ok=True)
            trained = _trained(self.model)
            save_file(trained if gathered is None else {name: gathered[name] for name in trained}, folder / WEIGHTS)

    def load(self, folder: Path) -> None:
        """Read the weights back that :meth:`save` wrote; they stay trainable.

        Raises:
            RecipeError: if the folder does not hold exactly the weights of the method.
        """
        if not self.adapters:
            _load_whole(folder, partial(_read_weights, self.model))
        for model in self.adapters:
            name = model.active_adapter
            _load_whole(folder if name == "default" else folder / name, partial(_read_adapter, model, name))


def _trained(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights that train, by name; tied weights are one and have one name."""
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


def _read_adapter(model: PeftModel, name: str, folder: Path) -> tuple[list[str], list[str]]:
    """Read an adapter that a model has; return what the folder lacks and what it has besides."""
    result = model.load_adapter(str(folder), name, is_trainable=True)
    return result.missing_keys, result.unexpected_keys


def _read_weights(model: PreTrainedModel, folder: Path) -> tuple[list[str], list[str]]:
    """Read the weights of a base that train; return what the folder lacks and what it has besides."""
    expected, found = _trained(model).keys(), load_file(folder / WEIGHTS)
    model.load_state_dict(found, strict=False)
    return sorted(expected - found.keys()), sorted(found.keys() - expected)


def _load_whole(folder: Path, read: Callable[[Path], tuple[list[str], list[str]]]) -> None:
    """Read a folder, and refuse one that is damaged or does not hold exactly the weights of the method."""
    try:
        missing, unexpected = read(folder)
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        last_line = str(error).strip().split("\n")[-1].strip().rstrip(".")
        raise RecipeError(f"{folder} cannot be loaded: {last_line}. Remove {folder.parent} and repeat.") from error
    for kind, keys in (("lacks", missing), ("has besides", unexpected)):
        if keys:
            more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
            raise RecipeError(
                f"{folder} is not this method's adapter: it {kind} {keys[0]}{more}. Remove {folder.parent} and repeat."
            )
