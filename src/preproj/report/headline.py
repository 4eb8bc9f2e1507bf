"""The headline of a report: what the numbers say, and what they do not, in sentences."""

from __future__ import annotations

from preproj.report import units
from preproj.report.contest import comparable, contest, direction
from preproj.report.records import Interval, Measure, Pair, Run

SUBJECTS = ("pre+skip", "skip", "pre")
"""The method the headline is about: the first of these that finished, else the first in the recipe."""

NOUNS = {"parameters": "trainable parameters", "dtype": "dtypes", "device": "devices", "data": "training tokens"}
"""What else may differ between the methods of a pair."""


def warnings(run: Run) -> tuple[str, ...]:
    """What a reader must know before any result.

    Args:
        run: The run.

    Returns:
        Sentences on damage of the run's dtype, on an untouched model that is not what others measured, and on cells
        that were run with other hardware or versions than the rest.
    """
    precision = [run.precision_warning] if run.precision_warning else []
    return (*precision, *_other_baselines(run), *_other_environments(run))


def headline(run: Run) -> tuple[str, ...]:
    """Puts the numbers of a run into sentences.

    Args:
        run: The run.

    Returns:
        The sentences, the most important first.
    """
    if not run.scores:
        return ("No cell of this run has finished, so there is nothing to report yet.",)
    sentences = _best(run)
    subject = _subject(run)
    for other in dict.fromkeys((run.baseline, run.reference)):
        if other is not None and subject not in (other, run.baseline):
            sentences += _against(run, subject, other)
    return (*(sentences or _values(run)), *_unfinished(run))


def _other_environments(run: Run) -> list[str]:
    """Warn where cells come from different machines or versions: their numbers may differ by that too."""
    every = [environment.ran_with for environment in run.environments]
    differing = [key for key in (every[0] if every else ()) if len({of.get(key) for of in every}) > 1]
    if not differing:
        return []
    groups = (
        f"{', '.join(group.cells)} with {', '.join(f'{key} {group.ran_with.get(key)}' for key in differing)}"
        for group in run.environments
    )
    return [f"Warning: the cells were not all run in one environment: {'; '.join(groups)}."]


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
    found = contest(run)
    if found is None or len(found.ranked) < 2:
        return []
    measure, first, lead = found.measure, found.first, found.lead
    value = units.measured(measure, run.scores[first][measure.name].value)
    said = f"Best in {measure.label}: {first} ({value}, {units.short(run.size(first))} trainable parameters)"
    if lead is None:
        return [f"{said}."]
    middle, low, high = units.difference(measure, lead)
    clear = ", not distinguishable" if lead.unclear else ""
    after = "next" if found.rival == found.ranked[1] else "next comparable"
    return [f"{said}; {after} {found.rival} ({first} − {found.rival}: {middle} [{low}, {high}]{clear})."]


def _against(run: Run, subject: str, other: str) -> list[str]:
    pair = run.pair(subject, other)
    if pair is None:
        return [f"{subject} cannot be compared with {other}: the run holds no finished pair of their cells."]
    if not comparable(run, pair):
        nouns = " and ".join(NOUNS.get(what, what) for what in pair.differs)
        return [
            f"{subject} and {other} are no matched pair, because their {nouns} differ ({_counts(run, pair)} "
            "trainable parameters): this run does not say which is better."
        ]
    name = f"the untouched model ({other})" if other == run.baseline else other
    clauses: dict[str, list[str]] = {"better": [], "worse": [], "not distinguishable": []}
    for measure in run.measures:
        if measure.name in pair.differences:
            difference = pair.differences[measure.name]
            clauses[direction(measure, difference)].append(_numbers(measure, difference))
    said = "; ".join(f"{wording} in {', '.join(found)}" for wording, found in clauses.items() if found)
    return [f"{subject} against {name}: {said}.", *([] if other == run.baseline else [_verdict(run, pair, clauses)])]


def _numbers(measure: Measure, difference: Interval) -> str:
    middle, low, high = units.difference(measure, difference)
    unit = " points" if measure.kind == "accuracy" else ""
    found = f"{measure.label} ({middle}{unit} [{low}, {high}]"
    if difference.unclear and difference.detectable:  # 0 where the two agree on every item
        smallest, *_ = units.difference(measure, Interval(difference.detectable, difference.low, difference.high))
        found += f"; n = {units.whole(measure.items)} would show {smallest.lstrip('+')}{unit}"
    return f"{found})"


def _verdict(run: Run, pair: Pair, clauses: dict[str, list[str]]) -> str:
    """Say which of a matched pair wins."""
    better, worse = clauses["better"], clauses["worse"]
    if better and worse:
        said = f"The measures disagree, so neither of {pair.ours} and {pair.theirs} is simply the better one"
    elif better:
        rest = ", and on none is it worse" if clauses["not distinguishable"] else ""
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
