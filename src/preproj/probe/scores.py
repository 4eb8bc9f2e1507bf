"""What a cell scored, item by item: ``items/<task>.jsonl`` of its folder, from which everything else is computed.

Every measure is a sum over items divided by a sum of weights: correct answers by number of questions (``accuracy``), or
negative log-likelihood by number of tokens, of which ``exp`` is taken (``perplexity``). A line is one item: ``id``,
``group`` (items of one group are drawn together by the bootstrap, such as the passages of one document) and, under each
metric's name, the pair of its total and its weight: correct and 1, or negative log-likelihood (nats) and number of
tokens. Further keys say what the model answered.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from preproj.probe.errors import RecipeError
from preproj.probe.files import read_json, read_jsonl, write_jsonl
from preproj.statistics import METRICS

Kind = Literal["accuracy", "perplexity"]


@dataclass(frozen=True)
class Measure:
    """One number of a cell: a metric of a task.

    Attributes:
        task: ``document``, ``stream``, ``last_word``, ``retention``, or a task of the harness.
        metric: ``perplexity``, ``word_perplexity``, ``acc``, ``acc_norm`` and so on.
        kind: an accuracy (higher is better) or a perplexity (lower is better).
    """

    task: str
    metric: str
    kind: Kind

    @property
    def name(self) -> str:
        """``task/metric``, the key in result files."""
        return f"{self.task}/{self.metric}"


@dataclass(frozen=True)
class Score:
    """A measure of one cell, by group of items.

    Attributes:
        measure: which.
        groups: names of the groups, in the order of the items.
        totals: ``(groups,)``.
        weights: ``(groups,)``.
        items: how many items the groups hold.
    """

    measure: Measure
    groups: tuple[str, ...]
    totals: np.ndarray
    weights: np.ndarray
    items: int

    @property
    def value(self) -> float:
        """The accuracy or the perplexity."""
        return float(METRICS[self.measure.kind](self.totals, self.weights))


def write_items(folder: Path, task: str, items: Iterable[dict[str, Any]]) -> None:
    """Write the items of one task into a cell's folder."""
    write_jsonl(folder / "items" / f"{task}.jsonl", items)


def read_scores(folder: Path) -> dict[str, Score]:
    """Read every score of a finished cell, by the name of its measure.

    Cells of format version 1 are read as ``document_v1/perplexity`` (a document's first token was not scored then) and
    ``last_word/acc``.
    """
    metrics = read_json(folder / "metrics.json")
    if metrics["format_version"] == 1:
        return _of_version_1(folder)
    scores = {}
    for task, kinds in metrics["measures"].items():
        path = folder / "items" / f"{task}.jsonl"
        if not path.exists():
            raise RecipeError(f"{path} is missing; remove metrics.json of its cell and repeat the command that ran it.")
        items = read_jsonl(path)
        for metric, kind in kinds.items():
            pairs = [(row["group"], *row[metric]) for row in items]
            score = _grouped(Measure(task, metric, kind), pairs)
            scores[score.measure.name] = score
    return scores


def _of_version_1(folder: Path) -> dict[str, Score]:
    documents, passages = (read_jsonl(folder / f"{name}.jsonl") for name in ("documents", "passages"))
    perplexity = [(row["id"], row["negative_log_likelihood"], row["tokens"]) for row in documents]
    scores = [_grouped(Measure("document_v1", "perplexity", "perplexity"), perplexity)]
    if passages:
        correct = [(row["document"], float(row["correct"]), 1) for row in passages]
        scores.append(_grouped(Measure("last_word", "acc", "accuracy"), correct))
    return {score.measure.name: score for score in scores}


def _grouped(measure: Measure, pairs: Iterable[tuple[str, float, float]]) -> Score:
    sums: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(2))
    items = 0
    for group, *pair in pairs:
        sums[group] += pair
        items += 1
    totals, weights = np.array(list(sums.values())).T
    return Score(measure, tuple(sums), totals, weights, items)
