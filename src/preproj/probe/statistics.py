"""Scores, their intervals, and paired comparisons of methods on the same held-out items.

Arrays of totals are ``(seeds, items)``: one row for each seed a method was trained with; a method with one cell for all
seeds has one row.
Items that belong together (passages of one document) are summed into one first.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.stats import binomtest, bootstrap, norm, permutation_test, t
from statsmodels.stats.multitest import multipletests

from preproj.probe.scores import METRICS

RESAMPLES = 10_000
CONFIDENCE = 0.95
POWER = 0.8

INTERVALS = (
    f"95 % intervals of differences come from a paired percentile bootstrap over items ({RESAMPLES:,} resamples, fixed "
    "seed; passages of one document go together), those of one accuracy are Wilson's. They cover which items were "
    "drawn, not training seeds; an interval over seeds is given from three seeds on (Student's t). p-values: McNemar's "
    "exact test for one seed's accuracy, else a paired permutation test over items; Holm's correction over the pairs "
    f"of a measure. The detectable difference is the smallest that would be found with {POWER:.0%} power at 5 %."
)


def wilson(correct: int, n: int) -> tuple[float, float]:
    """Return Wilson's interval of an accuracy: ``correct`` of ``n`` independent questions."""
    interval = binomtest(correct, n).proportion_ci(CONFIDENCE, method="wilson")
    return float(interval.low), float(interval.high)


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


def p_value(kind: str, ours: np.ndarray, theirs: np.ndarray, weights: np.ndarray) -> float:
    """Test whether two methods score the same on the same items, two-sided.

    Args:
        kind: ``"accuracy"`` or ``"perplexity"``.
        ours: totals ``(seeds, items)``.
        theirs: the other's.
        weights: ``(items,)``.

    Returns:
        McNemar's exact p-value for one seed's questions, else that of a permutation test that exchanges the two methods
        item by item (of mean totals over seeds).
    """
    a, b, n = np.atleast_2d(ours), np.atleast_2d(theirs), np.asarray(weights, dtype=float)
    if kind == "accuracy" and len(a) == len(b) == 1 and (n == 1).all():
        wins, losses = int((a > b).sum()), int((a < b).sum())
        return float(binomtest(wins, wins + losses).pvalue) if wins + losses else 1.0

    def difference(x: np.ndarray, y: np.ndarray, axis: int = -1) -> np.ndarray:
        return (x - y).sum(axis)

    test = permutation_test(
        (a.mean(0), b.mean(0)),
        difference,
        permutation_type="samples",
        vectorized=True,
        n_resamples=RESAMPLES - 1,
        rng=np.random.default_rng(0),
    )
    return float(test.pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected for their number by Holm's method."""
    return [float(p) for p in multipletests(p_values, method="holm")[1]] if len(p_values) else []


def over_seeds(values: Sequence[float]) -> dict[str, Any]:
    """Return the mean of a difference over training seeds, and from three seeds on its Student's t interval."""
    mean, n = float(np.mean(values)), len(values)
    if n < 3:
        return {"seeds": n, "mean": mean, "low": None, "high": None}
    low, high = t.interval(CONFIDENCE, n - 1, mean, np.std(values, ddof=1) / np.sqrt(n))
    return {"seeds": n, "mean": mean, "low": float(low), "high": float(high)}
