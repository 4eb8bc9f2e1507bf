"""Differences between two methods on the same held-out items, with intervals."""

from collections.abc import Callable, Sequence

import numpy as np
from scipy.stats import bootstrap

RESAMPLES = 10_000
CONFIDENCE = 0.95

INTERVALS = (
    f"95 % intervals of differences come from a paired percentile bootstrap over documents ({RESAMPLES:,} resamples, "
    "fixed seed). They cover which documents were drawn, not training seeds."
)


def perplexity(log_likelihood: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Return exp of the mean negative log-likelihood per token, over the last axis (documents)."""
    return np.exp(log_likelihood.sum(-1) / tokens.sum(-1))


def accuracy(correct: np.ndarray, passages: np.ndarray) -> np.ndarray:
    """Return the share of correct passages, over the last axis (documents)."""
    return correct.sum(-1) / passages.sum(-1)


def paired_difference(
    ours: Sequence[float],
    theirs: Sequence[float],
    weights: Sequence[float],
    metric: Callable[[np.ndarray, np.ndarray], np.ndarray],
) -> dict[str, float]:
    """Return ``metric(ours) − metric(theirs)`` with its 95 % interval.

    Documents are drawn with replacement, the same ones for both methods, so what a document's difficulty adds to
    both cancels.

    Args:
        ours: per document, summed negative log-likelihood or number of correct passages.
        theirs: the same of the other method, on the same documents.
        weights: per document, scored tokens or number of passages.
        metric: :func:`perplexity` or :func:`accuracy`.

    Returns:
        ``difference``, ``low`` and ``high``.
    """
    data = tuple(np.asarray(values, dtype=float) for values in (ours, theirs, weights))

    def difference(a: np.ndarray, b: np.ndarray, n: np.ndarray, axis: int = -1) -> np.ndarray:
        return metric(a, n) - metric(b, n)

    interval = bootstrap(
        data,
        difference,
        paired=True,
        vectorized=True,
        n_resamples=RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    a, b, n = data
    return {"difference": float(difference(a, b, n)), "low": float(interval.low), "high": float(interval.high)}
