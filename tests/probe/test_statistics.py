"""Scores and paired comparisons against closed forms, other libraries, and a resampling written out here."""

import itertools

import numpy as np
import pytest
from scipy.stats import t
from statsmodels.stats.contingency_tables import mcnemar
from statsmodels.stats.proportion import proportion_confint

from preproj.probe.statistics import holm, p_value, wilson
from preproj.statistics import accuracy, contrast, over_seeds, perplexity

GENERATOR = np.random.default_rng(1)


def difference(kind, ours, theirs, weights):
    return contrast(kind, [(1, np.asarray(ours)), (-1, np.asarray(theirs))], weights)


def test_perplexity_weighs_documents_by_tokens():
    assert perplexity(np.array([2.0, 6.0]), np.array([1, 3])) == pytest.approx(np.exp(2.0))


def test_accuracy_weighs_documents_by_questions():
    assert accuracy(np.array([1.0, 3.0]), np.array([1, 4])) == pytest.approx(0.8)


def test_a_method_against_itself_differs_by_nothing():
    loss, tokens = GENERATOR.uniform(100, 300, 40), GENERATOR.integers(50, 100, 40)
    found = difference("perplexity", loss, loss, tokens)
    assert set(found.values()) == {0.0}
    assert p_value("perplexity", loss, loss, tokens) == 1.0


def test_pairing_cancels_what_documents_share():
    # Every document is worse by the same number of correct passages, so resampling changes nothing.
    correct = GENERATOR.integers(1, 5, 50).astype(float)
    found = difference("accuracy", correct, correct - 1, np.full(50, 5.0))
    assert found == pytest.approx(
        {"value": 0.2, "low": 0.2, "high": 0.2, "standard_error": 0.0, "detectable": 0.0}, abs=1e-12
    )


def test_interval_of_a_mean_difference_is_the_normal_one():
    # With equal weights the accuracy difference is a mean over documents; its bootstrap interval approaches
    # mean ± 1.96 · s / √n, and 80 % power needs 2.80 standard errors (1.96 + 0.84).
    n = 400
    ours, theirs = GENERATOR.integers(0, 11, n), GENERATOR.integers(0, 11, n)
    found = difference("accuracy", ours, theirs, np.full(n, 10))
    d = (ours - theirs) / 10
    error = d.std() / np.sqrt(n)
    assert found["value"] == pytest.approx(d.mean())
    assert found["low"] == pytest.approx(d.mean() - 1.96 * error, abs=error / 5)
    assert found["high"] == pytest.approx(d.mean() + 1.96 * error, abs=error / 5)
    assert found["detectable"] == pytest.approx(2.80 * error, rel=0.05)


def test_interval_equals_a_resampling_written_out():
    tokens = GENERATOR.integers(20, 200, 30)
    ours = tokens * GENERATOR.normal(2.5, 0.3, 30)
    theirs = ours + tokens * GENERATOR.normal(0.1, 0.2, 30)
    found = difference("perplexity", ours, theirs, tokens)
    differences = []
    for _ in range(4000):
        drawn = GENERATOR.integers(0, 30, 30)
        n = tokens[drawn].sum()
        differences.append(np.exp(ours[drawn].sum() / n) - np.exp(theirs[drawn].sum() / n))
    low, high = np.quantile(differences, [0.025, 0.975])
    assert found["low"] == pytest.approx(low, abs=0.1 * (high - low))
    assert found["high"] == pytest.approx(high, abs=0.1 * (high - low))


def test_several_seeds_are_averaged_score_by_score():
    tokens = GENERATOR.integers(20, 200, 30)
    ours = tokens * GENERATOR.normal(2.5, 0.3, (3, 30))
    theirs = tokens * GENERATOR.normal(2.6, 0.3, (1, 30))
    scores = [np.exp(row.sum() / tokens.sum()) for row in (*ours, *theirs)]
    found = difference("perplexity", ours, theirs, tokens)
    assert found["value"] == pytest.approx(np.mean(scores[:3]) - scores[3])
    assert found["low"] < found["value"] < found["high"]


def test_an_interaction_of_parts_that_add_up_is_nothing():
    none = GENERATOR.integers(0, 5, 200).astype(float)
    one, other = none + GENERATOR.integers(0, 3, 200), none + GENERATOR.integers(0, 3, 200)
    both = one + other - none
    found = contrast("accuracy", [(1, both), (-1, one), (-1, other), (1, none)], np.full(200, 10.0))
    assert found["value"] == pytest.approx(0, abs=1e-12)
    assert found["high"] - found["low"] == pytest.approx(0, abs=1e-12)
    more = contrast("accuracy", [(1, both + 1), (-1, one), (-1, other), (1, none)], np.full(200, 10.0))
    assert more["low"] == pytest.approx(0.1)


def test_interval_is_repeatable():
    loss, tokens = GENERATOR.uniform(100, 300, 40), GENERATOR.integers(50, 100, 40)
    calls = [difference("perplexity", loss, loss[::-1], tokens) for _ in range(2)]
    assert calls[0] == calls[1]


def test_p_value_of_questions_is_mcnemars():
    ours = (GENERATOR.random(500) < 0.5).astype(float)
    theirs = np.where(GENERATOR.random(500) < 0.1, 1 - ours, ours)
    table = [[np.sum((ours == a) & (theirs == b)) for b in (1, 0)] for a in (1, 0)]
    assert p_value("accuracy", ours, theirs, np.ones(500)) == pytest.approx(mcnemar(table, exact=True).pvalue)


def test_p_value_of_documents_is_that_of_all_exchanges():
    ours, theirs = GENERATOR.normal(250, 20, 10), GENERATOR.normal(262, 20, 10)
    observed = abs((ours - theirs).sum())
    sums = [abs(((ours - theirs) * signs).sum()) for signs in itertools.product((1, -1), repeat=10)]
    expected = np.mean([total >= observed - 1e-9 for total in sums])
    assert p_value("perplexity", ours, theirs, np.full(10, 100.0)) == pytest.approx(expected)


def test_wilson_is_that_of_statsmodels():
    assert wilson(240, 500) == pytest.approx(proportion_confint(240, 500, method="wilson"))


def test_holm_multiplies_the_smallest_by_all_and_keeps_the_order():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])  # 3 · 0.01, then 2 · 0.03, then its maximum
    assert holm([]) == []


def test_seeds_get_an_interval_from_three_on():
    assert over_seeds([1.0, 3.0]) == {"seeds": 2, "mean": 2.0, "low": None, "high": None}
    found = over_seeds([1.0, 2.0, 3.0])
    half = t.ppf(0.975, 2) * 1 / np.sqrt(3)  # standard deviation 1, three seeds
    assert (found["mean"], found["low"], found["high"]) == pytest.approx((2.0, 2.0 - half, 2.0 + half))
    assert over_seeds([1.0, 1.0, 1.0]) == {"seeds": 3, "mean": 1.0, "low": 1.0, "high": 1.0}
