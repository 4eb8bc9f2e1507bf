"""The user's own text: files, folders and data sets, and the sentence for what is wrong with them."""

import json
import time
from pathlib import Path

import huggingface_hub
import pytest
from datasets import Dataset

from preproj.probe import sources
from preproj.probe.errors import RecipeError
from preproj.probe.recipe import Data
from preproj.probe.sources import read_corpus


def rows(documents):
    return list(zip(documents["id"], documents["text"], strict=True))


def read(tmp_path, **data):
    return read_corpus(Data(**data), None, tmp_path / "documents")


@pytest.fixture
def own(tmp_path):
    (tmp_path / "train.jsonl").write_text(
        '{"text": "first\u2028line", "id": "x"}\r\n\n{"text": "2020-01-01"}\n{"text": " "}\n', "utf-8"
    )
    (tmp_path / "validation.txt").write_bytes(b"\xef\xbb\xbfone document\r\n\nof two paragraphs\n")
    (tmp_path / "test").mkdir()
    for name, text in {"b.txt": "B", "a.txt": "A", "notes.md": "no"}.items():
        (tmp_path / "test" / name).write_text(text)
    return {split: str(tmp_path / name) for split, name in NAMES.items()}


NAMES = {"train": "train.jsonl", "validation": "validation.txt", "test": "test"}


def test_own_files(own, tmp_path):
    corpus = read(tmp_path, source="files", **own)
    assert {split: rows(documents) for split, documents in corpus.splits.items()} == {
        "train": [("x", "first\u2028line"), ("train.jsonl:3", "2020-01-01")],
        "validation": [("validation.txt", "one document\n\nof two paragraphs\n")],
        "test": [("a.txt", "A"), ("b.txt", "B")],
    }
    assert corpus.source == "train.jsonl, validation.txt, test"


def test_own_documents_survive_json_escapes(own, tmp_path):
    Path(own["train"]).write_text(json.dumps({"text": "😀 snow ☃", "id": 5}) + "\n")
    assert rows(read(tmp_path, source="files", **own).splits["train"]) == [("5", "😀 snow ☃")]


def test_another_column_and_parquet_files_in_a_folder_with_brackets(own, tmp_path):
    Path(own["train"]).write_text('{"body": "T"}\n')
    own["validation"] = str(tmp_path / "odd [1]*")
    Path(own["validation"]).mkdir()
    for name, texts in {"b.parquet": ["3"], "a.parquet": ["1", None, "2"]}.items():
        Dataset.from_dict({"n": list(range(len(texts))), "body": texts}).to_parquet(tmp_path / "odd [1]*" / name)
    own["test"] = str(tmp_path / "test.jsonl")
    Path(own["test"]).write_text('{"body": "B"}\n')
    splits = read(tmp_path, source="files", column="body", **own).splits
    assert rows(splits["validation"]) == [("a.parquet:1", "1"), ("a.parquet:3", "2"), ("b.parquet:1", "3")]


def test_parts_of_one_file_are_documents_in_order(own, tmp_path):
    (tmp_path / "all.jsonl").write_text("".join(f'{{"text": "{n}"}}\n' for n in range(20)))
    place = str(tmp_path / "all.jsonl")
    own |= {"train": f"{place}[:85%]", "validation": f"{place}[17:18]", "test": f"{place}[-2:]"}
    splits = read(tmp_path, source="files", **own).splits
    assert {split: list(documents["text"]) for split, documents in splits.items()} == {
        "train": [str(n) for n in range(17)],
        "validation": ["17"],
        "test": ["18", "19"],
    }


