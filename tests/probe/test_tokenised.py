"""Tokenising once: the blocks, what is kept for later runs, interruptions, and memory."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from datasets import Dataset
from transformers import AutoTokenizer

from preproj.probe import tokenised as module
from preproj.probe.corpus import SPLITS, Corpus
from preproj.probe.errors import RecipeError
from preproj.probe.recipe import Data
from preproj.probe.sources import read_corpus
from preproj.probe.tokenised import text_cache, tokenised, tokenizer_sha256


@pytest.fixture
def tokenizer(tiny_base):
    return AutoTokenizer.from_pretrained(tiny_base)


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PREPROJ_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "text"


def made_up(train):
    texts = {"train": train, "validation": ["a held-out text", "another"], "test": ["tested", "é☃"]}
    splits = {
        split: Dataset.from_dict({"id": [f"{split} {n}" for n in range(len(texts[split]))], "text": texts[split]})
        for split in SPLITS
    }
    return Corpus("made up", "Made up.", "None.", splits)


def packed(texts, tokenizer, block_size):
    """Join and cut in plain Python."""
    stream = []
    for text in texts:
        stream += [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    return [stream[i : i + block_size] for i in range(0, len(stream) - block_size + 1, block_size)]


def make(corpus, tokenizer, block_size=32):
    with text_cache():
        return tokenised(corpus, tokenizer, block_size)


@pytest.mark.parametrize("part_bytes", [1 << 25, 20_000], ids=["one part", "many parts"])
@pytest.mark.parametrize("batch_bytes", [1 << 20, 4_000], ids=["one process", "several processes"])
def test_blocks_are_the_documents_joined_by_end_of_text_however_the_work_is_cut(
    own_cache, corpus, tokenizer, monkeypatch, part_bytes, batch_bytes
):
    monkeypatch.setattr(module, "_PART_BYTES", part_bytes)
    monkeypatch.setattr(module, "_BATCH_BYTES", batch_bytes)
    texts = [text[:3000] for text in corpus.splits["train"]["text"][:30]]
    folder = make(made_up(texts), tokenizer)
    blocks = np.load(folder / "blocks.npy", mmap_mode="r")
    assert blocks.tolist() == packed(texts, tokenizer, 32)
    assert blocks.dtype == np.uint16
    assert sorted(path.name for path in folder.iterdir()) == ["blocks.npy", "test", "tokens.json", "validation"]
    counted = json.loads((folder / "tokens.json").read_text())
    for split, documents in made_up(texts).splits.items():
        assert counted[split] == sum(len(tokenizer(text).input_ids) for text in documents["text"])


def test_held_out_documents_keep_their_text_and_ids(own_cache, tokenizer):
    folder = make(made_up(["word " * 50]), tokenizer)
    test = Dataset.load_from_disk(str(folder / "test"))
    assert test["text"][:] == ["tested", "é☃"]
    assert test["id"][:] == ["test 0", "test 1"]
    assert test["input_ids"][:] == [tokenizer(text).input_ids for text in ("tested", "é☃")]


class Untouched:
    """A tokenizer that must not be asked for tokens."""

    def __init__(self, tokenizer):
        self.save_pretrained = tokenizer.save_pretrained


def test_a_later_run_takes_what_an_earlier_one_made(own_cache, tokenizer):
    folder = make(made_up(["word " * 50]), tokenizer)
    assert make(made_up(["word " * 50]), Untouched(tokenizer)) == folder


def test_other_text_another_tokenizer_or_another_length_is_another_folder(own_cache, tokenizer, tiny_base, tmp_path):
    text = ["word " * 50]
    shutil.copytree(tiny_base, tmp_path / "other")
    path = tmp_path / "other" / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["merges"].pop()
    path.write_text(json.dumps(content))
    folders = [
        make(made_up(text), tokenizer),
        make(made_up([text[0] + "!"]), tokenizer),
        make(made_up(text), AutoTokenizer.from_pretrained(tmp_path / "other")),
        make(made_up(text), tokenizer, block_size=16),
    ]
    assert len(set(folders)) == 4
    for folder, length in zip(folders, (32, 32, 32, 16), strict=True):
        assert np.load(folder / "blocks.npy").shape[1] == length


def test_the_tokenizers_hash_is_of_what_it_does_not_of_its_place_or_its_use(tiny_base, tmp_path):
    shutil.copytree(tiny_base, tmp_path / "moved")
    used, moved = (AutoTokenizer.from_pretrained(folder) for folder in (tiny_base, tmp_path / "moved"))
    used(["some", "text"])
    assert tokenizer_sha256(used) == tokenizer_sha256(moved)
    moved.add_special_tokens({"eos_token": "<end>"})
    assert tokenizer_sha256(used) != tokenizer_sha256(moved)


def test_a_file_that_changed_is_noticed_even_if_its_times_and_size_did_not(own_cache, tokenizer, tmp_path):
    for name in ("train", "validation", "test"):
        (tmp_path / f"{name}.txt").write_text(f"the {name} text " * 20)
    data = Data(source="files", **{name: str(tmp_path / f"{name}.txt") for name in ("train", "validation", "test")})

    def run():
        with text_cache() as documents:
            return tokenised(read_corpus(data, None, documents), tokenizer, 32)

    first = run()
    assert run() == first
    path = tmp_path / "train.txt"
    times = path.stat()
    path.write_text("his train text " * 20)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert path.stat().st_size == times.st_size
    assert tokenizer.decode(np.load(run() / "blocks.npy")[0]).startswith("his train")


class Interrupted(Exception):
    pass


def test_an_interruption_costs_the_part_at_hand_only(own_cache, tokenizer, monkeypatch):
    monkeypatch.setattr(module, "_PART_BYTES", 1000)
    texts = [f"text number {n} " * 20 for n in range(40)]
    encode, calls = module._encode, []

    def interrupted(batch, **kwargs):
        calls.extend(batch)
        if texts[30] in batch:
            raise Interrupted
        return encode(batch, **kwargs)

    monkeypatch.setattr(module, "_encode", interrupted)
    with pytest.raises(Interrupted):
        make(made_up(texts), tokenizer)
    first = [text for text in calls if text in texts]
    calls.clear()
    monkeypatch.setattr(module, "_encode", lambda batch, **kwargs: calls.extend(batch) or encode(batch, **kwargs))
    folder = make(made_up(texts), tokenizer)
    again = [text for text in calls if text in texts]
    assert len(set(first)) > 25
    assert len(set(first) & set(again)) <= 4  # a part has three or four of them
    assert set(first) | set(again) == set(texts)
    assert np.load(folder / "blocks.npy").tolist() == packed(texts, tokenizer, 32)
    assert not list(own_cache.glob("*.unfinished"))
    assert not (own_cache / "documents").exists()


def test_a_cache_that_cannot_be_written_is_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PREPROJ_CACHE", str(tmp_path / "file"))
    with pytest.raises(RecipeError) as error, text_cache():
        pass
    assert str(error.value) == (
        f"the cache {tmp_path / 'file/text'} cannot be used: Not a directory; name another with PREPROJ_CACHE."
    )


MEASURE = """
import json, sys, threading, time
from datasets import disable_progress_bars
from transformers import PreTrainedTokenizerFast
from preproj.probe.recipe import Data
from preproj.probe.sources import read_corpus
from preproj.probe.tokenised import text_cache, tokenised

