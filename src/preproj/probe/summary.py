"""What a run says when all its cells are put together: summary.json."""

from collections import defaultdict
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from preproj.probe.cell import LAYER_DOCUMENTS, cell_folder
from preproj.probe.corpus import RETENTION
from preproj.probe.errors import RecipeError
from preproj.probe.evaluation import PROTOCOLS, perplexity_protocol
from preproj.probe.files import read_json, refuse_newer, write_json
from preproj.probe.harness import task_protocol
from preproj.probe.method import parse_method
from preproj.probe.methods import SAME_SIZE
from preproj.probe.passages import RULE
from preproj.probe.published import published
from preproj.probe.recipe import Recipe, parse_recipe
from preproj.probe.scores import Score, read_scores
from preproj.probe.statistics import INTERVALS, holm, p_value, wilson
from preproj.probe.tuning import describe_tuning, tuning_protocol
from preproj.statistics import contrast, over_seeds

BASELINE = "none"
REFERENCE = "lora"
# Whether two parts gain more (or less) together than the sum of what each gains alone.
INTERACTIONS = {"pre × skip": ("pre", "skip", "pre+skip"), "pre × lora": ("pre", "lora", "pre+lora")}

Scores = dict[str, dict[int, dict[str, Score]]]
"""Method, seed, measure."""
Cells = dict[str, dict[int, dict[str, Any]]]
"""Method, seed, the content of metrics.json."""


def cells_of(recipe: Recipe) -> list[tuple[str, int]]:
    """List the cells of a recipe in order: every method with every seed, the untouched model once."""
    return [
        (method, seed)
        for method in recipe.methods
        for seed in (recipe.seeds[:1] if method == BASELINE else recipe.seeds)
    ]


def find_cell(recipe: Recipe, name: str) -> tuple[str, int]:
    """Return the cell that is called ``METHOD/seedN``.

    Raises:
        RecipeError: if the recipe has none of that name, with those it has.
    """
    cells = {f"{method}/seed{seed}": (method, seed) for method, seed in cells_of(recipe)}
    if name not in cells:
        raise RecipeError(f"--cell is {name!r}, no cell of this recipe; it has {', '.join(cells)}.")
    return cells[name]


def write_summary(run: Path, recipe: Recipe, base: dict[str, Any]) -> bool:
    """Read every cell of a run and write summary.json.

    Args:
        run: the run folder.
        recipe: its recipe.
        base: the content of summary.json's ``base``.

    Returns:
        Whether every cell is finished.
    """
    rows = [_row(run, method, seed) for method, seed in cells_of(recipe)]
    scores: Scores = defaultdict(dict)
    for row in rows:
        if row["status"] == "finished":
            method, seed = row["method"], row["seed"]
            scores[method][seed] = read_scores(cell_folder(run, method, seed))
            row["scores"] = {name: score.value for name, score in scores[method][seed].items()}
    measures = _measures(scores)
    made: Cells = {
        method: {seed: read_json(cell_folder(run, method, seed) / "metrics.json") for seed in seeds}
        for method, seeds in scores.items()
    }
    write_json(
        run / "summary.json",
        {
            "name": recipe.name,
            "base": base,
            "precision": read_json(run / "precision.json") if (run / "precision.json").exists() else None,
            "published": published(recipe.model.name),
            "protocol": _protocol(recipe, measures),
            "tuning": describe_tuning(recipe, run),
            "baseline": BASELINE if BASELINE in recipe.methods else None,
            "reference": REFERENCE if REFERENCE in recipe.methods else None,
            "measures": measures,
            "rows": rows,
            "methods": [_method(method, scores[method]) for method in scores],
            "pairs": _pairs(scores, made),
            "interactions": _interactions(scores),
            "environments": _environments(made),
        },
    )
    return all(row["status"] == "finished" for row in rows)


def join(run: Path) -> None:
    """Write the summary of a run again, with whatever has ended since.

    Args:
        run: the run folder.

    Raises:
        RecipeError: if it is none, or no worker has prepared it.
    """
    known, recipe = run / "summary.json", run / "recipe.yaml"
    for path in (known, recipe):
        if not path.exists():
            raise RecipeError(f"{path} is missing: give the folder of a run that `preproj probe` has begun.")
    refuse_newer(run)
    write_summary(run, parse_recipe(recipe.read_text("utf-8"), str(run)), read_json(known)["base"])


