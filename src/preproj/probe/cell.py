"""One cell of the probe: one method with one seed, in a process of its own.

The runner starts it as ``python -m preproj.probe.cell RUN METHOD SEED``. It reads the run folder's recipe and data,
writes the cell's folder, and prints its progress, one number of :func:`work_units` a line.
"""

import math
import platform
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from preproj.analysis import analyze
from preproj.probe import distributed
from preproj.probe.attached import Attached
from preproj.probe.base import load_model, load_tokenizer, resolve_base
from preproj.probe.corpus import RETENTION
from preproj.probe.ending import one_sentence
from preproj.probe.environment import describe_environment, peak_memory_bytes
from preproj.probe.errors import RecipeError
from preproj.probe.evaluation import score_document, score_last_word, score_stream, stream_parts
from preproj.probe.files import clear_unfinished, write_json
from preproj.probe.fit import TRAINING_WORK, fit
from preproj.probe.harness import load_tasks, run_tasks
from preproj.probe.method import parse_method
from preproj.probe.methods import attach
from preproj.probe.prepared import Prepared
from preproj.probe.process import Progress, start_process
from preproj.probe.recipe import Evaluation, Recipe, parse_recipe
from preproj.probe.scores import Kind, write_items
from preproj.probe.texts import beginning, ending, write_texts
from preproj.probe.trackers import keep_wandb_in
from preproj.probe.training import NonFiniteLossError
from preproj.probe.tuning import cell_settings, objective
from preproj.statistics import perplexity

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
    texts = sum(perplexity_work(prepared, protocol, evaluation.split) for protocol in evaluation.perplexity)
    if evaluation.retention is not None:
        texts += perplexity_work(prepared, "document", RETENTION)
    tasks = len(evaluation.tasks) * (evaluation.limit or TASK_ITEMS) * TASK_WORK
    return training + texts + len(prepared.passages) * PASSAGE_WORK + tasks


def trial_units(recipe: Recipe, prepared: Prepared) -> int:
    """Return the work in a trial of tuning, in the same unit."""
    assert recipe.tuning is not None
    tokens = recipe.tuning.tokens or recipe.training.tokens
    return TRAINING_WORK * tokens + perplexity_work(prepared, objective(recipe).split("/")[0], "validation")


def perplexity_work(prepared: Prepared, protocol: str, split: str) -> int:
    """Return the work in one perplexity, in tokens of one forward pass."""
    if protocol == "document":
        return sum(len(ids) for _, ids in prepared.documents(split))
    return (prepared.evaluation.windows or 0) * prepared.evaluation.stride


def run_cell(run: Path, method: str, seed: int) -> None:
    """Train and evaluate one cell, continuing where an interrupted process left it.

    Args:
        run: the run folder, prepared by the runner.
        method: one of the recipe's.
        seed: of the new weights and of the order of the text.
    """
    recipe = parse_recipe((run / "recipe.yaml").read_text("utf-8"), str(run / "recipe.yaml"))
    folder = cell_folder(run, method, seed)
    prepared = Prepared.read(run, recipe.evaluation)
    base = resolve_base(recipe.model.name)
    model = load_model(base, recipe.model.dtype)
    progress = Progress()
    try:
        attached = attach(model, method, seed, recipe.match)
        trained = _fit(attached, recipe, prepared, run, method, seed, progress)
        result = _evaluate(attached.model.eval(), method, load_tokenizer(base), recipe, prepared, run, folder, progress)
    except NonFiniteLossError as error:
        _fail(folder, method, seed, error)
        return
    layers, parts = [], parse_method(method)
    if parts.pre or parts.skip:
        documents = prepared.documents(recipe.evaluation.split)[:LAYER_DOCUMENTS]
        layers = analyze(attached.adapters[0], [ids for _, ids in documents]).layers
    seconds = {**trained.pop("seconds"), **result.pop("seconds")}
    environment = {"training": trained.pop("environment", None), "evaluation": describe_environment()}
    peak = trained.pop("peak_memory_bytes", 0)  # of another process, where that one trained
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
            "peak_memory_bytes": max(peak_memory_bytes(), peak),
            **result,
            "layers": layers,
            "environment": environment,
        },
    )


def train_cell(run: Path, method: str, seed: int, progress: Progress) -> None:
    """Train a cell together with the other processes that were started; each must call this.

    Args:
        run: the run folder, prepared by the main process.
        method: one of the recipe's that trains.
        seed: of the new weights and of the order of the text.
        progress: told of the work done.

    Raises:
        RecipeError: if this process does not see the run folder.
    """
    if not (run / "recipe.yaml").exists():
        raise RecipeError(
            f"run folder {run} is not on {platform.node()}: all machines need it, so name a folder that they share "
            "with --out."
        )
    recipe = parse_recipe((run / "recipe.yaml").read_text("utf-8"), str(run / "recipe.yaml"))
    prepared = Prepared.read(run, recipe.evaluation)
    model = load_model(resolve_base(recipe.model.name), recipe.model.dtype)
    try:
        _fit(attach(model, method, seed, recipe.match), recipe, prepared, run, method, seed, progress)
    except NonFiniteLossError as error:
        if distributed.is_main():
            _fail(cell_folder(run, method, seed), method, seed, error)


