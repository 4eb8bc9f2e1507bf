"""A worker: runs the parts of a run that nobody else does, each in a process of its own, and shows how far all are."""

import gc
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from preproj.probe import claims, distributed
from preproj.probe.base import Base
from preproj.probe.cell import train_cell
from preproj.probe.claims import Claim, Watch
from preproj.probe.ending import why
from preproj.probe.files import clear_unfinished, guard_writes, write_json
from preproj.probe.parts import Part, needs
from preproj.probe.prepared import Prepared
from preproj.probe.process import Progress as Work
from preproj.probe.process import last_line, run_module
from preproj.probe.recipe import Recipe
from preproj.probe.trackers import keep_wandb_in
from preproj.probe.tuning import nothing_found, write_parameters


def work(recipe: Recipe, run: Path, parts: list[Part], base: Base, console: Console) -> dict[Part, str]:
    """Run what is missing of some parts, each at most once, until all have ended or other workers hold what is left.

    Waits where what is left needs what another worker holds, and until it has seen of every other holder that it lives.

    Args:
        recipe: of the run.
        run: the run folder, prepared.
        parts: what to run, in this order.
        base: the model.
        console: for progress.

    Returns:
        What other workers hold, and who.
    """
    watch, tried = Watch(), set[Part]()
    with _Bar(recipe, run, parts, console) as bar:
        while True:
            bar.refresh()
            left = [part for part in parts if not part.ended(run)]
            ready = [part for part in left if all(need.ended(run) for need in needs(recipe, part))]
            for part in ready:
                if part not in tried and (claim := watch.take(part.folder(run))):
                    tried.add(part)
                    with claim:
                        _run_part(recipe, run, part, claim, base, bar)
                    break
            else:
                held = {part: holder for part in left if (holder := watch.holder(part.folder(run)))}
                waiting = [part for part in left if part not in ready and held.keys() & needs(recipe, part)]
                if not waiting and all(watch.alive(part.folder(run)) for part in held):
                    return held
                if waiting:
                    bar.say(f"{waiting[0]} waits for {_said(held)}")
                time.sleep(claims.POLL)


def _said(held: dict[Part, str]) -> str:
    return "; ".join(f"{part} ({holder})" for part, holder in held.items())


def _run_part(recipe: Recipe, run: Path, part: Part, claim: Claim, base: Base, bar: "_Bar") -> None:
    """Run one part, and say so where it stops before its end."""
    folder = part.folder(run)
    if not part.ended(run):  # another worker may have ended it just before the claim
        if part.kind == "trial":
            write_parameters(recipe, run, part.method, part.number)
        elif reason := nothing_found(recipe, run, part.method):
            failed = {"method": part.method, "seed": part.number, "step": None, "reason": reason}
            write_json(folder / "failed.json", failed)
    if not part.ended(run):
        bar.begin(part, claim)
        if part.kind == "cell" and distributed.world_size() > 1:
            _train_with_others(run, part, claim, bar)
    if not part.ended(run):
        arguments, log = [str(run), part.method, str(part.number)], folder / "log.txt"
        code = run_module(part.module, arguments, log, base, claim, bar.show)
        if claim.lost():
            bar.print(f"{part} was taken over by another worker, because this one gave no sign of life for too long.")
        elif code:
            said = f"{part} stopped with exit code {code}: {why(code, folder, last_line(log))} (see {log})."
            bar.print(f"{said} The same command tries again.")
    if part.ended(run):
        claim.remove()


def _train_with_others(run: Path, part: Part, claim: Claim, bar: "_Bar") -> None:
    """Train a cell in this process and the others; the cell's own process finds it trained."""
    folder = part.folder(run)
    if part.method == "none" or (folder / "trained.json").exists():
        return
    keep_wandb_in(folder)
    clear_unfinished(folder)
    with guard_writes(claim.check):
        distributed.from_main(lambda: (run.resolve(), part.method, part.number))
        train_cell(run, part.method, part.number, Work(bar.show))
    distributed.leave()
    gc.collect()
    torch.cuda.empty_cache()  # the cell's own process needs the device now


class _Bar:
    """Shows how far all parts are."""

    def __init__(self, recipe: Recipe, run: Path, parts: list[Part], console: Console):
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            TextColumn("left:"),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=console, speed_estimate_period=120)
        prepared = Prepared.read(run, recipe.evaluation)
        units = {(part.kind, part.method): 0 for part in parts}
        units = {key: Part(*key, 0).units(recipe, prepared) for key in units}
        self._units = {part: units[part.kind, part.method] for part in parts}
        self._task = self._progress.add_task("", total=sum(self._units.values()))
        self._run, self._parts, self._console = run, parts, console
        self._said, self._done = "", 0

    def __enter__(self) -> "_Bar":
        self._progress.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._progress.update(self._task, description="done")
        self._progress.__exit__(*error)

    def begin(self, part: Part, claim: Claim) -> None:
        """Say what is run, and where it was left by another."""
        same = [p for p in self._parts if p.kind == part.kind and (p.kind == "cell" or p.method == part.method)]
        again = f", left by {claim.left_by}" if claim.left_by else ""
        self.say(f"{part} ({same.index(part) + 1}/{len(same)}){again}")

    def say(self, what: str) -> None:
        """Describe what goes on, once."""
        self._progress.update(self._task, description=what)
        if what != self._said and not self._console.is_terminal:
            self._console.print(what, soft_wrap=True)
        self._said = what

    def refresh(self) -> None:
        """Show what has ended."""
        self._done = sum(count for part, count in self._units.items() if part.ended(self._run))
        self.show(0)

    def show(self, units: int) -> None:
        """Show so much of the part that is run."""
        self._progress.update(self._task, completed=self._done + units)

    def print(self, sentence: str) -> None:
        """Print a sentence above the bar."""
        self._progress.console.print(sentence, soft_wrap=True)
