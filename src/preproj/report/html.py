"""The report as one HTML file that needs nothing else: style, script, figures and data lie inside it."""

from __future__ import annotations

from importlib import resources
from urllib.parse import quote

from jinja2 import Environment, StrictUndefined

from preproj.report import units
from preproj.report.page import Page
from preproj.report.style import INK


def render_html(page: Page) -> str:
    """Renders the report as HTML.

    Args:
        page: The report.

    Returns:
        A whole HTML document.
    """
    room = resources.files("preproj.report")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["unbroken"] = units.unbroken
    environment.filters["data_link"] = _data_link
    environment.filters["ink"] = lambda colour: "currentColor" if colour == INK else colour
    template = environment.from_string(room.joinpath("report.html.jinja").read_text(encoding="utf-8"))
    css, script = (room.joinpath(name).read_text(encoding="utf-8") for name in ("report.css", "report.js"))
    return template.render(page=page, css=css, script=script) + "\n"


def _data_link(text: str) -> str:
    """A link that holds a file."""
    return f"data:text/csv;charset=utf-8,{quote(text, safe=',-._/()+ ')}"
