"""What a run will do and cost, before anything is started: ``preproj probe --dry-run``."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PretrainedConfig

from preproj.cost import flops_per_token, meta_model
from preproj.probe.base import load_config, resolve_base
from preproj.probe.claims import Watch
from preproj.probe.continuity import changes
from preproj.probe.corpus import RETENTION
from preproj.probe.errors import RecipeError
from preproj.probe.files import read_json
from preproj.probe.methods import attach
from preproj.probe.parts import ENDS, Part, parts_of
from preproj.probe.preparation import check_folder, has_text
from preproj.probe.prepared import Prepared
from preproj.probe.recipe import Recipe
from preproj.probe.summary import cells_of, find_cell
from preproj.probe.tuning import objective

UNKNOWN = "-"


@dataclass(frozen=True)
class Planned:
    """A part of a run and what it costs.

    Attributes:
        name: of a cell as ``--cell`` takes it, or ``METHOD/trialN``.
        status: ``finished``, ``failed``, ``to do``, or who holds it.
        trained: tokens trained on.
        scored: tokens of the perplexities, or None where only the text says how many.
        at_most: whether fewer may be scored: the text is not prepared yet.
        parameters: that train.
        flops: of the training, or None where they cannot be counted.
        seconds: measured, or None.
        alike: whether they are the mean of finished parts of the same method.
    """

    name: str
    status: str
    trained: int
    scored: int | None
    at_most: bool
    parameters: int
    flops: float | None
    seconds: float | None
    alike: bool

    def columns(self) -> tuple[str, ...]:
        """Return what is printed."""
        scored = UNKNOWN if self.scored is None else f"{'<=' * self.at_most}{self.scored:,}"
        seconds = UNKNOWN if self.seconds is None else f"{'~' * self.alike}{self.seconds:,.0f}"
        flops = UNKNOWN if self.flops is None else f"{self.flops:.3g}"
        return self.name, f"{self.trained:,}", scored, f"{self.parameters:,}", flops, seconds, self.status


def plan(recipe: Recipe, run: Path, cell: str | None = None) -> tuple[list[Planned], list[str]]:
    """List what a run consists of, with costs, and what has changed since it began; starts and writes nothing.

    Args:
        recipe: the checked recipe.
        run: the run folder, new or begun.
        cell: ``METHOD/seedN``, for this one and its method's trials alone.

    Raises:
        RecipeError: where the recipe's model or the run folder is wrong.
    """
    check_folder(run, recipe)
    every = parts_of(recipe, cells_of(recipe))
    parts = parts_of(recipe, [find_cell(recipe, cell)]) if cell is not None else every
    base = resolve_base(recipe.model.name)
    config = load_config(base)
    costs = {method: _cost(recipe, config, method) for method in dict.fromkeys(part.method for part in parts)}
    prepared = Prepared.read(run, recipe.evaluation) if has_text(run) else None
    watch = Watch()
    planned = [_planned(recipe, run, every, part, costs[part.method], prepared, watch) for part in parts]
    ended = all(part.ended(run) for part in parts) and (run / "environment.json").exists()
    return planned, [] if ended else changes(run, recipe, base, config)[0]


def said(planned: Sequence[Planned]) -> str:
    """Return the list as a table, with what is counted."""
    titles = ("part", "trained", "scored", "parameters", "training FLOPs", "seconds", "status")
    rows = [titles, *(row.columns() for row in planned)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(titles))]
    lines = [
        "  ".join(
            text.ljust(width) if column in (0, len(titles) - 1) else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    left = [row for row in planned if row.status not in ("finished", "failed")]
    flops = [row.flops for row in left]
    lines += [
        "",
        f"{len(left)} of {len(planned)} parts left: {sum(row.trained for row in left):,} tokens to train on"
        + (f", {sum(f for f in flops if f is not None):.3g} FLOPs." if None not in flops else "."),
        "scored: tokens of the perplexities; the last-word passages and the tasks come on top. training FLOPs: matrix "
        "products, forward and backward.",
        "seconds: measured in this folder; ~ is the mean of finished parts of the method, - is not measured.",
    ]
    return "\n".join(lines)


def _cost(recipe: Recipe, config: PretrainedConfig, method: str) -> tuple[int, float | None]:
    """Return a method's trainable parameters, and the FLOPs of a training step per token."""
    shell = meta_model(config)
    try:
        attached = attach(shell, method, 0, recipe.match)
    except ValueError as error:
        raise RecipeError(f"model.name: {recipe.model.name}: {error}") from error
    flops = flops_per_token(attached.model, recipe.training.block_size) if attached.trainable_parameters else 0.0
    return attached.trainable_parameters, flops


def _planned(
    recipe: Recipe,
    run: Path,
    every: Sequence[Part],
    part: Part,
    cost: tuple[int, float | None],
    prepared: Prepared | None,
    watch: Watch,
) -> Planned:
    parameters, flops = cost
    trained = 0 if part.method == "none" else recipe.training.tokens
    if part.kind == "trial":
        assert recipe.tuning is not None
        trained = recipe.tuning.tokens or trained
    seconds, alike = _seconds(run, [part]), False
    if seconds is None:
        same = [other for other in every if (other.kind, other.method) == (part.kind, part.method)]
        seconds, alike = _seconds(run, same), True
    return Planned(
        name=part.name,
        status=_status(run, part, watch),
        trained=trained,
        scored=_scored(recipe, part, prepared),
        at_most=prepared is None,
        parameters=parameters,
        flops=None if flops is None else flops * trained,
        seconds=seconds,
        alike=alike,
    )


def _status(run: Path, part: Part, watch: Watch) -> str:
    folder = part.folder(run)
    if (folder / "failed.json").exists():
        return "failed"
    return "finished" if part.ended(run) else watch.holder(folder) or "to do"


def _seconds(run: Path, parts: Sequence[Part]) -> float | None:
    """Return the mean time of those that are finished."""
    found = []
    for part in parts:
        path = part.folder(run) / ENDS[part.kind][0]
        if path.exists():
            seconds = read_json(path)["seconds"]
            found.append(seconds["total"] if part.kind == "cell" else seconds)
    return sum(found) / len(found) if found else None


def _scored(recipe: Recipe, part: Part, prepared: Prepared | None) -> int | None:
    """Return the tokens of the perplexities, at most where there is no text yet."""
    evaluation = recipe.evaluation
    if part.kind == "trial":
        texts = [(objective(recipe).split("/")[0], "validation")]
    else:
        texts = [(protocol, evaluation.split) for protocol in evaluation.perplexity]
        texts += [("document", RETENTION)] if evaluation.retention is not None else []
    found = []
    for protocol, split in texts:
        if protocol == "stream":
            found.append(evaluation.windows and evaluation.windows * evaluation.stride)
        elif prepared is not None:
            found.append(sum(len(ids) for _, ids in prepared.documents(split)))
        else:
            of_each, documents = evaluation.document_tokens, evaluation.documents
            found.append(of_each and documents and of_each * documents)
    return None if None in found else sum(tokens for tokens in found if tokens is not None)
