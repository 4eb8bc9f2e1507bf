"""Statistics over depth, by hand."""

import numpy as np
import pytest
from scipy.stats import t

from preproj.depth import depth, depth_over_seeds, early_layers, late_over_early, spearman


@pytest.mark.parametrize(
    ("layers", "model", "early"),
    [
        (12, "EleutherAI/pythia-160m", 8),  # layers 0 to 7
        (24, "EleutherAI/pythia-410m", 11),  # layers 0 to 10
        (24, "models/Pythia-410M-deduped", 11),
        (12, "EleutherAI/pythia-410m", 8),  # only some of its layers are adapted
        (24, "another", 16),
        (30, "", 20),
        (1, "", 1),
    ],
)
def test_early_layers_are_the_papers_or_two_thirds(layers, model, early):
    assert early_layers(layers, model) == early


def test_the_ratio_is_the_last_layer_over_the_mean_of_the_early_ones():
    assert late_over_early([1, 2, 3, 100, 100, 8], early=3) == pytest.approx(4)


@pytest.mark.parametrize("values", [[1.0], [1.0, 1.0, None], [None, 1.0, 2.0], [-1.0, 1.0, 2.0], [-3.0, 1.0, 2.0]])
def test_there_is_no_ratio_without_a_positive_mean_and_a_value_for_each_layer(values):
    assert late_over_early(values, early=2) is None


def test_spearman_of_planted_curves():
    layers = np.arange(12)
    assert spearman(list(np.exp(layers))) == pytest.approx(1)
    assert spearman(list(-(layers**3))) == pytest.approx(-1)
    swapped = [0, 1, 2, 5, 4, 3]  # by hand: 1 - 6 · (2² + 2²) / (6 · (6² - 1))
    assert spearman(swapped) == pytest.approx(1 - 6 * 8 / (6 * 35))
    assert spearman([1.0, 2.0, None]) is None
    assert spearman([2.0, 2.0, 2.0]) is None


def rows(measure: str, values: list, token_class: str = "all") -> list[dict]:
    empty = dict.fromkeys(
        [
            f"{what}_{measure}"
            for what in ("skip", "skip_change", "pre")
            for measure in ("norm", "spectral_norm", "mean_row_norm", "effective_rank")
        ]
        + ["skip_to_attention", "skip_cosine", "skip_share", "pre_to_input"]
    )
    return [empty | {"layer": i, "token_class": token_class, measure: value} for i, value in enumerate(values)]


def test_the_table_has_each_measure_that_there_is_for_each_class():
    found = depth(rows("skip_norm", [1, 1, 3]) + rows("skip_to_attention", [4, 4, 2], "content"))
    assert found == [
        {"token_class": "all", "measure": "skip_norm", "late_over_early": 3, "spearman": pytest.approx(0.75**0.5)},
        {
            "token_class": "content",
            "measure": "skip_to_attention",
            "late_over_early": 0.5,
            "spearman": pytest.approx(-(0.75**0.5)),
        },
    ]


def test_seeds_are_put_together_with_an_interval_from_three_on():
    tables = [depth(rows("skip_norm", [1, 1, last])) for last in (2, 3, 4)]
    (row,) = depth_over_seeds(tables)
    half = t.ppf(0.975, 2) / np.sqrt(3)  # the ratios 2, 3, 4 have standard deviation 1
    assert (row["token_class"], row["measure"]) == ("all", "skip_norm")
    assert row["late_over_early"] == {
        "seeds": 3,
        "mean": 3,
        "low": pytest.approx(3 - half),
        "high": pytest.approx(3 + half),
    }
    (pair,) = depth_over_seeds(tables[:2])
    assert pair["late_over_early"] == {"seeds": 2, "mean": 2.5, "low": None, "high": None}
    (missing,) = depth_over_seeds([tables[0], depth(rows("skip_norm", [-1, -1, 1]))])
    assert missing["late_over_early"] is None
    assert missing["spearman"]["seeds"] == 2
