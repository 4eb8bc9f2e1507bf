"""The report as data, in reading order. The HTML and the Markdown page say the same with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from preproj.report import units
from preproj.report.headline import warnings
from preproj.report.records import Examples, Run
from preproj.report.section import Section, sections
from preproj.report.style import styles
from preproj.report.tables import footnotes
from preproj.report.verdict import Verdict, verdict

TABLE_LEGEND = (
    "Δ is this row minus the other; in brackets its 95 % interval. "
    "“Better” and “worse” stand where the interval excludes 0, “not distinguishable” where it includes 0; where a row "
    "names what else differs, they are no fair comparison."
)
COMMAND = "preproj probe recipe.yaml"


@dataclass(frozen=True)
class Page:
    """Everything a report says.

    `colours` are those of the methods in the figures, `protocol` and the facts are pairs of a name and a text; `recipe`
    is a file's text, word for word.
    """

    name: str
    title: str
    base: str
    note: str | None
    warnings: tuple[str, ...]
    verdict: Verdict
    sections: tuple[Section, ...]
    footnotes: tuple[str, ...]
    colours: Mapping[str, str]
    protocol: tuple[tuple[str, str], ...]
    corpus: tuple[tuple[str, str], ...]
    environment: tuple[tuple[str, str], ...]
    recipe: str
    command: str = COMMAND


def build_page(run: Run, examples: tuple[Examples, ...]) -> Page:
    """Collects what a report says about a run.

    Args:
        run: The run.
        examples: Items won and lost.

    Returns:
        The report as data.
    """
    base = run.base
    return Page(
        name=run.name,
        title=f"{run.name}: {base.name}",
        base=f"Base model {base.name}: {units.whole(base.parameters)} frozen parameters, {base.dtype}.",
        note=base.note,
        warnings=warnings(run),
        verdict=verdict(run),
        sections=sections(run, examples),
        footnotes=numbered_footnotes(run),
        colours={method: style.colour for method, style in styles(run.methods).items()},
        protocol=_protocol(run),
        corpus=_corpus(run),
        environment=_environment(run),
        recipe=run.recipe,
    )


def numbered_footnotes(run: Run) -> tuple[str, ...]:
    """The sentences under the tables.

    Args:
        run: The run.

    Returns:
        The footnotes with their numbers, then how to read a difference where there is one.
    """
    numbered = (f"[{number}] {sentence}" for number, sentence in enumerate(footnotes(run), start=1))
    return (*numbered, *([TABLE_LEGEND] if run.pairs else []))


def _protocol(run: Run) -> tuple[tuple[str, str], ...]:
    order = _token_order(run)
    return (*run.protocol.items(), *([("order of the text", order)] if order else []))


def _token_order(run: Run) -> str | None:
    """Says whether the methods of a seed were trained on one and the same stream of tokens."""
    orders: dict[int, list[str]] = {}
    for row, result in run.finished:
        if result.token_order is not None:
            orders.setdefault(row.seed, []).append(result.token_order)
    if not any(len(found) > 1 for found in orders.values()):
        return None
    if all(len(set(found)) == 1 for found in orders.values()):
        return "Within a seed, every trained method saw the same tokens in the same order (equal hashes)."
    return (
        "Warning: the methods of a seed did not see the same tokens in the same order (hashes differ), "
        "so their differences also hold the effect of the text."
    )


def _corpus(run: Run) -> tuple[tuple[str, str], ...]:
    corpus = run.corpus
    splits = (
        (
            name,
            f"{units.whole(split.documents)} documents, {units.whole(split.tokens)} tokens, "
            f"{units.whole(split.characters)} characters",
        )
        for name, split in corpus.splits.items()
    )
    return (
        ("source", corpus.source),
        ("text", corpus.description),
        ("split", corpus.split_rule),
        *splits,
        ("SHA-256", corpus.sha256),
    )


def _environment(run: Run) -> tuple[tuple[str, str], ...]:
    environment = run.environment
    machine = environment.hardware
    return (
        ("started", environment.started),
        ("git commit", environment.git_commit or "unknown (not run from a git checkout)"),
        ("device", f"{machine.device}: {machine.device_name}"),
        ("processor", f"{machine.cpu}, {machine.cores} cores, {environment.threads} threads used"),
        ("memory", units.memory(machine.memory_bytes)),
        ("platform", machine.platform),
        ("packages", ", ".join(f"{name} {version}" for name, version in environment.packages.items())),
        *((f"went on {started} with changes", "; ".join(changes)) for started, changes in environment.continued),
    )
