"""The tables of a run as data. Terminal, Markdown and HTML print the same cells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from preproj.report import units
from preproj.report.records import LAST_WORD, Result, Row, Run


@dataclass(frozen=True)
class Cell:
    """One cell: its number, and smaller lines below it (interval, wording)."""

    text: str
    details: tuple[str, ...] = ()


@dataclass(frozen=True)
class Column:
    """A column; `group` says which of the narrower tables of the terminal shows it."""

    title: str
    group: str
    cell: Callable[[Row, Result], Cell]


@dataclass(frozen=True)
class Table:
    """A table whose first columns (`heads` of them) name the cell of the run."""

    caption: str
    titles: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    heads: int
    groups: tuple[str, ...]


def headline_table(run: Run) -> Table:
    """The table of every number of a run, and of the differences from the untouched model.

    Args:
        run: The run.

    Returns:
        One row per cell, in recipe order.
    """
    columns = [
        Column("trainable parameters", "quality", lambda _, result: Cell(units.whole(result.trainable_parameters))),
        Column("share of total", "cost", lambda _, result: Cell(units.share(result.share_of_total))),
        *(column for measure in run.measures for column in _measure_columns(run, measure)),
        Column("peak learning rate", "cost", lambda _, result: Cell(units.learning_rate(result.learning_rate))),
        Column("training tokens/s", "cost", lambda _, result: Cell(units.rate(result.tokens_per_second))),
        Column("peak memory", "cost", lambda _, result: Cell(units.memory(result.peak_memory_bytes))),
        Column("training + evaluation", "cost", lambda _, result: Cell(units.seconds(result.seconds))),
    ]
    return _table(run, f"Results of {run.name} on {run.base.name}", columns, run.rows)


def reference_table(run: Run) -> Table | None:
    """The differences from the reference method (LoRA).

    Args:
        run: The run.

    Returns:
        One row per cell that has such a difference, or None if no cell has. The untouched model is left out:
        the headline table has that difference, in the row of the reference.
    """
    other = run.reference
    rows = tuple(row for row, result in run.finished if other in result.versus and row.method != run.baseline)
    if other is None or not rows:
        return None
    sizes = {row.seed: result.trainable_parameters for row, result in run.finished if row.method == other}

    def ratio(row: Row, result: Result) -> Cell:
        size = sizes.get(row.seed)
        return Cell(units.times(result.trainable_parameters / size) if size else units.NOTHING)

    columns = [
        Column(f"trainable parameters relative to {other}", "quality", ratio),
        *(column for measure in run.measures for column in _difference_columns(run, other, measure)),
    ]
    return _table(run, f"Differences from {other}, same seed", columns, rows)


def _measure_columns(run: Run, measure: str) -> list[Column]:
    value = Column(measure, "quality", lambda _, result: Cell(units.measured(measure, result.value(measure))))
    return [value, *_difference_columns(run, run.baseline, measure)]


def _difference_columns(run: Run, other: str | None, measure: str) -> list[Column]:
    if other is None or not any(other in result.versus for _, result in run.finished):
        return []
    points = measure == LAST_WORD

    def cell(_: Row, result: Result) -> Cell:
        comparison = result.versus.get(other)
        interval = comparison.interval(measure) if comparison else None
        if interval is None:
            return Cell(units.NOTHING)
        middle, low, high = units.difference(interval, points=points)
        wording = (units.NOT_DISTINGUISHABLE,) if interval.includes_zero else ()
        return Cell(middle, (f"[{low}, {high}]", *wording))

    unit = " (percentage points)" if points else ""
    return [Column(f"Δ {measure} vs {other}{unit}", "quality", cell)]


def footnotes(run: Run) -> tuple[str, ...]:
    """What must be read beside the tables: notes of methods and reasons of unfinished cells.

    Args:
        run: The run.

    Returns:
        Sentences, each once; the tables refer to them by number, from [1].
    """
    return tuple(dict.fromkeys(sentence for row in run.rows for sentence in _sentences(row)))


def _sentences(row: Row) -> tuple[str, ...]:
    return (*row.notes, *([unfinished_sentence(row)] if row.result is None else []))


def _table(run: Run, caption: str, columns: list[Column], rows: tuple[Row, ...]) -> Table:
    numbers = {sentence: f" [{number}]" for number, sentence in enumerate(footnotes(run), start=1)}
    body = []
    for row in rows:
        head = [Cell(row.method + "".join(numbers[note] for note in dict.fromkeys(row.notes)))]
        if run.several_seeds:
            head.append(Cell("all" if row.method == run.baseline else str(row.seed)))
        if row.result is None:
            cells = [Cell(row.status + numbers[unfinished_sentence(row)])]
            cells += [Cell(units.NOTHING)] * (len(columns) - 1)
        else:
            cells = [column.cell(row, row.result) for column in columns]
        body.append((*head, *cells))
    heads = ("method", "seed") if run.several_seeds else ("method",)
    return Table(
        caption=caption,
        titles=(*heads, *(column.title for column in columns)),
        rows=tuple(body),
        heads=len(heads),
        groups=tuple(column.group for column in columns),
    )


def unfinished_sentence(row: Row) -> str:
    """Why a cell has no numbers.

    Args:
        row: A failed or missing cell.

    Returns:
        One sentence.
    """
    if row.status == "failed":
        return f"{row.method}, seed {row.seed}, failed: {row.reason or 'no reason was recorded.'}"
    return f"{row.method}, seed {row.seed}, has no result yet; the command that started the run tries it again."
