"""``preproj analyze``: a trained adapter and a text in, the files of docs/analysis.md out."""

import tempfile
from collections.abc import Iterable
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, load_from_disk
from peft import PeftModel
from pydantic import ValidationError
from transformers import PreTrainedTokenizerBase

from preproj.analysis import analyze
from preproj.analysis.attention import measure_attention
from preproj.analysis.interventions import measure_ablations
from preproj.analysis.position import measure_position, permutation_deviation
from preproj.depth import early_layers
from preproj.probe.base import context_length, load_tokenizer
from preproj.probe.corpus import Corpus
from preproj.probe.environment import describe_environment
from preproj.probe.errors import RecipeError
from preproj.probe.files import write_json
from preproj.probe.recipe import Text
from preproj.probe.sources import read_text
from preproj.probe.trained_adapter import TrainedAdapter, find_adapter
from preproj.whole import whole_file

FORMAT_VERSION = 1
PYTHON_DOCS = "python-docs"


def text_of(text: str | None, split: str | None, config: str | None, column: str, documents: int) -> Text | None:
    """Return the text that ``--text``, ``--split``, ``--config`` and ``--column`` name, or None where they name none.

    Args:
        text: ``python-docs``, a file or folder of text, or the name or folder of a data set.
        split: of the data set, perhaps with a part at its end, ``train[100:200]``; None where ``text`` is none.
        config: of the data set.
        column: of the data set, or field of a file, that holds the text.
        documents: so many of a split without a part are read.

    Raises:
        RecipeError: if they do not go together.
    """
    if text is None and (split or config):
        raise RecipeError(f"{'--split' if split else '--config'} is of a data set; name the data set with --text.")
    if config and not split:
        raise RecipeError(f"--config is of a data set; name the split of {text} to read with --split.")
    if text is None:
        return None
    if split is None:
        return Text() if text == PYTHON_DOCS else Text(source="files", test=text, column=column)
    part = split if split.endswith("]") else f"{split}[:{documents}]"
    try:
        return Text(source="datasets", name=text, config=config, test=part, column=column, streaming=True)
    except ValidationError as error:
        raise RecipeError(
            f"--split is {split}: expected a split's name, or one with a number of documents, train[100:200]."
        ) from error


def analyze_adapter(
    path: Path, base: str | None, text: Text | None, documents: int, tokens: int, ablations: int, out: Path | None
) -> tuple[dict[str, Any], Path]:
    """Analyse an adapter, and write ``layers.parquet`` and ``analysis.json``.

    Args:
        path: an adapter's folder, or a cell of a run.
        base: the base model, where it is not the one that the run or the adapter names.
        text: where it is; None takes the run's own held-out text, else that of python-docs.
        documents: so many pieces of text are read, each one forward pass; the first so many documents take turns.
        tokens: length of a piece.
        ablations: so many pieces of full length are read for each ablation; 0 leaves ablations out.
        out: the folder to write to; None takes ``analysis`` in the cell's folder, or the adapter's.

    Returns:
        The content of ``analysis.json``, and the folder.

    Raises:
        RecipeError: for what cannot be found, read or put together.
    """
    if out is not None and out.is_file():
        raise RecipeError(f"--out is {out}, a file; name a folder.")
    adapter = find_adapter(path, base)
    source, read = _documents(adapter, text, documents)
    tokenizer = load_tokenizer(adapter.base)
    model = adapter.load()
    length = min(tokens, context_length(model.config) or tokens)
    pieces = _pieces(tokenizer, read["text"], length, documents)
    try:
        analysis = analyze(model, pieces, tokenizer)
    except ValueError as error:
        raise RecipeError(f"{adapter.folder} cannot be analysed: {error}") from error
    content = {
        "format_version": FORMAT_VERSION,
        "model": {"name": adapter.base.name, "note": adapter.base.note},
        "adapter": _describe(adapter),
        "text": {
            "source": source,
            "sha256": Corpus(source, "", "", {"test": read}).sha256,
            "documents": len(read),
            "pieces": len(pieces),
            "tokens": sum(map(len, pieces)),
        },
        **describe_environment(),
        "dtype": adapter.dtype,
        "early_layers": early_layers(len(analysis.layers), adapter.base.name),
        "layers": analysis.layers,
        "token_classes": analysis.token_classes,
        "depth": analysis.depth(adapter.base.name),
    }
    content |= _whole_pieces(model, [piece for piece in pieces if len(piece) == length], length, ablations)
    folder = out or (adapter.cell or adapter.folder) / "analysis"
    folder.mkdir(parents=True, exist_ok=True)
    _write_parquet(folder / "layers.parquet", analysis.rows)
    write_json(folder / "analysis.json", content)
    return content, folder


def _whole_pieces(model: PeftModel, pieces: list[list[int]], length: int, ablations: int) -> dict[str, Any]:
    """Return the sections that want pieces of one length; null where there are fewer than two."""
    found: dict[str, Any] = dict.fromkeys(("cause", "position", "attention", "permutation_deviation"))
    if len(pieces) < 2:
        return found
    if ablations >= 2:
        found["cause"] = measure_ablations(model, pieces[:ablations], length)
    return found | {
        "position": measure_position(model, pieces, length),
        "attention": measure_attention(model, pieces, length),
        "permutation_deviation": permutation_deviation(model, pieces[0]),
    }


def _documents(adapter: TrainedAdapter, text: Text | None, documents: int) -> tuple[str, Dataset]:
    """Return the name of a text and its first documents: ``id`` and ``text``."""
    if text is None and adapter.run and adapter.recipe:
        split = adapter.recipe.evaluation.split
        held_out = adapter.run / "data" / split
        if not held_out.is_dir():
            raise RecipeError(f"{held_out} is missing: the run was copied without its text; name a text with --text.")
        return f"{adapter.recipe.name}, {split}", _first(load_from_disk(str(held_out)), documents)
    with tempfile.TemporaryDirectory() as folder:
        corpus = read_text(text or Text(), Path(folder), "--text")
        source = corpus.source if text and text.test else f"{corpus.source}, test"
        return source, Dataset.from_list(list(_first(corpus.splits["test"], documents)))  # no longer on disk


def _first(documents: Dataset, count: int) -> Dataset:
    return documents.select_columns(["id", "text"]).select(range(min(count, len(documents))))


def _pieces(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], length: int, count: int) -> list[list[int]]:
    """Cut texts into pieces of at most ``length`` tokens: the first of each text, then the second, up to ``count``."""
    encoded = tokenizer(
        list(texts), add_special_tokens=False, truncation=True, max_length=length * count, verbose=False
    )
    cut = [[ids[start : start + length] for start in range(0, len(ids), length)] for ids in encoded.input_ids]
    turns = (piece for turn in zip_longest(*cut) for piece in turn if piece is not None)
    return list(islice(turns, count))


def _describe(adapter: TrainedAdapter) -> dict[str, Any]:
    """Return what the adapter is, and the seed its start is drawn from."""
    keys = ("pre_projection", "content_skip", "expansion", "activation", "skip_rank", "skip_init_std", "init_seed")
    return {"folder": str(adapter.folder), **{key: getattr(adapter.config, key) for key in keys}}


def _write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    types = {"layer": pa.int64(), "site": pa.string(), "token_class": pa.string(), "tokens": pa.int64()}
    schema = pa.schema([(name, types.get(name, pa.float64())) for name in rows[0]])
    with whole_file(path) as temporary:
        pq.write_table(pa.Table.from_pylist(rows, schema), temporary)
