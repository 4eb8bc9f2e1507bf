"""One cell of the probe: one method with one seed, in a process of its own.

The runner starts it as ``python -m preproj.probe.cell RUN METHOD SEED``. It reads the run folder's recipe and data,
writes the cell's folder, and prints its progress, one number of :func:`work_units` a line.
"""

import os
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

from filelock import FileLock
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from preproj.analysis.measures import measure_layers
from preproj.probe.base import load_model, load_tokenizer, resolve_base
from preproj.probe.environment import peak_memory_bytes
from preproj.probe.evaluation import score_document, score_last_word, score_stream
from preproj.probe.files import read_json, write_json
from preproj.probe.harness import load_tasks, run_tasks
from preproj.probe.methods import Attached, attach
from preproj.probe.prepared import Prepared
from preproj.probe.recipe import Recipe, parse_recipe
from preproj.probe.scores import Kind, write_items
from preproj.probe.training import NonFiniteLossError, train

TRAINING_WORK = 4  # a training token takes about as long as four tokens of a plain forward pass
PASSAGE_WORK = 64  # tokens of a usual passage
TASK_WORK = 200  # tokens of a usual item of a task, all its choices together
TASK_ITEMS = 1000  # guessed where a task has no limit
LAYER_DOCUMENTS = 8  # held-out documents for the layer measures


def cell_folder(run: Path, method: str, seed: int) -> Path:
    """Return the folder of a cell."""
    return run / "cells" / method / f"seed{seed}"


def work_units(recipe: Recipe, prepared: Prepared, method: str) -> int:
    """Return the work in a cell, in tokens of one forward pass, for the progress bar."""
    training = 0 if method == "none" else TRAINING_WORK * recipe.training.tokens
    evaluation = recipe.evaluation
    documents = sum(len(ids) for _, ids in prepared.documents) if "document" in evaluation.perplexity else 0
    stream = (evaluation.windows or 0) * evaluation.stride if "stream" in evaluation.perplexity else 0
    tasks = len(evaluation.tasks) * (evaluation.limit or TASK_ITEMS) * TASK_WORK
    return training + documents + stream + len(prepared.passages) * PASSAGE_WORK + tasks


def run_cell(run: Path, method: str, seed: int) -> None:
    """Train and evaluate one cell, continuing where an interrupted process left it.

    Args:
        run: the run folder, prepared by the runner.
        method: one of :data:`preproj.probe.recipe.METHODS`.
        seed: of the new weights and of the order of the text.
    """
    recipe = parse_recipe((run / "recipe.yaml").read_text("utf-8"), str(run / "recipe.yaml"))
    folder = cell_folder(run, method, seed)
    prepared = Prepared.read(run, recipe.evaluation)
    base = resolve_base(recipe.model.name)
    model = load_model(base, recipe.model.dtype)
    progress = _Progress()
    try:
        attached, trained = _train(recipe, prepared, model, folder, method, seed, progress)
    except NonFiniteLossError as error:
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        write_json(folder / "failed.json", {"method": method, "seed": seed, "step": error.step, "reason": str(error)})
        return
    result = _evaluate(attached.model.eval(), load_tokenizer(base), recipe, prepared, folder, progress)
    layers = []
    if not method.startswith(("none", "lora")):
        layers = measure_layers(attached.adapters[0], [ids for _, ids in prepared.documents[:LAYER_DOCUMENTS]])
    seconds = {**trained.pop("seconds"), **result.pop("seconds")}
    write_json(
        folder / "metrics.json",
        {
            "method": method,
            "seed": seed,
            "trainable_parameters": attached.trainable_parameters,
            "total_parameters": attached.total_parameters,
            "share_of_total": attached.trainable_parameters / attached.total_parameters,
            "adapter": attached.adapter,
            "notes": attached.notes,
            **trained,
            "dtype": recipe.model.dtype,
            "device": model.device.type,
            "seconds": {**seconds, "total": sum(seconds.values())},
            "peak_memory_bytes": peak_memory_bytes(),
            **result,
            "layers": layers,
        },
    )


