"""Reads what the layers of trained adapters measure, from runs, cells and analyses, into curves over depth."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from preproj.depth import MEASURES, depth, depth_over_seeds
from preproj.report.fields import ANALYSIS_VERSION, Fields, ReportError, read_json
from preproj.report.load import read_recipe
from preproj.report.records import Interval
from preproj.statistics import over_seeds

Layers = tuple[Mapping[str, float | None], ...]
"""The measures of each layer, from the input up; None where the adapter has no such part."""

OverSeeds = Mapping[str, Any]
"""`seeds`, `mean`, `low` and `high` of `preproj.statistics.over_seeds`."""


@dataclass(frozen=True)
class Curves:
    """What the layers of one method measure, for each training seed.

    `name` is that of the run or the adapter, `text` what the measures of function were taken on.
    """

    name: str
    model: str
    method: str
    text: str
    seeds: Mapping[int, Layers]

    @property
    def count(self) -> int:
        """The number of adapted layers."""
        return len(next(iter(self.seeds.values())))

    def has(self, measure: str) -> bool:
        """Whether every layer of every seed has a measure."""
        return all(layer[measure] is not None for layers in self.seeds.values() for layer in layers)

    def curve(self, measure: str) -> list[Interval]:
        """A measure that it has, layer by layer: the mean over the seeds in their band.

        The band is the 95 % interval (Student's t) from three seeds on, and from least to most below.
        """
        found = []
        for of_seeds in zip(*self.seeds.values(), strict=True):
            values = [value for layer in of_seeds if (value := layer[measure]) is not None]
            over = over_seeds(values)
            if over["low"] is None:
                over |= {"low": min(values), "high": max(values)}
            found.append(Interval(over["mean"], over["low"], over["high"]))
        return found

    @cached_property
    def depth(self) -> dict[str, dict[str, OverSeeds | None]]:
        """`late_over_early` and `spearman` of each measure, over the seeds: `preproj.depth.depth_over_seeds`."""
        tables = [
            depth(({"layer": index, "token_class": "all", **layer} for index, layer in enumerate(layers)), self.model)
            for layers in self.seeds.values()
        ]
        return {row["measure"]: row for row in depth_over_seeds(tables)}


@dataclass(frozen=True)
class _Read:
    """The layers of one file; `group` is equal for all seeds of one method."""

    file: Path
    group: tuple[Path, str, str]
    name: str
    model: str
    method: str
    seed: int
    text: str
    layers: Layers


def read_curves(sources: Iterable[Path]) -> list[Curves]:
    """Reads curves of runs, cells and analysed adapters; the seeds of one method of a run become one.

    Args:
        sources: Each a run folder, a cell of one, an adapter's folder that holds `analysis/`, or a folder with
            `analysis.json`.

    Returns:
        Curves in the order of the arguments; within a run in recipe order. Two of one name are named by their folders.

    Raises:
        ReportError: If one of them is something else, has no layers, or comes twice; if a file is missing or wrong.
    """
    groups: dict[tuple[Path, str, str], dict[int, _Read]] = {}
    for source in sources:
        for read in _read(source):
            seeds = groups.setdefault(read.group, {})
            if read.seed in seeds:
                raise ReportError(f"{read.file} is named twice; name each run, cell and adapter once.")
            seeds[read.seed] = read
            first = next(iter(seeds.values()))
            if len(read.layers) != len(first.layers):
                raise ReportError(f"{read.file} has another number of layers than {first.file}, another seed of it.")
    firsts = {group: next(iter(seeds.values())) for group, seeds in groups.items()}
    places: dict[str, set[Path]] = {}
    for (place, *_), first in firsts.items():
        places.setdefault(first.name, set()).add(place)
    return [
        Curves(
            first.name if len(places[first.name]) == 1 else f"{first.name} in {group[0]}",
            first.model,
            first.method,
            first.text,
            {seed: groups[group][seed].layers for seed in sorted(groups[group])},
        )
        for group, first in firsts.items()
    ]


def _read(source: Path) -> list[_Read]:
    if not source.is_dir():
        raise ReportError(f"{source} is no folder; give a run, a cell of one, or an adapter that was analysed.")
    folder = source.resolve()
    if (folder / "recipe.yaml").is_file():
        found = [read for read in _run(folder) if read.layers]
        if not found:
            raise ReportError(f"{source} has no finished cell with a pre-projection or a skip to compare.")
        return found
    # An adapter of a cell: the cell's layers are its own.
    cell = folder.parent if folder.name == "adapter" and not (folder / "analysis").is_dir() else folder
    if (cell / "metrics.json").is_file():
        read = _cell(cell)
    elif analysis := next((f for f in (folder, folder / "analysis") if (f / "analysis.json").is_file()), None):
        read = _analysis(analysis)
    elif (folder / "adapter_config.json").is_file():
        raise ReportError(f"{source} has not been analysed; run `preproj analyze {source}` first.")
    else:
        raise ReportError(f"{source} is no run, no finished cell and no adapter; give one that is.")
    if not read.layers:
        raise ReportError(f"{source} has no layers to compare: {read.method} has no pre-projection and no skip.")
    return [read]


def _run(run: Path) -> Iterator[_Read]:
    cells = [_cell(file.parent) for file in run.glob("cells/*/seed*/metrics.json")]
    for method in read_recipe(run / "recipe.yaml")[1].texts("methods"):
        yield from sorted((cell for cell in cells if cell.method == method), key=lambda cell: cell.seed)


def _cell(cell: Path) -> _Read:
    run = (cell / "../../..").resolve()
    if not (run / "recipe.yaml").is_file():
        raise ReportError(f"{cell} is a cell without its run: {run / 'recipe.yaml'} is missing.")
    metrics, recipe = read_json(cell / "metrics.json"), read_recipe(run / "recipe.yaml")[1]
    method = metrics.text("method")
    return _Read(
        cell / "metrics.json",
        (run, "run", method),
        recipe.text("name"),
        recipe.child("model").text("name"),
        method,
        metrics.whole("seed"),
        "the run's first held-out documents",
        _layers(metrics),
    )


def _analysis(folder: Path) -> _Read:
    file = folder / "analysis.json"
    owner = folder.parent if folder.name == "analysis" else folder
    content = read_json(file, ANALYSIS_VERSION, f"run `preproj analyze` on {owner} again")
    text = content.child("text")
    read_on = f"{text.whole('tokens'):,} tokens of {text.text('source')}"
    model, layers = content.child("model").text("name"), _layers(content)
    if (owner / "metrics.json").is_file():
        cell = _cell(owner)
        group = (cell.group[0], "analysis", cell.method)
        return _Read(file, group, f"{cell.name}, analysed", model, cell.method, cell.seed, read_on, layers)
    adapter = content.child("adapter")
    method = _method(adapter.data)
    return _Read(
        file, (owner, "adapter", method), owner.name, model, method, adapter.whole("init_seed"), read_on, layers
    )


def _method(adapter: Mapping[str, object]) -> str:
    """The method's name in the grammar of recipes."""
    rank = adapter.get("skip_rank")
    skip = "skip" if rank is None else f"skip-r{rank}"
    return "+".join(
        name for name, has in (("pre", "pre_projection"), (skip, "content_skip")) if adapter.get(has) is True
    )


def _layers(fields: Fields) -> Layers:
    return tuple({measure: _finite(row, measure) for measure in MEASURES} for row in fields.children("layers"))


def _finite(row: Fields, measure: str) -> float | None:
    """A measure of a layer; cells of earlier versions have fewer of them."""
    value = row.optional_number(measure) if measure in row.data else None
    return value if value is not None and math.isfinite(value) else None
