"""The recipe: everything that defines a run, read from YAML and checked before anything is written."""

import math
import os
import re
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)

from preproj.probe.errors import NewerFormatError, RecipeError
from preproj.probe.method import parse_method

FORMAT_VERSION = 1


def _known(name: str) -> str:
    parse_method(name)
    return name


MethodName = Annotated[str, AfterValidator(_known)]
PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """A part of the recipe; unknown keys and wrong types are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Model(Section):
    """The frozen base model."""

    name: str
    """``smollm2-135m-instruct`` (packaged), a local folder, or a Hub name."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"


class Text(Section):
    """Where text comes from: ``source: python-docs`` (every CPython carries it), files, or what ``datasets`` loads."""

    splits: ClassVar[tuple[str, ...]] = ("test",)

    source: Literal["python-docs", "files", "datasets"] = "python-docs"
    name: str | None = None
    """A data set on the Hub, or a folder that holds one."""
    config: str | None = None
    revision: str | None = None
    test: str | None = None
    """A file, a folder or a split's name; ``[:90%]`` or ``[100:200]`` at its end takes a part of its documents."""
    column: str = "text"
    articles: bool = False
    """Whether the text is lines of WikiText, to be put together into articles."""
    streaming: bool = False
    """Whether to read only what the parts name."""

    @model_validator(mode="after")
    def _keys_go_together(self) -> "Text":
        allowed: dict[str, set[str]] = {
            "python-docs": set(),
            "files": {*self.splits, "column", "articles"},
            "datasets": set(type(self).model_fields),
        }
        for key, field in type(self).model_fields.items():
            if key not in {"source", *allowed[self.source]} and getattr(self, key) != field.default:
                sources = [source for source, keys in allowed.items() if key in keys]
                raise ValueError(f"{key} goes with source: {' or '.join(sources)} only")
        if self.source == "files" and None in [getattr(self, split) for split in self.splits]:
            raise ValueError(f"source files needs {', '.join(self.splits)}: each a file or a folder")
        if self.source == "datasets" and self.name is None:
            raise ValueError("source datasets needs name, a data set on the Hub or a folder that holds one")
        if self.streaming:
            for split in self.splits:
                if not re.fullmatch(r"\[\d*:\d+\]", self.place(split)[1]):
                    raise ValueError(f"streaming needs {split} to say how many documents, like {split}[:1000]")
        return self

    def place(self, split: str) -> tuple[str, str]:
        """Return where a split comes from, and which part of it: ``("train", "[:90%]")``, or ``("train", "")``."""
        match = re.fullmatch(r"(.*?)(\[[^\[\]]*:[^\[\]]*\])?", getattr(self, split) or split, re.DOTALL)
        assert match is not None
        return match[1], match[2] or ""


class Data(Text):
    """The text of the experiment, in three splits."""

    splits: ClassVar[tuple[str, ...]] = ("train", "validation", "test")

    train: str | None = None
    validation: str | None = None


DeviceBatch = Annotated[
    Annotated[PositiveInt, Tag("number")] | Annotated[Literal["auto"], Tag("auto")],
    Discriminator(lambda given: "auto" if isinstance(given, str) else "number"),
]


