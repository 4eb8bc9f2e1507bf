"""The text of an experiment: documents in three splits, and reading them from the user's files."""

import hashlib
import json
import os
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from preproj.probe.errors import RecipeError

SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Document:
    """One text; ``id`` is unique within its split."""

    id: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """Documents in three splits, and the sentences a report prints about them."""

    source: str
    description: str
    split_rule: str
    splits: dict[str, tuple[Document, ...]]

    @cached_property
    def sha256(self) -> str:
        """Hash over every document's split, id and text, in order: train, validation, test."""
        digest = hashlib.sha256()
        for split in SPLITS:
            for document in self.splits[split]:
                # JSON marks where each part ends, so no two different corpora feed the same bytes.
                digest.update(json.dumps([split, document.id, document.text]).encode() + b"\n")
        return digest.hexdigest()


def files(train: Path, validation: Path, test: Path) -> Corpus:
    """Read the user's own text, one path a split.

    A path is a ``.jsonl`` file (a document a line: ``text`` and, if wanted, ``id``), a ``.txt`` file (one document)
    or a folder of ``.txt`` files (a document each, by name). Documents without text are left out.

    Raises:
        RecipeError: naming the key, the file and what is allowed.
    """
    paths = {"train": train, "validation": validation, "test": test}
    splits = {split: _read(f"data.{split}", path) for split, path in paths.items()}
    trained = {document.text: document.id for document in splits["train"]}
    for split in ("validation", "test"):
        for document in splits[split]:
            if document.text in trained:
                raise RecipeError(
                    f"data.{split}: document {document.id} is also in data.train (as {trained[document.text]}); "
                    "held-out text must not be trained on."
                )
    counts = ", ".join(f"{len(documents)} {split}" for split, documents in splits.items())
    return Corpus(
        source=", ".join(path.name for path in paths.values()),
        description=f"The user's own text: {counts} documents.",
        split_rule="The user's own files, one for each split; nothing is moved, merged or removed.",
        splits=splits,
    )


def _read(key: str, path: Path) -> tuple[Document, ...]:
    if path.is_dir():
        documents = [Document(file.name, _decode(key, file)) for file in sorted(path.glob("*.txt"))]
    elif not path.exists():
        raise RecipeError(f"{key}: {path} does not exist; give a .jsonl file, a .txt file or a folder of .txt files.")
    elif path.suffix == ".txt":
        documents = [Document(path.name, _decode(key, path))]
    elif path.suffix == ".jsonl":
        documents = _read_jsonl(key, path)
    else:
        raise RecipeError(f"{key}: {path} is neither a .jsonl file, a .txt file nor a folder of .txt files.")
    documents = [document for document in documents if document.text.strip()]
    if not documents:
        what = "has no .txt file with text" if path.is_dir() else "has no text"
        raise RecipeError(f"{key}: {path} {what}; at least one document is needed.")
    return tuple(documents)


def _decode(key: str, path: Path) -> str:
    try:
        return path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RecipeError(f"{key}: {path} is not UTF-8 text (byte {error.start}); save it as UTF-8.") from error
    except OSError as error:
        raise RecipeError(f"{key}: {path} cannot be read: {os.strerror(error.errno or 0)}.") from error


def _read_jsonl(key: str, path: Path) -> list[Document]:
    documents: dict[str, Document] = {}
    # Not splitlines(): a JSON string may hold U+2028 and its like unescaped.
    for number, line in enumerate(_decode(key, path).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{key}: {path}, line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise RecipeError(f"{where} is not valid JSON; each line is an object with the field text.") from error
        if not isinstance(row, dict) or not isinstance(row.get("text"), str):
            raise RecipeError(f"{where} has no string in the field text; each line is an object with that field.")
        id = row.get("id", f"{path.name}:{number}")
        if not isinstance(id, str | int):
            raise RecipeError(f"{where} has an id that is neither a string nor a whole number.")
        if str(id) in documents:
            raise RecipeError(f"{where} repeats the id {id}; an id names one document only.")
        if re.search("[\ud800-\udfff]", f"{id}{row['text']}"):
            raise RecipeError(f"{where} has half of a surrogate pair (\\ud800 to \\udfff), which is not text.")
        documents[str(id)] = Document(str(id), row["text"])
    return list(documents.values())
