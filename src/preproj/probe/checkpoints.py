"""Checkpoints that are whole or not used: a manifest, written last, lists every file with its hash."""

import shutil
from pathlib import Path

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from preproj.probe.errors import RecipeError
from preproj.probe.files import flush, read_json, sha256, write_json

MANIFEST = "manifest.json"
_WRITERS = {"optimizer.pt": "one process or DDP", "optimizer.bin": "FSDP", "latest": "DeepSpeed"}


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


def check_optimizer(checkpoint: Path, file: str) -> None:
    """Refuse a checkpoint whose optimiser is in the form of another way to spread a model over processes.

    Args:
        checkpoint: a whole one.
        file: where the optimiser would be read from.

    Raises:
        RecipeError: naming the way; the Trainer would start with a new optimiser and say nothing.
    """
    writer = next(who for name, who in _WRITERS.items() if (checkpoint / name).exists())
    if writer != _WRITERS[file]:
        raise RecipeError(
            f"{checkpoint} was written under {writer}, which {_WRITERS[file]} cannot read: go on as the cell began, or "
            f"remove {checkpoint.parent} to train it anew."
        )


def _is_whole(checkpoint: Path) -> bool:
    try:
        return read_json(checkpoint / MANIFEST)["sha256"] == _hashes(checkpoint)
    except (OSError, RecipeError, KeyError):
        return False


def _hashes(checkpoint: Path) -> dict[str, str]:
    """Return the sha256 of every file but the manifest, by its path in the checkpoint."""
    files = (path for path in sorted(checkpoint.rglob("*")) if path.is_file() and path.name != MANIFEST)
    return {path.relative_to(checkpoint).as_posix(): sha256(path) for path in files}
