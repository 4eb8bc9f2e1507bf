"""The report as one HTML file that needs nothing else: style and figures lie inside it."""

from __future__ import annotations

from importlib import resources

from jinja2 import Environment, StrictUndefined

from preproj.report import units
from preproj.report.page import Page


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
    template = environment.from_string(room.joinpath("report.html.jinja").read_text(encoding="utf-8"))
    css = room.joinpath("report.css").read_text(encoding="utf-8")
    return template.render(page=page, css=css) + "\n"
