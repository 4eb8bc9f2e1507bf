"""The run's text, tokenised once and kept in the run folder for every cell."""

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from preproj.probe.corpus import SPLITS, Corpus
from preproj.probe.errors import RecipeError
from preproj.probe.files import read_jsonl, write_jsonl
from preproj.probe.passages import Passage, last_word_passages
from preproj.probe.recipe import Recipe
from preproj.probe.training import pack


@dataclass(frozen=True)
class Prepared:
    """Tokenised text of a run.

    Attributes:
        blocks: packed training text, ``(blocks, block_size)`` int64.
        documents: ``(id, token ids)`` of each scored held-out document.
        passages: of the last-word task.
        tokens: number of tokens per split; not written.
    """

    blocks: np.ndarray
    documents: list[tuple[str, list[int]]]
    passages: list[Passage]
    tokens: dict[str, int]

    def write(self, run: Path) -> None:
        """Write ``run/data``, whole or not at all."""
        folder, temporary = run / "data", run / ".data.tmp"
        for leftover in (folder, temporary):
            shutil.rmtree(leftover, ignore_errors=True)
        temporary.mkdir()
        np.save(temporary / "blocks.npy", self.blocks)
        write_jsonl(temporary / "documents.jsonl", ({"id": name, "input_ids": ids} for name, ids in self.documents))
        write_jsonl(temporary / "passages.jsonl", map(asdict, self.passages))
        temporary.rename(folder)

    @classmethod
    def read(cls, run: Path) -> "Prepared":
        """Read what :meth:`write` wrote."""
        folder = run / "data"
        return cls(
            np.load(folder / "blocks.npy"),
            [(row["id"], row["input_ids"]) for row in read_jsonl(folder / "documents.jsonl")],
            [Passage(**row) for row in read_jsonl(folder / "passages.jsonl")],
            {},
        )


def prepare(recipe: Recipe, corpus: Corpus, tokenizer: Any, context_length: int, vocab_size: int) -> Prepared:
    """Tokenise a corpus for a recipe; nothing is written.

    Args:
        recipe: the checked recipe.
        corpus: its text.
        tokenizer: the base model's tokenizer.
        context_length: the most tokens the base model reads at once.
        vocab_size: rows of the base model's embedding.

    Raises:
        RecipeError: where text, tokenizer and model do not fit the recipe.
    """
    training, evaluation = recipe.training, recipe.evaluation
    for key, value in (("training.block_size", training.block_size), ("evaluation.context", evaluation.context)):
        if value > context_length:
            raise RecipeError(f"{key} is {value}: {recipe.model.name} reads at most {context_length} tokens at once.")
    if tokenizer.eos_token_id is None:
        raise RecipeError(
            f"model.name: the tokenizer of {recipe.model.name} has no end-of-text token to part documents."
        )
    if len(tokenizer) > vocab_size:
        raise RecipeError(
            f"model.name: the tokenizer of {recipe.model.name} has {len(tokenizer)} entries, its embedding only "
            f"{vocab_size}; they do not belong together."
        )
    encoded = {
        split: tokenizer([document.text for document in corpus.splits[split]], add_special_tokens=False).input_ids
        for split in SPLITS
    }
    tokens = {split: sum(map(len, documents)) for split, documents in encoded.items()}
    blocks = pack(encoded["train"], tokenizer.eos_token_id, training.block_size)
    if not len(blocks):
        raise RecipeError(
            f"data.train has {tokens['train']} tokens: expected at least one block of training.block_size = "
            f"{training.block_size}."
        )
    held_out = corpus.splits[evaluation.split]
    documents = [
        (document.id, ids[: evaluation.document_tokens])
        for document, ids in zip(held_out, encoded[evaluation.split], strict=True)
        if len(ids) > 1
    ][: evaluation.documents]
    if len(documents) < 2:
        raise RecipeError(f"data.{evaluation.split} has {len(documents)} documents to score: expected at least 2.")
    passages = [
        passage
        for passage in (last_word_passages(held_out, evaluation.passages) if evaluation.passages else [])
        if len(tokenizer(passage.context + passage.target, add_special_tokens=False).input_ids) <= context_length
    ]
    if evaluation.passages and not passages:
        raise RecipeError(
            f"data.{evaluation.split} has no English prose passage within the model's context for the last-word task; "
            "set evaluation.passages: 0 to leave it out."
        )
    return Prepared(blocks, documents, passages, tokens)


def describe_corpus(corpus: Corpus, prepared: Prepared) -> dict[str, Any]:
    """Return the content of corpus.json (docs/run-folder.md)."""
    return {
        "source": corpus.source,
        "description": corpus.description,
        "sha256": corpus.sha256,
        "split_rule": corpus.split_rule,
        "splits": {
            split: {
                "documents": len(corpus.splits[split]),
                "characters": sum(len(document.text) for document in corpus.splits[split]),
                "tokens": prepared.tokens[split],
            }
            for split in SPLITS
        },
    }
