"""The headline of a report: what the numbers say, and what they do not, in sentences."""

from __future__ import annotations

from preproj.report import units
from preproj.report.records import Interval, Measure, Pair, Run

SUBJECTS = ("pre+skip", "skip", "pre")
"""The method the headline is about: the first of these that finished, else the first in the recipe."""

NOUNS = {"parameters": "trainable parameters", "dtype": "dtypes", "device": "devices", "data": "training tokens"}
"""What else may differ between the methods of a pair."""


def headline(run: Run) -> tuple[str, ...]:
    """Puts the numbers of a run into sentences.

    Args:
        run: The run.

    Returns:
        The sentences, the most important first.
    """
    warnings = (*([run.precision_warning] if run.precision_warning else []), *_other_baselines(run))
    if not run.scores:
        return (*warnings, "No cell of this run has finished, so there is nothing to report yet.")
    sentences = _best(run)
    subject = _subject(run)
    for other in dict.fromkeys((run.baseline, run.reference)):
        if other is not None and subject not in (other, run.baseline):
            sentences += _against(run, subject, other)
    return (*warnings, *(sentences or _values(run)), *_unfinished(run))


def _other_baselines(run: Run) -> list[str]:
    """Warn where the untouched model is not what others measured: its gains may be repair."""
    said = []
    for known in run.published:
        if known.paper or (found := run.measured(known)) is None or found[1].holds(known.value):
            continue
        measure, score = found
        here, low, high, there = (
            units.measured(measure, value) for value in (score.value, score.low, score.high, known.value)
        )
        said.append(
            f"Warning: the untouched model has {measure.label} {here} [{low}, {high}] here and {there} in "
            f"{known.source}; find out why before you report a gain."
        )
    return said


def _subject(run: Run) -> str:
    finished = list(run.scores)
    others = [method for method in finished if method not in (run.baseline, run.reference)]
    return next((method for method in SUBJECTS if method in others), (others or finished[::-1])[0])


def _best(run: Run) -> list[str]:
    """Name the best method of the first measure, with its lead over the next."""
    if len(run.scores) < 2 or not run.measures:
        return []
    measure = run.measures[0]
    ranked = sorted(
        (method for method in run.scores if measure.name in run.scores[method]),
        key=lambda method: run.scores[method][measure.name].value,
        reverse=measure.higher_is_better,
    )
    if len(ranked) < 2:
        return []
    first = ranked[0]
    value = units.measured(measure, run.scores[first][measure.name].value)
    size = f"{units.short(run.size(first))} trainable parameters"
    said = f"Best in {measure.label}: {first} ({value}, {size})"
    for second in ranked[1:]:
        pair = run.pair(first, second)
        lead = pair.differences.get(measure.name) if pair else None
        if pair is None or lead is None or not _comparable(run, pair):
            continue
        middle, low, high = units.difference(measure, lead)
        clear = "" if not lead.includes_zero else ", not distinguishable"
        after = "next" if second == ranked[1] else "next comparable"
        return [f"{said}; {after} {second} ({first} − {second}: {middle} [{low}, {high}]{clear})."]
    return [f"{said}."]


def _comparable(run: Run, pair: Pair) -> bool:
    """Whether a headline may name a pair: one that differs in nothing, or in size only, from the untouched model."""
    return not (pair.beside_size if run.baseline in (pair.ours, pair.theirs) else pair.differs)


def _against(run: Run, subject: str, other: str) -> list[str]:
    pair = run.pair(subject, other)
    if pair is None:
        return [f"{subject} cannot be compared with {other}: the run holds no finished pair of their cells."]
    if not _comparable(run, pair):
        nouns = " and ".join(NOUNS.get(what, what) for what in pair.differs)
        return [
            f"{subject} and {other} are no matched pair, because their {nouns} differ ({_counts(run, pair)} "
            "trainable parameters): this run does not say which is better."
        ]
    name = f"the untouched model ({other})" if other == run.baseline else other
    clauses: dict[str, list[str]] = {"better in": [], "worse in": [], "not distinguishable in": []}
    for measure in run.measures:
        if measure.name in pair.differences:
            difference = pair.differences[measure.name]
            clauses[_direction(measure, difference)].append(_numbers(measure, difference))
    said = "; ".join(f"{wording} {', '.join(found)}" for wording, found in clauses.items() if found)
    return [f"{subject} against {name}: {said}.", *([] if other == run.baseline else [_verdict(run, pair, clauses)])]


def _direction(measure: Measure, difference: Interval) -> str:
    if difference.includes_zero:
        return "not distinguishable in"
    return "better in" if (difference.low > 0) == measure.higher_is_better else "worse in"


def _numbers(measure: Measure, difference: Interval) -> str:
    middle, low, high = units.difference(measure, difference)
    unit = " points" if measure.kind == "accuracy" else ""
    found = f"{measure.label} ({middle}{unit} [{low}, {high}]"
    if difference.includes_zero and difference.detectable is not None:
        smallest, *_ = units.difference(measure, Interval(difference.detectable, difference.low, difference.high))
        found += f"; n = {units.whole(measure.items)} would show {smallest.lstrip('+')}{unit}"
    return f"{found})"


def _verdict(run: Run, pair: Pair, clauses: dict[str, list[str]]) -> str:
    """Say which of a matched pair wins."""
    better, worse = clauses["better in"], clauses["worse in"]
    if better and worse:
        said = f"The measures disagree, so neither of {pair.ours} and {pair.theirs} is simply the better one"
    elif better:
        rest = ", and on none is it worse" if clauses["not distinguishable in"] else ""
        said = f"So {pair.ours} beats {pair.theirs} in this run{rest}"
    else:
        said = f"So {pair.ours} does not beat {pair.theirs} in this run"
    return f"{said}, at an equal budget of trainable parameters ({_counts(run, pair)})."


def _counts(run: Run, pair: Pair) -> str:
    return f"{units.short(run.size(pair.ours))} against {units.short(run.size(pair.theirs))}"


def _values(run: Run) -> list[str]:
    return [
        f"{method}: "
        + ", ".join(
            f"{measure.label} {units.measured(measure, scores[measure.name].value)}"
            for measure in run.measures
            if measure.name in scores
        )
        + "."
        for method, scores in run.scores.items()
    ]


def _unfinished(run: Run) -> list[str]:
    cells = [f"{row.method}, seed {row.seed}, {row.status}" for row in run.rows if row.result is None]
    if not cells:
        return []
    return [f"{len(cells)} of {len(run.rows)} cells have no result ({'; '.join(cells)}): see the notes."]
