"""The headline says no more than the numbers do."""

import pytest

from preproj.report.headline import headline
from preproj.report.records import Base, Comparison, Interval, Result, Row, Run

NO = (-0.2, 0.2)


def cell(method, parameters, perplexity=30.0, seed=0, **versus):
    """A finished cell; `versus` holds, per other method, the intervals of perplexity and accuracy."""
    comparisons = {
        other: Comparison(*(Interval((low + high) / 2, low, high) for low, high in intervals))
        for other, intervals in versus.items()
    }
    result = Result(parameters, 0.1, 1e-3, None, 2**30, 1.0, perplexity, 0.4, comparisons, None, (), ())
    return Row(method, seed, "finished", None, (), result)


def say(*rows, reference="lora"):
    base = Base("b", "float32", 1, None)
    run = Run("r", base, None, "none", reference, rows, None, None, "")  # type: ignore[arg-type]
    return " ".join(headline(run))


@pytest.mark.parametrize(
    ("perplexity", "accuracy", "expected"),
    [
        (NO, NO, "So pre+skip does not beat lora in this run."),
        ((0.1, 0.5), NO, "So pre+skip does not beat lora in this run."),
        ((-0.5, -0.1), NO, "pre+skip beats lora on one of the two measures, not on both."),
        ((-0.5, -0.1), (-0.05, -0.01), "The two measures disagree"),
        (NO, (0.01, 0.05), "pre+skip beats lora on one of the two measures, not on both."),
    ],
)
def test_the_verdict_against_lora_follows_the_intervals(perplexity, accuracy, expected):
    rows = (cell("none", 0), cell("lora", 10), cell("pre+skip", 10, none=(NO, NO), lora=(perplexity, accuracy)))
    assert expected in say(*rows)


def test_a_clear_win_is_not_talked_down():
    said = say(cell("lora", 10), cell("pre+skip", 10, lora=((-0.5, -0.1), (0.01, 0.05))))
    assert "better in perplexity" in said
    assert "better in last-word accuracy" in said
    for doubt in ("does not beat", "not on both", "disagree", "equal size"):
        assert doubt not in said


def test_an_interval_that_touches_zero_is_not_a_difference():
    said = say(cell("none", 0), cell("pre+skip", 10, none=((-0.4, 0.0), (0.0, 0.02))))
    assert said.count("not distinguishable in") == 2
    assert "better" not in said


@pytest.mark.parametrize(
    ("mine", "perplexity", "advantage"),
    [(210, (-0.5, -0.1), "pre+skip"), (210, (0.1, 0.5), None), (5, (-0.5, -0.1), None), (5, (0.1, 0.5), "lora")],
)
def test_a_lower_perplexity_with_more_parameters_is_called_so(mine, perplexity, advantage):
    said = say(cell("lora", 10), cell("pre+skip", mine, lora=(perplexity, NO)))
    assert f"({mine} against 10)" in said
    if advantage:
        assert f"an advantage of {advantage} here is not an advantage at equal size" in said
    else:
        assert "equal size" not in said


def test_parameter_counts_within_a_hundredth_are_not_called_an_advantage():
    said = say(cell("lora", 1000), cell("pre+skip", 1001, lora=((-0.5, -0.1), (0.01, 0.05))))
    assert "train about as many parameters (1.00 k against 1.00 k)" in said
    assert "equal size" not in said


def test_seeds_that_disagree_are_said_to_disagree():
    said = say(
        cell("none", 0),
        cell("pre+skip", 10, none=((-0.5, -0.1), (0.01, 0.05))),
        cell("pre+skip", 10, seed=1, none=((-0.3, 0.1), (0.01, 0.05))),
        reference=None,
    )
    assert "in perplexity the seeds disagree (seed 0: 30.00, difference −0.30" in said
    assert "better in last-word accuracy" in said


def test_a_lower_perplexity_elsewhere_is_named():
    said = say(cell("none", 0), cell("pre+skip", 10, none=(NO, NO)), cell("lora-qkv", 7, 29.5), reference=None)
    assert "lowest perplexity of the run is that of lora-qkv (29.50, 7 trainable parameters)" in said


def test_unfinished_cells_are_counted():
    failed = Row("lora", 0, "failed", "out of memory", (), None)
    said = say(cell("none", 0), failed, cell("pre+skip", 10, none=(NO, NO)))
    assert "pre+skip cannot be compared with lora" in said
    assert "1 of 3 cells have no result (lora, seed 0, failed)" in said
    assert say(failed) == "No cell of this run has finished, so there is nothing to report yet."


def test_the_untouched_model_alone_is_not_compared():
    assert say(cell("none", 0)) == "none: perplexity 30.00, last-word accuracy 40.0 %."