def test_wikitext_files_are_read_as_articles(own, tmp_path):
    lines = "".join(f" \n = Title {n} = \n \n Text {n} . \n" for n in range(4))
    (tmp_path / "wiki.raw").write_text(lines)
    (tmp_path / "wiki.jsonl").write_text("".join(json.dumps({"text": x}) + "\n" for x in lines.splitlines(True)))
    parts = {"train": "raw[:2]", "validation": "raw[2:3]", "test": "jsonl[3:]"}
    own = {split: f"{tmp_path}/wiki.{part}" for split, part in parts.items()}
    splits = read(tmp_path, source="files", articles=True, **own).splits
    assert [len(splits[split]) for split in NAMES] == [2, 1, 1]
    assert rows(splits["test"]) == [("4 Title 3", " = Title 3 = \n \n Text 3 . \n")]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("gone.txt", None, "does not exist; give a .txt, .raw, .jsonl or .parquet file, or a folder of such files."),
        ("text.csv", b"a,b", "is of no known kind; give a .txt, .raw, .jsonl or .parquet file, or a folder of such"),
        ("blank.txt", b" \n\n", "has no document with text; at least one document is needed."),
        ("empty.jsonl", b"", "has no document with text; at least one document is needed."),
        ("blank.jsonl", b'{"text": ""}\n', "has no document with text; at least one document is needed."),
        ("latin.txt", b"caf\xe9", "is not UTF-8 text (byte 3); save it as UTF-8."),
        ("latin.jsonl", b'\n{"text": "caf\xe9"}', "line 2 is not UTF-8 text; save it as UTF-8."),
        ("bad.jsonl", b'{"text": "a"}\n{"text"\n', "line 2 is not valid JSON; "),
        ("list.jsonl", b'["a"]\n', "line 1 has no string in the field text; "),
        ("other.jsonl", b'\n{"body": "a", "n": 1}\n', "line 2 has no string in the field text; it has body, n."),
        ("number.jsonl", b'{"text": 3}\n', "line 1 has no string in the field text; "),
        ("id.jsonl", b'{"text": "a", "id": [1]}\n', "line 1 has an id that is neither a string nor a whole number."),
        ("half.jsonl", b'{"text": "a\\ud83d"}\n', "line 1 has half of a surrogate pair "),
        ("bad.parquet", b"PAR1 no PAR1", "cannot be read: "),
    ],
)
@pytest.mark.parametrize("key", ["train", "validation", "test"])
def test_mistakes_in_own_files_are_told_in_one_sentence(own, tmp_path, key, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RecipeError) as error:
        read(tmp_path, source="files", **{**own, key: str(path)})
    assert str(error.value).startswith(f"data.{key}: {path}")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def refused(tmp_path, **data) -> str:
    with pytest.raises(RecipeError) as error:
        read(tmp_path, **data)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_folders_without_text_or_of_several_kinds_are_refused(own, tmp_path):
    (tmp_path / "void").mkdir()
    message = refused(tmp_path, source="files", **{**own, "test": str(tmp_path / "void")})
    assert message == f"data.test: {tmp_path / 'void'} has no document with text; at least one document is needed."
    (tmp_path / "test" / "more.jsonl").write_text("")
    assert "test holds files of several kinds; " in refused(tmp_path, source="files", **own)


def test_held_out_ids_that_repeat_and_held_out_text_that_is_trained_on_are_refused(own, tmp_path):
    path = tmp_path / "twice.jsonl"
    path.write_text('{"text": "a", "id": 1}\n{"text": "b", "id": "1"}\n')
    assert refused(tmp_path, source="files", **{**own, "test": str(path)}) == (
        "data.test repeats the id 1; an id names one document only."
    )
    path.write_text('{"text": "new"}\n{"text": "2020-01-01", "id": 7}\n')
    assert refused(tmp_path, source="files", **{**own, "validation": str(path)}) == (
        "data.validation: document 7 is also in data.train (as train.jsonl:3); held-out text must not be trained on."
    )


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("[:half]", "data.test ends in [:half]; a part is written like [:90%], [90%:] or [100:200]."),
        ("[1:2:3]", "data.test ends in [1:2:3]; a part is written like "),
        ("[7:]", "[7:] has no document with text; at least one document is needed."),
    ],
)
def test_parts_that_are_none_or_empty_are_refused(own, tmp_path, part, message):
    assert message in refused(tmp_path, source="files", **{**own, "test": own["test"] + part})


def test_wikitext_without_titles_is_refused(own, tmp_path):
    assert "has no article (a line ` = Title = ` between blank lines); " in refused(
        tmp_path, source="files", articles=True, **own
    )


