"""How a measure changes with depth: the paper's late/early ratio, and Spearman's rank correlation."""

from collections.abc import Iterable, Sequence
from typing import Any

from preproj.statistics import over_seeds

PAPER_RANGES = {"pythia-160m": (12, 8), "pythia-410m": (24, 11)}
"""By name of the model: its layers, and how many of the first the paper calls early (Shinde 2026)."""

MEASURES = (
    "skip_norm",
    "skip_spectral_norm",
    "skip_mean_row_norm",
    "skip_effective_rank",
    "skip_change_norm",
    "skip_change_spectral_norm",
    "skip_change_mean_row_norm",
    "skip_change_effective_rank",
    "pre_norm",
    "pre_spectral_norm",
    "pre_mean_row_norm",
    "pre_effective_rank",
    "skip_to_attention",
    "skip_cosine",
    "skip_share",
    "pre_to_input",
)


def early_layers(layers: int, model: str = "") -> int:
    """Return how many of the first layers count as early; the last layer is late.

    Args:
        layers: number of layers.
        model: name of the base; for Pythia-160M and -410M the paper's own ranges hold (0-7 and 0-10).

    Returns:
        In general two thirds of the layers, at least one.
    """
    for name, (paper_layers, early) in PAPER_RANGES.items():
        if name in model.lower() and layers == paper_layers:
            return early
    return max(1, 2 * layers // 3)


def late_over_early(values: Sequence[float | None], early: int) -> float | None:
    """Return the last layer's value over the mean of the first ``early``.

    None for fewer than two layers, where a layer has no value, and where that mean is not above zero.
    """
    known = [value for value in values if value is not None]
    if len(known) < max(len(values), 2):
        return None
    mean = sum(known[:early]) / early
    return known[-1] / mean if mean > 0 else None


def spearman(values: Sequence[float | None]) -> float | None:
    """Return Spearman's ρ between depth and a measure: 1 where it rises from layer to layer, -1 where it falls.

    None for fewer than two layers, where a layer has no value, and where all have the same.
    """
    from scipy.stats import spearmanr  # of the extra `probe`

    known = [value for value in values if value is not None]
    if len(known) < len(values) or len(set(known)) < 2:
        return None
    return float(spearmanr(range(len(known)), known).statistic)


def depth(rows: Iterable[dict[str, Any]], model: str = "") -> list[dict[str, Any]]:
    """Return both statistics of every measure, for each class of tokens.

    Args:
        rows: one for each layer and class, see :attr:`preproj.analysis.Analysis.rows`; of one adapter.
        model: name of the base.

    Returns:
        Rows of ``token_class``, ``measure``, ``late_over_early`` and ``spearman``; measures that no layer has are left
        out.
    """
    by_class: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_class.setdefault(row["token_class"], []).append(row)
    found = []
    for token_class, layers in by_class.items():
        early = early_layers(len(layers), model)
        for measure in MEASURES:
            values = [row[measure] for row in sorted(layers, key=lambda row: row["layer"])]
            if any(value is not None for value in values):
                statistics = {"late_over_early": late_over_early(values, early), "spearman": spearman(values)}
                found.append({"token_class": token_class, "measure": measure, **statistics})
    return found


def depth_over_seeds(seeds: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Put the depth tables of several training seeds together.

    Args:
        seeds: a table of :func:`depth` for each seed.

    Returns:
        Rows of ``token_class``, ``measure``, and for each statistic ``seeds``, ``mean``, ``low`` and ``high`` (by
        Student's t, from three seeds on, else None); a statistic that one of the seeds does not have is None.
    """
    tables = [{(row["token_class"], row["measure"]): row for row in table} for table in seeds]
    rows = []
    for token_class, measure in tables[0]:
        row: dict[str, Any] = {"token_class": token_class, "measure": measure}
        for statistic in ("late_over_early", "spearman"):
            values = [table.get((token_class, measure), {}).get(statistic) for table in tables]
            known = [value for value in values if value is not None]
            row[statistic] = over_seeds(known) if len(known) == len(tables) else None
        rows.append(row)
    return rows