class Training(Section):
    """Frozen-probe training: the same tokens in the same order for every method of a seed."""

    tokens: PositiveInt
    """Budget in tokens, a multiple of ``block_size · batch_size``."""
    block_size: PositiveInt = 256
    """Tokens per packed block."""
    batch_size: PositiveInt = 4
    """Blocks per optimiser step, on all devices together."""
    per_device_batch_size: DeviceBatch | None = None
    """Blocks in memory at once, the gradients of a step accumulate; None takes all of a step, ``auto`` what fits."""
    gradient_checkpointing: bool = False
    """Whether activations are computed again in the backward pass, to save memory."""
    learning_rate: dict[MethodName, PositiveFloat] = {}
    """Peak learning rate, per method; left out where ``tuning`` searches it."""
    pre_lr_ratio: PositiveFloat = 1.0
    """Rate of the pre-projection's weights over the method's."""
    warmup_ratio: Fraction = 0.1
    """Share of the steps in linear warm-up; cosine decay to zero follows."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    max_grad_norm: PositiveFloat = 1.0
    save_steps: PositiveInt = 10
    """Optimiser steps between checkpoints."""

    @field_validator("batch_size", mode="before")
    @classmethod
    def _stated(cls, given: Any) -> Any:
        if given == "auto":
            raise ValueError("auto would leave open what is trained; give a number, and per_device_batch_size: auto")
        return given

    @model_validator(mode="after")
    def _whole_steps(self) -> "Training":
        step = self.block_size * self.batch_size
        if self.tokens % step:
            raise ValueError(f"tokens is {self.tokens}: expected a multiple of block_size · batch_size = {step}")
        part = self.per_device_batch_size
        if isinstance(part, int) and self.batch_size % part:
            raise ValueError(f"per_device_batch_size is {part}: expected a divisor of batch_size = {self.batch_size}")
        return self

    @property
    def steps(self) -> int:
        """Optimiser steps in the budget."""
        return self.tokens // (self.block_size * self.batch_size)

    def changed(self, **values: Any) -> "Training":
        """Return the section with other values, checked."""
        return type(self).model_validate(self.model_dump() | values)


class Range(Section):
    """Numbers between two, drawn on a logarithmic scale."""

    low: PositiveFloat
    high: PositiveFloat

    @model_validator(mode="after")
    def _ordered(self) -> "Range":
        if self.low >= self.high:
            raise ValueError(f"low is {self.low:g}: expected less than high = {self.high:g}")
        return self


Space = Annotated[
    Annotated[Annotated[list[Annotated[float, Field(ge=0, allow_inf_nan=False)]], Field(min_length=1)], Tag("values")]
    | Annotated[Range, Tag("range")],
    Discriminator(lambda given: "range" if isinstance(given, dict | Range) else "values"),
]


class Search(Section):
    """What tuning tries of the training section: values, or a range."""

    learning_rate: Space
    pre_lr_ratio: Space | None = None
    warmup_ratio: Space | None = None
    weight_decay: Space | None = None
    max_grad_norm: Space | None = None

    def spaces(self) -> dict[str, list[float] | Range]:
        """Return what is searched, by key of the training section."""
        return {key: space for key in type(self).model_fields if (space := getattr(self, key)) is not None}


class Tuning(Section):
    """A search on the validation split before the cells run, with the same number of trials for every method."""

    trials: PositiveInt
    """Per method."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Of the search, and of the weights and the order of the text in every trial."""
    tokens: PositiveInt | None = None
    """Training budget of a trial; None takes that of the cells."""
    search: Search

    @model_validator(mode="after")
    def _grid_is_whole(self) -> "Tuning":
        spaces = self.search.spaces().values()
        if any(isinstance(space, list) and len(set(space)) < len(space) for space in spaces):
            raise ValueError("search names a value twice")
        if all(isinstance(space, list) for space in spaces):
            points = math.prod(len(space) for space in spaces if isinstance(space, list))
            if self.trials != points:
                raise ValueError(f"trials is {self.trials}: expected {points}, one for each point of the grid")
        return self


class Evaluation(Section):
    """What is measured on held-out text and on benchmarks."""

    split: Literal["test", "validation"] = "test"
    perplexity: list[Literal["document", "stream"]] = ["document"]
    """Protocols: each document on its own, or all of them one after the other."""
    context: PositiveInt = 256
    """Tokens the model reads per window."""
    stride: PositiveInt = 128
    """Tokens the window moves; a token is scored once, with more than ``context - stride`` tokens before it."""
    document_tokens: PositiveInt | None = 256
    """Tokens scored at the start of each document; None scores all."""
    documents: Annotated[int, Field(ge=2)] | None = 48
    """Documents scored, the first of the split; None scores all."""
    windows: PositiveInt | None = None
    """Windows of the stream scored, the first; None scores all."""
    retention: Text | None = None
    """Text of another kind than is trained on, scored as ``document``: what a method loses there."""
    passages: Annotated[int, Field(ge=0)] = 100
    """Passages in the last-word task; 0 leaves it out."""
    tasks: list[str] = []
    """Tasks of the Language Model Evaluation Harness, such as lambada_openai."""
    task_data: str | None = None
    """Folder with ``<task>.jsonl`` for every task; None takes the harness's own source, the Hub."""
    limit: PositiveInt | None = None
    """Items per task, the first; None takes all."""
    batch_size: PositiveInt = 8
    """Requests per forward pass of the tasks."""

    @model_validator(mode="after")
    def _stride_within_context(self) -> "Evaluation":
        if self.stride > self.context:
            raise ValueError(f"stride is {self.stride}: expected at most context = {self.context}")
        for key in ("tasks", "perplexity"):
            if len(set(getattr(self, key))) < len(getattr(self, key)):
                raise ValueError(f"{key} names an entry twice")
        if not (self.tasks or self.perplexity or self.passages):
            raise ValueError("nothing is measured: name a perplexity, passages or tasks")
        if self.task_data is not None and not self.tasks:
            raise ValueError("task_data goes with tasks only")
        return self


