"""Who leads in the run's first measure, and over whom: the question that the report answers first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from preproj.report.records import Interval, Measure, Pair, Run

Direction = Literal["better", "worse", "not distinguishable"]


@dataclass(frozen=True)
class Contest:
    """The methods by their score in `measure`, best first, and the pair of the first with its rival.

    The rival is the next method that the first may be compared with; None where there is none.
    """

    measure: Measure
    ranked: tuple[str, ...]
    pair: Pair | None

    @property
    def first(self) -> str:
        """The method with the best score."""
        return self.ranked[0]

    @property
    def rival(self) -> str | None:
        """The next method that the first may be compared with."""
        return self.pair.theirs if self.pair else None

    @property
    def lead(self) -> Interval | None:
        """The first's difference from its rival."""
        return self.pair.differences[self.measure.name] if self.pair else None


def contest(run: Run) -> Contest | None:
    """Ranks the methods of a run.

    Args:
        run: The run.

    Returns:
        The contest, or None where nothing has a score.
    """
    if not run.measures:
        return None
    measure = run.measures[0]
    ranked = sorted(
        (method for method in run.scores if measure.name in run.scores[method]),
        key=lambda method: run.scores[method][measure.name].value,
        reverse=measure.higher_is_better,
    )
    if not ranked:
        return None
    pairs = (run.pair(ranked[0], other) for other in ranked[1:])
    fair = (pair for pair in pairs if pair and measure.name in pair.differences and comparable(run, pair))
    return Contest(measure, tuple(ranked), next(fair, None))


def comparable(run: Run, pair: Pair) -> bool:
    """Whether a headline may name a pair: one that differs in nothing, or in size only, from the untouched model."""
    return not (pair.beside_size if run.baseline in (pair.ours, pair.theirs) else pair.differs)


def direction(measure: Measure, difference: Interval) -> Direction:
    """What a difference says of the first method of its pair."""
    if difference.unclear:
        return "not distinguishable"
    return "better" if (difference.low > 0) == measure.higher_is_better else "worse"
