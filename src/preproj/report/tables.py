"""The tables of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from preproj.report import units
from preproj.report.contest import direction
from preproj.report.records import Interval, Measure, Result, Row, Run, Trial, Tuning
from preproj.report.table import Cell, Table

WORDING = {
    "parameters": "not an equal budget",
    "dtype": "another dtype",
    "device": "another device",
    "data": "not the same tokens",
}
"""What else differs between the methods of a pair, as tables say it."""

RISE = Measure("ablations/perplexity", "ablations", "perplexity", "perplexity", 0)


def tables(run: Run) -> tuple[Table, ...]:
    """Puts the numbers of a run into tables.

    Args:
        run: The run.

    Returns:
        The tables that the run has numbers for, the most important first.
    """
    others = [other for other in (run.baseline, run.reference) if other is not None]
    found = [_scores(run), *(_differences(run, other) for other in others), _cost(run), _cells(run), _all_pairs(run)]
    found += [_ablations(run), _interactions(run), _tuning(run), _published(run)]
    return tuple(table for table in found if table is not None and table.rows)


def footnotes(run: Run) -> tuple[str, ...]:
    """What must be read beside the tables: notes of methods and reasons of unfinished cells.

    Args:
        run: The run.

    Returns:
        Sentences, each once; the tables refer to them by number, from [1].
    """
    return tuple(dict.fromkeys(sentence for row in run.rows for sentence in _sentences(row)))


def _sentences(row: Row) -> tuple[str, ...]:
    return (*row.notes, *([unfinished_sentence(row)] if row.result is None else []))


def unfinished_sentence(row: Row) -> str:
    """Why a cell has no numbers.

    Args:
        row: A failed or missing cell.

    Returns:
        One sentence.
    """
    if row.status == "failed":
        return f"{row.method}, seed {row.seed}, failed: {row.reason or 'no reason was recorded.'}"
    return f"{row.method}, seed {row.seed}, has no result yet; the command that started the run tries it again."


def _scores(run: Run) -> Table:
    """Every score of every method, over its seeds."""
    rows = []
    for method in run.methods:
        if method in run.scores:
            scores = run.scores[method]
            cells = [_score(measure, scores.get(measure.name)) for measure in run.measures]
        else:
            cells = [Cell("no result"), *[Cell(units.NOTHING)] * (len(run.measures) - 1)][: len(run.measures)]
        rows.append((_head(run, method), *cells))
    seeds = ", mean over seeds" if run.several_seeds else ""
    return Table("scores", f"Results of {run.name} on {run.base.name}{seeds}", _titles(run.measures), tuple(rows))


def _score(measure: Measure, interval: Interval | None) -> Cell:
    if interval is None:
        return Cell(units.NOTHING)
    low, high = (units.measured(measure, end) for end in (interval.low, interval.high))
    return Cell(units.measured(measure, interval.value), (f"[{low}, {high}]",), _values(interval))


def _values(interval: Interval) -> tuple[float, float, float]:
    return interval.value, interval.low, interval.high


def _differences(run: Run, other: str) -> Table:
    """The differences of every other method from one."""
    relative = other != run.baseline
    rows = []
    for method in run.methods:
        pair = run.pair(method, other)
        if pair is None or (relative and method == run.baseline):
            continue
        if relative:
            ratio = run.size(method) / run.size(other)
            head = [_head(run, method), Cell(units.times(ratio), _wording(pair.differs), (ratio,))]
        else:  # the untouched model trains nothing, which is no news
            head = [Cell(_head(run, method).text, _wording(pair.beside_size))]
        cells = [_difference(measure, pair.differences.get(measure.name)) for measure in run.measures]
        rows.append((*head, *cells))
    titles = _titles(run.measures, unit=True)
    if relative:
        titles = (titles[0], f"trainable parameters relative to {other}", *titles[1:])
    return Table(f"differences-from-{other}", f"Differences from {_name(run, other)}", titles, tuple(rows))


def _wording(differs: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(WORDING.get(what, f"another {what}") for what in differs)


def _difference(measure: Measure, interval: Interval | None) -> Cell:
    if interval is None:
        return Cell(units.NOTHING)
    middle, low, high = units.difference(measure, interval)
    return Cell(middle, (f"[{low}, {high}]",), _values(interval), direction(measure, interval))


def _cost(run: Run) -> Table:
    """What every cell cost."""
    columns: dict[str, Callable[[Result], Cell]] = {
        "trainable parameters": lambda result: _number(units.whole, result.trainable_parameters),
        "share of total": lambda result: _number(units.share, result.share_of_total),
        "peak learning rate": lambda result: _number(units.learning_rate, result.learning_rate),
        "training tokens/s": lambda result: _number(units.rate, result.tokens_per_second),
        "peak memory": lambda result: _number(units.memory, result.peak_memory_bytes),
        "training + evaluation": lambda result: _number(units.seconds, result.seconds),
    }
    return _by_cell(run, "cost", "Size and cost", columns, lambda result: [cell(result) for cell in columns.values()])


def _number(words: Callable[[Any], str], number: float | None) -> Cell:
    return Cell(words(number), values=() if number is None else (number,))


def _cells(run: Run) -> Table | None:
    """The scores of every seed, where there are several."""
    if not run.several_seeds:
        return None

    def scores(result: Result) -> list[Cell]:
        return [
            Cell(units.measured(measure, value), values=() if value is None else (value,))
            for measure in run.measures
            for value in [result.scores.get(measure.name)]
        ]

    return _by_cell(run, "seeds", "Every seed", [measure.label for measure in run.measures], scores)


def _by_cell(run: Run, name: str, caption: str, titles: Iterable[str], cells: Callable[[Result], list[Cell]]) -> Table:
    titles = tuple(titles)
    rows = []
    for row in run.rows:
        seed = [Cell("all" if row.method == run.baseline else str(row.seed))] if run.several_seeds else []
        body = (
            cells(row.result)
            if row.result is not None
            else [Cell(row.status), *[Cell(units.NOTHING)] * (len(titles) - 1)]
        )
        rows.append((_head(run, row.method), *seed, *body))
    heads = ("method", "seed") if run.several_seeds else ("method",)
    return Table(name, caption, (*heads, *titles), tuple(rows), heads=len(heads))


def _all_pairs(run: Run) -> Table | None:
    """Every pair of methods with its corrected p-value, where there are more than the tables above show."""
    shown = {run.baseline, run.reference}
    if all({pair.ours, pair.theirs} & shown for pair in run.pairs):
        return None
    rows = []
    for pair in run.pairs:
        cells = []
        for measure in run.measures:
            interval = pair.differences.get(measure.name)
            cell = _difference(measure, interval)
            if interval is not None and interval.p_holm is not None:
                cell = Cell(cell.text, (f"p = {interval.p_holm:.2g}",), cell.values)
            cells.append(cell)
        rows.append(
            (
                Cell(f"{pair.ours} − {pair.theirs}"),
                Cell("no" if pair.differs else "yes", _wording(pair.differs)),
                *cells,
            )
        )
    titles = ("pair", "matched", *_titles(run.measures, unit=True)[1:])
    return Table("pairs", "Every pair of methods, p-values after Holm's correction", titles, tuple(rows))


def _interactions(run: Run) -> Table:
    """What parts gain together beyond the sum of their own gains."""
    rows = tuple(
        (
            Cell(found.name),
            *(_difference(measure, found.differences.get(measure.name)) for measure in run.measures),
        )
        for found in run.interactions
    )
    titles = ("parts", *_titles(run.measures, unit=True)[1:])
    caption = "Interactions: gain of both parts together minus the sum of each one's gain"
    return Table("interactions", caption, titles, rows)


def _ablations(run: Run) -> Table:
    """What perplexity rises by without a part in a group of layers, where cells were analysed."""
    rows = []
    for row, result in run.finished:
        ablations = result.analysis.ablations if result.analysis else ()
        for one in (one for one in ablations if one.group is not None):
            span = f"{one.group}: {one.layers[0]}–{one.layers[-1]}"
            middle, low, high = units.difference(RISE, one.rise)
            rise = Cell(middle, (f"[{low}, {high}]",), _values(one.rise))
            part = one.part.replace("_", "-")
            rows.append((_head(run, row.method), Cell(str(row.seed)), Cell(part), Cell(span), rise))
    titles = ("method", "seed", "without", "layers", "Δ perplexity")
    caption = "What groups of layers are worth: perplexity without a part of them"
    return Table("ablations", caption, titles, tuple(rows), heads=4)


def _tuning(run: Run) -> Table | None:
    """Every trial of the search for each method's settings."""
    if run.tuning is None:
        return None
    keys = list(dict.fromkeys(key for trial in run.tuning.trials for key in trial.parameters))
    rows = []
    for trial in run.tuning.trials:
        settings = [_number(units.learning_rate, trial.parameters.get(key)) for key in keys]
        failed = Cell("failed", (trial.reason or "",))
        value = failed if trial.value is None else Cell(f"{trial.value:,.2f}", values=(trial.value,))
        rows.append((Cell(trial.method), *settings, value, Cell(_choice(run.tuning, trial))))
    titles = ("method", *(key.replace("_", " ") for key in keys), f"validation {run.tuning.measure}", "chosen")
    return Table("tuning", "Tuning: every trial, judged on the validation split", titles, tuple(rows))


