"""What a user can choose about the adapter."""

import math
from dataclasses import dataclass, field

from peft import PeftConfig

from preproj.adapter.register import peft_type
from preproj.modules import ACTIVATIONS, activation_function


@dataclass
class PreProjConfig(PeftConfig):
    """Configuration of pre-projection and content skip (Shinde 2026, arXiv 2604.10791) as a PEFT method.

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
    expansion: float = field(
        default=1.25,
        metadata={"help": "Inner width of the pre-projection over the hidden size; the paper uses 1.25."},
    )
    activation: str = field(
        default="silu",
        metadata={"help": f"Activation of the pre-projection: one of {', '.join(ACTIVATIONS)}."},
    )
    pre_projection: bool = field(default=True, metadata={"help": "Whether to add the pre-projection."})
    content_skip: bool = field(default=True, metadata={"help": "Whether to add the content skip."})
    skip_init_std: float = field(
        default=1e-4,
        metadata={
            "help": "Standard deviation of W_skip at the start; 0 makes a fresh adapter an exact no-op, as other "
            "PEFT methods are."
        },
    )
    init_seed: int = field(
        default=0,
        metadata={"help": "Seed of the start weights, which can be rebuilt from it exactly on any machine."},
    )
    modules_to_save: list[str] | None = field(
        default=None,
        metadata={"help": "Further modules to train and save whole, such as a classification head."},
    )

    def __post_init__(self) -> None:
        """Check every value and name the allowed range where one is wrong."""
        super().__post_init__()
        self.peft_type = peft_type()
        if isinstance(self.target_modules, list):
            self.target_modules = set(self.target_modules)  # type: ignore[assignment]  # as every PEFT config does
        if not (self.pre_projection or self.content_skip):
            raise ValueError("pre_projection and content_skip are both False: switch at least one on.")
        for name in ("pre_projection", "content_skip"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}: expected True or False.")
        if not _is_number(self.expansion) or self.expansion <= 0:
            raise ValueError(f"expansion is {self.expansion!r}: expected a number above 0, such as 1.25.")
        activation_function(self.activation)
        if not _is_number(self.skip_init_std) or self.skip_init_std < 0:
            raise ValueError(f"skip_init_std is {self.skip_init_std!r}: expected 0 or a positive number.")
        if not isinstance(self.init_seed, int) or isinstance(self.init_seed, bool):
            raise ValueError(f"init_seed is {self.init_seed!r}: expected a whole number.")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
