"""The text of a run as every cell reads it: training blocks, held-out documents and passages."""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, load_from_disk
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from preproj.probe.base import context_length
from preproj.probe.corpus import RETENTION, Corpus, Document
from preproj.probe.errors import RecipeError
from preproj.probe.files import cache_folder, read_json, read_jsonl, whole_folder, write_jsonl
from preproj.probe.passages import Passage, last_word_passages
from preproj.probe.recipe import Evaluation, Recipe
from preproj.probe.tokenised import BLOCKS, TOKENS, tokenised


@dataclass(frozen=True)
class Prepared:
    """Tokenised text of a run, in a folder of the cache or the run's own.

    Attributes:
        folder: holds the text; see :func:`preproj.probe.tokenised.tokenised`.
        evaluation: the recipe's section.
        passages: of the last-word task.
    """

    folder: Path
    evaluation: Evaluation
    passages: list[Passage]

    @cached_property
    def blocks(self) -> np.ndarray:
        """Packed training text, ``(blocks, block_size)`` of an unsigned type, memory-mapped."""
        with self._readable():
            return np.load(self.folder / BLOCKS, mmap_mode="r")

    def held_out(self, split: str) -> Dataset:
        """Return a whole split, memory-mapped: ``id``, ``text`` and ``input_ids`` of each document."""
        with self._readable():
            return load_from_disk(str(self.folder / split))

    def documents(self, split: str) -> list[tuple[str, list[int]]]:
        """Return ``(id, token ids)`` of each document that is scored, cut to ``evaluation.document_tokens``."""
        cut = ((row["id"], row["input_ids"][: self.evaluation.document_tokens]) for row in self.held_out(split))
        return list(islice((document for document in cut if len(document[1]) > 1), self.evaluation.documents))

    def write(self, run: Path) -> None:
        """Write ``run/data``, whole or not at all; what the cache holds is linked, where the file system can."""
        with whole_folder(run / "data") as folder:
            shutil.copytree(self.folder, folder, copy_function=_link, dirs_exist_ok=True)
            write_jsonl(folder / "passages.jsonl", map(asdict, self.passages))

    @classmethod
    def read(cls, run: Path, evaluation: Evaluation) -> "Prepared":
        """Read what :meth:`write` wrote.

        Raises:
            RecipeError: here or where the text is read, if it is damaged.
        """
        prepared = cls(run / "data", evaluation, [])
        with prepared._readable():
            return replace(prepared, passages=[Passage(**row) for row in read_jsonl(run / "data/passages.jsonl")])

    @contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except PermissionError:
            raise
        except (EOFError, OSError, TypeError, ValueError) as error:
            raise RecipeError(  # both, because the run's files may be links to those of the cache
                f"{self.folder} is damaged; remove it and {cache_folder() / 'text'} and repeat the command, which "
                "prepares the same text again."
            ) from error


def prepare(recipe: Recipe, corpus: Corpus, tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig) -> Prepared:
    """Tokenise a corpus for a recipe, in the cache; call it inside :func:`preproj.probe.tokenised.text_cache`.

    Args:
        recipe: the checked recipe.
        corpus: its text.
        tokenizer: the base model's tokenizer.
        config: the base model's configuration.

    Raises:
        RecipeError: where text, tokenizer and model do not fit the recipe.
    """
    training, evaluation = recipe.training, recipe.evaluation
    limit = context_length(config) or sys.maxsize
    for key, value in (("training.block_size", training.block_size), ("evaluation.context", evaluation.context)):
        if value > limit:
            raise RecipeError(f"{key} is {value}: {recipe.model.name} reads at most {limit} tokens at once.")
    _check_tokenizer(recipe.model.name, tokenizer, config)
    prepared = Prepared(tokenised(corpus, tokenizer, training.block_size), evaluation, [])
    tokens = _tokens(prepared)["train"]
    if tokens + len(corpus.splits["train"]) < training.block_size:
        raise RecipeError(
            f"data.train has {tokens} tokens: expected at least one block of training.block_size = "
            f"{training.block_size}."
        )
    read: dict[str, str] = {evaluation.split: f"data.{evaluation.split}"}
    if recipe.tuning is not None:
        read["validation"] = "data.validation"
    if evaluation.retention is not None:
        read[RETENTION] = f"evaluation.{RETENTION}"
    for split, key in read.items():
        if (count := len(prepared.documents(split))) < 2:
            raise RecipeError(f"{key} has {count} documents to score: expected at least 2.")
    held_out = (Document(**row) for row in corpus.splits[evaluation.split])
    passages = [
        passage
        for passage in (last_word_passages(held_out, evaluation.passages) if evaluation.passages else [])
        if len(tokenizer(passage.context + passage.target, add_special_tokens=False).input_ids) <= limit
    ]
    if evaluation.passages and not passages:
        raise RecipeError(
            f"data.{evaluation.split} has no English prose passage within the model's context for the last-word task; "
            "set evaluation.passages: 0 to leave it out."
        )
    return replace(prepared, passages=passages)


def describe_corpus(corpus: Corpus, prepared: Prepared) -> dict[str, Any]:
    """Return the content of corpus.json (docs/run-folder.md)."""
    tokens = _tokens(prepared)
    return {
        "source": corpus.source,
        "description": corpus.description,
        "sha256": corpus.sha256,
        "split_rule": corpus.split_rule,
        "splits": {
            split: {
                "documents": len(corpus.splits[split]),
                "characters": sum(len(row["text"]) for row in corpus.splits[split]),
                "tokens": tokens[split],
            }
            for split in corpus.splits
        },
    }


def _check_tokenizer(name: str, tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig) -> None:
    """Refuse a tokenizer that does not belong to the model."""
    text_config = config.get_text_config()
    rows, ends = text_config.vocab_size, text_config.eos_token_id
    if tokenizer.eos_token_id is None:
        raise RecipeError(f"model.name: the tokenizer of {name} has no end-of-text token to part documents.")
    last = max(tokenizer.get_vocab().values())
    if last >= rows:
        raise RecipeError(
            f"model.name: the tokenizer of {name} gives ids up to {last}, its embedding has only {rows} rows; they do "
            "not belong together."
        )
    if ends is not None and tokenizer.eos_token_id not in (ends if isinstance(ends, list) else [ends]):
        raise RecipeError(
            f"model.name: the tokenizer of {name} ends a text with {tokenizer.eos_token_id}, its configuration with "
            f"{ends}; they do not belong together."
        )


def _tokens(prepared: Prepared) -> dict[str, int]:
    return read_json(prepared.folder / TOKENS)


def _link(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)
