"""The parts of a run: what a worker runs in a process of its own, a cell or a trial of a method's tuning."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from preproj.probe.cell import cell_folder, trial_units, work_units
from preproj.probe.prepared import Prepared
from preproj.probe.recipe import Recipe
from preproj.probe.tuning import trial_folder, tuned_methods, waits_for

MODULES = {"cell": "preproj.probe.cell", "trial": "preproj.probe.trial"}
ENDS = {"cell": ("metrics.json", "failed.json"), "trial": ("trial.json",)}


@dataclass(frozen=True)
class Part:
    """A cell, whose ``number`` is its seed, or a trial, by its number."""

    kind: Literal["cell", "trial"]
    method: str
    number: int

    def __str__(self) -> str:
        """Return ``pre seed 0`` or ``pre trial 0``."""
        return f"{self.method} {'seed' if self.kind == 'cell' else 'trial'} {self.number}"

    @property
    def name(self) -> str:
        """Return ``pre/seed0``, as ``--cell`` takes it, or ``pre/trial0``."""
        return f"{self.method}/{'seed' if self.kind == 'cell' else 'trial'}{self.number}"

    @property
    def module(self) -> str:
        """What ``python -m`` runs."""
        return MODULES[self.kind]

    def folder(self, run: Path) -> Path:
        """Return where it is run."""
        return (cell_folder if self.kind == "cell" else trial_folder)(run, self.method, self.number)

    def ended(self, run: Path) -> bool:
        """Whether it is finished or has failed for good."""
        return any((self.folder(run) / end).exists() for end in ENDS[self.kind])

    def units(self, recipe: Recipe, prepared: Prepared) -> int:
        """Return its work, in tokens of one forward pass."""
        return work_units(recipe, prepared, self.method) if self.kind == "cell" else trial_units(recipe, prepared)


def parts_of(recipe: Recipe, cells: Sequence[tuple[str, int]]) -> list[Part]:
    """List what some cells need: the trials of a method before its first cell."""
    parts: dict[Part, None] = {}
    for method, seed in cells:
        if recipe.tuning is not None and method in tuned_methods(recipe):
            parts |= dict.fromkeys(Part("trial", method, number) for number in range(recipe.tuning.trials))
        parts[Part("cell", method, seed)] = None
    return list(parts)


def needs(recipe: Recipe, part: Part) -> list[Part]:
    """List the trials that must have ended before a part can begin."""
    if part.method not in tuned_methods(recipe):
        return []
    assert recipe.tuning is not None
    count = recipe.tuning.trials if part.kind == "cell" else waits_for(recipe.tuning, part.number)
    return [Part("trial", part.method, number) for number in range(count)]
