"""The precision check: does the run's dtype damage the untouched model? Asked before any training.

A damaged baseline makes every method that repairs it look good. So where a run is not in float32, the untouched model
is scored on the first held-out documents and passages in float32 and in the run's dtype.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np

from preproj.probe.base import load_model, load_tokenizer, resolve_base
from preproj.probe.ending import one_sentence
from preproj.probe.evaluation import score_document, score_last_word
from preproj.probe.files import write_json
from preproj.probe.prepared import Prepared
from preproj.probe.process import start_process
from preproj.probe.recipe import Recipe, parse_recipe
from preproj.probe.statistics import wilson
from preproj.statistics import accuracy, perplexity

DOCUMENTS = 16
PASSAGES = 100
TOLERANCE = 0.02  # relative, of perplexity


def check_precision(run: Path) -> None:
    """Score the untouched model in both dtypes and write ``precision.json``.

    Args:
        run: the run folder, with its recipe and data.
    """
    recipe = parse_recipe((run / "recipe.yaml").read_text("utf-8"), str(run / "recipe.yaml"))
    prepared = Prepared.read(run, recipe.evaluation)
    dtypes: tuple[str, ...] = ("float32", recipe.model.dtype)
    scores = {dtype: _score(recipe, prepared, dtype) for dtype in dtypes}
    write_json(run / "precision.json", {"scores": scores, "warning": _warning(recipe.model.dtype, scores)})


def _score(recipe: Recipe, prepared: Prepared, dtype: str) -> dict[str, Any]:
    base = resolve_base(recipe.model.name)
    model, tokenizer = load_model(base, dtype), load_tokenizer(base)
    evaluation = recipe.evaluation
    documents = [
        score_document(model, tokenizer, name, ids, evaluation.context, evaluation.stride)["perplexity"]
        for name, ids in prepared.documents(recipe.evaluation.split)[:DOCUMENTS]
    ]
    loss, tokens = np.array(documents).T
    found: dict[str, Any] = {"perplexity": float(perplexity(loss, tokens)), "documents": len(documents)}
    passages = prepared.passages[:PASSAGES]
    if passages:
        correct = [score_last_word(model, tokenizer, p.context, p.target)["acc"] for p in passages]
        right, asked = np.array(correct).T
        found |= {"last_word": float(accuracy(right, asked)), "passages": len(passages)}
    return found


def _warning(dtype: str, scores: dict[str, dict[str, Any]]) -> str | None:
    """Say what the dtype changes, if that is more than the tolerance or the interval of float32's accuracy."""
    exact, rounded = scores["float32"], scores[dtype]
    said = []
    if not abs(rounded["perplexity"] / exact["perplexity"] - 1) <= TOLERANCE:  # true for what is not a number too
        said.append(f"perplexity {rounded['perplexity']:.2f} instead of {exact['perplexity']:.2f}")
    if "last_word" in exact:
        low, high = wilson(round(exact["last_word"] * exact["passages"]), exact["passages"])
        if not low <= rounded["last_word"] <= high:
            said.append(f"last-word accuracy {rounded['last_word']:.1%} instead of {exact['last_word']:.1%}")
    if not said:
        return None
    return (
        f"The untouched model is damaged by {dtype}: {' and '.join(said)} in float32. A method may only repair that "
        "damage; do not report its gain. Set model.dtype to float32."
    )


if __name__ == "__main__":
    with start_process(Path(sys.argv[1])), one_sentence(Path(sys.argv[1])):
        check_precision(Path(sys.argv[1]))
