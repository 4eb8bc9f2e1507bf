"""The headline of a report: what the numbers say, and what they do not, in sentences."""

from __future__ import annotations

from preproj.report import units
from preproj.report.records import LAST_WORD, PERPLEXITY, Interval, Result, Row, Run

SUBJECTS = ("pre+skip", "skip", "pre")
"""The method the headline is about: the first of these that finished, else the first in the recipe."""

SAME_SIZE = 0.01
"""Parameter counts that differ by less than this share count as equal."""


def headline(run: Run) -> tuple[str, ...]:
    """Puts the numbers of a run into sentences.

    Args:
        run: The run.

    Returns:
        The sentences, the most important first.
    """
    if not run.finished:
        return ("No cell of this run has finished, so there is nothing to report yet.",)
    subject = _subject(run)
    others = [run.baseline, run.reference] if subject != run.baseline else []
    named = [other for other in dict.fromkeys(others) if other not in (None, subject)]
    sentences = [sentence for other in named for sentence in _against(run, subject, other)]
    if run.reference in named:
        sentences += _verdict(run, subject, run.reference)
    if any(_compared(run, subject, other, PERPLEXITY) for other in named):
        sentences += _lowest(run, subject)
    else:
        sentences += _values(run)
    return (*sentences, *_unfinished(run))


def _subject(run: Run) -> str:
    finished = [row.method for row, _ in run.finished]
    others = [method for method in finished if method not in (run.baseline, run.reference)]
    return next((method for method in SUBJECTS if method in others), (others or finished[::-1])[0])


def _compared(run: Run, method: str, other: str, measure: str) -> list[tuple[Row, Result, Interval]]:
    """The cells of `method` that were compared with `other` on a measure, one per seed."""
    cells = [(row, result) for row, result in run.finished if row.method == method and other in result.versus]
    pairs = [(row, result, result.versus[other].interval(measure)) for row, result in cells]
    return [(row, result, interval) for row, result, interval in pairs if interval is not None]


def _directions(run: Run, method: str, other: str) -> dict[str, str]:
    """How `method` does against `other` by measure: better, worse, undecided, or mixed where seeds differ."""
    directions = {}
    for measure in run.measures:
        found = {_direction(interval, measure) for *_, interval in _compared(run, method, other, measure)}
        if found:
            directions[measure] = found.pop() if len(found) == 1 else "mixed"
    return directions


def _direction(interval: Interval, measure: str) -> str:
    if interval.includes_zero:
        return "undecided"
    return "better" if (interval.high < 0) == (measure == PERPLEXITY) else "worse"


def _against(run: Run, method: str, other: str) -> list[str]:
    directions = _directions(run, method, other)
    if not directions:
        return [f"{method} cannot be compared with {other}: the run holds no finished pair of their cells."]
    name = f"the untouched model ({other})" if other == run.baseline else other
    wordings = {
        "better": "better in {}",
        "worse": "worse in {}",
        "undecided": "not distinguishable in {}",
        "mixed": "in {} the seeds disagree",
    }
    clauses = (
        f"{wordings[direction].format(measure)} ({_numbers(run, method, other, measure)})"
        for measure, direction in directions.items()
    )
    return [f"{method} against {name}: {'; '.join(clauses)}."]


def _numbers(run: Run, method: str, other: str, measure: str) -> str:
    numbers = []
    for row, result, interval in _compared(run, method, other, measure):
        middle, low, high = units.difference(interval, points=measure == LAST_WORD)
        seed = f"seed {row.seed}: " if run.several_seeds else ""
        unit = " percentage points" if measure == LAST_WORD else ""
        value = units.measured(measure, result.value(measure))
        numbers.append(f"{seed}{value}, difference {middle}{unit}, 95 % interval {low} to {high}")
    return "; ".join(numbers)


def _verdict(run: Run, method: str, other: str) -> list[str]:
    directions = list(_directions(run, method, other).values())
    if not directions:
        return []
    sentences = []
    if "better" not in directions:
        sentences.append(f"So {method} does not beat {other} in this run.")
    elif "worse" in directions:
        sentences.append(f"The two measures disagree, so neither of {method} and {other} is simply the better one.")
    elif len(set(directions)) > 1:
        sentences.append(f"So {method} beats {other} on one of the two measures, not on both.")
    mine, theirs = _parameters(run, method), _parameters(run, other)
    counts = f"({units.short(mine)} against {units.short(theirs)})"
    if abs(mine - theirs) < SAME_SIZE * theirs:
        return [*sentences, f"{method} and {other} train about as many parameters {counts}."]
    size = f"{method} trains {units.times(mine / theirs)} the parameters of {other} {counts}"
    larger, wins = (method, "better") if mine > theirs else (other, "worse")
    if wins in directions:
        size += f", so an advantage of {larger} here is not an advantage at equal size"
    return [*sentences, f"{size}."]


def _parameters(run: Run, method: str) -> int:
    return next(result.trainable_parameters for row, result in run.finished if row.method == method)


def _lowest(run: Run, subject: str) -> list[str]:
    row, result = min(run.finished, key=lambda cell: cell[1].perplexity)
    if row.method in (subject, run.reference):
        return []
    seed = f", seed {row.seed}" if run.several_seeds and row.method != run.baseline else ""
    value = units.measured(PERPLEXITY, result.perplexity)
    return [
        f"The lowest perplexity of the run is that of {row.method}{seed} ({value}, "
        f"{units.short(result.trainable_parameters)} trainable parameters)."
    ]


def _values(run: Run) -> list[str]:
    return [
        f"{row.method}{f', seed {row.seed}' if run.several_seeds else ''}: "
        + ", ".join(f"{measure} {units.measured(measure, result.value(measure))}" for measure in run.measures)
        + "."
        for row, result in run.finished
    ]


def _unfinished(run: Run) -> list[str]:
    cells = [f"{row.method}, seed {row.seed}, {row.status}" for row in run.rows if row.result is None]
    if not cells:
        return []
    return [f"{len(cells)} of {len(run.rows)} cells have no result ({'; '.join(cells)}): see the notes."]
