"""What the report knows about a run: the run folder's files as small typed records.

The fields are those of `docs/run-folder.md`, less what no page of the report shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

PERPLEXITY = "perplexity"
LAST_WORD = "last-word accuracy"
"""The two measures, as tables and sentences name them."""


@dataclass(frozen=True)
class Interval:
    """A difference between two cells and its 95 % interval."""

    difference: float
    low: float
    high: float

    @property
    def includes_zero(self) -> bool:
        """Whether the data are compatible with no difference at all."""
        return self.low <= 0 <= self.high


@dataclass(frozen=True)
class Comparison:
    """This cell minus another one; without the last word where the run left that out."""

    perplexity: Interval
    last_word_accuracy: Interval | None

    def interval(self, measure: str) -> Interval | None:
        """The interval of one of the two measures."""
        return self.perplexity if measure == PERPLEXITY else self.last_word_accuracy


@dataclass(frozen=True)
class Layer:
    """What one adapted attention module learned; None where the method has no such part."""

    layer: int
    site: str
    skip_norm: float | None
    initial_skip_norm: float | None
    skip_to_attention: float | None
    pre_to_input: float | None


@dataclass(frozen=True)
class Step:
    """One optimiser step: tokens seen so far and the mean loss in nats per token."""

    tokens: int
    loss: float


@dataclass(frozen=True)
class Result:
    """The numbers of a finished cell."""

    trainable_parameters: int
    share_of_total: float
    learning_rate: float | None
    tokens_per_second: float | None
    peak_memory_bytes: int
    seconds: float
    perplexity: float
    last_word_accuracy: float | None
    versus: Mapping[str, Comparison]
    token_order: str | None
    layers: tuple[Layer, ...]
    training: tuple[Step, ...]

    def value(self, measure: str) -> float | None:
        """The number of one of the two measures."""
        return self.perplexity if measure == PERPLEXITY else self.last_word_accuracy


@dataclass(frozen=True)
class Row:
    """One cell of the run; `result` is None unless the cell finished."""

    method: str
    seed: int
    status: Literal["finished", "failed", "missing"]
    reason: str | None
    notes: tuple[str, ...]
    result: Result | None


@dataclass(frozen=True)
class Base:
    """The frozen model under test."""

    name: str
    dtype: str
    parameters: int
    note: str | None


@dataclass(frozen=True)
class Protocol:
    """How the numbers were measured, one sentence each."""

    perplexity: str
    last_word: str
    training: str
    intervals: str


@dataclass(frozen=True)
class Split:
    """The size of one part of the corpus."""

    documents: int
    characters: int
    tokens: int


@dataclass(frozen=True)
class Corpus:
    """What the text is."""

    source: str
    description: str
    sha256: str
    split_rule: str
    splits: Mapping[str, Split]


@dataclass(frozen=True)
class Hardware:
    """The machine of the run."""

    device: str
    device_name: str
    cpu: str
    cores: int
    memory_bytes: int
    platform: str


@dataclass(frozen=True)
class Environment:
    """Versions and hardware of the run."""

    started: str
    packages: Mapping[str, str]
    git_commit: str | None
    hardware: Hardware
    threads: int


@dataclass(frozen=True)
class Run:
    """A whole run folder."""

    name: str
    base: Base
    protocol: Protocol
    baseline: str | None
    reference: str | None
    rows: tuple[Row, ...]
    environment: Environment
    corpus: Corpus
    recipe: str

    @property
    def finished(self) -> tuple[tuple[Row, Result], ...]:
        """The finished cells in recipe order, each with its numbers."""
        return tuple((row, row.result) for row in self.rows if row.result is not None)

    @property
    def several_seeds(self) -> bool:
        """Whether a method was trained with more than one seed."""
        return len({row.seed for row in self.rows if row.method != self.baseline}) > 1

    @property
    def measures(self) -> tuple[str, ...]:
        """The measures that the run took."""
        last_word = any(result.last_word_accuracy is not None for _, result in self.finished)
        return (PERPLEXITY, LAST_WORD) if last_word else (PERPLEXITY,)

    @property
    def methods(self) -> tuple[str, ...]:
        """Every method once, in recipe order."""
        return tuple(dict.fromkeys(row.method for row in self.rows))
