"""The results of a report in sections: what is told, shown and listed together."""

from __future__ import annotations

from dataclasses import dataclass

from preproj.report.figures import Figure, figures
from preproj.report.headline import headline
from preproj.report.records import Examples, Run
from preproj.report.table import Table
from preproj.report.tables import tables

PARTS = {
    "Result": (("headline",), ("scores", "differences")),
    "Learning": (("learning-curves",), ()),
    "Cost against quality": (("cost-quality",), ("cost",)),
    "Layer by layer": (
        ("skip-norm", "skip-to-attention", "without-skip", "pre-to-input", "without-pre"),
        ("ablations",),
    ),
    "Items won and lost": ((), ()),
    "More numbers": ((), ("seeds", "pairs", "interactions", "tuning", "published")),
}
"""Figures and tables of each section, by name (tables by the first word of it)."""


@dataclass(frozen=True)
class Section:
    """A heading with sentences, figures, tables and examples below it."""

    title: str
    sentences: tuple[str, ...] = ()
    figures: tuple[Figure, ...] = ()
    tables: tuple[Table, ...] = ()
    examples: tuple[Examples, ...] = ()

    @property
    def name(self) -> str:
        """The title as an anchor."""
        return self.title.lower().replace(" ", "-")


def sections(run: Run, examples: tuple[Examples, ...]) -> tuple[Section, ...]:
    """Puts sentences, figures, tables and examples of a run in reading order.

    Args:
        run: The run.
        examples: Items won and lost.

    Returns:
        The sections that have anything to say.
    """
    drawn, listed = figures(run), tables(run)
    found = (
        Section(
            title,
            headline(run) if title == "Result" else (),
            tuple(figure for figure in drawn if figure.name in of_figures),
            tuple(table for table in listed if table.name.split("-")[0] in of_tables),
            examples if title == "Items won and lost" else (),
        )
        for title, (of_figures, of_tables) in PARTS.items()
    )
    return tuple(one for one in found if one.sentences or one.figures or one.tables or one.examples)
