"""The headline says no more than the numbers do."""

from dataclasses import replace

import pytest
from made_run import cell, made, pair

from preproj.report.headline import headline, warnings
from preproj.report.records import Published, Row

NO = (-0.2, 0.2)


def say(rows, pairs=(), **options):
    run = made(rows, pairs, **options)
    return " ".join((*warnings(run), *headline(run)))


def against_lora(perplexity, accuracy, *, differs=(), sizes=(10, 10)):
    rows = (cell("lora", sizes[0]), cell("pre+skip", sizes[1]))
    return say(rows, [pair("pre+skip", "lora", perplexity, accuracy, differs=differs)])


@pytest.mark.parametrize(
    ("perplexity", "accuracy", "expected"),
    [
        (NO, NO, "So pre+skip does not beat lora in this run, at an equal budget"),
        ((0.1, 0.5), NO, "So pre+skip does not beat lora in this run"),
        ((-0.5, -0.1), NO, "So pre+skip beats lora in this run, and on none is it worse"),
        ((-0.5, -0.1), (-0.05, -0.01), "The measures disagree, so neither of pre+skip and lora"),
        ((-0.5, -0.1), (0.01, 0.05), "So pre+skip beats lora in this run, at an equal budget"),
        (NO, (0.01, 0.05), "So pre+skip beats lora in this run, and on none is it worse"),
    ],
)
def test_the_verdict_against_lora_follows_the_intervals(perplexity, accuracy, expected):
    assert expected in against_lora(perplexity, accuracy)


def test_the_side_that_a_pair_is_stored_from_changes_nothing():
    rows = (cell("lora", 10), cell("pre+skip", 10))
    stored = say(rows, [pair("pre+skip", "lora", (-0.5, -0.1), (0.01, 0.05))])
    assert say(rows, [pair("lora", "pre+skip", (0.1, 0.5), (-0.05, -0.01))]) == stored


def test_an_interval_that_touches_zero_is_not_a_difference():
    rows = (cell("none", 0), cell("pre+skip", 10))
    said = say(rows, [pair("pre+skip", "none", (-0.4, 0.0), (0.0, 0.02))])
    assert "not distinguishable in document perplexity" in said
    assert "n = 500 would show 30.0 points" in said
    assert "better in" not in said


@pytest.mark.parametrize(("p_holm", "clear"), [(0.19, False), (0.04, True)])
def test_a_difference_whose_corrected_p_value_is_no_evidence_is_none(p_holm, clear):
    compared = pair("pre+skip", "lora", (-0.5, -0.1), NO)
    differences = {name: replace(one, p_holm=p_holm) for name, one in compared.differences.items()}
    said = say((cell("lora", 10, 30), cell("pre+skip", 10, 29)), [replace(compared, differences=differences)])
    assert ("better in document perplexity" in said) is clear
    assert ("So pre+skip beats lora in this run" in said) is clear
    assert ("−0.10], not distinguishable)" in said) is not clear


def test_no_number_of_items_is_named_where_two_methods_agree_on_every_item():
    compared = pair("pre+skip", "lora", NO, (0.0, 0.0))
    same = replace(compared.differences["last_word/acc"], detectable=0.0)
    said = say(
        (cell("lora", 10), cell("pre+skip", 10)),
        [replace(compared, differences={**compared.differences, "last_word/acc": same})],
    )
    assert "would show 0.0" not in said
    assert "would show" in said


@pytest.mark.parametrize(
    ("differs", "reason"),
    [
        (("parameters",), "their trainable parameters differ (210 against 10 trainable parameters)"),
        (("device",), "their devices differ"),
        (("dtype", "data"), "their dtypes and training tokens differ"),
    ],
)
def test_a_pair_that_is_not_matched_gets_no_verdict(differs, reason):
    said = against_lora((-0.5, -0.1), (0.01, 0.05), differs=differs, sizes=(10, 210))
    assert f"pre+skip and lora are no matched pair, because {reason}" in said
    assert "this run does not say which is better" in said
    assert "beats" not in said
    assert "better in" not in said


