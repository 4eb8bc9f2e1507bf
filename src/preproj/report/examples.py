"""Held-out items that the leading method won and lost against its rival, from the cells' own items."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from preproj.report.contest import Contest, contest
from preproj.report.fields import Fields, read_lines
from preproj.report.records import Answer, Example, Examples, Measure, Run

SHOWN = 3
"""As many items are shown of those won, and of those lost."""

Items = Mapping[str, Fields]
"""Lines of `items/<task>.jsonl` or `texts/<task>.jsonl` by their id."""


def examples(run: Run, run_dir: Path) -> tuple[Examples, ...]:
    """Finds the items that part the leading method from its rival.

    Args:
        run: The run.
        run_dir: Its folder.

    Returns:
        One entry for each task whose items both methods have, by the task's first measure. The items with the largest
        difference come first; of equal ones, those that stand first in the file.

    Raises:
        ReportError: If a file is damaged.
    """
    found = contest(run)
    if found is None or found.pair is None:
        return ()
    first_of_task = {measure.task: measure for measure in reversed(run.measures)}
    tasks = dict.fromkeys(measure.task for measure in run.measures)
    by_task = (_of_task(run, run_dir, found, first_of_task[task]) for task in tasks)
    return tuple(entry for entry in by_task if entry is not None)


def _of_task(run: Run, run_dir: Path, found: Contest, measure: Measure) -> Examples | None:
    assert found.pair is not None
    ours, theirs = found.pair.ours, found.pair.theirs
    seeds = [next(row.seed for row, _ in run.finished if row.method == method) for method in (ours, theirs)]
    cells = [run_dir / "cells" / method / f"seed{seed}" for method, seed in zip((ours, theirs), seeds, strict=True)]
    a, b = (_read(cell / "items" / f"{measure.task}.jsonl") for cell in cells)
    texts = _read(run_dir / "texts" / f"{measure.task}.jsonl")
    ids = [name for name in a if name in b]
    if not ids:
        return None
    gains = {name: _score(a[name], measure) - _score(b[name], measure) for name in ids}
    by_gain = sorted(ids, key=lambda name: -gains[name])
    won = [name for name in by_gain if gains[name] > 0]
    lost = [name for name in sorted(ids, key=gains.__getitem__) if gains[name] < 0]

    def shown(names: list[str]) -> tuple[Example, ...]:
        chosen = names[:SHOWN]
        return tuple(_example(name, measure, (ours, a[name]), (theirs, b[name]), texts.get(name)) for name in chosen)

    seed = seeds[0] if run.several_seeds else None
    counts = (len(ids), len(won), len(lost))
    return Examples(measure.task, measure.kind, ours, theirs, seed, *counts, shown(won), shown(lost))


def _read(path: Path) -> Items:
    """Read a file of items; one that is not there, as in older folders, holds none."""
    return {line.text("id"): line for line in read_lines(path)} if path.exists() else {}


def _score(item: Fields, measure: Measure) -> float:
    """What an item adds, more being better: right answers, or minus the loss in nats per token."""
    total, weight = item.pair(measure.metric)
    return total / weight if measure.kind == "accuracy" else -total / weight


def _example(
    name: str, measure: Measure, ours: tuple[str, Fields], theirs: tuple[str, Fields], text: Fields | None
) -> Example:
    target = next((line.text("target") for line in (text, ours[1]) if line and "target" in line.data), None)
    choices = text.texts("choices") if text and "choices" in text.data else ()
    return Example(
        id=name,
        text=text.text("text") if text else None,
        target=target,
        answers=(_answer(*ours, measure, choices), _answer(*theirs, measure, choices)),
    )


def _answer(method: str, item: Fields, measure: Measure, choices: tuple[str, ...]) -> Answer:
    if measure.kind == "perplexity":
        return Answer(method, f"{-_score(item, measure):.3f} nats per {measure.unit}", None)
    return Answer(method, _said(item, choices), _score(item, measure) > 0)


def _said(item: Fields, choices: tuple[str, ...]) -> str:
    """What the model answered: a word, the choice it holds likeliest, or how likely it holds the target."""
    if "predicted" in item.data:
        return item.text("predicted")
    response = item.data.get("response")
    if not isinstance(response, list) or not response:
        return ""
    if not all(isinstance(one, list) and one and isinstance(one[0], (int, float)) for one in response):
        return str(response[0])
    likelihoods = [one[0] for one in response]
    if len(likelihoods) == 1:
        return f"log-likelihood {likelihoods[0]:.2f}"
    likeliest = likelihoods.index(max(likelihoods))
    return choices[likeliest] if likeliest < len(choices) else f"choice {likeliest + 1}"
