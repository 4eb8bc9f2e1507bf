"""Small helpers for the files of a run folder: written whole or not at all."""

import json
import os
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from preproj.probe.errors import RecipeError

FORMAT_VERSION = 2


def cache_folder() -> Path:
    """Return where things are kept between runs: ``PREPROJ_CACHE``, or the user's cache."""
    import platformdirs  # of the extra `probe`: `preproj params` works without it

    return Path(os.environ.get("PREPROJ_CACHE") or platformdirs.user_cache_dir("preproj"))


_guards: list[Callable[[], None]] = []


def guard_writes(check: Callable[[], None]) -> None:
    """Have ``check`` called before any file gets its name: it ends a process whose work another has taken over."""
    _guards.append(check)


def write_text(path: Path, text: str) -> None:
    """Write ``text`` under a temporary name and rename it, so that a reader sees all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")  # processes of two machines may share a number
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        for check in _guards:
            check()
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file with the format version first."""
    write_text(path, json.dumps({"format_version": FORMAT_VERSION, **content}, indent=2, ensure_ascii=False) + "\n")


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write one JSON object per line."""
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file.

    Raises:
        RecipeError: if it is damaged.
    """
    try:
        return json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise RecipeError(f"{path} is damaged; remove it and repeat the command.") from error


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read one JSON object per line."""
    # Not splitlines(): text in JSON may hold other line ends, such as U+2028.
    return [json.loads(line) for line in path.read_text("utf-8").split("\n") if line]