def _choice(tuning: Tuning, trial: Trial) -> str:
    """Say whether a trial was chosen, and of which settings it has the smallest or largest value that was tried."""
    if not trial.chosen:
        return ""
    edges = []
    for key, value in trial.parameters.items():
        tried = {other.parameters[key] for other in tuning.trials if other.method == trial.method}
        if len(tried) > 1 and value in (min(tried), max(tried)):
            edges.append(f"{'lowest' if value == min(tried) else 'highest'} {key.replace('_', ' ')} tried")
    return f"yes ({', '.join(edges)})" if edges else "yes"


def _published(run: Run) -> Table:
    """Numbers of others beside what was measured here."""
    rows = []
    for known in run.published:
        value, here = f"{known.value:g}", Cell(units.NOTHING)
        if (found := run.measured(known)) is not None:
            measure, score = found
            value, here = units.measured(measure, known.value), _score(measure, score)
            wording = () if score.holds(known.value) else ("differs beyond its interval",)
            name = () if measure.label == known.what else (measure.label,)
            here = Cell(here.text, (*name, *here.details, *wording), here.values)
        rows.append(
            (Cell(known.method), Cell(known.what), Cell(value, values=(known.value,)), here, Cell(known.source))
        )
    titles = ("method", "what", "published", "measured here", "source")
    return Table("published", "Published by others, not measured here", titles, tuple(rows))


def _titles(measures: tuple[Measure, ...], *, unit: bool = False) -> tuple[str, ...]:
    points = {measure: " (percentage points)" if unit and measure.higher_is_better else "" for measure in measures}
    return ("method", *(f"{'Δ ' if unit else ''}{measure.label}{points[measure]}" for measure in measures))


def _head(run: Run, method: str) -> Cell:
    """A method's name with the numbers of its footnotes."""
    numbers = {sentence: f" [{number}]" for number, sentence in enumerate(footnotes(run), start=1)}
    own = (sentence for row in run.rows if row.method == method for sentence in _sentences(row))
    return Cell(method + "".join(numbers[sentence] for sentence in dict.fromkeys(own)))


def _name(run: Run, method: str) -> str:
    return f"the untouched model ({method})" if method == run.baseline else method
