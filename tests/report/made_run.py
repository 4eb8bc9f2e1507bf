"""Runs made in memory, with chosen scores and chosen differences."""

from preproj.report.records import Base, Interval, Measure, Pair, Result, Row, Run

MEASURES = (
    Measure("document/perplexity", "document", "perplexity", "perplexity", 40),
    Measure("last_word/acc", "last_word", "acc", "accuracy", 500),
)


def cell(method, parameters, perplexity=30.0, seed=0):
    scores = {"document/perplexity": perplexity, "last_word/acc": 0.4}
    return Row(
        method, seed, "finished", None, (), Result(parameters, 0.1, 1e-3, None, 2**30, 1.0, scores, None, (), ())
    )


def pair(ours, theirs, perplexity, accuracy, *, differs=()):
    intervals = [Interval((low + high) / 2, low, high, 0.04, 0.3) for low, high in (perplexity, accuracy)]
    return Pair(ours, theirs, differs, dict(zip((m.name for m in MEASURES), intervals, strict=True)))


def made(rows, pairs=(), reference="lora", warning=None, published=()):
    """Makes a run from its cells and pairs."""
    finished = {row.method: row.result.scores for row in rows if row.result}
    scores = {
        method: {name: Interval(value, value - 1, value + 1) for name, value in values.items()}
        for method, values in finished.items()
    }
    return Run(
        name="r",
        base=Base("b", "float32", 1, None),
        protocol={},
        baseline="none",
        reference=reference,
        measures=MEASURES,
        rows=tuple(rows),
        scores=scores,
        pairs=tuple(pairs),
        tuning=None,
        interactions=(),
        published=published,
        precision_warning=warning,
        environment=None,  # type: ignore[arg-type]
        environments=(),
        corpus=None,  # type: ignore[arg-type]
        recipe="",
    )