@pytest.fixture
def data_set(tmp_path):
    """A folder as the Hub holds them: two configurations, three splits."""
    folder = tmp_path / "my-set"
    for config in ("small", "large"):
        for split in NAMES:
            texts = [f"{config} {split} {n}" for n in range(5)]
            (folder / config).mkdir(parents=True, exist_ok=True)
            Dataset.from_dict({"n": list(range(5)), "content": texts}).to_parquet(folder / config / f"{split}.parquet")
    entries = "".join(f"- config_name: {config}\n  data_dir: {config}\n" for config in ("small", "large"))
    (folder / "README.md").write_text(f"---\nconfigs:\n{entries}---\n")
    return {"source": "datasets", "name": str(folder), "config": "large", "column": "content"}


def test_a_data_set_by_configuration_split_and_column(data_set, tmp_path):
    corpus = read(tmp_path, **data_set, test="test[1:3]")
    assert {split: len(documents) for split, documents in corpus.splits.items()} == {
        "train": 5,
        "validation": 5,
        "test": 2,
    }
    assert rows(corpus.splits["test"]) == [("test:2", "large test 1"), ("test:3", "large test 2")]
    assert corpus.source == f"{data_set['name']} large train validation test[1:3]"


def test_streaming_reads_no_further_than_the_part(data_set, tmp_path, monkeypatch):
    read_rows = []
    column = sources._column
    monkeypatch.setattr(
        sources, "_column", lambda *a: (read_rows.append(row) or row for row in column(*a))
    )  # what is taken from the data set
    parts = {"train": "train[:2]", "validation": "validation[1:3]", "test": "test[:1]"}
    splits = read(tmp_path, **data_set, streaming=True, **parts).splits
    assert list(splits["train"]["text"]) == ["large train 0", "large train 1"]
    assert list(splits["validation"]["text"]) == ["large validation 1", "large validation 2"]
    assert len(read_rows) == 2 + 3 + 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"column": "text"}, "data.column is text: data.train has no such column; it has n, content."),
        ({"column": "n"}, "data.train: row 1 holds int in column n, not text."),
        ({"train": "training"}, "cannot be read: Bad split: training. Available splits: ['train', 'validation', 'tes"),
        ({"config": "huge"}, "cannot be read: BuilderConfig 'huge' not found. Available: ['small', 'large']."),
    ],
)
def test_a_wrong_column_split_or_configuration_names_those_present(data_set, tmp_path, change, message):
    assert message in refused(tmp_path, **{**data_set, **change})


def test_a_data_set_that_changed_is_read_again(data_set, tmp_path):
    first = read(tmp_path, **data_set)
    path = Path(data_set["name"], "large", "train.parquet")
    Dataset.from_dict({"n": [0], "content": ["new"]}).to_parquet(path)
    second = read_corpus(Data(**data_set), None, tmp_path / "again")
    assert first.sha256 != second.sha256
    assert list(second.splits["train"]["text"]) == ["new"]


def test_without_network_a_name_on_the_hub_is_one_sentence_in_seconds(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    # Nothing answers at this address.
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    begin = time.monotonic()
    message = refused(tmp_path, source="datasets", name="Salesforce/wikitext", config="wikitext-103-raw-v1")
    assert time.monotonic() - begin < 15
    assert message.startswith("data.name: Salesforce/wikitext cannot be had from the Hub: ")
    assert message.endswith("or set HF_HUB_OFFLINE=1 to use a copy loaded before.")


def test_all_splits_of_a_name_on_the_hub_are_of_one_commit(tmp_path, monkeypatch):
    class Hub:
        def dataset_info(self, name, revision, timeout):
            assert (name, revision) == ("someone/set", "main")
            return huggingface_hub.DatasetInfo(id=name, sha="c0ffee", tags=[])

    asked = []

    def load(name, config, split, revision, streaming):
        asked.append((name, config, split, revision, streaming))
        return Dataset.from_dict({"text": [f"{split} {n}" for n in range(3)]})

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    monkeypatch.setattr(sources, "load_dataset", load)
    corpus = read(tmp_path, source="datasets", name="someone/set", config="c", revision="main", validation="train[:1]",
                  train="train[1:]")  # fmt: skip
    assert asked == [("someone/set", "c", split, "c0ffee", False) for split in ("train", "test")]
    assert corpus.source == "someone/set c @c0ffee train[1:] train[:1] test"
