"""The text of an experiment: documents in three splits, on disk rather than in memory."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from datasets import Dataset, Features, Value
from datasets.arrow_writer import ArrowWriter

from preproj.probe.errors import RecipeError

SPLITS = ("train", "validation", "test")
RETENTION = "retention"

# Characters written at once; a batch of documents is never much larger, however long one of them is.
_FLUSH = 1 << 20


@dataclass(frozen=True)
class Document:
    """One text; ``id`` is unique within its split."""

    id: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """Documents in three splits, and the sentences a report prints about them.

    Attributes:
        source: a name.
        description: one sentence.
        split_rule: one sentence.
        splits: a dataset of the columns ``id`` and ``text`` for each of :data:`SPLITS`, and :data:`RETENTION` where the
            recipe names such text.
    """

    source: str
    description: str
    split_rule: str
    splits: dict[str, Dataset]

    @cached_property
    def sha256(self) -> str:
        """Hash over every document's split, id and text, in order: train, validation, test, retention."""
        digest = hashlib.sha256()
        for split in (split for split in (*SPLITS, RETENTION) if split in self.splits):
            for row in self.splits[split]:
                # JSON marks where each part ends, so no two different corpora feed the same bytes.
                digest.update(json.dumps([split, row["id"], row["text"]]).encode() + b"\n")
        return digest.hexdigest()


def store(documents: Iterable[Document], path: Path) -> Dataset:
    """Write documents to an Arrow file and return them memory-mapped, as a dataset of ``id`` and ``text``.

    Errors of ``documents`` pass through; ``Dataset.from_generator`` would wrap them and keep what it read before.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    waiting = 0
    with ArrowWriter(path=str(path), features=Features({"id": Value("string"), "text": Value("string")})) as writer:
        for document in documents:
            writer.write({"id": document.id, "text": document.text})
            waiting += len(document.text)
            if waiting > _FLUSH:
                writer.write_examples_on_file()
                waiting = 0
        writer.finalize()
    return Dataset.from_file(str(path))


def check_held_out(splits: dict[str, Dataset]) -> None:
    """Refuse held-out documents that share an id, or whose text is trained on.

    Raises:
        RecipeError: naming the key and the first such document.
    """
    held_out: dict[bytes, tuple[str, str]] = {}
    for split in (split for split in splits if split != "train"):
        ids: set[str] = set()
        for row in splits[split]:
            if row["id"] in ids:
                raise RecipeError(f"{_key(split)} repeats the id {row['id']}; an id names one document only.")
            ids.add(row["id"])
            held_out.setdefault(_digest(row["text"]), (split, row["id"]))
    for row in splits["train"]:
        if (found := held_out.get(_digest(row["text"]))) is not None:
            split, id = found
            raise RecipeError(
                f"{_key(split)}: document {id} is also in data.train (as {row['id']}); "
                "held-out text must not be trained on."
            )


def _key(split: str) -> str:
    return "evaluation.retention" if split == RETENTION else f"data.{split}"


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
