"""Benchmarks: any task of the Language Model Evaluation Harness (lm-eval), on a model in memory.

The harness is an optional extra and is imported when a recipe names a task. With local data (``task_data``) nothing
is fetched: the task keeps its prompt, its choices and its metrics, and only the place its items come from changes.
"""

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from preproj.probe.errors import RecipeError
from preproj.probe.scores import Kind

# The fields that the harness's own tasks read, so that a wrong file is named before anything runs.
FIELDS = {
    "lambada_openai": ("text",),
    "arc_easy": ("question", "choices", "answerKey"),
    "arc_challenge": ("question", "choices", "answerKey"),
    "hellaswag": ("activity_label", "ctx_a", "ctx_b", "endings", "label"),
    "wikitext": ("page",),
}
# HellaSwag as its cleaned form carries it: the harness's own cleaning must not run again.
PROCESSED_HELLASWAG = {
    "fields": ("query", "endings", "label"),
    "changes": {"process_docs": None, "doc_to_choice": "endings"},
}
PROCESSED_NOTE = "hellaswag: from already cleaned items, so close to the harness's own score but not equal to it."


@dataclass(frozen=True)
class Tasks:
    """Tasks that are ready to run.

    Attributes:
        tasks: the harness's own objects, by name.
        notes: sentences a reader of the results must see.
    """

    tasks: dict[str, Any]
    notes: list[str]


def load_tasks(names: list[str], task_data: str | None) -> Tasks:
    """Find tasks by their names in the harness.

    Args:
        names: task names, such as ``lambada_openai``.
        task_data: folder with ``<name>.jsonl`` for every task; None takes the harness's own source (the Hub).

    Raises:
        RecipeError: if lm-eval is missing, a task is not known, or its local file is missing or has other fields.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise RecipeError("evaluation.tasks needs lm-eval; run `pip install 'preproj[harness]'`.")
    from lm_eval import tasks as harness
    from lm_eval.tasks._yaml_loader import load_yaml

    folder = Path(harness.__file__).parent
    places = sorted({path.parent for name in names for path in folder.rglob(f"{name}.yaml")})
    manager = harness.TaskManager(include_defaults=False, include_path=places)
    if unknown := [name for name in names if name not in manager.all_subtasks]:
        raise RecipeError(
            f"evaluation.tasks: lm-eval has no task {', '.join(unknown)}; `lm_eval --tasks list` lists all."
        )
    specs: list[Any] = list(names)
    notes: list[str] = []
    if task_data is not None:
        own = {name: manager.task_index[name].yaml_path for name in names}
        changed = {name: _local(name, Path(task_data).expanduser()) for name in names}
        specs = [
            load_yaml(own[name], resolve_func=True, recursive=True) | changes for name, (changes, _) in changed.items()
        ]
        notes = [note for _, note in changed.values() if note]
    return Tasks(manager.load(specs)["tasks"], notes)


def _local(name: str, task_data: Path) -> tuple[dict[str, Any], str | None]:
    """Return a task's changes for local data, and what must be said about them."""
    file = task_data / f"{name}.jsonl"
    try:
        with file.open(encoding="utf-8") as lines:
            row = json.loads(next(lines))
    except (OSError, StopIteration) as error:
        raise RecipeError(
            f"evaluation.task_data: {file} is missing or empty; the task {name} reads its items there."
        ) from error
    except ValueError as error:
        raise RecipeError(f"evaluation.task_data: {file} is not JSON lines.") from error
    spec = {
        "task": name,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {"test": str(file.resolve())}},
        "training_split": None,
        "validation_split": None,
        "test_split": "test",
    }
    wanted = FIELDS.get(name, ())
    if missing := [field for field in wanted if field not in row]:
        if name == "hellaswag" and all(field in row for field in PROCESSED_HELLASWAG["fields"]):
            return spec | PROCESSED_HELLASWAG["changes"], PROCESSED_NOTE
        raise RecipeError(
            f"evaluation.task_data: {file} has no field {', '.join(missing)}; {name} needs {', '.join(wanted)}."
        )
    return spec, None


def run_tasks(
    model: Any, tokenizer: Any, tasks: Tasks, limit: int | None, batch_size: int
) -> dict[str, tuple[dict[str, Kind], list[dict[str, Any]]]]:
    """Evaluate a model on tasks, zero-shot unless a task says otherwise.

    Args:
        model: a causal language model; it stays in the mode it was in.
        tokenizer: its tokenizer.
        tasks: from :func:`load_tasks`.
        limit: the first items of each task; None takes all.
        batch_size: requests per forward pass.

    Returns:
        By task: the kind of each metric, and the items (see ``scores.py``).
    """
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    training = model.training
    lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
    try:  # its own bootstrap is slow and not paired; ours is made from the items
        found = simple_evaluate(
            model=lm, tasks=list(tasks.tasks.values()), limit=limit, bootstrap_iters=0, log_samples=True
        )
    finally:
        model.train(training)
    assert found is not None  # None only on other processes than the first
    return {name: _items(tasks.tasks[name], found["samples"][name]) for name in tasks.tasks}


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
