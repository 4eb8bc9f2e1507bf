"""What the report knows about a run: the run folder's files as small typed records.

The fields are those of `docs/run-folder.md`, less what no page of the report shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

LEVEL = 0.05
"""A corrected p-value above it is no evidence, whatever the interval says."""


@dataclass(frozen=True)
class Measure:
    """One number of every cell: a metric of a task."""

    name: str
    task: str
    metric: str
    kind: Literal["accuracy", "perplexity"]
    items: int

    @property
    def label(self) -> str:
        """As tables and sentences name it: `lambada_openai acc`, `document word perplexity`."""
        return f"{self.task} {self.metric.replace('_', ' ')}"

    @property
    def unit(self) -> str:
        """What a perplexity is over: tokens, words or bytes."""
        return self.metric.removesuffix("perplexity").rstrip("_") or "token"

    @property
    def higher_is_better(self) -> bool:
        """Whether more is better."""
        return self.kind == "accuracy"


@dataclass(frozen=True)
class Interval:
    """A number with its 95 % interval; for a difference of two methods also its test.

    `over_seeds` is the same difference with its interval over training seeds, where there are enough of them.
    """

    value: float
    low: float
    high: float
    p_holm: float | None = None
    detectable: float | None = None
    over_seeds: Interval | None = None

    @property
    def includes_zero(self) -> bool:
        """Whether the data are compatible with no difference at all."""
        return self.holds(0)

    @property
    def unclear(self) -> bool:
        """Whether interval or corrected p-value allow for no difference at all."""
        return self.includes_zero or (self.p_holm is not None and self.p_holm > LEVEL)

    def holds(self, value: float) -> bool:
        """Whether the data are compatible with a value."""
        return self.low <= value <= self.high

    @property
    def turned(self) -> Interval:
        """The same difference seen from the other side."""
        over_seeds = self.over_seeds and self.over_seeds.turned
        return replace(self, value=-self.value, low=-self.high, high=-self.low, over_seeds=over_seeds)


@dataclass(frozen=True)
class Pair:
    """Method `ours` minus method `theirs`, by name of the measure; `differs` names what else differs between them."""

    ours: str
    theirs: str
    differs: tuple[str, ...]
    differences: Mapping[str, Interval]

    @property
    def beside_size(self) -> tuple[str, ...]:
        """What differs besides the trainable parameters."""
        return tuple(what for what in self.differs if what != "parameters")

    @property
    def turned(self) -> Pair:
        """The same pair seen from the other side."""
        turned = {name: difference.turned for name, difference in self.differences.items()}
        return Pair(self.theirs, self.ours, self.differs, turned)


@dataclass(frozen=True)
class Interaction:
    """What two parts gain together beyond the sum of what each gains alone, by name of the measure."""

    name: str
    differences: Mapping[str, Interval]


@dataclass(frozen=True)
class Published:
    """A number that somebody else published: of which method, in whose words, and the measure here that is the same.

    `paper` says that it is the paper's; the others are of the untouched model.
    """

    method: str
    what: str
    value: float
    measure: str | None
    source: str
    paper: bool


@dataclass(frozen=True)
class Trial:
    """One trial of tuning: its settings, and the perplexity on the validation split or why there is none."""

    method: str
    parameters: Mapping[str, float]
    value: float | None
    reason: str | None
    chosen: bool


@dataclass(frozen=True)
class Tuning:
    """The search that found every method's settings, judged by a measure."""

    measure: str
    trials: tuple[Trial, ...]


@dataclass(frozen=True)
class Ablation:
    """What perplexity rises by when a part is switched off in some layers, of which a group has a name."""

    part: Literal["skip", "pre_projection"]
    group: str | None
    layers: tuple[int, ...]
    rise: Interval


@dataclass(frozen=True)
class Analysis:
    """What `preproj analyze` found of a cell's adapter; `text` says what it was measured on."""

    text: str
    ablations: tuple[Ablation, ...]


