"""Checked access to JSON files: every wrong value gives one sentence that names its file."""

from __future__ import annotations

import json
from pathlib import Path

FORMAT_VERSION = 2
"""The newest version of the run folder that this report reads."""

ANALYSIS_VERSION = 1
"""The newest version of `analysis.json` that this report reads."""

AGAIN = "run `preproj probe` on the recipe again, it continues where the run stopped"


class ReportError(ValueError):
    """A run folder that cannot be reported on; the message says which file and what to do."""


class Fields:
    """A JSON object together with the place it came from."""

    def __init__(self, data: object, where: str, again: str = AGAIN) -> None:
        """Checks that `data` is a JSON object; `where` names it in messages, `again` says how to make it anew."""
        if not isinstance(data, dict):
            raise ReportError(f"{where} is not a JSON object; {again}.")
        self.data: dict[str, object] = data
        self.where = where
        self.again = again

    def _get(self, key: str, what: str, kinds: tuple[type, ...]) -> object:
        if key not in self.data:
            raise ReportError(f"{self.where} has no {key!r}; {self.again}.")
        value = self.data[key]
        # A JSON true is an int to Python; no field of the format is a bool.
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise ReportError(f"{self.where}: {key!r} should be {what}, not {value!r}; {self.again}.")
        return value

    def text(self, key: str) -> str:
        """A string."""
        return str(self._get(key, "text", (str,)))

    def optional_text(self, key: str) -> str | None:
        """A string or null."""
        value = self._get(key, "text or null", (str, type(None)))
        return None if value is None else str(value)

    def whole(self, key: str) -> int:
        """A whole number."""
        value = self._get(key, "a whole number", (int,))
        assert isinstance(value, int)
        return value

    def optional_number(self, key: str) -> float | None:
        """A number or null."""
        value = self._get(key, "a number or null", (int, float, type(None)))
        assert value is None or isinstance(value, (int, float))
        return None if value is None else float(value)

    def number(self, key: str) -> float:
        """A number."""
        value = self._get(key, "a number", (int, float))
        assert isinstance(value, (int, float))
        return float(value)

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings."""
        value = self._get(key, "a list of texts", (list,))
        assert isinstance(value, list)
        return tuple(Fields({key: entry}, self.where, self.again).text(key) for entry in value)

    def wholes(self, key: str) -> tuple[int, ...]:
        """A list of whole numbers."""
        value = self._get(key, "a list of whole numbers", (list,))
        assert isinstance(value, list)
        return tuple(Fields({key: entry}, self.where, self.again).whole(key) for entry in value)

    def pair(self, key: str) -> tuple[float, float]:
        """A pair of numbers."""
        value = self._get(key, "a pair of numbers", (list,))
        assert isinstance(value, list)
        if len(value) != 2:
            raise ReportError(f"{self.where}: {key!r} should be a pair of numbers, not {value!r}; {self.again}.")
        first, second = (Fields({key: entry}, self.where, self.again).number(key) for entry in value)
        return first, second

    def child(self, key: str) -> Fields:
        """An object inside this one."""
        return Fields(self._get(key, "an object", (dict,)), f"{self.where}: {key!r}", self.again)

    def children(self, key: str) -> tuple[Fields, ...]:
        """A list of objects inside this one."""
        value = self._get(key, "a list", (list,))
        assert isinstance(value, list)
        return tuple(Fields(entry, f"{self.where}: {key}[{index}]", self.again) for index, entry in enumerate(value))


def read_text(path: Path, again: str = AGAIN) -> str:
    """Reads a result file.

    Args:
        path: The file.
        again: How to make it anew.

    Returns:
        Its text.

    Raises:
        ReportError: If the file is missing or is not UTF-8 text.
    """
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ReportError(f"{path} is missing; {again}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ReportError(f"{path} cannot be read ({error}); {again}.") from error


def read_json(path: Path, newest: int = FORMAT_VERSION, again: str = AGAIN) -> Fields:
    """Reads a JSON file that carries a format version.

    Args:
        path: The file.
        newest: The newest version of its format that can be read.
        again: How to make it anew.

    Returns:
        Its fields.

    Raises:
        ReportError: If the file is missing, is not a JSON object, or is of a newer format.
    """
    fields = _parse(read_text(path, again), str(path), again)
    version = fields.whole("format_version")
    if version > newest:
        raise ReportError(
            f"{path} has format version {version}, and this preproj reads up to version {newest}; "
            "install a newer preproj to read it."
        )
    return fields


def read_lines(path: Path) -> tuple[Fields, ...]:
    """Reads a JSON Lines file.

    Args:
        path: The file.

    Returns:
        The fields of each line.

    Raises:
        ReportError: If the file is missing or a line is not a JSON object.
    """
    # Not splitlines(): text in JSON may hold other line ends, such as U+2028.
    lines = [line for line in read_text(path).split("\n") if line]
    return tuple(_parse(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1))


def _parse(text: str, where: str, again: str = AGAIN) -> Fields:
    try:
        return Fields(json.loads(text), where, again)
    except json.JSONDecodeError as error:
        raise ReportError(f"{where} is not JSON ({error.msg}); {again}.") from error
