"""A trained adapter in a folder: its own, or a cell's of a run."""

from dataclasses import dataclass
from pathlib import Path

from peft import PeftConfig, PeftModel, get_peft_model
from safetensors import SafetensorError

from preproj.adapter import PreProjConfig
from preproj.probe.base import Base, load_model, resolve_base
from preproj.probe.errors import RecipeError
from preproj.probe.methods import BESIDE
from preproj.probe.recipe import Recipe, parse_recipe

CONFIG = "adapter_config.json"


@dataclass(frozen=True)
class TrainedAdapter:
    """An adapter that can be loaded.

    Attributes:
        folder: PEFT's, with ``adapter_config.json``.
        config: the adapter's configuration.
        base: the model it was trained on.
        cell: the folder of the run's cell it belongs to, if any.
        run: the run's folder.
        recipe: of that run.
    """

    folder: Path
    config: PreProjConfig
    base: Base
    cell: Path | None = None
    run: Path | None = None
    recipe: Recipe | None = None

    @property
    def dtype(self) -> str:
        """The dtype of the base: the run's, else float32."""
        return self.recipe.model.dtype if self.recipe else "float32"

    def load(self) -> PeftModel:
        """Load base and adapter in evaluation mode, with the LoRA beside it where the cell's method has one.

        Raises:
            RecipeError: if the base cannot be had, or the adapter does not fit it.
        """
        base = load_model(self.base, self.dtype)
        try:
            model = get_peft_model(base, self.config)
            loaded = model.load_adapter(str(self.folder), "default")
            if (self.folder / BESIDE).is_dir():
                PeftModel.from_pretrained(model.get_base_model(), str(self.folder / BESIDE), adapter_name=BESIDE)
        except (OSError, RuntimeError, ValueError, SafetensorError) as error:
            raise RecipeError(f"{self.folder} cannot be put on {self.base.name}: {_reason(error)}.") from error
        if keys := [*loaded.missing_keys, *loaded.unexpected_keys]:
            raise RecipeError(f"{self.folder} does not fit {self.base.name}: only one of them has {keys[0]}.")
        return model.eval()


def find_adapter(path: Path, base: str | None = None) -> TrainedAdapter:
    """Find the adapter in a folder.

    Args:
        path: a folder of ``save_pretrained``, or a cell of a run (``cells/<method>/seed<k>``) or its ``adapter``.
        base: the base model, in place of the one that the run or the adapter's configuration names.

    Raises:
        RecipeError: if there is no adapter of ours, or it names no base.
    """
    if not path.is_dir():
        raise RecipeError(f"{path} is no folder; give an adapter's folder or a cell of a run.")
    folder = path if (path / CONFIG).is_file() else path / "adapter"
    if not (folder / CONFIG).is_file():
        if (path / "metrics.json").is_file():
            raise RecipeError(f"{path} is a cell without an adapter; give one whose method has pre or skip.")
        raise RecipeError(f"{path} has no {CONFIG}; give an adapter's folder or a cell of a run, cells/METHOD/seed0.")
    try:
        config = PeftConfig.from_pretrained(str(folder))
    except (KeyError, OSError, TypeError, ValueError) as error:
        raise RecipeError(f"{folder / CONFIG} cannot be read: {_reason(error)}.") from error
    if not isinstance(config, PreProjConfig):
        raise RecipeError(f"{folder} is an adapter of {config.peft_type.value}: only preproj's can be analysed.")
    cell, run, recipe = _run_of(folder)
    name = base or (recipe.model.name if recipe else config.base_model_name_or_path)
    if not name:
        raise RecipeError(f"{folder / CONFIG} names no base model; name it with --base.")
    config.base_model_name_or_path = None  # else PEFT warns where the base lies elsewhere now
    return TrainedAdapter(folder, config, resolve_base(name), cell, run, recipe)


def _reason(error: Exception) -> str:
    return str(error).strip().split("\n")[-1].strip().rstrip(".")


def _run_of(folder: Path) -> tuple[Path | None, Path | None, Recipe | None]:
    """Return the cell that an adapter belongs to, its run and the recipe; None for an adapter on its own."""
    absolute = folder.resolve()
    if len(absolute.parents) < 4 or absolute.name != "adapter" or absolute.parents[2].name != "cells":
        return None, None, None
    cell, run = absolute.parent, absolute.parents[3]
    file = run / "recipe.yaml"
    if not file.is_file():
        return None, None, None
    return cell, run, parse_recipe(file.read_text("utf-8"), str(file))
