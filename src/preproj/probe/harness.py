"""Benchmarks: any task of the Language Model Evaluation Harness (lm-eval), on a model in memory.

The harness is an optional extra and is imported when a recipe names a task. With local data (``task_data``) nothing
is fetched: the task keeps its prompt, its choices and its metrics, and only the place its items come from changes.
"""

import importlib.metadata
import importlib.util
import json
from pathlib import Path
from typing import Any

from preproj.probe.errors import RecipeError
from preproj.probe.recipe import Evaluation
from preproj.probe.scores import Kind
from preproj.probe.texts import CHOICE, beginning, ending

# The fields that the harness's own tasks read, so that a wrong file is named before anything runs.
FIELDS = {
    "lambada_openai": ("text",),
    "arc_easy": ("question", "choices", "answerKey"),
    "arc_challenge": ("question", "choices", "answerKey"),
    "hellaswag": ("activity_label", "ctx_a", "ctx_b", "endings", "label"),
    "wikitext": ("page",),
}
# HellaSwag as its cleaned form carries it: the harness's own cleaning must not run again.
PROCESSED_HELLASWAG = ("query", "endings", "label")
PROCESSED_NOTE = "hellaswag: from already cleaned items, so close to the harness's own score but not equal to it."


def load_tasks(names: list[str], task_data: str | None) -> dict[str, Any]:
    """Find tasks, or groups of them, by their names in the harness.

    Args:
        names: names such as ``lambada_openai``.
        task_data: folder with ``<name>.jsonl`` for every task; None takes the harness's own source (the Hub).

    Returns:
        The harness's task objects by name; a group is replaced by its tasks.

    Raises:
        RecipeError: if lm-eval is missing, a task is not known, or its local file is missing or has other fields.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise RecipeError("evaluation.tasks needs lm-eval; run `pip install 'preproj[harness]'`.")
    from lm_eval import tasks as harness
    from lm_eval.tasks._yaml_loader import load_yaml

    folder = Path(harness.__file__).parent
    places = {path.parent for name in names for path in folder.rglob(f"{name}.yaml")}
    manager = harness.TaskManager(include_defaults=False, include_path=sorted(places))
    if not set(names) <= set(manager.all_tasks):
        manager = harness.TaskManager()  # reads all of its thousands of files, which takes seconds
    if unknown := [name for name in names if name not in manager.all_tasks]:
        raise RecipeError(
            f"evaluation.tasks: lm-eval has no task {', '.join(unknown)}; `lm_eval ls tasks` lists them all."
        )
    if task_data is None:
        return _from_hub(manager, names)
    changes = {name: _local(name, Path(task_data).expanduser())[0] for name in names}
    own = {name: load_yaml(manager.task_index[name].yaml_path, resolve_func=True, recursive=True) for name in names}
    return manager.load([own[name] | changes[name] for name in names])["tasks"]


def _from_hub(manager: Any, names: list[str]) -> dict[str, Any]:
    try:
        return manager.load(names)["tasks"]
    except (OSError, ConnectionError) as error:
        raise RecipeError(
            "evaluation.tasks: the items cannot be had from the Hub; give local ones with evaluation.task_data."
        ) from error


def task_protocol(evaluation: Evaluation) -> str:
    """Say in a few sentences how the tasks are measured."""
    limit = "all items" if evaluation.limit is None else f"the first {evaluation.limit} items"
    said = f"lm-eval {importlib.metadata.version('lm-eval')} on {limit} of each task, no chat template."
    if evaluation.task_data is None:
        return said
    folder = Path(evaluation.task_data).expanduser()
    notes = [note for name in evaluation.tasks for _, note in [_local(name, folder)] if note]
    return " ".join([f"{said} Items from local files.", *notes])


def _local(name: str, folder: Path) -> tuple[dict[str, Any], str | None]:
    """Return what local data change in a task, and what must be said about them."""
    file = folder / f"{name}.jsonl"
    if name == "hellaswag" and not file.exists():
        file = folder / "hellaswag_processed.jsonl"
    try:
        with file.open(encoding="utf-8") as lines:
            row = json.loads(next(lines))
    except (OSError, StopIteration) as error:
        raise RecipeError(
            f"evaluation.task_data: {folder / f'{name}.jsonl'} is missing or empty; {name} reads its items there."
        ) from error
    except ValueError as error:
        raise RecipeError(f"evaluation.task_data: {file} is not JSON lines.") from error
    source = {
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {"test": str(file.resolve())}},
        "training_split": None,
        "validation_split": None,
        "test_split": "test",
    }
    wanted = FIELDS.get(name, ())
    if missing := [field for field in wanted if field not in row]:
        if name == "hellaswag" and all(field in row for field in PROCESSED_HELLASWAG):
            return source | {"process_docs": None, "doc_to_choice": "endings"}, PROCESSED_NOTE
        raise RecipeError(
            f"evaluation.task_data: {file} has no field {', '.join(missing)}; {name} needs {', '.join(wanted)}."
        )
    return source, None


def run_tasks(
    model: Any, tokenizer: Any, tasks: dict[str, Any], limit: int | None, batch_size: int
) -> dict[str, tuple[dict[str, Kind], list[dict[str, Any]], list[dict[str, Any]]]]:
    """Evaluate a model on tasks, zero-shot unless a task says otherwise.

    Args:
        model: a causal language model; it stays in the mode it was in.
        tokenizer: its tokenizer.
        tasks: from :func:`load_tasks`.
        limit: the first items of each task; None takes all.
        batch_size: requests per forward pass.

    Returns:
        By task: the kind of each metric, the items (see ``scores.py``), and their texts (see ``texts.py``).
    """
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    training = model.training
    lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
    try:  # its own bootstrap is slow and not paired; ours is made from the items
        found = simple_evaluate(model=lm, tasks=list(tasks.values()), limit=limit, bootstrap_iters=0, log_samples=True)
    finally:
        model.train(training)
    assert found is not None  # None only on other processes than the first
    samples = found["samples"]
    return {name: (*_items(tasks[name], samples[name]), _texts(samples[name])) for name in tasks}


def _texts(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the prompt, the choices and the right answer of every sample, clipped."""
    texts: dict[str, dict[str, Any]] = {}
    for sample in samples:
        requests = [[str(argument) for argument in request] for request in sample["arguments"]]
        prompt, *continuation = requests[0]
        text: dict[str, Any] = {"id": str(sample["doc_id"])}
        if not continuation:  # a whole text is scored
            texts[text["id"]] = text | {"text": beginning(prompt)}
            continue
        text["text"], target = ending(prompt), sample["target"]
        if len(requests) > 1:
            text["choices"] = [beginning(request[1], CHOICE) for request in requests]
            if isinstance(target, int) and 0 <= target < len(requests):
                target = requests[target][1]
        texts[text["id"]] = text | {"target": beginning(str(target), CHOICE)}
    return list(texts.values())


def _items(task: Any, samples: list[dict[str, Any]]) -> tuple[dict[str, Kind], list[dict[str, Any]]]:
    """Turn the harness's samples into items; a metric that is no mean over items and no perplexity is left out."""
    aggregations = {name: function.__name__ for name, function in task.aggregation().items()}
    kinds: dict[str, Kind] = {}
    items: dict[str, dict[str, Any]] = {}
    for sample in samples:
        name = str(sample["doc_id"])
        item = items.setdefault(name, {"id": name, "group": name, "response": sample["filtered_resps"]})
        for metric in sample["metrics"]:
            key = metric if sample["filter"] == "none" else f"{metric},{sample['filter']}"
            match aggregations[metric]:
                case "mean":
                    kinds[key], item[key] = "accuracy", [float(sample[metric]), 1]
                case "perplexity":
                    kinds[key], item[key] = "perplexity", [-sample[metric], 1]
                case "weighted_perplexity":
                    log_likelihood, weight = sample[metric]
                    kinds[key], item[key] = "perplexity", [-log_likelihood, weight]
    return kinds, list(items.values())
