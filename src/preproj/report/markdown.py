"""The report as Markdown, for repositories and mails; the figures lie beside it as files."""

from __future__ import annotations

import re

from preproj.report.page import Page
from preproj.report.tables import Cell, Table


def render_markdown(page: Page) -> str:
    """Renders the report as Markdown.

    Args:
        page: The report.

    Returns:
        The text of the file; figures are linked as `figures/<name>.svg`.
    """
    parts = [f"# {escape(page.title)}", escape(page.base)]
    if page.note:
        parts.append(f"> **About this base model.** {escape(page.note)}")
    parts += ["## Result", _bullets(page.headline)]
    for table in page.tables:
        parts += [f"**{escape(table.caption)}**", _table(table)]
    parts += map(escape, page.footnotes)
    if page.figures:
        parts.append("## Figures")
        for figure in page.figures:
            parts += [f"![{escape(figure.caption)}](figures/{figure.name}.svg)", escape(figure.caption)]
    parts += ["## How it was measured", _facts(page.protocol)]
    parts += ["## How to repeat it", "Save the recipe below as `recipe.yaml` (it lies beside this report), then:"]
    parts += [_code(page.command, "sh"), "### Recipe, every default filled in", _code(page.recipe, "yaml")]
    parts += ["### Corpus", _facts(page.corpus), "### Environment", _facts(page.environment)]
    return "\n\n".join(parts) + "\n"


def escape(text: str) -> str:
    """Makes Markdown show a text as it is.

    Args:
        text: Any text.

    Returns:
        One line in which no character means formatting.
    """
    return re.sub(r"([\\`*_\[\]<>|#~&$])", r"\\\1", " ".join(text.split()))


def _table(table: Table) -> str:
    lines = [
        table.titles,
        ["---"] + ["---:"] * (len(table.titles) - 1),
        *([_cell(cell) for cell in row] for row in table.rows),
    ]
    titles = [escape(title) for title in lines[0]]
    return "\n".join(f"| {' | '.join(line)} |" for line in (titles, *lines[1:]))


def _cell(cell: Cell) -> str:
    return "<br>".join(escape(text) for text in (cell.text, *cell.details))


def _bullets(sentences: tuple[str, ...]) -> str:
    return "\n".join(f"- {escape(sentence)}" for sentence in sentences)


def _facts(pairs: tuple[tuple[str, str], ...]) -> str:
    return "\n".join(f"- **{escape(name)}**: {escape(text)}" for name, text in pairs)


def _code(text: str, language: str) -> str:
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"
