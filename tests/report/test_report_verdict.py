"""The first screen answers four questions, and no more than the numbers do."""

from dataclasses import replace

import pytest
from made_run import cell, made, pair

from preproj.report.records import Interval
from preproj.report.verdict import verdict

CLEAR, UNCLEAR, NO = (-0.7, -0.3), (-0.7, 0.1), (-0.2, 0.2)


def answers(rows, pairs=(), **options):
    found = verdict(made(rows, pairs, **options))
    return found.title, {answer.question: answer for answer in found.answers}


ROWS = (cell("none", 0, 30.0), cell("lora", 10, 29.5), cell("pre+skip", 10, 29.0))


@pytest.mark.parametrize(
    ("rows", "pairs", "title"),
    [
        (ROWS, [pair("pre+skip", "lora", CLEAR, NO)], "pre+skip wins in document perplexity"),
        (ROWS, [pair("lora", "pre+skip", (0.3, 0.7), NO)], "pre+skip wins in document perplexity"),
        (
            ROWS,
            [pair("pre+skip", "lora", UNCLEAR, NO)],
            "No clear winner: pre+skip and lora cannot be told apart",
        ),
        (
            ROWS,
            [pair("pre+skip", "lora", CLEAR, NO, differs=("parameters",)), pair("pre+skip", "none", CLEAR, NO)],
            "pre+skip scores best in document perplexity",
        ),
        (
            ROWS,
            [pair("pre+skip", "lora", CLEAR, NO, differs=("data",))],
            "pre+skip scores best in document perplexity, with no fair rival",
        ),
        (
            (cell("none", 0, 30.0), cell("pre+skip", 10, 31.0)),
            [pair("pre+skip", "none", (0.3, 0.7), NO)],
            "No method beats the untouched model",
        ),
        (ROWS[:1], [], "The untouched model stands alone"),
        ((), [], "Nothing to report yet"),
    ],
)
def test_the_title_follows_the_pair_of_the_best_and_the_next_fair_method(rows, pairs, title):
    assert answers(rows, pairs)[0] == title


def test_the_lead_is_told_with_its_interval_and_every_measure():
    _, found = answers(ROWS, [pair("pre+skip", "lora", CLEAR, (-0.03, -0.01))])
    assert found["Which method won?"].answer == "pre+skip"
    much = found["By how much?"]
    assert much.answer == "0.50 lower"
    assert much.details[1] == "pre+skip − lora: −0.50 [−0.70, −0.30]."
    assert much.verdicts == (("document perplexity", "better"), ("last_word acc", "worse"))
    assert found["What did it cost?"].details[1].startswith("lora: 10 parameters (10.00 %), 1 s, 1.00 GiB")


def test_a_close_second_is_named_even_where_it_is_no_fair_comparison():
    pairs = [pair("pre+skip", "lora", NO, NO, differs=("parameters",)), pair("pre+skip", "none", CLEAR, NO)]
    _, found = answers(ROWS, pairs)
    assert found["Which method won?"].details == (
        "pre+skip: document perplexity 29.00 [28.00, 30.00]",
        "lora: 29.50 [28.50, 30.50], no fair comparison",
        "the untouched model: 30.00 [29.00, 31.00]",
    )
    assert found["By how much?"].details[0].endswith("the untouched model, the next that it may be compared with.")


def test_no_winner_is_named_where_the_corrected_p_value_is_no_evidence():
    compared = pair("pre+skip", "lora", CLEAR, NO)
    for p_holm, title, real in (
        (0.19, "No clear winner: pre+skip and lora cannot be told apart", "not after correction"),
        (0.04, "pre+skip wins in document perplexity", "for these items, yes"),
    ):
        lead = replace(compared.differences["document/perplexity"], p_holm=p_holm)
        tested = replace(compared, differences={**compared.differences, "document/perplexity": lead})
        found, said = answers(ROWS, [tested])
        assert found == title
        assert said["Is it real?"].answer == real


def test_no_winner_is_named_where_the_interval_includes_zero():
    _, found = answers(ROWS, [pair("pre+skip", "lora", UNCLEAR, NO)])
    assert found["Which method won?"].answer == "none clearly"


@pytest.mark.parametrize(
    ("perplexity", "over_seeds", "answer"),
    [
        (CLEAR, None, "for these items, yes"),
        (UNCLEAR, None, "not distinguishable"),
        (CLEAR, Interval(-0.5, -0.9, -0.1), "yes, over items and seeds"),
        (CLEAR, Interval(-0.5, -1.1, 0.1), "for these items, not over seeds"),
    ],
)
def test_real_means_beyond_items_and_beyond_seeds(perplexity, over_seeds, answer):
    compared = pair("pre+skip", "lora", perplexity, NO)
    lead = replace(compared.differences["document/perplexity"], over_seeds=over_seeds)
    compared = replace(compared, differences={**compared.differences, "document/perplexity": lead})
    _, found = answers(ROWS, [compared])
    assert found["Is it real?"].answer == answer
    assert "p = 0.04 after Holm's correction" in found["Is it real?"].details[0]
    if over_seeds is None and perplexity == CLEAR:
        assert found["Is it real?"].details[1] == "One seed: what another seed would change is not known."


def test_an_interval_over_seeds_turns_with_its_difference():
    turned = Interval(1, 0.5, 2, over_seeds=Interval(1, -1, 3)).turned
    assert turned.over_seeds == Interval(-1, -3, 1)