def take_part() -> None:
    """Train the cell that the main process names, if it does; in every process but that one."""
    distributed.join()
    job = distributed.from_main(lambda: None)
    if job is not None:
        train_cell(*job, Progress(lambda done: None))
        distributed.leave()


def _fit(
    attached: Attached, recipe: Recipe, prepared: Prepared, run: Path, method: str, seed: int, progress: Progress
) -> dict[str, Any]:
    settings = cell_settings(recipe, run, method)
    folder, name = cell_folder(run, method, seed), f"{recipe.name} {method} seed{seed}"
    return fit(attached, prepared, settings, method, seed, folder, progress, recipe.report_to, name)


def _fail(folder: Path, method: str, seed: int, error: NonFiniteLossError) -> None:
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    write_json(folder / "failed.json", {"method": method, "seed": seed, "step": error.step, "reason": str(error)})


def _evaluate(
    model: PreTrainedModel,
    method: str,
    tokenizer: Any,
    recipe: Recipe,
    prepared: Prepared,
    run: Path,
    folder: Path,
    progress: Progress,
) -> dict[str, Any]:
    """Score everything the recipe asks for, write items and texts, and return what metrics.json says about them."""
    evaluation = recipe.evaluation
    started = time.perf_counter()
    measures: dict[str, dict[str, Kind]] = {}
    texts: dict[str, tuple[str, str]] = {protocol: (protocol, evaluation.split) for protocol in evaluation.perplexity}
    if evaluation.retention is not None:
        texts |= {RETENTION: ("document", RETENTION)}
    for name, (protocol, split) in texts.items():
        items = list(perplexity_items(model, tokenizer, protocol, prepared, split, evaluation, progress))
        measures[name] = {metric: "perplexity" for metric in items[0] if metric.endswith("perplexity")}
        for metric in measures[name] if method != "none" else ():  # the precision check judges the untouched model
            mean_perplexity(items, metric, name, recipe.training.steps)
        write_items(folder, name, items)
        write_texts(run, name, _texts(tokenizer, protocol, prepared, split, evaluation))
    if prepared.passages:
        items = []
        for passage in prepared.passages:
            score = score_last_word(model, tokenizer, passage.context, passage.target)
            items.append({"id": passage.id, "group": passage.document, "target": passage.target, **score})
            progress.add(PASSAGE_WORK)
        write_items(folder, "last_word", items)
        write_texts(run, "last_word", ({"id": one.id, "text": ending(one.context)} for one in prepared.passages))
        measures["last_word"] = {"acc": "accuracy"}
    if evaluation.tasks:
        tasks = load_tasks(evaluation.tasks, evaluation.task_data)
        found = run_tasks(model, tokenizer, tasks, evaluation.limit, evaluation.batch_size)
        for name, (kinds, items, prompts) in found.items():
            write_items(folder, name, items)
            write_texts(run, name, prompts)
            measures[name] = kinds
    return {"measures": measures, "seconds": {"evaluate": time.perf_counter() - started}}


def mean_perplexity(items: list[dict[str, Any]], metric: str, name: str, step: int) -> float:
    """Return a perplexity over all items.

    Args:
        items: of one task.
        metric: which of its perplexities.
        name: of the task, for the error.
        step: of the end of training, for the error.

    Raises:
        NonFiniteLossError: if it is infinite or not a number: trained weights may be finite and of no use.
    """
    loss, weight = np.array([item[metric] for item in items]).T
    with np.errstate(over="ignore"):
        value = float(perplexity(loss, weight))
    if not math.isfinite(value):
        raise NonFiniteLossError(step, f"the {name} {metric.replace('_', ' ')}")
    return value


def perplexity_items(
    model: PreTrainedModel,
    tokenizer: Any,
    protocol: str,
    prepared: Prepared,
    split: str,
    evaluation: Evaluation,
    progress: Progress,
) -> Iterator[dict[str, Any]]:
    """Yield the items of one perplexity of a split.

    Args:
        model: a causal language model in eval mode.
        tokenizer: its tokenizer.
        protocol: ``document`` or ``stream``.
        prepared: the text.
        split: which text.
        evaluation: the recipe's section.
        progress: told of the work done.
    """
    if protocol == "document":
        for name, ids in prepared.documents(split):
            yield score_document(model, tokenizer, name, ids, evaluation.context, evaluation.stride)
            progress.add(len(ids))
    else:
        for item in score_stream(model, tokenizer, prepared.held_out(split), evaluation):
            yield item
            progress.add(evaluation.stride)


def _texts(
    tokenizer: Any, protocol: str, prepared: Prepared, split: str, evaluation: Evaluation
) -> Iterator[dict[str, Any]]:
    """Yield what the items of a perplexity begin with."""
    if protocol == "document":
        parts: Iterable[tuple[str, list[int]]] = prepared.documents(split)
    else:
        parts = stream_parts(tokenizer, prepared.held_out(split), evaluation)
    for name, ids in parts:
        yield {"id": name, "text": beginning(tokenizer.decode(ids))}


def main(run: str, method: str, seed: str) -> None:
    """Run the cell named on the command line."""
    folder = cell_folder(Path(run), method, int(seed))
    keep_wandb_in(folder)
    with start_process(folder), one_sentence(Path(run)):
        clear_unfinished(folder)
        run_cell(Path(run), method, int(seed))


if __name__ == "__main__":
    main(*sys.argv[1:])