def _protocol(recipe: Recipe, measures: list[dict[str, Any]]) -> dict[str, str]:
    """Say how everything was measured, one entry for each part of the run."""
    training, evaluation = recipe.training, recipe.evaluation
    said = {
        "training": (
            f"The base is frozen; the new weights train on {training.tokens:,} tokens ({training.steps} steps of "
            f"{training.batch_size} packed blocks of {training.block_size}), the same tokens in the same order for "
            f"every method of a seed; AdamW, {training.warmup_ratio:.0%} linear warm-up, cosine decay to zero, weight "
            f"decay {training.weight_decay:g}, gradient norm clipped at {training.max_grad_norm:g}."
        )
    }
    if training.pre_lr_ratio != 1:
        said["training"] += f" The pre-projection learns at {training.pre_lr_ratio:g} of the rate of its method."
    of_the_base = [method for method in recipe.methods if parse_method(method).base]
    if of_the_base:
        said["training"] += f" In {' and '.join(of_the_base)} weights of the base train, in place of new ones."
    if recipe.tuning is not None:
        said["tuning"] = tuning_protocol(recipe.tuning, training)
    tasks = dict.fromkeys(measure["task"] for measure in measures)
    said |= {name: perplexity_protocol(name, evaluation, evaluation.split) for name in tasks if name in PROTOCOLS}
    if evaluation.retention is not None:
        said[RETENTION] = perplexity_protocol("document", evaluation, RETENTION)
    if evaluation.passages:
        said["last_word"] = RULE
    if any((parts := parse_method(method)).pre or parts.skip for method in recipe.methods):
        said["layers"] = (
            f"Measures of layers are means over the tokens of the first {LAYER_DOCUMENTS} documents that are scored "
            f"({evaluation.split} split)."
        )
    if evaluation.tasks:
        said["tasks"] = task_protocol(evaluation)
    return said | {"dtype": f"Base weights in {recipe.model.dtype}, new weights in float32.", "intervals": INTERVALS}


def _row(run: Path, method: str, seed: int) -> dict[str, Any]:
    folder = cell_folder(run, method, seed)
    row: dict[str, Any] = {"method": method, "seed": seed, "status": "missing", "reason": None, "notes": []}
    if (folder / "failed.json").exists():
        return row | {"status": "failed", "reason": read_json(folder / "failed.json")["reason"]}
    if not (folder / "metrics.json").exists():
        return row
    metrics = read_json(folder / "metrics.json")
    same = ("trainable_parameters", "share_of_total", "learning_rate", "tokens", "tokens_per_second", "notes")
    return (
        row
        | {key: metrics[key] for key in (*same, "peak_memory_bytes")}
        | {"status": "finished", "seconds": metrics["seconds"]["total"]}
    )


def _measures(scores: Scores) -> list[dict[str, Any]]:
    """List the measures of a run, in the order the cells have them."""
    first = {name: score for seeds in scores.values() for cell in seeds.values() for name, score in cell.items()}
    return [
        {
            "name": name,
            "task": score.measure.task,
            "metric": score.measure.metric,
            "kind": score.measure.kind,
            "items": score.items,
        }
        for name, score in first.items()
    ]


def _method(method: str, seeds: dict[int, dict[str, Score]]) -> dict[str, Any]:
    """Return a method's scores over its seeds, each with its interval over items."""
    names = next(iter(seeds.values()))
    return {
        "method": method,
        "seeds": list(seeds),
        "scores": {name: _interval([cell[name] for cell in seeds.values()]) for name in names},
    }


def _interval(scores: list[Score]) -> dict[str, float]:
    first = scores[0]
    if first.measure.kind == "accuracy" and len(scores) == 1 and first.items == len(first.groups):
        low, high = wilson(round(first.totals.sum()), first.items)
        return {"value": first.value, "low": low, "high": high}
    found = contrast(first.measure.kind, [(1, _totals(scores))], first.weights)
    return {key: found[key] for key in ("value", "low", "high")}


def _totals(scores: list[Score]) -> np.ndarray:
    """Return ``(seeds, groups)``."""
    return np.stack([score.totals for score in scores])


