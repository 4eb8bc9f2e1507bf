"""Reading the user's text: files and folders, or anything that ``datasets`` loads."""

import glob
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import huggingface_hub
from datasets import Dataset, ReadInstruction, load_dataset
from datasets.exceptions import DatasetsError

from preproj.probe.corpus import RETENTION, Corpus, Document, check_held_out, store
from preproj.probe.errors import RecipeError
from preproj.probe.python_docs import python_docs
from preproj.probe.recipe import Data, Text
from preproj.probe.wikitext import articles

HUB_SECONDS = 10

_SUFFIXES = (".txt", ".raw", ".jsonl", ".parquet")
_EXPECTED = "a .txt, .raw, .jsonl or .parquet file, or a folder of such files"


def read_corpus(data: Data, retention: Text | None, folder: Path) -> Corpus:
    """Read the text of an experiment.

    Args:
        data: the recipe's section.
        retention: the section of the text that retention is measured on.
        folder: where the documents are written, to be memory-mapped.

    Raises:
        RecipeError: naming the key, the place and what is allowed.
    """
    corpus = read_text(data, folder / "data", "data")
    if retention is not None:
        other = read_text(retention, folder / RETENTION, f"evaluation.{RETENTION}")
        splits = corpus.splits | {RETENTION: other.splits["test"]}
        corpus = replace(corpus, splits=splits, description=f"{corpus.description} Retention: {other.source}.")
    check_held_out(corpus.splits)
    return corpus


def read_text(data: Text, folder: Path, section: str) -> Corpus:
    """Read the splits of one text.

    Args:
        data: where they are.
        folder: where the documents are written, to be memory-mapped.
        section: what the sentences of errors call ``data``.

    Raises:
        RecipeError: naming the key, the place and what is allowed.
    """
    if data.source == "python-docs":
        return python_docs()
    revision = _revision(data, section) if data.source == "datasets" else None
    whole: dict[tuple[str, int | None], Dataset] = {}  # a place that gives several splits is read once
    splits = {}
    for split in data.splits:
        key, (name, part) = f"{section}.{split}", data.place(split)
        limit = int(part[1:-1].split(":")[1]) if data.streaming else None
        if (name, limit) not in whole:
            rows = _read_files(key, name, data) if data.source == "files" else _read_dataset(key, name, data, revision)
            whole[name, limit] = store(islice(_documents(rows, data.articles), limit), folder / f"{split}.arrow")
        splits[split] = _slice(key, whole[name, limit], part)
        if not len(splits[split]):
            what = "article (a line ` = Title = ` between blank lines)" if data.articles else "document with text"
            raise RecipeError(f"{key}: {name}{part} has no {what}; at least one document is needed.")
    return _described(data, splits, revision)


def local_files(data: Text) -> list[Path]:
    """List the local files that exist and that a text is read from."""
    if data.source == "files":
        places = {Path(data.place(split)[0]): None for split in data.splits}
        return [
            file for place in places for file in (_in_folder(place) if place.is_dir() else [place]) if file.exists()
        ]
    folder = Path(data.name or "")
    return sorted(path for path in folder.rglob("*") if path.is_file()) if data.name and folder.is_dir() else []


def _in_folder(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.suffix in _SUFFIXES)


def _documents(rows: Iterator[tuple[str, str]], as_articles: bool) -> Iterator[Document]:
    if as_articles:
        return articles(text for _, text in rows)
    return (Document(id, text) for id, text in rows if text.strip())


def _slice(key: str, documents: Dataset, part: str) -> Dataset:
    if not part:
        return documents
    try:
        # The library's own rules for [:90%] and its like.
        (bounds,) = ReadInstruction.from_spec(f"all{part}").to_absolute({"all": len(documents)})
    except (ValueError, AssertionError) as error:
        raise RecipeError(f"{key} ends in {part}; a part is written like [:90%], [90%:] or [100:200].") from error
    return documents.select(range(len(documents))[bounds.from_ : bounds.to] or [])  # select wants no empty range


def _described(data: Text, splits: dict[str, Dataset], revision: str | None) -> Corpus:
    places = {split: "".join(data.place(split)) for split in data.splits}
    if data.source == "files":
        source = ", ".join(Path(place).name for place in places.values())
    else:
        source = " ".join(filter(None, (data.name, data.config, revision and f"@{revision}", *places.values())))
    counts = ", ".join(f"{len(documents)} {split}" for split, documents in splits.items())
    kind = ", articles of WikiText" if data.articles else ""
    return Corpus(
        source=source,
        description=f"The user's own text{kind}: {counts} documents.",
        split_rule="The user's own splits; nothing is moved or merged, documents without text are left out.",
        splits=splits,
    )


