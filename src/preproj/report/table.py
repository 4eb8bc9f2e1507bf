"""A table as data: terminal, Markdown, HTML and CSV print the same cells."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import StringIO

from preproj.report.contest import Direction


@dataclass(frozen=True)
class Cell:
    """One cell: its number in words, and smaller lines below it (interval, wording).

    `values` are the numbers behind the words, unrounded: one, or one with the two ends of its interval. `verdict` says
    what a difference means.
    """

    text: str
    details: tuple[str, ...] = ()
    values: tuple[float, ...] = ()
    verdict: Direction | None = None

    @property
    def lines(self) -> tuple[str, ...]:
        """Everything the cell says, line by line."""
        return (self.text, *self.details, *([self.verdict] if self.verdict else []))


@dataclass(frozen=True)
class Table:
    """A table whose first columns (`heads` of them) name the row; `name` is that of its files."""

    name: str
    caption: str
    titles: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    heads: int = 1

    @property
    def csv(self) -> str:
        """The table with unrounded numbers; an interval takes two more columns."""
        columns = range(len(self.titles))
        wide = {c for c in columns if any(len(row[c].values) == 3 for row in self.rows)}
        titles = [
            [title, f"{title} low", f"{title} high"] if c in wide else [title] for c, title in enumerate(self.titles)
        ]
        lines = [[part for c in columns for part in _parts(row[c], c in wide)] for row in self.rows]
        return to_csv([part for title in titles for part in title], lines)


def to_csv(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Writes comma-separated values as RFC 4180 has them, but with plain line ends.

    Args:
        titles: The first line.
        rows: The lines after it; None becomes an empty field.

    Returns:
        The text of the file.
    """
    stream = StringIO()
    csv.writer(stream, lineterminator="\n").writerows([titles, *rows])
    return stream.getvalue()


def _parts(cell: Cell, wide: bool) -> list[object]:
    parts: list[object] = [*cell.values] or [cell.text]
    return [*parts, None, None][:3] if wide else parts[:1]
