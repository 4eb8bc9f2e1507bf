"""Paired differences against closed forms and a resampling written out here."""

import numpy as np
import pytest

from preproj.probe.statistics import accuracy, paired_difference, perplexity

GENERATOR = np.random.default_rng(1)


def test_perplexity_weighs_documents_by_tokens():
    assert perplexity(np.array([2.0, 6.0]), np.array([1, 3])) == pytest.approx(np.exp(2.0))


def test_a_method_against_itself_differs_by_nothing():
    loss, tokens = GENERATOR.uniform(100, 300, 40), GENERATOR.integers(50, 100, 40)
    assert paired_difference(loss, loss, tokens, perplexity) == {"difference": 0.0, "low": 0.0, "high": 0.0}


def test_pairing_cancels_what_documents_share():
    # Every document is worse by the same number of correct passages, so resampling changes nothing.
    correct = GENERATOR.integers(1, 5, 50).astype(float)
    result = paired_difference(correct, correct - 1, np.full(50, 5.0), accuracy)
    assert result == pytest.approx({"difference": 0.2, "low": 0.2, "high": 0.2})


def test_interval_of_a_mean_difference_is_the_normal_one():
    # With equal weights the accuracy difference is a mean over documents; its bootstrap interval approaches
    # mean ± 1.96 · s / √n.
    n = 400
    ours, theirs = GENERATOR.integers(0, 11, n), GENERATOR.integers(0, 11, n)
    result = paired_difference(ours, theirs, np.full(n, 10), accuracy)
    d = (ours - theirs) / 10
    half = 1.96 * d.std() / np.sqrt(n)
    assert result["difference"] == pytest.approx(d.mean())
    assert result["low"] == pytest.approx(d.mean() - half, abs=half / 10)
    assert result["high"] == pytest.approx(d.mean() + half, abs=half / 10)


def test_interval_equals_a_resampling_written_out():
    tokens = GENERATOR.integers(20, 200, 30)
    ours = tokens * GENERATOR.normal(2.5, 0.3, 30)
    theirs = ours + tokens * GENERATOR.normal(0.1, 0.2, 30)
    result = paired_difference(ours, theirs, tokens, perplexity)
    differences = []
    for _ in range(4000):
        drawn = GENERATOR.integers(0, 30, 30)
        n = tokens[drawn].sum()
        differences.append(np.exp(ours[drawn].sum() / n) - np.exp(theirs[drawn].sum() / n))
    low, high = np.quantile(differences, [0.025, 0.975])
    assert result["low"] == pytest.approx(low, abs=0.1 * (high - low))
    assert result["high"] == pytest.approx(high, abs=0.1 * (high - low))


def test_interval_is_repeatable():
    loss, tokens = GENERATOR.uniform(100, 300, 40), GENERATOR.integers(50, 100, 40)
    calls = [paired_difference(loss, loss[::-1], tokens, perplexity) for _ in range(2)]
    assert calls[0] == calls[1]