def test_the_untouched_model_has_no_size_to_match_but_a_device():
    rows = (cell("none", 0), cell("pre+skip", 10, 29.5))
    said = say(rows, [pair("pre+skip", "none", (-0.7, -0.3), NO, differs=("parameters",))])
    assert "pre+skip against the untouched model (none): better in document perplexity" in said
    said = say(rows, [pair("pre+skip", "none", (-0.7, -0.3), NO, differs=("parameters", "device"))])
    assert "better in" not in said


def test_the_best_method_comes_first_with_its_lead():
    rows = (cell("none", 0), cell("pre+skip", 10), cell("lora-qkv", 7, 29.5))
    said = say(rows, [pair("lora-qkv", "none", (-0.7, -0.3), NO)], reference=None)
    assert said.startswith(
        "Best in document perplexity: lora-qkv (29.50, 7 trainable parameters); next none "
        "(lora-qkv − none: −0.50 [−0.70, −0.30])."
    )


def test_the_lead_of_the_best_is_over_the_next_that_it_is_matched_with():
    rows = (cell("none", 0), cell("lora", 7, 29.4), cell("full", 70, 28.0), cell("dense-qkv", 70, 29.0))
    pairs = [
        pair("full", "lora", (-1.5, -1.3), NO, differs=("parameters",)),
        pair("full", "dense-qkv", (-1.1, -0.9), NO),
        pair("full", "none", (-2.1, -1.9), NO, differs=("parameters",)),
    ]
    best = "Best in document perplexity: full (28.00, 70 trainable parameters)"
    assert say(rows, pairs, reference=None).startswith(f"{best}; next dense-qkv (full − dense-qkv: −1.00")
    del pairs[1]
    assert say(rows, pairs, reference=None).startswith(f"{best}; next comparable none (full − none: −2.00")
    del pairs[1]
    assert say(rows, pairs, reference=None).startswith(f"{best}.")


def test_unfinished_cells_are_counted():
    failed = Row("lora", 0, "failed", "out of memory", (), None)
    said = say((cell("none", 0), failed, cell("pre+skip", 10)), [pair("pre+skip", "none", NO, NO)])
    assert "pre+skip cannot be compared with lora" in said
    assert "1 of 3 cells have no result (lora, seed 0, failed)" in said
    assert say((failed,)) == "No cell of this run has finished, so there is nothing to report yet."


def test_the_untouched_model_alone_is_not_compared():
    assert say((cell("none", 0),)) == "none: document perplexity 30.00, last_word acc 40.0 %."


def test_damage_of_a_dtype_is_said_before_everything_else():
    assert say((cell("none", 0),), warning="The untouched model is damaged.").startswith(
        "The untouched model is damaged."
    )


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        # the untouched model has 30 [29, 31] here
        (
            Published("none", "ppl", 31.2, "document/perplexity", "a page", paper=False),
            "30.00 [29.00, 31.00] here and 31.20",
        ),
        (
            Published("none", "ppl", 28.9, "document/perplexity", "a page", paper=False),
            "30.00 [29.00, 31.00] here and 28.90",
        ),
        (Published("none", "ppl", 30.9, "document/perplexity", "a page", paper=False), None),
        (Published("none", "ppl", 78.4, "document/perplexity", "the paper", paper=True), None),
        (Published("none", "ppl", 78.4, "stream/perplexity", "a page", paper=False), None),
    ],
)
def test_a_baseline_that_is_not_the_published_one_is_warned_of(known, expected):
    said = say((cell("none", 0),), published=(known,))
    if expected is None:
        assert "Warning" not in said
    else:
        assert said.startswith(
            f"Warning: the untouched model has document perplexity {expected} in a page; find out why"
        )


def test_damage_of_a_dtype_is_said_before_a_strange_baseline():
    known = Published("none", "ppl", 78.4, "document/perplexity", "a page", paper=False)
    said = say((cell("none", 0),), warning="The untouched model is damaged.", published=(known,))
    assert said.startswith("The untouched model is damaged. Warning: the untouched model has ")
