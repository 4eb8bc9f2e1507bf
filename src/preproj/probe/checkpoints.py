"""Checkpoints that are whole or not used: a manifest, written last, lists every file with its hash."""

import hashlib
import shutil
from pathlib import Path

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from preproj.probe.errors import RecipeError
from preproj.probe.files import flush, read_json, write_json

MANIFEST = "manifest.json"


def checkpoint_folder(folder: Path, step: int) -> Path:
    """Return where the Trainer keeps the checkpoint of a step."""
    return folder / f"{PREFIX_CHECKPOINT_DIR}-{step}"


def seal(checkpoint: Path) -> None:
    """Put every file of a checkpoint onto the disk, and then its manifest: from here on it is whole."""
    flush(checkpoint)
    write_json(checkpoint / MANIFEST, {"sha256": _hashes(checkpoint)})


def newest_whole(folder: Path) -> Path | None:
    """Find the newest whole checkpoint, and remove the newer ones, which a kill or a full disk has cut short."""
    numbered = {int(step): path for path in folder.glob("*") if (step := path.name.rpartition("-")[2]).isdecimal()}
    for _, checkpoint in sorted(numbered.items(), reverse=True):
        if _is_whole(checkpoint):
            return checkpoint
        shutil.rmtree(checkpoint, ignore_errors=True)
    return None


def _is_whole(checkpoint: Path) -> bool:
    try:
        return read_json(checkpoint / MANIFEST)["sha256"] == _hashes(checkpoint)
    except (OSError, RecipeError, KeyError):
        return False


def _hashes(checkpoint: Path) -> dict[str, str]:
    """Return the sha256 of every file but the manifest, by its path in the checkpoint."""
    hashes = {}
    for path in sorted(checkpoint.rglob("*")):
        if path.is_file() and path.name != MANIFEST:
            with path.open("rb") as file:
                hashes[path.relative_to(checkpoint).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return hashes
