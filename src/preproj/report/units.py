"""Numbers as a reader sees them. Every page, table and figure formats its numbers here."""

from __future__ import annotations

import math
import re

from preproj.report.records import Interval, Measure

NOTHING = "–"
"""Stands where a number does not apply."""


def whole(number: int) -> str:
    """A count in full: `24,772,608`."""
    return f"{number:,}"


def short(number: int) -> str:
    """A count to three digits, for sentences: `24.8 M`."""
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            scaled = number / size
            return f"{scaled:.{0 if scaled >= 100 else 1 if scaled >= 10 else 2}f} {letter}"
    return str(number)


def share(fraction: float) -> str:
    """A share of the whole model: `13.24 %`."""
    return f"{100 * fraction:.2f} %"


def measured(measure: Measure, value: float | None) -> str:
    """The value of a measure: a perplexity as `31.80`, an accuracy as `43.2 %`."""
    if value is None:
        return NOTHING
    if not math.isfinite(value):
        return "not finite"
    return f"{100 * value:.1f} %" if measure.kind == "accuracy" else f"{value:,.2f}"


def rate(per_second: float | None) -> str:
    """Tokens per second: `1,234`."""
    return NOTHING if per_second is None else f"{per_second:,.0f}"


def learning_rate(rate: float | None) -> str:
    """A learning rate: `3e-5`."""
    return NOTHING if rate is None else f"{rate:.3g}".replace("e-0", "e-")


def memory(size: int) -> str:
    """A memory size: `1.53 GiB`."""
    return f"{size / 2**30:,.2f} GiB"


def seconds(duration: float) -> str:
    """A duration: `312 s`."""
    return f"{duration:,.0f} s"


def times(ratio: float) -> str:
    """A ratio: `21.0 ×`."""
    return f"{ratio:,.1f} ×" if ratio >= 1 else f"{ratio:.2f} ×"


def decimal(number: float) -> str:
    """A plain number to two decimals: `−1.25`."""
    return f"{number:,.2f}".replace("-", "−")


def difference(measure: Measure, interval: Interval) -> tuple[str, str, str]:
    """A difference and the two ends of its interval, signed, with equal decimals; of accuracies in percentage points.

    Args:
        measure: Of what.
        interval: The difference; of accuracies as fractions.

    Returns:
        The difference, the low end and the high end.
    """
    scale, decimals = (100.0, 1) if measure.kind == "accuracy" else (1.0, 2)
    width = scale * (interval.high - interval.low)
    # Two digits of the interval's width must show, or a small clear difference would read as 0.
    if 0 < width < 10 ** (1 - decimals):
        decimals = min(6, 1 - math.floor(math.log10(width)))
    ends = (interval.value, interval.low, interval.high)
    middle, low, high = (_signed(scale * end, decimals) for end in ends)
    return middle, low, high


def unbroken(sentence: str) -> str:
    """Ties numbers to their units, so that no line of a page breaks between them."""
    return re.sub(r"(?<=\d) (?=[%×kMB])", "\N{NO-BREAK SPACE}", sentence)


def _signed(value: float, decimals: int) -> str:
    if not math.isfinite(value):
        return "not finite"
    text = f"{abs(value):,.{decimals}f}"
    if float(text.replace(",", "")) == 0:
        return text
    return f"{'−' if value < 0 else '+'}{text}"
