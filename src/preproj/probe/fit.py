"""A method trained on the base, or loaded where an earlier process has finished that."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from preproj.probe.attached import Attached
from preproj.probe.distributed import is_main, world_size
from preproj.probe.environment import describe_environment, peak_memory_bytes
from preproj.probe.files import read_json, write_json
from preproj.probe.prepared import Prepared
from preproj.probe.process import Progress
from preproj.probe.recipe import Training
from preproj.probe.training import train

TRAINING_WORK = 4  # a training token takes about as long as four tokens of a plain forward pass


def fit(
    attached: Attached,
    prepared: Prepared,
    settings: Training,
    method: str,
    seed: int,
    folder: Path,
    progress: Progress,
    report_to: Sequence[str] = (),
    run_name: str | None = None,
) -> dict[str, Any]:
    """Train a method in ``folder``, where ``trained.json`` says that it is done; the untouched model needs nothing.

    Args:
        attached: the method on the base; changed in place.
        prepared: the text.
        settings: the training section, with the method's learning rate.
        method: its name, see :func:`preproj.probe.method.parse_method`.
        seed: of the order of the text.
        folder: of the cell or the trial.
        progress: told of the work done.
        report_to: trackers of the recipe.
        run_name: what they call the run.

    Returns:
        What metrics.json says about the training; nothing in a process that is not the main one.

    Raises:
        NonFiniteLossError: if the loss is not finite.
    """
    if method == "none":
        record = dict.fromkeys(("learning_rate", "per_device_batch_size", "token_order_sha256", "tokens_per_second"))
        return {**record, "tokens": 0, "steps": 0, "processes": 1, "seconds": {"train": 0.0}}
    trained_record = folder / "trained.json"
    if trained_record.exists():
        attached.load(folder / "adapter")
    else:
        learning_rate = settings.learning_rate[method]
        tokens_per_step = settings.block_size * settings.batch_size
        trained = train(
            attached,
            prepared.blocks,
            settings,
            learning_rate,
            seed,
            folder,
            lambda step: progress.set(TRAINING_WORK * tokens_per_step * step),
            report_to,
            run_name,
        )
        if not is_main():
            return {}
        write_json(
            trained_record,
            {
                "learning_rate": learning_rate,
                "tokens": settings.tokens,
                "steps": settings.steps,
                "per_device_batch_size": trained.per_device_batch_size,
                "token_order_sha256": trained.token_order_sha256,
                "tokens_per_second": settings.tokens / trained.seconds,
                "processes": world_size(),
                "peak_memory_bytes": peak_memory_bytes(),
                "seconds": {"train": trained.seconds},
                "environment": describe_environment(),
            },
        )
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    progress.set(TRAINING_WORK * settings.tokens)
    record = read_json(trained_record)
    del record["format_version"]
    return record
