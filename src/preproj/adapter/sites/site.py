"""A place where the method acts, and how it is printed."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class Site:
    """One self-attention module and its surroundings.

    Args:
        name: path of the attention module in the model.
        kind: what distinguishes its block, or ``"plain"`` (norm, attention, residual sum).
        width: width of x̂.
        out_width: width of the residual stream.
        arguments: ``(position, name)`` of the arguments of the attention module that are x̂.
        landing: path of the module whose output the skip is added to.
        multiplier: what the block multiplies that output by before the sum; the skip is divided by it.
        sequence_first: whether x̂ is ``(seq, batch, hidden)``, so that no mixed batch is possible.
        is_residual: whether attention itself adds x̂ to its branch (ALBERT), so that x̃ - x̂ has to leave the sum again.
    """

    name: str
    kind: str
    width: int
    out_width: int
    arguments: tuple[tuple[int, str], ...]
    landing: str
    multiplier: float = 1.0
    is_residual: bool = False
    sequence_first: bool = False
    attention: nn.Module = field(default=None, repr=False, compare=False)  # type: ignore[assignment]
    # Where the landing module hangs, and by what name, which blocks share that share compiled code; None for attention.
    landing_parent: nn.Module | None = field(default=None, repr=False, compare=False)
    landing_child: str = field(default="", repr=False, compare=False)

    def hidden_states(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Pick x̂ out of what attention is called with."""
        position, name = self.arguments[0]
        return args[position] if position < len(args) else kwargs[name]

    @property
    def landing_module(self) -> nn.Module:
        """The module at ``landing`` as it is now: another PEFT method may have put a layer of its own there."""
        if self.landing_parent is None:
            return self.attention
        return getattr(self.landing_parent, self.landing_child)


class Sites(list[Site]):
    """Sites in the order of the model; shown as a table."""

    def __repr__(self) -> str:
        rows = [("attention", "kind", "width", "x̃ enters as", "skip lands on the output of")]
        for site in self:
            width = str(site.width) if site.width == site.out_width else f"{site.width} -> {site.out_width}"
            rows.append((site.name, site.kind, width, ", ".join(n for _, n in site.arguments), site.landing))
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)