def _pairs(scores: Scores, made: Cells) -> list[dict[str, Any]]:
    """Compare every method with every one before it."""
    pairs = [_pair(scores, made, ours, theirs) for theirs, ours in combinations(scores, 2)]
    for name in dict.fromkeys(name for pair in pairs for name in pair["differences"]):
        differences = [pair["differences"][name] for pair in pairs if name in pair["differences"]]
        for difference, corrected in zip(differences, holm([d["p"] for d in differences]), strict=True):
            difference["p_holm"] = corrected
    return pairs


def _pair(scores: Scores, made: Cells, ours: str, theirs: str) -> dict[str, Any]:
    differs = _differs(made[ours], made[theirs])
    return {
        "ours": ours,
        "theirs": theirs,
        "differs": differs,
        "matched": not differs,
        "differences": {name: _difference(scores, ours, theirs, name) for name in _shared(scores, ours, theirs)},
    }


def _differs(mine: dict[int, dict[str, Any]], others: dict[int, dict[str, Any]]) -> list[str]:
    """List what besides the method differs between the cells of two methods."""
    sizes = [next(iter(cells.values()))["trainable_parameters"] for cells in (mine, others)]
    found = ["parameters"] if max(sizes) - min(sizes) > SAME_SIZE * max(sizes) else []
    found += [
        key for key in ("dtype", "device") if len({cell[key] for of in (mine, others) for cell in of.values()}) > 1
    ]
    orders = [{seed: cell["token_order_sha256"] for seed, cell in cells.items()} for cells in (mine, others)]
    untrained = any(None in order.values() for order in orders)
    return found + (["data"] if orders[0] != orders[1] and not untrained else [])


def _environments(made: Cells) -> list[dict[str, Any]]:
    """Group the cells by what they were trained and scored with."""
    found: list[dict[str, Any]] = []
    for method, cells in made.items():
        for seed, cell in cells.items():
            # Cells of earlier versions do not say.
            for environment in filter(None, cell.get("environment", {}).values()):
                ran_with = {
                    "device": environment["hardware"]["device_name"],
                    "platform": environment["hardware"]["platform"],
                    **environment["packages"],
                    "commit": environment["git_commit"] or "none",
                }
                group = next((group for group in found if group["with"] == ran_with), None)
                if group is None:
                    found.append(group := {"cells": [], "with": ran_with})
                if (name := f"{method} seed {seed}") not in group["cells"]:
                    group["cells"].append(name)
    return found


def _shared(scores: Scores, *methods: str) -> list[str]:
    """List the measures that all methods have."""
    cells = [next(iter(scores[method].values())) for method in methods]
    return [name for name in cells[0] if all(name in cell for cell in cells)]


def _difference(scores: Scores, ours: str, theirs: str, name: str) -> dict[str, Any]:
    mine, others = (_seeds(scores, method, name) for method in (ours, theirs))
    first = next(iter(mine.values()))
    kind, weights = first.measure.kind, first.weights
    assert all(score.groups == first.groups for score in (*mine.values(), *others.values()))
    a, b = (_totals(list(of.values())) for of in (mine, others))
    by_seed = [
        score.value - others[seed if seed in others else next(iter(others))].value for seed, score in mine.items()
    ]
    return {
        **contrast(kind, [(1, a), (-1, b)], weights),
        "p": p_value(kind, a, b, weights),
        "over_seeds": over_seeds(by_seed),
    }


def _seeds(scores: Scores, method: str, name: str) -> dict[int, Score]:
    return {seed: cell[name] for seed, cell in scores[method].items()}


def _interactions(scores: Scores) -> list[dict[str, Any]]:
    found = []
    for name, (one, other, both) in INTERACTIONS.items():
        if not all(method in scores for method in (BASELINE, one, other, both)):
            continue
        signed = [(1, both), (-1, one), (-1, other), (1, BASELINE)]
        differences = {}
        for measure in _shared(scores, BASELINE, one, other, both):
            terms = [(sign, list(_seeds(scores, method, measure).values())) for sign, method in signed]
            first = terms[0][1][0]
            totals = [(sign, _totals(of)) for sign, of in terms]
            differences[measure] = contrast(first.measure.kind, totals, first.weights)
        found.append({"name": name, "differences": differences})
    return found
