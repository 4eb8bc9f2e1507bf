"""The tables of a run for the terminal, split so that each is readable in 100 columns."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from preproj.report.headline import headline, warnings
from preproj.report.page import numbered_footnotes
from preproj.report.records import Run
from preproj.report.table import Table
from preproj.report.tables import tables

TABLES = 4
"""As many tables, the most important, are printed; the report has them all."""

COLUMNS = 4
"""As many columns of numbers fit beside each other."""


def print_run(run: Run, console: Console) -> None:
    """Prints the headline and the tables of a run.

    Args:
        run: The run.
        console: Where to print.
    """
    if run.base.note:
        console.print(Text(run.base.note, style="bold"))
    for sentence in (*warnings(run), *headline(run)):
        console.print(Text(f"• {sentence}"))
    for table in tables(run)[:TABLES]:
        print_parts(table, console)
    for footnote in numbered_footnotes(run):
        console.print(Text(footnote, style="dim"))


def print_parts(table: Table, console: Console) -> None:
    """Prints a table in parts of a few columns, each with the columns that name the row.

    Args:
        table: The table.
        console: Where to print.
    """
    columns = range(table.heads, len(table.titles))
    for first in range(0, len(columns), COLUMNS):
        group = columns[first : first + COLUMNS]
        console.print(_part(table, [*range(table.heads), *group], first=first == 0))


def _part(table: Table, keep: list[int], *, first: bool) -> RichTable:
    caption = table.caption if first else f"{table.caption}, continued"
    rich_table = RichTable(title=Text(caption), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for index in keep:
        # A column is as wide as its numbers need; its title breaks between words.
        lines = [line for row in table.rows for line in row[index].lines]
        width = max(map(len, (*lines, *table.titles[index].split())))
        longest_word = max(len(word) for line in lines for word in line.split())
        title = Text(table.titles[index])
        rich_table.add_column(
            title, justify="right" if index else "left", min_width=longest_word, max_width=width, overflow="fold"
        )
    for row in table.rows:
        rich_table.add_row(*(Text("\n".join(row[i].lines)) for i in keep))
    return rich_table
