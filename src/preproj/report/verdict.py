"""What the report says first: which method won, by how much, whether it is real, and what it cost."""

from __future__ import annotations

from dataclasses import dataclass

from preproj.report import units
from preproj.report.contest import Contest, Direction, comparable, contest, direction
from preproj.report.records import Interval, Pair, Run


@dataclass(frozen=True)
class Answer:
    """A question with a few words of answer, sentences below them, and what each measure says of the pair."""

    question: str
    answer: str
    details: tuple[str, ...] = ()
    verdicts: tuple[tuple[str, Direction], ...] = ()


@dataclass(frozen=True)
class Verdict:
    """The title of the report, and its four answers."""

    title: str
    answers: tuple[Answer, ...] = ()


def verdict(run: Run) -> Verdict:
    """Answers the four questions from the run's first measure.

    Args:
        run: The run.

    Returns:
        The verdict; without answers where nothing has a score.
    """
    found = contest(run)
    if found is None:
        return Verdict("Nothing to report yet")
    answers = (_which(run, found), _how_much(run, found), _real(run, found), _cost(run, found))
    return Verdict(_title(run, found), answers)


def _title(run: Run, found: Contest) -> str:
    first, label = found.first, found.measure.label
    if run.precision_warning:
        return f"No verdict: {run.base.dtype} damages the untouched model"
    if len(found.ranked) == 1:
        return f"{'The untouched model' if first == run.baseline else first} stands alone"
    if found.lead is None or found.rival is None:
        return f"{first} scores best in {label}, with no fair rival"
    if found.lead.unclear:
        return f"No clear winner: {_name(run, first)} and {_name(run, found.rival)} cannot be told apart"
    if first == run.baseline:
        return "No method beats the untouched model"
    return f"{first} wins in {label}" if found.rival == found.ranked[1] else f"{first} scores best in {label}"


def _which(run: Run, found: Contest) -> Answer:
    said = [f"{_name(run, found.first)}: {found.measure.label} {_score(run, found, found.first)}"]
    for other in dict.fromkeys((*found.ranked[1:2], found.rival, run.baseline)):
        if other in found.ranked[1:]:
            pair = run.pair(found.first, other)
            fair = "" if pair and comparable(run, pair) else ", no fair comparison"
            said.append(f"{_name(run, other)}: {_score(run, found, other)}{fair}")
    unclear = found.lead is not None and found.lead.unclear
    return Answer("Which method won?", "none clearly" if unclear else _name(run, found.first), tuple(said))


def _how_much(run: Run, found: Contest) -> Answer:
    question = "By how much?"
    if found.lead is None or found.rival is None:
        return Answer(question, "not known", ("No method of equal budget, data and precision stands beside it.",))
    middle, low, high = units.difference(found.measure, found.lead)
    unit = " points" if found.measure.kind == "accuracy" else ""
    way = " higher" if middle.startswith("+") else " lower" if middle.startswith("−") else ""
    next_fair = "" if found.rival == found.ranked[1] else ", the next that it may be compared with"
    said = (
        f"In {found.measure.label}, against {_name(run, found.rival)}{next_fair}.",
        f"{found.first} − {found.rival}: {middle}{unit} [{low}, {high}].",
    )
    return Answer(question, f"{middle.lstrip('+−')}{unit}{way}", said, _verdicts(run, found.pair))


def _verdicts(run: Run, pair: Pair | None) -> tuple[tuple[str, Direction], ...]:
    differences = pair.differences if pair else {}
    return tuple(
        (measure.label, direction(measure, differences[measure.name]))
        for measure in run.measures
        if measure.name in differences
    )


def _real(run: Run, found: Contest) -> Answer:
    question, lead = "Is it real?", found.lead
    if lead is None or found.pair is None:
        return Answer(question, "not tested")
    said = [f"The 95 % interval over test items {'includes' if lead.includes_zero else 'excludes'} 0{_tested(lead)}."]
    seeds = len([row for row, _ in run.finished if row.method == found.first])
    if lead.includes_zero:
        answer = "not distinguishable"
    elif lead.unclear:
        answer = "not after correction"
    elif lead.over_seeds is None:
        answer = "for these items, yes"
        one = "One seed: what another seed would change is not known."
        said.append(one if seeds == 1 else f"{seeds} seeds, without an interval over seeds.")
    else:
        _, low, high = units.difference(found.measure, lead.over_seeds)
        holds = not lead.over_seeds.includes_zero
        answer = "yes, over items and seeds" if holds else "for these items, not over seeds"
        said.append(f"Over {seeds} seeds [{low}, {high}].")
    return Answer(question, answer, tuple(said))


def _tested(lead: Interval) -> str:
    return "" if lead.p_holm is None else f"; p = {lead.p_holm:.2g} after Holm's correction"


def _cost(run: Run, found: Contest) -> Answer:
    said = [f"{_name(run, method)}: {_price(run, method)}" for method in (found.first, found.rival) if method]
    size = f"{units.short(run.size(found.first))} parameters"
    return Answer("What did it cost?", size, tuple(said))


def _price(run: Run, method: str) -> str:
    result = next(result for row, result in run.finished if row.method == method)
    parts = [f"{units.short(result.trainable_parameters)} parameters ({units.share(result.share_of_total)})"]
    parts += [units.seconds(run.seconds(method)), units.memory(result.peak_memory_bytes)]
    return ", ".join(parts)


def _score(run: Run, found: Contest, method: str) -> str:
    score = run.scores[method][found.measure.name]
    value, low, high = (units.measured(found.measure, end) for end in (score.value, score.low, score.high))
    return f"{value} [{low}, {high}]"


def _name(run: Run, method: str) -> str:
    return "the untouched model" if method == run.baseline else method
