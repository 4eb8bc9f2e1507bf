"""Small helpers for the files of a run folder: written whole or not at all."""

import errno
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from preproj.probe.errors import NewerFormatError, RecipeError
from preproj.whole import whole_file

FORMAT_VERSION = 2


def cache_folder() -> Path:
    """Return where things are kept between runs: ``PREPROJ_CACHE``, or the user's cache."""
    import platformdirs  # of the extra `probe`: `preproj params` works without it

    return Path(os.environ.get("PREPROJ_CACHE") or platformdirs.user_cache_dir("preproj"))


_guards: list[Callable[[], None]] = []


@contextmanager
def guard_writes(check: Callable[[], None]) -> Iterator[None]:
    """Have ``check`` called before any file gets its name: it ends a process whose work another has taken over."""
    _guards.append(check)
    try:
        yield
    finally:
        _guards.remove(check)


def _check_guards() -> None:
    for check in _guards:
        check()


def write_text(path: Path, text: str) -> None:
    """Write ``text`` under a temporary name and rename it, so that a reader sees all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path, _check_guards) as temporary:
        temporary.write_text(text, "utf-8")


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Give an empty folder to write into; it takes the place of ``folder`` when everything in it is on the disk.

    Raises:
        OSError: if it cannot be written; ``folder`` stays as it was then.
    """
    temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.tmp")  # as of a file, see whole_file
    with named(temporary):
        temporary.mkdir(parents=True)
        yield temporary
        flush(temporary)
        _check_guards()
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)


@contextmanager
def named(folder: Path) -> Iterator[None]:
    """Remove a folder that is not written to its end, and name it where the disk is the reason.

    Raises:
        OSError: for every error of writing; safetensors and torch have their own kinds, and torch says no reason.
    """
    try:
        yield
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, SafetensorError) or "inline_container.cc" in str(error):  # where torch writes files
            reason = str(error).rpartition(": ")[2] if isinstance(error, SafetensorError) else "it cannot be written"
            free = shutil.disk_usage(folder.parent).free / 1e9
            raise OSError(errno.EIO, f"{reason}; {free:.1f} GB are free there", str(folder)) from error
        if isinstance(error, shutil.Error):  # a list of all files that were not copied, each with its reason
            reason = error.args[0][0][2].partition("] ")[2].partition(": ")[0]
            raise OSError(errno.EIO, reason, str(folder)) from error
        if isinstance(error, OSError) and error.errno and error.filename is None:
            raise OSError(error.errno, os.strerror(error.errno), str(folder)) from error
        raise


def flush(folder: Path) -> None:
    """Wait until every file in a folder is on the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("r+b") as file:
                os.fsync(file.fileno())


def sha256(path: Path) -> str:
    """Return the hash of a file, which is read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def clear_unfinished(folder: Path) -> None:
    """Remove the temporary files and folders that a killed process left; only while nobody else writes there."""
    for leftover in [*folder.rglob(".*.tmp")]:
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file with the format version first."""
    write_text(path, json.dumps({"format_version": FORMAT_VERSION, **content}, indent=2, ensure_ascii=False) + "\n")


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write one JSON object per line."""
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file.

    Raises:
        RecipeError: if it is damaged, or a newer preproj wrote it.
    """
    try:
        content = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise RecipeError(f"{path} is damaged; remove it and repeat the command.") from error
    if (version := content.get("format_version", 1)) > FORMAT_VERSION:
        raise NewerFormatError(
            f"{path} has format version {version}, and this preproj reads up to version {FORMAT_VERSION}; install a "
            "newer preproj to read it."
        )
    return content


def refuse_newer(run: Path) -> None:
    """Check that no newer preproj wrote a run.

    Raises:
        RecipeError: naming the file that it wrote.
    """
    for name in ("environment.json", "corpus.json", "summary.json"):
        if (run / name).exists():
            read_json(run / name)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read one JSON object per line."""
    # Not splitlines(): text in JSON may hold other line ends, such as U+2028.
    return [json.loads(line) for line in path.read_text("utf-8").split("\n") if line]