class Recipe(Section):
    """A whole run: cells = methods × seeds."""

    format_version: Literal[1] = 1
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    model: Model
    data: Data = Data()
    methods: Annotated[list[MethodName], Field(min_length=1)]
    match: bool = False
    """Whether ``pre`` is widened to the parameters of ``pre+skip``."""
    seeds: Annotated[list[Annotated[int, Field(ge=0, lt=2**32)]], Field(min_length=1)] = [0]
    training: Training
    tuning: Tuning | None = None
    evaluation: Evaluation = Evaluation()
    report_to: list[Literal["tensorboard", "wandb", "trackio"]] = []
    """Trackers that follow the training; none by default."""

    @model_validator(mode="after")
    def _complete(self) -> "Recipe":
        for key in ("methods", "seeds", "report_to"):
            if len(set(getattr(self, key))) < len(getattr(self, key)):
                raise ValueError(f"{key} names an entry twice")
        rates = self.training.learning_rate
        if self.tuning is not None:
            if rates:
                raise ValueError("tuning finds the learning rate of every method; leave training.learning_rate out")
            self._check_trials(self.tuning)
            if self.evaluation.split == "validation":
                raise ValueError("tuning looks at the validation split; evaluate on evaluation.split: test")
        elif missing := [method for method in self.methods if method != "none" and method not in rates]:
            raise ValueError(f"training.learning_rate has no value for {', '.join(missing)}")
        if self.match and "pre" not in self.methods:
            raise ValueError("match goes with the method pre only, which it widens to the size of pre+skip")
        of_the_base = [m for m in self.methods if parse_method(m).base]
        if of_the_base and self.model.dtype != "float32":
            raise ValueError(
                f"model.dtype is {self.model.dtype}, and the base's own weights train in {', '.join(of_the_base)}, "
                "which needs float32"
            )
        return self

    def _check_trials(self, tuning: Tuning) -> None:
        step = self.training.block_size * self.training.batch_size
        if tuning.tokens is not None and tuning.tokens % step:
            raise ValueError(
                f"tuning.tokens is {tuning.tokens}: expected a multiple of block_size · batch_size = {step}"
            )
        for key, space in tuning.search.spaces().items():
            for value in space if isinstance(space, list) else (space.low, space.high):
                try:
                    self.training.changed(**{key: {"pre": value} if key == "learning_rate" else value})
                except ValidationError as error:
                    problem = error.errors()[0]["msg"].replace("Input should", "it should")
                    raise ValueError(f"tuning.search.{key} has {value:g}; {problem}") from error

    def to_yaml(self) -> str:
        """Return the recipe with every default filled in."""
        return yaml.safe_dump(self.model_dump(), sort_keys=False)


class _DuplicateKeyError(yaml.MarkedYAMLError):
    pass


class _UniqueKeys(yaml.SafeLoader):
    """YAML in which a mapping names a key once; plain YAML lets the last one win in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise _DuplicateKeyError(problem=f"{key.value} stands twice", problem_mark=key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def load_recipe(path: Path | None) -> Recipe:
    """Read and check a recipe.

    Args:
        path: a YAML file; None means the embedded demo.

    Raises:
        RecipeError: one sentence naming the key and what is allowed.
    """
    if path is None:
        text, where = resources.files("preproj.probe").joinpath("demo.yaml").read_text("utf-8"), "demo.yaml"
    else:
        try:
            text, where = path.read_text("utf-8"), str(path)
        except (OSError, UnicodeDecodeError) as error:
            reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else "not UTF-8 text"
            raise RecipeError(f"recipe {path} cannot be read: {reason}.") from error
    return parse_recipe(text, where)


def parse_recipe(text: str, where: str) -> Recipe:
    """Check the text of a recipe; see :func:`load_recipe`."""
    try:
        content = yaml.load(text, Loader=_UniqueKeys)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" (line {mark.line + 1})" if mark else ""
        problem = f": {error.problem}" if isinstance(error, _DuplicateKeyError) else ""
        raise RecipeError(f"recipe {where} is not valid YAML{line}{problem}.") from error
    if not isinstance(content, dict):
        raise RecipeError(f"recipe {where} is empty or not a mapping: expected keys {_keys(Recipe)}.")
    version = content.get("format_version", 1)
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise NewerFormatError(
            f"recipe {where} has format version {version}, and this preproj reads up to version {FORMAT_VERSION}; "
            "install a newer preproj to read it."
        )
    try:
        return Recipe.model_validate(content)
    except ValidationError as error:
        raise RecipeError(f"recipe {where}: {_sentence(error.errors()[0])}") from error


def _sentence(error: Any) -> str:
    """Turn pydantic's first finding into one sentence with the key and what is allowed."""
    path = [part for part in error["loc"] if part not in ("[key]", "values", "range", "number", "auto")]
    key = ".".join(str(part) for part in path)
    given = error["input"]
    match error["type"]:
        case "extra_forbidden":
            section: Any = Recipe
            for part in path[:-1]:
                section = _section(section.model_fields[part].annotation)
            return f"unknown key {key}; allowed here: {_keys(section)}."
        case "missing":
            return f"{key} is missing."
        case "literal_error":
            return f"{key} is {given!r}; allowed: {error['ctx']['expected']}."
        case "value_error":
            return f"{key + ': ' if key else ''}{error['ctx']['error']}."
        case _:
            message = error["msg"].replace("Input should", "it should").replace("String should", "it should")
            # YAML reads 1e-3 as text.
            hint = (
                " (write 1.0e-3, with a point)" if isinstance(given, str) and re.fullmatch(r"\d+e-?\d+", given) else ""
            )
            return f"{key} is {given!r}; {message[0].lower()}{message[1:]}{hint}."


def _section(annotation: Any) -> Any:
    """Find the section in the type of a key, such as ``Tuning | None``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_section, get_args(annotation))), None)


def _keys(section: type[BaseModel]) -> str:
    return ", ".join(section.model_fields)
