"""Several processes that train one cell, as torchrun and ``accelerate launch`` start them.

The main process does all that a run needs. The others wait for the training, take part in it, and end.
"""

import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch
from accelerate import PartialState
from torch import distributed

from preproj.probe.errors import RecipeError
from preproj.probe.recipe import Recipe

T = TypeVar("T")

# Preparing the text may take hours. That a process has died is the launcher's to notice.
PATIENCE = timedelta(days=1)
# What launchers tell a process of the others.
PLACES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
PREFIXES = ("ACCELERATE_", "FSDP_", "GROUP_", "ROLE_", "TORCHELASTIC_")


def world_size() -> int:
    """Return how many processes were started together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main() -> bool:
    """Whether this is the main process: the only one that writes and prints."""
    return os.environ.get("RANK", "0") == "0"


def check(recipe: Recipe, cell: str | None) -> None:
    """Refuse what the processes that were started cannot train together.

    Args:
        recipe: of the run.
        cell: ``METHOD/seedN``, if one was named.

    Raises:
        RecipeError: saying what to change.
    """
    processes = world_size()
    if processes == 1:
        return
    if cell is None:
        raise RecipeError(
            f"{processes} processes were started together: name the cell they train, --cell METHOD/seedN."
        )
    batch, part = recipe.training.batch_size, recipe.training.per_device_batch_size
    if part == "auto":
        raise RecipeError(
            f"training.per_device_batch_size is auto, which one process alone can find out: with {processes} processes "
            "give a number."
        )
    if batch % (processes * (part or 1)):
        each = f", each with {part} at once," if part else ""
        raise RecipeError(
            f"training.batch_size is {batch}: {processes} processes{each} cannot share that; expected a multiple of "
            f"{processes * (part or 1)}."
        )
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision != "no":
        raise RecipeError(
            f"accelerate's mixed_precision is {precision}: set it to 'no'. The recipe's model.dtype says in what a "
            "cell is trained, however it is started."
        )
    if os.environ.get("ACCELERATE_USE_FSDP") == "true" and os.environ.get("FSDP_VERSION", "1") == "1":
        raise RecipeError(
            "accelerate's fsdp_version is 1, which takes one dtype a block, but new weights are float32 beside a base "
            "of any dtype: set it to 2, as in recipes/accelerate/fsdp2.yaml."
        )


def join() -> None:
    """Meet the other processes, if there are any."""
    if world_size() > 1:
        PartialState(cpu=not torch.cuda.is_available(), timeout=PATIENCE)


def from_main(make: Callable[[], T]) -> T:
    """Return in every process what the main process makes; alone, what this one makes."""
    if not distributed.is_initialized():
        return make()
    made = [make() if is_main() else None]
    distributed.broadcast_object_list(made, src=0)
    return made[0]  # type: ignore[return-value]  # the main process's


def at_main(mine: T) -> list[T]:
    """Return in the main process what every process gives, by rank; in the others nothing."""
    if not distributed.is_initialized():
        return [mine]
    given: list[Any] = [None] * world_size()
    distributed.gather_object(mine, given if is_main() else None)
    return given if is_main() else []


def leave() -> None:
    """Part from the other processes."""
    distributed.destroy_process_group()


def dismiss() -> None:
    """Let the other processes end where they still wait for something to train."""
    if distributed.is_initialized():
        from_main(lambda: None)
        leave()


def alone(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which a new process knows of no others."""
    return {key: value for key, value in environment.items() if key not in PLACES and not key.startswith(PREFIXES)}
