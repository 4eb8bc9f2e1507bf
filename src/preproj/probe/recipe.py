"""The recipe: everything that defines a run, read from YAML and checked before anything is written."""

import os
import re
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from preproj.probe.errors import RecipeError

Method = Literal["none", "pre", "skip", "pre+skip", "lora", "lora-qkv", "pre+lora", "pre+skip+lora"]
METHODS: tuple[str, ...] = get_args(Method)

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


class Data(Section):
    """The text: ``source: python-docs`` (every CPython carries it), files, or what ``datasets`` loads."""

    source: Literal["python-docs", "files", "datasets"] = "python-docs"
    name: str | None = None
    """A data set on the Hub, or a folder that holds one."""
    config: str | None = None
    revision: str | None = None
    train: str | None = None
    """A file, a folder or a split's name; ``[:90%]`` or ``[100:200]`` at its end takes a part of its documents."""
    validation: str | None = None
    test: str | None = None
    column: str = "text"
    articles: bool = False
    """Whether the text is lines of WikiText, to be put together into articles."""
    streaming: bool = False
    """Whether to read only what the parts name."""

    @model_validator(mode="after")
    def _keys_go_together(self) -> "Data":
        allowed: dict[str, set[str]] = {
            "python-docs": set(),
            "files": {"train", "validation", "test", "column", "articles"},
            "datasets": set(type(self).model_fields),
        }
        for key, field in type(self).model_fields.items():
            if key not in {"source", *allowed[self.source]} and getattr(self, key) != field.default:
                sources = [source for source, keys in allowed.items() if key in keys]
                raise ValueError(f"{key} goes with source: {' or '.join(sources)} only")
        if self.source == "files" and None in (self.train, self.validation, self.test):
            raise ValueError("source files needs train, validation and test, each a file or a folder")
        if self.source == "datasets" and self.name is None:
            raise ValueError("source datasets needs name, a data set on the Hub or a folder that holds one")
        if self.streaming:
            for split in ("train", "validation", "test"):
                if not re.fullmatch(r"\[\d*:\d+\]", self.place(split)[1]):
                    raise ValueError(f"streaming needs {split} to say how many documents, like {split}[:1000]")
        return self

    def place(self, split: str) -> tuple[str, str]:
        """Return where a split comes from, and which part of it: ``("train", "[:90%]")``, or ``("train", "")``."""
        match = re.fullmatch(r"(.*?)(\[[^\[\]]*:[^\[\]]*\])?", getattr(self, split) or split, re.DOTALL)
        assert match is not None
        return match[1], match[2] or ""


class Training(Section):
    """Frozen-probe training: the same tokens in the same order for every method of a seed."""

    tokens: PositiveInt
    """Budget in tokens, a multiple of ``block_size · batch_size``."""
    block_size: PositiveInt = 256
    """Tokens per packed block."""
    batch_size: PositiveInt = 4
    """Blocks per optimiser step."""
    learning_rate: dict[Method, PositiveFloat]
    """Peak learning rate, per method."""
    warmup_ratio: Fraction = 0.1
    """Share of the steps in linear warm-up; cosine decay to zero follows."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    max_grad_norm: PositiveFloat = 1.0
    save_steps: PositiveInt = 10
    """Optimiser steps between checkpoints."""

    @model_validator(mode="after")
    def _whole_steps(self) -> "Training":
        step = self.block_size * self.batch_size
        if self.tokens % step:
            raise ValueError(f"tokens is {self.tokens}: expected a multiple of block_size · batch_size = {step}")
        return self

    @property
    def steps(self) -> int:
        """Optimiser steps in the budget."""
        return self.tokens // (self.block_size * self.batch_size)


class Evaluation(Section):
    """What is measured on held-out text."""

    split: Literal["test", "validation"] = "test"
    context: PositiveInt = 256
    """Tokens per perplexity window."""
    stride: PositiveInt = 128
    """Tokens the window moves; a token is scored once, with at least ``context - stride`` tokens
    before it."""
    document_tokens: Annotated[int, Field(ge=2)] = 256
    """Tokens scored at the start of each document."""
    documents: Annotated[int, Field(ge=2)] = 48
    """Documents scored, the first of the split."""
    passages: Annotated[int, Field(ge=0)] = 100
    """Passages in the last-word task; 0 leaves it out."""

    @model_validator(mode="after")
    def _stride_within_context(self) -> "Evaluation":
        if self.stride >= self.context:
            raise ValueError(f"stride is {self.stride}: expected less than context = {self.context}")
        return self


class Recipe(Section):
    """A whole run: cells = methods × seeds."""

    format_version: Literal[1] = 1
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    model: Model
    data: Data = Data()
    methods: Annotated[list[Method], Field(min_length=1)]
    seeds: Annotated[list[Annotated[int, Field(ge=0, lt=2**32)]], Field(min_length=1)] = [0]
    training: Training
    evaluation: Evaluation = Evaluation()

    @model_validator(mode="after")
    def _complete(self) -> "Recipe":
        for key in ("methods", "seeds"):
            if len(set(getattr(self, key))) < len(getattr(self, key)):
                raise ValueError(f"{key} names an entry twice")
        missing = [m for m in self.methods if m != "none" and m not in self.training.learning_rate]
        if missing:
            raise ValueError(f"training.learning_rate has no value for {', '.join(missing)}")
        return self

    def to_yaml(self) -> str:
        """Return the recipe with every default filled in."""
        return yaml.safe_dump(self.model_dump(exclude_none=True), sort_keys=False)


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
    try:
        return Recipe.model_validate(content)
    except ValidationError as error:
        raise RecipeError(f"recipe {where}: {_sentence(error.errors()[0])}") from error


def _sentence(error: Any) -> str:
    """Turn pydantic's first finding into one sentence with the key and what is allowed."""
    path = [part for part in error["loc"] if part != "[key]"]
    key = ".".join(str(part) for part in path)
    given = error["input"]
    match error["type"]:
        case "extra_forbidden":
            section: Any = Recipe
            for part in path[:-1]:
                section = section.model_fields[part].annotation
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


def _keys(section: type[BaseModel]) -> str:
    return ", ".join(section.model_fields)
