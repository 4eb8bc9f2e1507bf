"""The report as Markdown, for repositories and mails; the figures lie beside it as files."""

from __future__ import annotations

import re

from preproj.report.page import Page
from preproj.report.records import Example, Examples
from preproj.report.section import Section
from preproj.report.table import Cell, Table
from preproj.report.verdict import Answer


def render_markdown(page: Page) -> str:
    """Renders the report as Markdown.

    Args:
        page: The report.

    Returns:
        The text of the file; figures are linked as `figures/<name>.svg`.
    """
    parts = [f"# {escape(page.verdict.title)}", f"{escape(page.title)}. {escape(page.base)}"]
    parts += [f"> **{escape(warning)}**" for warning in page.warnings]
    if page.note:
        parts.append(f"> **About this base model.** {escape(page.note)}")
    if page.verdict.answers:
        parts.append("\n".join(map(_answer, page.verdict.answers)))
    for section in page.sections:
        parts += _section(section)
        if section.sentences:
            parts += map(escape, page.footnotes)
    parts += ["## How it was measured", _facts(page.protocol)]
    parts += ["## How to repeat it", "Save the recipe below as `recipe.yaml` (it lies beside this report), then:"]
    parts += [_code(page.command, "sh"), "### Recipe, every default filled in", _code(page.recipe, "yaml")]
    parts += ["### Corpus", _facts(page.corpus), "### Environment", _facts(page.environment)]
    return "\n\n".join(parts) + "\n"


def _answer(answer: Answer) -> str:
    verdicts = "; ".join(f"{label}: {verdict}" for label, verdict in answer.verdicts)
    said = " ".join((*(_sentence(detail) for detail in answer.details), *([_sentence(verdicts)] if verdicts else [])))
    return f"- {escape(answer.question)} **{escape(answer.answer)}**. {escape(said)}"


def _sentence(text: str) -> str:
    return text if text.endswith(".") else f"{text}."


def _section(section: Section) -> list[str]:
    parts = [f"## {escape(section.title)}"]
    for figure in section.figures:
        parts += [f"![{escape(figure.caption)}](figures/{figure.name}.svg)", escape(figure.caption)]
    if section.sentences:
        parts.append(_bullets(section.sentences))
    for table in section.tables:
        parts += [f"**{escape(table.caption)}**", table_lines(table)]
    for examples in section.examples:
        parts += _examples(examples)
    return parts


def _examples(examples: Examples) -> list[str]:
    parts = [f"### {escape(examples.task)}", escape(examples.summary)]
    for title, found in (("Won", examples.won), ("Lost", examples.lost)):
        if found:
            parts += [f"{title} by {escape(examples.ours)}:", "\n".join(map(_example, found))]
    return parts


def _example(example: Example) -> str:
    answers = "; ".join(f"{answer.method}: {answer.words}" for answer in example.answers)
    text = f" “{escape(example.text)}”" if example.text else ""
    target = f" **{escape(example.target)}**" if example.target else ""
    return f"- {escape(example.id)}:{text}{target} ({escape(answers)})"


def escape(text: str) -> str:
    """Makes Markdown show a text as it is.

    Args:
        text: Any text.

    Returns:
        One line in which no character means formatting.
    """
    return re.sub(r"([\\`*_\[\]<>|#~&$])", r"\\\1", " ".join(text.split()))


def table_lines(table: Table) -> str:
    """Renders a table as Markdown.

    Args:
        table: The table.

    Returns:
        Its lines.
    """
    lines = [
        table.titles,
        ["---"] + ["---:"] * (len(table.titles) - 1),
        *([_cell(cell) for cell in row] for row in table.rows),
    ]
    titles = [escape(title) for title in lines[0]]
    return "\n".join(f"| {' | '.join(line)} |" for line in (titles, *lines[1:]))


def _cell(cell: Cell) -> str:
    return "<br>".join(escape(text) for text in cell.lines)


def _bullets(sentences: tuple[str, ...]) -> str:
    return "\n".join(f"- {escape(sentence)}" for sentence in sentences)


def _facts(pairs: tuple[tuple[str, str], ...]) -> str:
    return "\n".join(f"- **{escape(name)}**: {escape(text)}" for name, text in pairs)


def _code(text: str, language: str) -> str:
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"
