"""Text tokenised once and kept in the user's cache: packed training blocks, and the held-out documents."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from math import ceil
from pathlib import Path

import numpy as np
from datasets import Dataset, Features, List, Value, concatenate_datasets
from filelock import FileLock
from transformers import PreTrainedTokenizerBase

from preproj.probe.corpus import Corpus
from preproj.probe.errors import RecipeError
from preproj.probe.files import cache_folder, write_json

BLOCKS, TOKENS = "blocks.npy", "tokens.json"

_BATCH_BYTES = 1 << 20  # tokenised at once by a process; what a tokenizer returns takes a hundred times as much
_PART_BYTES = 1 << 25  # an interruption costs the work on one part at most


@contextmanager
def text_cache() -> Iterator[Path]:
    """Hold the cache of texts, and give an empty folder in it for the documents that are being read.

    Raises:
        RecipeError: if it cannot be written.
    """
    cache = cache_folder() / "text"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        # The system frees this lock when its holder dies, so whoever holds it may clear what a killed one left.
        with FileLock(cache / ".lock"):
            documents = cache / "documents"
            shutil.rmtree(documents, ignore_errors=True)
            documents.mkdir()
            try:
                yield documents
            finally:
                shutil.rmtree(documents, ignore_errors=True)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else error
        raise RecipeError(f"the cache {cache} cannot be used: {reason}; name another with PREPROJ_CACHE.") from error


def tokenised(corpus: Corpus, tokenizer: PreTrainedTokenizerBase, block_size: int) -> Path:
    """Tokenise a corpus, unless an earlier run has; call it inside :func:`text_cache`.

    The folder is named after text, tokenizer and block size. It holds ``blocks.npy``, the training text packed:
    ``(blocks, block_size)`` of the smallest unsigned type, an end-of-text token after each document, a last, shorter
    piece dropped; every other split as a saved dataset of ``id``, ``text`` and ``input_ids``; and ``tokens.json``, the
    tokens per split, without those ends.

    Args:
        corpus: the text.
        tokenizer: with an end-of-text token.
        block_size: tokens per block.

    Returns:
        The folder.
    """
    name = f"{corpus.sha256[:16]}-{tokenizer_sha256(tokenizer)[:16]}-{block_size}"
    folder = cache_folder() / "text" / name
    if folder.is_dir():
        return folder
    unfinished = folder.with_name(f"{name}.unfinished")  # an earlier call may have left some parts
    unfinished.mkdir(exist_ok=True)
    parts = partial(_tokenised_parts, tokenizer=tokenizer, folder=unfinished)
    tokens = {}
    for split in (split for split in corpus.splits if split != "train"):
        documents = concatenate_datasets(list(parts(corpus.splits[split], split, end=[])))
        documents.save_to_disk(str(unfinished / split))
        tokens[split] = sum(map(len, _streams([documents])))
    train = partial(parts, corpus.splits["train"], "train", end=[tokenizer.eos_token_id])
    length = sum(map(len, _streams(train())))
    tokens["train"] = length - len(corpus.splits["train"])
    dtype = np.min_scalar_type(max(tokenizer.get_vocab().values()))
    _write_blocks(_streams(train()), (length // block_size, block_size), dtype, unfinished / BLOCKS)
    write_json(unfinished / TOKENS, tokens)
    for part in unfinished.glob("*.arrow"):
        part.unlink()
    unfinished.rename(folder)
    return folder


def tokenizer_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash the files that ``save_pretrained`` writes: they are all that tokenising depends on."""
    digest = hashlib.sha256()
    with tempfile.TemporaryDirectory() as folder:
        for path in sorted(map(Path, tokenizer.save_pretrained(folder))):
            digest.update(f"{path.name} {path.stat().st_size} ".encode() + path.read_bytes())
    return digest.hexdigest()


def _tokenised_parts(
    documents: Dataset, split: str, tokenizer: PreTrainedTokenizerBase, end: list[int], folder: Path
) -> Iterator[Dataset]:
    """Yield the documents with ``input_ids``, part by part; a part that has its file is not made again."""
    size = documents.data.nbytes
    parts = min(ceil(size / _PART_BYTES), len(documents))
    for number in range(parts):
        part = documents.shard(parts, number, contiguous=True)
        processes = min(os.cpu_count() or 1, len(part), ceil(size / parts / _BATCH_BYTES))
        yield part.map(
            partial(_encode, tokenizer=tokenizer, end=end, worker=processes > 1),
            input_columns="text",
            batched=True,
            batch_size=max(1, min(1000, len(documents) * _BATCH_BYTES // size)),
            features=Features({**documents.features, "input_ids": List(Value("int32"))}),
            num_proc=processes if processes > 1 else None,
            cache_file_name=str(folder / f"{split}-{number:05}-of-{parts:05}.arrow"),
            load_from_cache_file=True,
            new_fingerprint=f"{split}-{number}",  # else the library hashes the tokenizer, which changes by use
            desc=f"tokenising {split}" + f", part {number + 1} of {parts}" * (parts > 1),
        )


def _encode(
    texts: list[str], tokenizer: PreTrainedTokenizerBase, end: list[int], worker: bool
) -> dict[str, list[list[int]]]:
    if worker:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes and threads at once would be too many
    encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
    return {"input_ids": [ids + end for ids in encoded.input_ids]}


def _streams(parts: Iterable[Dataset]) -> Iterator[np.ndarray]:
    """Yield the tokens of all documents, one after the other, in pieces."""
    for part in parts:
        for chunk in part.with_format("arrow").data.column("input_ids").chunks:
            yield chunk.flatten().to_numpy()


def _write_blocks(streams: Iterable[np.ndarray], shape: tuple[int, int], dtype: np.dtype, path: Path) -> None:
    left = shape[0] * shape[1]
    with path.open("wb") as file:
        # Not through a memory map: all that is written would count as the process's memory.
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        for stream in streams:
            file.write(stream[:left].astype(dtype).tobytes())
            left -= min(left, len(stream))