class _Progress:
    """Prints the work done so far."""

    def __init__(self) -> None:
        self.done = 0

    def set(self, done: int) -> None:
        self.done = done
        print(done, flush=True)

    def add(self, done: int) -> None:
        self.set(self.done + done)


def _train(
    recipe: Recipe,
    prepared: Prepared,
    base: PreTrainedModel,
    folder: Path,
    method: str,
    seed: int,
    progress: _Progress,
) -> tuple[Attached, dict[str, Any]]:
    """Train the method, or load it where an earlier process has finished that.

    Returns:
        The model with the method, and what metrics.json says about its training.
    """
    attached = attach(base, method, seed)
    if method == "none":
        record = dict.fromkeys(("learning_rate", "token_order_sha256", "tokens_per_second"))
        return attached, {**record, "tokens": 0, "steps": 0, "seconds": {"train": 0.0}}
    settings = recipe.training
    learning_rate = settings.learning_rate[method]  # type: ignore[index]
    trained_record = folder / "trained.json"
    if trained_record.exists():
        attached.load(folder / "adapter")
    else:
        tokens_per_step = settings.block_size * settings.batch_size
        trained = train(
            attached,
            prepared.blocks,
            settings,
            learning_rate,
            seed,
            folder,
            lambda step: progress.set(TRAINING_WORK * tokens_per_step * step),
        )
        attached.save(folder / "adapter")
        write_json(
            trained_record,
            {
                "learning_rate": learning_rate,
                "tokens": settings.tokens,
                "steps": settings.steps,
                "token_order_sha256": trained.token_order_sha256,
                "tokens_per_second": settings.tokens / trained.seconds,
                "seconds": {"train": trained.seconds},
            },
        )
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    progress.set(TRAINING_WORK * settings.tokens)
    record = read_json(trained_record)
    del record["format_version"]
    return attached, record


def _evaluate(
    model: PreTrainedModel, tokenizer: Any, recipe: Recipe, prepared: Prepared, folder: Path, progress: _Progress
) -> dict[str, Any]:
    """Score everything the recipe asks for, write the items, and return what metrics.json says about them."""
    evaluation = recipe.evaluation
    started = time.perf_counter()
    measures: dict[str, dict[str, Kind]] = {}
    if "document" in evaluation.perplexity:
        items = []
        for name, ids in prepared.documents:
            item = score_document(model, tokenizer, name, ids, evaluation.context, evaluation.stride)
            items.append(item)
            progress.add(len(ids))
        write_items(folder, "document", items)
        measures["document"] = dict.fromkeys(("perplexity", "word_perplexity", "byte_perplexity"), "perplexity")
    if "stream" in evaluation.perplexity:
        items = []
        for item in score_stream(model, tokenizer, prepared.held_out, evaluation):
            items.append(item)
            progress.add(evaluation.stride)
        write_items(folder, "stream", items)
        measures["stream"] = {"perplexity": "perplexity"}
    if prepared.passages:
        items = []
        for passage in prepared.passages:
            score = score_last_word(model, tokenizer, passage.context, passage.target)
            items.append({"id": passage.id, "group": passage.document, "target": passage.target, **score})
            progress.add(PASSAGE_WORK)
        write_items(folder, "last_word", items)
        measures["last_word"] = {"acc": "accuracy"}
    if evaluation.tasks:
        tasks = load_tasks(evaluation.tasks, evaluation.task_data)
        for name, (kinds, items) in run_tasks(model, tokenizer, tasks, evaluation.limit, evaluation.batch_size).items():
            write_items(folder, name, items)
            measures[name] = kinds
    return {"measures": measures, "seconds": {"evaluate": time.perf_counter() - started}}


def _exit_with_parent() -> None:
    """End this process when the runner is gone: its end of our standard input is closed then, even by kill -9."""

    def wait() -> None:
        os.read(0, 1)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def main(run: str, method: str, seed: str) -> None:
    """Run the cell named on the command line."""
    _exit_with_parent()
    transformers_logging.disable_progress_bar()
    folder = cell_folder(Path(run), method, int(seed))
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock", timeout=60):  # an orphan of a killed runner may need a moment to end
        run_cell(Path(run), method, int(seed))


if __name__ == "__main__":
    main(*sys.argv[1:])