def _read_files(key: str, name: str, data: Text) -> Iterator[tuple[str, str]]:
    """Yield ids and texts; with ``data.articles`` the texts of text files are their lines."""
    path = Path(name)
    if path.is_dir():
        paths = _in_folder(path)
        if len({file.suffix for file in paths}) > 1:
            raise RecipeError(f"{key}: {path} holds files of several kinds; give {_EXPECTED} of one kind.")
    elif not path.exists():
        raise RecipeError(f"{key}: {path} does not exist; give {_EXPECTED}.")
    elif path.suffix not in _SUFFIXES:
        raise RecipeError(f"{key}: {path} is of no known kind; give {_EXPECTED}.")
    else:
        paths = [path]
    for file in paths:
        try:
            if file.suffix == ".parquet":
                yield from _read_parquet(key, file, data.column)
            elif file.suffix == ".jsonl":
                yield from _read_jsonl(key, file, data.column)
            elif data.articles:
                yield from ((file.name, line) for _, line in _lines(key, file))
            else:
                yield file.name, file.read_text("utf-8-sig")
        except UnicodeDecodeError as error:
            raise RecipeError(f"{key}: {file} is not UTF-8 text (byte {error.start}); save it as UTF-8.") from error
        except OSError as error:
            raise RecipeError(f"{key}: {file} cannot be read: {os.strerror(error.errno or 0)}.") from error


def _lines(key: str, path: Path) -> Iterator[tuple[int, str]]:
    # Bytes first: text files also end lines at the returns that a JSON string or an article may hold.
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8").replace("\r\n", "\n")
            except UnicodeDecodeError as error:
                raise RecipeError(f"{key}: {path}, line {number} is not UTF-8 text; save it as UTF-8.") from error


def _read_jsonl(key: str, path: Path, column: str) -> Iterator[tuple[str, str]]:
    """Read JSON lines here: the builder of ``datasets`` makes times of dates, and cannot say which line is wrong."""
    for number, line in _lines(key, path):
        if not line.strip():
            continue
        where = f"{key}: {path}, line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise RecipeError(f"{where} is not valid JSON; each line is an object with the field {column}.") from error
        if not isinstance(row, dict) or not isinstance(row.get(column), str):
            fields = f"it has {', '.join(row)}" if isinstance(row, dict) and column not in row else "it needs one"
            raise RecipeError(f"{where} has no string in the field {column}; {fields}.")
        id = row.get("id", f"{path.name}:{number}")
        if not isinstance(id, str | int):
            raise RecipeError(f"{where} has an id that is neither a string nor a whole number.")
        if re.search("[\ud800-\udfff]", f"{id}{row[column]}"):
            raise RecipeError(f"{where} has half of a surrogate pair (\\ud800 to \\udfff), which is not text.")
        yield str(id), row[column]


def _read_parquet(key: str, path: Path, column: str) -> Iterator[tuple[str, str]]:
    with _one_sentence(key, str(path)):
        dataset = load_dataset("parquet", data_files=glob.escape(str(path)), split="train", streaming=True)
        yield from _column(key, path.name, dataset, column)


def _read_dataset(key: str, split: str, data: Text, revision: str | None) -> Iterator[tuple[str, str]]:
    # A folder is streamed, because the library's cache may be older than the folder's files.
    streaming = data.streaming or Path(data.name or "").is_dir()
    with _one_sentence(key, f"{data.name}, split {split},"):
        dataset = load_dataset(data.name, data.config, split=split, revision=revision, streaming=streaming)
        yield from _column(key, split, dataset, data.column)


def _column(key: str, name: str, dataset: Any, column: str) -> Iterator[tuple[str, str]]:
    columns = dataset.column_names or list(next(iter(dataset), {column: None}))
    if column not in columns:
        section = key.rpartition(".")[0]
        raise RecipeError(f"{section}.column is {column}: {key} has no such column; it has {', '.join(columns)}.")
    for number, row in enumerate(dataset.select_columns([column]), start=1):
        text = row[column]
        if not isinstance(text, str | None):
            raise RecipeError(f"{key}: row {number} holds {type(text).__name__} in column {column}, not text.")
        yield f"{name}:{number}", text or ""


def _revision(data: Text, section: str) -> str | None:
    """Return the commit on the Hub, so that all splits are of one; this also finds out quickly if there is none.

    ``load_dataset`` tries again for half a minute.
    """
    name, revision = data.name or "", data.revision
    if Path(name).is_dir() or huggingface_hub.constants.HF_HUB_OFFLINE:
        return revision
    try:
        return huggingface_hub.HfApi().dataset_info(name, revision=revision, timeout=HUB_SECONDS).sha
    except Exception as error:  # the Hub's client lets through whatever its HTTP library raises
        raise RecipeError(
            f"{section}.name: {name} cannot be had from the Hub: {_first_line(error)}; give a name there or a folder "
            "of a data set, or set HF_HUB_OFFLINE=1 to use a copy loaded before."
        ) from error


@contextmanager
def _one_sentence(key: str, what: str) -> Iterator[None]:
    try:
        yield
    except RecipeError:
        raise
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        raise RecipeError(f"{key}: {what} cannot be read: {_first_line(error.__cause__ or error)}.") from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0].rstrip(".:") or type(error).__name__
