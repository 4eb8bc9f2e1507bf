"""What a user can choose about the adapter."""

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peft import PeftConfig
from peft.utils.other import get_pattern_key

from preproj.adapter.card import complete_card
from preproj.adapter.register import peft_type
from preproj.modules import ACTIVATIONS, activation_function

FORMAT_VERSION = 1


@dataclass
class PreProjConfig(PeftConfig):
    """Configuration of pre-projection and content skip (Shinde 2026, arXiv 2604.10791) as a PEFT method.

    The fields named as in ``LoraConfig`` mean the same.

    Raises:
        ValueError: if a value is out of range, or both ``pre_projection`` and ``content_skip`` are off.
    """

    target_modules: list[str] | str | None = field(
        default=None,
        metadata={
            "help": "Names of the attention modules to adapt (a list of suffixes, or a regular expression as one "
            "string). None finds every self-attention module; preproj.sites(model) shows them."
        },
    )
    exclude_modules: list[str] | str | None = field(
        default=None,
        metadata={"help": "Names of attention modules to leave out, written as target_modules are."},
    )
    layers_to_transform: list[int] | int | None = field(
        default=None,
        metadata={"help": "Indices of the layers to adapt; None adapts all. Not with target_modules as one string."},
    )
    layers_pattern: list[str] | str | None = field(
        default=None,
        metadata={"help": "Name of the list of layers that layers_to_transform counts in, such as 'layers' or 'h'."},
    )
    expansion: float = field(
        default=1.25,
        metadata={"help": "Inner width of the pre-projection over the hidden size; the paper uses 1.25."},
    )
    expansion_pattern: dict[str, float] = field(
        default_factory=dict,
        metadata={
            "help": "Other expansions for some layers: names or regular expressions of attention modules, as in "
            "LoRA's rank_pattern, to expansions. The first that matches a module counts."
        },
    )
    activation: str = field(
        default="silu",
        metadata={"help": f"Activation of the pre-projection: one of {', '.join(ACTIVATIONS)}."},
    )
    pre_projection: bool = field(default=True, metadata={"help": "Whether to add the pre-projection."})
    content_skip: bool = field(default=True, metadata={"help": "Whether to add the content skip."})
    skip_init_std: float | None = field(
        default=None,
        metadata={
            "help": "Standard deviation of W_skip at the start; None means the paper's 1e-4, 0 makes a fresh adapter "
            "an exact no-op, as other PEFT methods are. Not with skip_rank."
        },
    )
    skip_rank: int | None = field(
        default=None,
        metadata={
            "help": "Rank of W_skip as a product of two factors, the second zero at the start; None keeps W_skip dense."
        },
    )
    init_weights: bool = field(
        default=True,
        metadata={"help": "Whether to start as the method does; False starts with random weights, to test with."},
    )
    init_seed: int = field(
        default=0,
        metadata={"help": "Seed of the start weights, which can be rebuilt from it exactly on any machine."},
    )
    modules_to_save: list[str] | None = field(
        default=None,
        metadata={"help": "Further modules to train and save whole, such as a classification head."},
    )
    format_version: int = field(
        default=FORMAT_VERSION, metadata={"help": "Of the files of a saved adapter, which name it; not to be set."}
    )

    def __post_init__(self) -> None:
        """Check every value and name the allowed range where one is wrong."""
        super().__post_init__()
        if not _is_whole(self.format_version) or not 1 <= self.format_version <= FORMAT_VERSION:
            raise ValueError(
                f"the adapter has format version {self.format_version!r}, and this preproj reads up to version "
                f"{FORMAT_VERSION}; install a newer preproj to read it."
            )
        self.peft_type = peft_type()
        for name in ("target_modules", "exclude_modules", "layers_pattern", "modules_to_save"):
            self._check_names(name)
        for name in ("target_modules", "exclude_modules"):
            if isinstance(getattr(self, name), list):
                setattr(self, name, set(getattr(self, name)))  # as every PEFT config does
        self._check_switches()
        self._check_layers()
        self._check_sizes()
        activation_function(self.activation)
        if not _is_whole(self.init_seed):
            raise ValueError(f"init_seed is {self.init_seed!r}: expected a whole number.")

    def save_pretrained(self, save_directory: str, **kwargs: Any) -> None:
        """Write ``adapter_config.json``, and into a model card that PEFT has put beside it how to load the adapter.

        Args:
            save_directory: the folder.
            **kwargs: as in PEFT.
        """
        super().save_pretrained(save_directory, **kwargs)
        card_file = Path(save_directory) / "README.md"
        if card_file.exists():
            complete_card(card_file)

    def _check_switches(self) -> None:
        for name in ("pre_projection", "content_skip", "init_weights"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}: expected True or False.")
        if not (self.pre_projection or self.content_skip):
            raise ValueError("pre_projection and content_skip are both False: switch at least one on.")

    def _check_names(self, name: str) -> None:
        """Check that a field holds names; one string is a regular expression, and no such thing in modules_to_save."""
        value = getattr(self, name)
        if value is None:
            return
        if isinstance(value, str) and name != "modules_to_save":
            try:
                re.compile(value)
            except re.error as error:
                raise ValueError(f"{name} is {value!r}: not a regular expression ({error}).") from error
        elif not isinstance(value, list | set | tuple) or not all(isinstance(one, str) for one in value):
            raise ValueError(f"{name} is {value!r}: expected a list of names.")
        else:
            setattr(self, name, list(value))

    def _check_layers(self) -> None:
        if isinstance(self.layers_to_transform, tuple | range | set):
            self.layers_to_transform = sorted(self.layers_to_transform)
        layers = self.layers_to_transform
        if layers is None:
            if self.layers_pattern:
                raise ValueError("layers_pattern needs layers_to_transform, the indices to adapt.")
            return
        if isinstance(self.target_modules, str):
            raise ValueError(
                "layers_to_transform does not go with target_modules as a regular expression: name the layers in it."
            )
        if layers == [] or not all(_is_whole(i) and i >= 0 for i in (layers if isinstance(layers, list) else [layers])):
            raise ValueError(f"layers_to_transform is {layers!r}: expected layer indices from 0 on, such as [0, 1].")

    def _check_sizes(self) -> None:
        if not isinstance(self.expansion_pattern, dict):
            raise ValueError(
                f"expansion_pattern is {self.expansion_pattern!r}: expected names of attention modules and their "
                "expansions, such as {'layers.0.self_attn': 2.0}."
            )
        patterns = {f"expansion_pattern[{key!r}]": value for key, value in self.expansion_pattern.items()}
        for name, value in {"expansion": self.expansion, **patterns}.items():
            if not _is_number(value) or value <= 0:
                raise ValueError(f"{name} is {value!r}: expected a number above 0, such as 1.25.")
        if self.skip_rank is None:
            if self.skip_init_std is None:
                self.skip_init_std = 1e-4
            if not _is_number(self.skip_init_std) or self.skip_init_std < 0:
                raise ValueError(f"skip_init_std is {self.skip_init_std!r}: expected 0 or a positive number.")
        elif not _is_whole(self.skip_rank) or self.skip_rank < 1:
            raise ValueError(f"skip_rank is {self.skip_rank!r}: expected a whole number from 1 on, or None.")
        elif not self.content_skip:
            raise ValueError(f"skip_rank is {self.skip_rank}, but content_skip is False: there is no skip to size.")
        elif self.skip_init_std is not None:
            raise ValueError(
                f"skip_rank is {self.skip_rank} and skip_init_std is {self.skip_init_std!r}: give one of them; a skip "
                "of low rank always starts at exactly zero."
            )


def inner_size(config: PreProjConfig, name: str, width: int) -> int:
    """Return the inner width of the pre-projection of one attention module.

    Args:
        config: the adapter's configuration.
        name: path of the attention module in the model.
        width: width of x̂.

    Raises:
        ValueError: if the expansion leaves no inner width.
    """
    key = get_pattern_key(list(config.expansion_pattern), name)
    expansion = config.expansion_pattern.get(key, config.expansion)
    inner = round(expansion * width)
    if inner < 1:
        raise ValueError(f"expansion {expansion} of {name!r} ({width} wide) leaves an inner width of 0: raise it.")
    return inner


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
