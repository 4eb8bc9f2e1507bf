"""Why a cell or a trial ended early, in one sentence, where the machine is the reason: memory, disk or a kill."""

import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch
from accelerate.utils.memory import should_reduce_batch_size

from preproj.probe.environment import peak_memory_bytes
from preproj.probe.errors import RecipeError
from preproj.probe.recipe import Recipe, parse_recipe

LESS_MEMORY = (
    "set training.per_device_batch_size: auto, or training.gradient_checkpointing: true and a lower "
    "evaluation.batch_size, and go on with --accept-changes; or lower training.block_size and evaluation.context, or "
    "take model.dtype: bfloat16, with another --out"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the memory of the device or of the machine was too small."""
    return isinstance(error, MemoryError) or (isinstance(error, Exception) and should_reduce_batch_size(error))


@contextmanager
def one_sentence(run: Path) -> Iterator[None]:
    """End this process with a sentence, in place of a traceback, where memory or disk are too small.

    Args:
        run: the run folder.
    """
    try:
        yield
    except RecipeError as error:
        sys.exit(str(error))
    except (MemoryError, OSError, RuntimeError) as error:
        if is_out_of_memory(error):
            sys.exit(_with_recipe(parse_recipe((run / "recipe.yaml").read_text("utf-8"), "recipe.yaml")))
        if isinstance(error, OSError):
            sys.exit(f"{error.filename or run}: {error.strerror or error}.")
        raise


def why(code: int, folder: Path, said: str) -> str:
    """Say why a process ended early.

    Args:
        code: its exit code.
        folder: it worked in.
        said: the last line of its log, which a full disk may have cut off.
    """
    if code == -signal.SIGKILL:
        return f"killed from outside, as Linux does where memory is short ({_free('cpu')} now); if so, {LESS_MEMORY}"
    if shutil.disk_usage(folder).free < 1e6:
        return f"{folder}: no space left on the disk"
    return said.rstrip(".")


def _with_recipe(recipe: Recipe) -> str:
    training, evaluation = recipe.training, recipe.evaluation
    at_once = f"{training.per_device_batch_size or training.batch_size} × {training.block_size}"
    return (
        f"{out_of_memory()} with {recipe.model.name} in {recipe.model.dtype}, {at_once} tokens at once in training and "
        f"{evaluation.context} in evaluation; {LESS_MEMORY}"
    )


def out_of_memory() -> str:
    """Say that memory ran out, and how much there is."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return f"out of memory on {device} ({peak_memory_bytes() / 1e9:.1f} GB at the peak, {_free(device)})"


def _free(device: str) -> str:
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
    else:
        memory = psutil.virtual_memory()
        free, total = memory.available, memory.total
    return f"{free / 1e9:.1f} of {total / 1e9:.1f} GB free"
