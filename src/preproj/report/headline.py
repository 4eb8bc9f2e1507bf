"""The headline of a report: what the numbers say, and what they do not, in sentences."""

from __future__ import annotations

from preproj.report import units
from preproj.report.records import Result, Row, Run
from preproj.report.tables import interval_of

SUBJECTS = ("pre+skip", "skip", "pre")
"""The method the headline is about: the first of these that finished, else the first in the recipe."""

MEASURES = ("perplexity", "last-word accuracy")


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
    if any(_cells(run, subject, other) for other in named):
        sentences += _lowest(run, subject)
    else:
        sentences += _values(run)
    return (*sentences, *_unfinished(run))


def _subject(run: Run) -> str:
    finished = [row.method for row, _ in run.finished]
    others = [method for method in finished if method not in (run.baseline, run.reference)]
    return next((method for method in SUBJECTS if method in others), (others or finished[::-1])[0])


def _cells(run: Run, method: str, other: str | None) -> list[tuple[Row, Result]]:
    return [(row, result) for row, result in run.finished if row.method == method and other in result.versus]


def _direction(run: Run, method: str, other: str, measure: str) -> str:
    """How `method` does against `other`: better, worse, undecided, or mixed where seeds differ."""
    intervals = [interval_of(result.versus[other], measure) for _, result in _cells(run, method, other)]
    found = {
        "undecided"
        if interval.includes_zero
        else "better"
        if (interval.high < 0) == (measure == "perplexity")
        else "worse"
        for interval in intervals
    }
    return found.pop() if len(found) == 1 else "mixed"


def _against(run: Run, method: str, other: str) -> list[str]:
    if not _cells(run, method, other):
        return [f"{method} cannot be compared with {other}: the run holds no finished pair of their cells."]
    name = f"the untouched model ({other})" if other == run.baseline else other
    return [f"{method} against {name}: {'; '.join(_clause(run, method, other, measure) for measure in MEASURES)}."]


def _clause(run: Run, method: str, other: str, measure: str) -> str:
    points = measure != "perplexity"
    show = units.accuracy if points else units.perplexity
    numbers = []
    for row, result in _cells(run, method, other):
        middle, low, high = units.difference(interval_of(result.versus[other], measure), points=points)
        value = result.last_word_accuracy if points else result.perplexity
        seed = f"seed {row.seed}: " if run.several_seeds else ""
        unit = " percentage points" if points else ""
        numbers.append(f"{seed}{show(value)}, difference {middle}{unit}, 95 % interval {low} to {high}")
    wording = {
        "better": f"better in {measure}",
        "worse": f"worse in {measure}",
        "undecided": f"not distinguishable in {measure}",
        "mixed": f"in {measure} the seeds disagree",
    }
    return f"{wording[_direction(run, method, other, measure)]} ({'; '.join(numbers)})"


def _verdict(run: Run, method: str, other: str) -> list[str]:
    if not _cells(run, method, other):
        return []
    perplexity, last_word = (_direction(run, method, other, measure) for measure in MEASURES)
    sentences = []
    if "better" not in (perplexity, last_word):
        sentences.append(f"So {method} does not beat {other} in this run.")
    elif "worse" in (perplexity, last_word):
        sentences.append(f"The two measures disagree, so neither of {method} and {other} is simply the better one.")
    elif perplexity != last_word:
        sentences.append(f"So {method} beats {other} on one of the two measures, not on both.")
    mine, theirs = _parameters(run, method), _parameters(run, other)
    larger, wins = (method, "better") if mine > theirs else (other, "worse")
    sizes = f"{method} trains {units.times(mine / theirs)} the parameters of {other}"
    size = f"{sizes} ({units.short(mine)} against {units.short(theirs)})"
    if mine != theirs and wins in (perplexity, last_word):
        size += f", so an advantage of {larger} here is not an advantage at equal size"
    return [*sentences, f"{size}."]


def _parameters(run: Run, method: str) -> int:
    return next(result.trainable_parameters for row, result in run.finished if row.method == method)


def _lowest(run: Run, subject: str) -> list[str]:
    row, result = min(run.finished, key=lambda cell: cell[1].perplexity)
    if row.method in (subject, run.reference):
        return []
    seed = f", seed {row.seed}" if run.several_seeds and row.method != run.baseline else ""
    return [
        f"The lowest perplexity of the run is that of {row.method}{seed} ({units.perplexity(result.perplexity)}, "
        f"{units.short(result.trainable_parameters)} trainable parameters)."
    ]


def _values(run: Run) -> list[str]:
    return [
        f"{row.method}{f', seed {row.seed}' if run.several_seeds else ''}: "
        f"perplexity {units.perplexity(result.perplexity)}, "
        f"last-word accuracy {units.accuracy(result.last_word_accuracy)}."
        for row, result in run.finished
    ]


def _unfinished(run: Run) -> list[str]:
    cells = [f"{row.method}, seed {row.seed}, {row.status}" for row in run.rows if row.result is None]
    if not cells:
        return []
    return [f"{len(cells)} of {len(run.rows)} cells have no result ({'; '.join(cells)}): see the notes."]
