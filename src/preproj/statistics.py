"""Scores as sums over items, and paired differences of them with intervals.

Arrays of totals are ``(seeds, items)``: one row for each seed a method was trained with; what has one cell for all
seeds has one row. scipy is imported where it is used, so that adapters can be analysed for all else without it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

RESAMPLES = 10_000
CONFIDENCE = 0.95
POWER = 0.8


def accuracy(totals: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the share of correct answers, over the last axis (items)."""
    return totals.sum(-1) / weights.sum(-1)


def perplexity(totals: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return exp of the mean negative log-likelihood per unit of weight, over the last axis (items)."""
    return np.exp(totals.sum(-1) / weights.sum(-1))


METRICS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {"accuracy": accuracy, "perplexity": perplexity}


def contrast(kind: str, terms: Sequence[tuple[int, np.ndarray]], weights: np.ndarray) -> dict[str, float]:
    """Return a signed sum of methods' scores with its interval, paired over items.

    ``[(1, a), (-1, b)]`` is the difference of two methods; ``[(1, both), (-1, one), (-1, other), (1, none)]`` their
    interaction: what two parts gain together beyond the sum of what each gains alone.

    Args:
        kind: ``"accuracy"`` or ``"perplexity"``.
        terms: sign and totals ``(seeds, items)`` of each method.
        weights: ``(items,)``.

    Returns:
        ``value``, ``low``, ``high``, ``standard_error`` and ``detectable`` (in the unit of the score).
    """
    from scipy.stats import bootstrap, norm

    matrices = [(sign, np.atleast_2d(np.asarray(totals, dtype=float))) for sign, totals in terms]
    rows = [row for _, matrix in matrices for row in matrix]
    signed_weights = [sign / len(matrix) for sign, matrix in matrices for _ in matrix]  # the mean over seeds

    def score(*columns: np.ndarray, axis: int = -1) -> np.ndarray:
        *totals, n = columns
        scores = [METRICS[kind](row, n) for row in totals]
        return np.sum([weight * one for weight, one in zip(signed_weights, scores, strict=True)], axis=0)

    data = (*rows, np.asarray(weights, dtype=float))
    drawn = bootstrap(
        data,
        score,
        paired=True,
        vectorized=True,
        n_resamples=RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(0),
    )
    error = float(drawn.standard_error)
    return {
        "value": float(score(*data)),
        "low": float(drawn.confidence_interval.low),
        "high": float(drawn.confidence_interval.high),
        "standard_error": error,
        "detectable": float((norm.ppf(0.5 + CONFIDENCE / 2) + norm.ppf(POWER)) * error),
    }


def over_seeds(values: Sequence[float]) -> dict[str, Any]:
    """Return the mean of a difference over training seeds, and from three seeds on its Student's t interval."""
    from scipy.stats import t

    mean, n = float(np.mean(values)), len(values)
    if n < 3:
        return {"seeds": n, "mean": mean, "low": None, "high": None}
    half = float(t.ppf(0.5 + CONFIDENCE / 2, n - 1) * np.std(values, ddof=1) / np.sqrt(n))  # 0 where all are equal
    return {"seeds": n, "mean": mean, "low": mean - half, "high": mean + half}
