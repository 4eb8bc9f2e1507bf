"""What the cells read: documents, blocks and passages, and tokenizers that do not fit."""

import errno
import os

import numpy as np
import pytest
from datasets import Dataset
from transformers import AutoConfig, AutoTokenizer

from preproj.probe.corpus import SPLITS, Corpus
from preproj.probe.errors import RecipeError
from preproj.probe.prepared import Prepared, describe_corpus, prepare
from preproj.probe.recipe import Recipe
from preproj.probe.tokenised import text_cache


@pytest.fixture
def base(tiny_base):
    return AutoTokenizer.from_pretrained(tiny_base), AutoConfig.from_pretrained(tiny_base)


@pytest.fixture
def made_up():
    story = "The river had risen in the night and nobody in the village dared to cross it {}."
    texts = {
        "train": [f"text {n} " * 30 for n in range(5)],
        "validation": ["one text", "two texts"],
        "test": [
            " ".join(story.format(word) for word in ("there", "alone", "again", "below")),
            "x",
            "short one",
            "last",
        ],
    }
    splits = {s: Dataset.from_dict({"id": [f"{s}{n}" for n in range(len(t))], "text": t}) for s, t in texts.items()}
    return Corpus("made up", "Made up.", "None.", splits)


def test_what_is_prepared_reads_back_from_the_run_folder(recipe, made_up, base, tmp_path):
    checked = Recipe.model_validate(recipe)
    tokenizer, config = base
    with text_cache():
        prepared = prepare(checked, made_up, tokenizer, config)
        described = describe_corpus(made_up, prepared)
    prepared.write(tmp_path)
    read = Prepared.read(tmp_path, checked.evaluation)
    assert read.folder == tmp_path / "data"
    assert (read.blocks == prepared.blocks).all()
    assert isinstance(read.blocks, np.memmap)
    assert read.passages == prepared.passages
    assert [passage.target for passage in read.passages] == [" alone", " below"]
    encoded = {row["id"]: tokenizer(row["text"]).input_ids for row in made_up.splits["test"]}
    assert all(len(encoded[id]) > 1 for id in ("test0", "test2", "test3"))
    assert read.documents("test") == [(id, encoded[id][:64]) for id in ("test0", "test2", "test3")]
    # What is not scored is there too, whole.
    assert {row["id"]: row["input_ids"] for row in read.held_out("test")} == encoded
    assert read.held_out("test")["text"][:] == made_up.splits["test"]["text"][:]
    assert described["splits"]["test"] == {
        "documents": 4,
        "characters": sum(map(len, made_up.splits["test"]["text"])),
        "tokens": sum(map(len, encoded.values())),
    }
    assert set(described["splits"]) == set(SPLITS)


def test_the_run_folder_shares_the_caches_bytes_or_copies_them(recipe, made_up, base, tmp_path, monkeypatch):
    checked = Recipe.model_validate(recipe)
    with text_cache():
        prepared = prepare(checked, made_up, *base)
    prepared.write(tmp_path)
    assert (tmp_path / "data/blocks.npy").samefile(prepared.folder / "blocks.npy")

    def refuse(source, target):
        raise OSError(errno.EXDEV, "another file system")

    monkeypatch.setattr(os, "link", refuse)
    prepared.write(tmp_path)
    assert not (tmp_path / "data/blocks.npy").samefile(prepared.folder / "blocks.npy")
    assert (Prepared.read(tmp_path, checked.evaluation).blocks == prepared.blocks).all()


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("blocks.npy", None),
        ("blocks.npy", 100),
        ("blocks.npy", 140),  # the header is whole
        ("test/data-00000-of-00001.arrow", 100),
        ("test/state.json", 20),
        ("passages.jsonl", 20),
    ],
)
def test_damaged_text_is_one_sentence_that_says_what_to_remove(recipe, made_up, base, tmp_path, name, kept):
    checked = Recipe.model_validate(recipe)
    with text_cache():
        prepare(checked, made_up, *base).write(tmp_path)
    path = tmp_path / "data" / name
    content = path.read_bytes()
    path.unlink()  # of the cache's bytes
    if kept is not None:
        path.write_bytes(content[:kept])
    with pytest.raises(RecipeError, match=f"^{tmp_path}/data is damaged; remove it and .*/text and repeat the command"):
        _ = (read := Prepared.read(tmp_path, checked.evaluation)).blocks, read.documents("test")


def test_the_recipes_split_is_held_out(recipe, made_up, base):
    recipe["evaluation"] |= {"split": "validation", "passages": 0}
    with text_cache():
        prepared = prepare(Recipe.model_validate(recipe), made_up, *base)
    assert prepared.held_out("validation")["text"][:] == ["one text", "two texts"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 200}, "gives ids up to 383, its embedding has only 200 rows; they do not belong together."),
        ({"eos_token_id": 5}, "ends a text with 0, its configuration with 5; they do not belong together."),
        ({"eos_token_id": [5, 6]}, "ends a text with 0, its configuration with [5, 6]; they do not belong together."),
        ({"max_position_embeddings": 16}, "training.block_size is 32: "),
    ],
)
def test_a_tokenizer_that_does_not_fit_the_model_is_refused(recipe, made_up, base, change, message):
    tokenizer, config = base
    config.update(change)
    with pytest.raises(RecipeError) as error, text_cache():
        prepare(Recipe.model_validate(recipe), made_up, tokenizer, config)
    assert message in str(error.value)


def test_a_tokenizer_without_end_of_text_is_refused_and_a_list_of_ends_is_enough(recipe, made_up, base):
    tokenizer, config = base
    config.eos_token_id = [7, 0]
    with text_cache():
        assert prepare(Recipe.model_validate(recipe), made_up, tokenizer, config).documents("test")
    tokenizer.eos_token = None
    with pytest.raises(RecipeError, match="has no end-of-text token to part documents"), text_cache():
        prepare(Recipe.model_validate(recipe), made_up, tokenizer, config)
