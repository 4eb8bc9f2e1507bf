"""One row per cell, and the differences between them: summary.json."""

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from preproj.probe.cell import cell_folder
from preproj.probe.evaluation import perplexity_protocol
from preproj.probe.files import read_json, read_jsonl, write_json
from preproj.probe.passages import RULE
from preproj.probe.recipe import Recipe
from preproj.probe.statistics import INTERVALS, accuracy, paired_difference, perplexity

BASELINE = "none"
REFERENCE = "lora"


def cells_of(recipe: Recipe) -> list[tuple[str, int]]:
    """List the cells of a recipe in order: every method with every seed, the untouched model once."""
    return [
        (method, seed)
        for method in recipe.methods
        for seed in (recipe.seeds[:1] if method == BASELINE else recipe.seeds)
    ]


def write_summary(run: Path, recipe: Recipe, base: dict[str, Any]) -> list[dict[str, Any]]:
    """Read every cell of a run and write summary.json.

    Args:
        run: the run folder.
        recipe: its recipe.
        base: the content of summary.json's ``base``.

    Returns:
        The rows.
    """
    rows = [_row(run, recipe, method, seed) for method, seed in cells_of(recipe)]
    methods = recipe.methods
    write_json(
        run / "summary.json",
        {
            "name": recipe.name,
            "base": base,
            "protocol": _protocol(recipe),
            "baseline": BASELINE if BASELINE in methods else None,
            "reference": REFERENCE if REFERENCE in methods else None,
            "rows": rows,
        },
    )
    return rows


def _protocol(recipe: Recipe) -> dict[str, str]:
    training, evaluation = recipe.training, recipe.evaluation
    return {
        "training": (
            f"The base is frozen; the new weights train on {training.tokens:,} tokens ({training.steps} steps of "
            f"{training.batch_size} packed blocks of {training.block_size}), the same tokens in the same order for "
            f"every method of a seed; AdamW, {training.warmup_ratio:.0%} linear warm-up, cosine decay to zero, weight "
            f"decay {training.weight_decay:g}, gradient norm clipped at {training.max_grad_norm:g}."
        ),
        "perplexity": perplexity_protocol(evaluation, recipe.model.dtype),
        "last_word": RULE if evaluation.passages else "Left out in this run.",
        "intervals": INTERVALS,
    }


def _row(run: Path, recipe: Recipe, method: str, seed: int) -> dict[str, Any]:
    folder = cell_folder(run, method, seed)
    row: dict[str, Any] = {"method": method, "seed": seed, "status": "missing", "reason": None, "notes": []}
    if (folder / "failed.json").exists():
        return row | {"status": "failed", "reason": read_json(folder / "failed.json")["reason"]}
    if not (folder / "metrics.json").exists():
        return row
    metrics = read_json(folder / "metrics.json")
    same = ("trainable_parameters", "share_of_total", "learning_rate", "tokens", "tokens_per_second", "notes")
    others = [BASELINE, REFERENCE]
    return (
        row
        | {key: metrics[key] for key in (*same, "peak_memory_bytes")}
        | {
            "status": "finished",
            "seconds": metrics["seconds"]["total"],
            "perplexity": metrics["perplexity"]["value"],
            "last_word_accuracy": metrics["last_word"]["accuracy"] if metrics["last_word"] else None,
            "versus": {
                other: _versus(folder, other_folder)
                for other in others
                if other != method and other in recipe.methods
                for other_folder in [cell_folder(run, other, recipe.seeds[0] if other == BASELINE else seed)]
                if (other_folder / "metrics.json").exists()
            },
        }
    )


def _versus(ours: Path, theirs: Path) -> dict[str, Any]:
    """Compare two finished cells on the same items."""
    a, b = (read_jsonl(folder / "documents.jsonl") for folder in (ours, theirs))
    assert [row["id"] for row in a] == [row["id"] for row in b]
    differences = {
        "perplexity": paired_difference(
            [row["negative_log_likelihood"] for row in a],
            [row["negative_log_likelihood"] for row in b],
            [row["tokens"] for row in a],
            perplexity,
        )
    }
    a, b = (read_jsonl(folder / "passages.jsonl") for folder in (ours, theirs))
    if a:
        counts = Counter(row["document"] for row in a)
        correct_a, correct_b = _correct_by_document(a), _correct_by_document(b)
        differences["last_word_accuracy"] = paired_difference(
            [correct_a[name] for name in counts],
            [correct_b[name] for name in counts],
            list(counts.values()),
            accuracy,
        )
    return differences


def _correct_by_document(passages: list[dict[str, Any]]) -> dict[str, int]:
    correct: dict[str, int] = defaultdict(int)
    for row in passages:
        correct[row["document"]] += row["correct"]
    return correct
