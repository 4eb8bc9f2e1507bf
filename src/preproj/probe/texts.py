"""The text of evaluated items, clipped, so that a report can show what was won and lost: ``texts/<task>.jsonl``.

A line is one item: ``id`` as in the cells' ``items/<task>.jsonl``, ``text``, and where there are such ``choices`` and
``target``. A run has each file once, for all of its cells.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from preproj.probe.files import write_jsonl

TEXT = 300
CHOICE = 120


def write_texts(run: Path, task: str, texts: Iterable[dict[str, Any]]) -> None:
    """Write the texts of one task into the run folder, where no cell has done so before."""
    path = run / "texts" / f"{task}.jsonl"
    if not path.exists():
        write_jsonl(path, texts)


def beginning(text: str, limit: int = TEXT) -> str:
    """Return the first characters of a text; an ellipsis marks what is left out."""
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def ending(text: str, limit: int = TEXT) -> str:
    """Return the last characters of a text, what an answer follows."""
    return text if len(text) <= limit else f"…{text[1 - limit :]}"
