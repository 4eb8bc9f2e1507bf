"""Wilson's intervals and tests of methods on the same held-out items; differences are in :mod:`preproj.statistics`.

Items that belong together (passages of one document) are summed into one first.
"""

from collections.abc import Sequence

import numpy as np
from scipy.stats import binomtest, permutation_test
from statsmodels.stats.multitest import multipletests

from preproj.statistics import CONFIDENCE, POWER, RESAMPLES

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