@dataclass(frozen=True)
class Layer:
    """What one adapted attention module learned; None where the method has no such part, or was not measured.

    `without_skip` and `without_pre` are what perplexity rises by when that part of this layer alone is switched off.
    """

    layer: int
    site: str
    skip_norm: float | None
    initial_skip_norm: float | None
    skip_to_attention: float | None
    pre_to_input: float | None
    without_skip: Interval | None = None
    without_pre: Interval | None = None


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
    scores: Mapping[str, float]
    token_order: str | None
    layers: tuple[Layer, ...]
    training: tuple[Step, ...]
    analysis: Analysis | None = None


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
class Answer:
    """What one method said of an item; `right` is None where there is no right or wrong."""

    method: str
    said: str
    right: bool | None

    @property
    def words(self) -> str:
        """What it said, and whether it was right."""
        said = self.said.strip() or "nothing"
        return said if self.right is None else f"{said} ({'right' if self.right else 'wrong'})"


@dataclass(frozen=True)
class Example:
    """A held-out item and what two methods made of it; what the run folder does not hold is None."""

    id: str
    text: str | None
    target: str | None
    answers: tuple[Answer, Answer]


@dataclass(frozen=True)
class Examples:
    """The items of a task that `ours` won and lost against `theirs`: how many of all, and a few of each."""

    task: str
    kind: Literal["accuracy", "perplexity"]
    ours: str
    theirs: str
    seed: int | None
    items: int
    wins: int
    losses: int
    won: tuple[Example, ...]
    lost: tuple[Example, ...]

    @property
    def summary(self) -> str:
        """How often each of the two was ahead, in one sentence."""
        ahead = "right where the other is wrong" if self.kind == "accuracy" else "the one with the lower loss"
        seed = "" if self.seed is None else f" (seed {self.seed})"
        same = self.items - self.wins - self.losses
        return (
            f"Of {self.items:,} items {self.ours} is {ahead} in {self.wins:,}, {self.theirs} in {self.losses:,}; in "
            f"{same:,} they are even{seed}. Shown are those with the largest difference."
        )


@dataclass(frozen=True)
class Base:
    """The frozen model under test."""

    name: str
    dtype: str
    parameters: int
    note: str | None


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
    """Versions and hardware of the run; `continued` holds when it went on under changes, and which."""

    started: str
    packages: Mapping[str, str]
    git_commit: str | None
    hardware: Hardware
    threads: int
    continued: tuple[tuple[str, tuple[str, ...]], ...] = ()


@dataclass(frozen=True)
class CellsEnvironment:
    """What some cells were trained and scored with: hardware, versions and commit by name."""

    cells: tuple[str, ...]
    ran_with: Mapping[str, str]


@dataclass(frozen=True)
class Run:
    """A whole run folder."""

    name: str
    base: Base
    protocol: Mapping[str, str]
    baseline: str | None
    reference: str | None
    measures: tuple[Measure, ...]
    rows: tuple[Row, ...]
    scores: Mapping[str, Mapping[str, Interval]]
    pairs: tuple[Pair, ...]
    interactions: tuple[Interaction, ...]
    published: tuple[Published, ...]
    precision_warning: str | None
    tuning: Tuning | None
    environment: Environment
    environments: tuple[CellsEnvironment, ...]
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

    def pair(self, ours: str, theirs: str | None) -> Pair | None:
        """The comparison of two methods, or None where they were not compared."""
        for pair in self.pairs:
            if (pair.ours, pair.theirs) == (ours, theirs):
                return pair
            if (pair.theirs, pair.ours) == (ours, theirs):
                return pair.turned
        return None

    def measured(self, known: Published) -> tuple[Measure, Interval] | None:
        """The measure and the score here of what somebody published, or None where this run did not measure it."""
        measure = next((measure for measure in self.measures if measure.name == known.measure), None)
        if measure is None or measure.name not in self.scores.get(known.method, {}):
            return None
        return measure, self.scores[known.method][measure.name]

    def size(self, method: str) -> int:
        """Trainable parameters of a method that has a finished cell."""
        return next(result.trainable_parameters for row, result in self.finished if row.method == method)

    def seconds(self, method: str) -> float:
        """Seconds that a cell of a method took, mean over its finished cells."""
        found = [result.seconds for row, result in self.finished if row.method == method]
        return sum(found) / len(found)

    @property
    def methods(self) -> tuple[str, ...]:
        """Every method once, in recipe order."""
        return tuple(dict.fromkeys(row.method for row in self.rows))
