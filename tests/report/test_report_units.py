"""Numbers as a reader sees them."""

import pytest

from preproj.report import units
from preproj.report.records import Interval, Measure


@pytest.mark.parametrize(
    ("interval", "kind", "expected"),
    [
        ((-2.29, -2.5, -2.06), "perplexity", ("−2.29", "−2.50", "−2.06")),
        ((0.0371, 0.024, 0.0512), "accuracy", ("+3.7", "+2.4", "+5.1")),
        ((-1234.5, -2000.0, 0.0), "perplexity", ("−1,234.50", "−2,000.00", "0.00")),
        # A narrow interval keeps two digits of its width, or it would read as [0.00, 0.00].
        ((-0.0042, -0.0061, -0.0023), "perplexity", ("−0.0042", "−0.0061", "−0.0023")),
        ((float("inf"), 0.0, float("inf")), "perplexity", ("not finite", "0.00", "not finite")),
    ],
)
def test_differences_are_signed_and_show_their_width(interval, kind, expected):
    assert units.difference(Measure("t/m", "t", "m", kind, 9), Interval(*interval)) == expected


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (999, "999"), (884_736, "885 k"), (24_778_752, "24.8 M"), (1_179_648, "1.18 M")]
)
def test_short_counts(number, text):
    assert units.short(number) == text


def test_no_line_breaks_between_a_number_and_its_unit():
    assert units.unbroken("95 % of 24.8 M words") == "95\u00a0% of 24.8\u00a0M words"