def anonymous():
    status = open("/proc/self/status").read()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024

disable_progress_bars()
tokenizer = PreTrainedTokenizerFast(tokenizer_file=sys.argv[1], eos_token="<|endoftext|>")
data = Data(source="files", **json.loads(sys.argv[2]))
start, peak = anonymous(), [0]
def watch():
    while True:
        peak[0] = max(peak[0], anonymous())
        time.sleep(0.01)
threading.Thread(target=watch, daemon=True).start()
begin = time.perf_counter()
with text_cache() as documents:
    corpus = read_corpus(data, None, documents)
    folder = tokenised(corpus, tokenizer, 1024)
    tokens = json.loads((folder / "tokens.json").read_text())["train"]
print(json.dumps({"mib": (peak[0] - start) / 2**20, "seconds": time.perf_counter() - begin, "tokens": tokens}))
"""


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.timeout(3600)
def test_memory_does_not_grow_with_the_text(own_cache, data_folder, tmp_path, capsys):
    # Anonymous memory: pages of mapped files are the system's to take back.
    novels = sorted((data_folder / "novels").glob("*.txt"))
    found = {}
    for name, files in {"a third": novels[::3], "all": novels}.items():
        folder = tmp_path / name
        folder.mkdir()
        for file in files:
            shutil.copy(file, folder)
        held_out = {
            split: f"{data_folder}/wiki.{part}.raw" for split, part in (("validation", "valid"), ("test", "test"))
        }
        data = json.dumps({"train": str(folder), **held_out})
        tokenizer = data_folder / "pythia-tokenizer" / "tokenizer.json"
        run = [sys.executable, "-c", MEASURE, str(tokenizer), data]
        found[name] = json.loads(subprocess.check_output(run, text=True))
    with capsys.disabled():
        print(f"\n{found}")
    assert found["all"]["tokens"] > 2.5 * found["a third"]["tokens"] > 5e6
    assert found["all"]["mib"] < 1.1 * found["a third"]["mib"]
    assert found["all"]["mib"] < 400
