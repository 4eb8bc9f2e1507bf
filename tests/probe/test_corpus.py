"""The text: real standard library and a made-up one."""

import hashlib
import inspect
import os
import re
import subprocess
import sys
import sysconfig
import textwrap

import pytest
from datasets import Dataset

from preproj.probe.corpus import Corpus
from preproj.probe.errors import RecipeError
from preproj.probe.python_docs import python_docs


@pytest.fixture(scope="module")
def corpus():
    return python_docs()


def words_in_a_row(text, count=8):
    words = re.sub(r"[^\w]+", " ", text.lower()).split()
    return {" ".join(words[i : i + count]) for i in range(len(words) - count + 1)}


def test_documents_are_split_by_the_hash_of_their_id_alone(corpus):
    for split, documents in corpus.splits.items():
        for id in documents["id"]:
            share = int.from_bytes(hashlib.sha256(id.encode()).digest(), "big") % 100
            assert split == ("test" if share < 15 else "validation" if share < 25 else "train"), id


def test_there_is_enough_of_every_split(corpus):
    characters = {split: sum(map(len, documents["text"])) for split, documents in corpus.splits.items()}
    assert list(corpus.splits) == ["train", "validation", "test"]
    assert len(corpus.splits["test"]) >= 40
    assert characters["train"] > 1_000_000
    assert min(characters["test"], characters["validation"]) > 150_000
    ids = [id for documents in corpus.splits.values() for id in documents["id"]]
    assert len(set(ids)) == len(ids)
    assert min(len(text) for documents in corpus.splits.values() for text in documents["text"]) >= 200


def test_the_first_documents_are_a_mixture(corpus):
    kinds = [id.split("/")[0] for id in corpus.splits["test"]["id"][:40]]
    assert kinds.count("reference") >= 2
    assert kinds.count("library") >= 20


def test_docstrings_read_as_inspect_shows_them(corpus):
    texts = {d["id"]: d["text"] for documents in corpus.splits.values() for d in documents}
    text = texts["library/textwrap"]
    assert f"textwrap.dedent\n\n{inspect.getdoc(textwrap.dedent)}" in text
    assert text.index("textwrap.TextWrapper.wrap\n") < text.index("textwrap.wrap\n") < text.index("textwrap.dedent\n")
    assert text.startswith("textwrap\n\nText wrapping and filling.")


def test_a_paragraph_stands_in_one_document_only(corpus):
    texts = [text for documents in corpus.splits.values() for text in documents["text"]]
    # The reference holds this in the topics "while" and "compound".
    sentence = 'The "while" statement is used for repeated execution as long as an\nexpression is true:'
    assert sum(text.count(sentence) for text in texts) == 1

    seen = set()
    for text in texts:
        for paragraph in re.split(r"\n[ \t]*\n", text):
            plain = re.sub(r"\s+", " ", paragraph).strip()
            assert len(plain) < 60 or plain not in seen, plain
            seen.add(plain)


def test_hardly_eight_words_in_a_row_of_the_test_split_are_trained_on(corpus):
    of = {
        s: set().union(*(words_in_a_row(text) for text in documents["text"])) for s, documents in corpus.splits.items()
    }
    assert len(of["test"] & of["train"]) < 0.002 * len(of["test"])
    assert len(of["validation"] & of["train"]) < 0.002 * len(of["validation"])
    assert len(of["test"] & of["validation"]) < 0.002 * len(of["test"])


def test_another_process_reads_the_same_text_and_imports_none_of_it(corpus):
    code = (
        "import sys; from preproj.probe.python_docs import Dataset, python_docs; Dataset.from_list([{'a': ''}])[0];"
        "before = set(sys.modules); print(python_docs().sha256); print(*sorted(set(sys.modules) - before))"
    )
    # Warnings as errors and another hash seed: neither may show in the text.
    run = [sys.executable, "-W", "error::SyntaxWarning", "-W", "error::DeprecationWarning", "-c", code]
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    digest, imported = subprocess.check_output(run, text=True, env=environment).splitlines()
    assert digest == corpus.sha256
    assert {name for name in imported.split() if not name.startswith("_sysconfigdata")} <= {
        "pydoc_data",
        "pydoc_data.topics",
    }


def test_hash_covers_split_id_text_and_order():
    def corpus(train, validation=(), test=()):
        splits = {"test": test, "validation": validation, "train": train}
        datasets = {}
        for name, rows in splits.items():
            datasets[name] = Dataset.from_dict({key: [row[key] for row in rows] for key in ("id", "text")})
        return Corpus("s", "d", "r", datasets)

    a, b = {"id": "a", "text": "é\n"}, {"id": "b", "text": "x"}
    expected = hashlib.sha256(b'["train", "a", "\\u00e9\\n"]\n["test", "b", "x"]\n').hexdigest()
    assert corpus([a], test=[b]).sha256 == expected
    others = [corpus([a, b]), corpus([b, a]), corpus([a], [b]), corpus([a], test=[{"id": "b", "text": "y"}])]
    assert len({expected, *(other.sha256 for other in others)}) == 5


def make_library(folder, modules):
    for number in range(modules):
        sentence = " ".join(f"word{number}x{i}" for i in range(40))
        (folder / f"m{number}.py").write_text(f'"""{sentence}."""\nraise SystemExit("imported")\n')
    return folder


def test_broken_and_foreign_files_are_passed_over(tmp_path, monkeypatch):
    make_library(tmp_path, 400)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    expected = python_docs().sha256

    text = ("prose of another kind " * 20).encode()
    (tmp_path / "zeros.py").write_bytes(b'"""' + text + b'\x00"""')
    (tmp_path / "latin.py").write_bytes(b'"""' + text + b'\xe9"""')
    (tmp_path / "syntax.py").write_bytes(b'"""' + text + b'"""\nprint 1')
    for folder in ("site-packages", "test", "config-3.11-x86", "tkinter"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mod.py").write_bytes(b'"""' + text + b'"""')
    assert python_docs().sha256 == expected

    (tmp_path / "good.py").write_bytes(b'"""' + text + b'"""')
    changed = python_docs()
    assert changed.sha256 != expected
    assert [d["text"] for ds in changed.splits.values() for d in ds if d["id"] == "library/good"] == [
        "good\n\n" + text.decode().rstrip()
    ]


def test_a_python_without_sources_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(RecipeError, match=r"^data\.source: python-docs gives \d+ test documents .* needs 40: "):
        python_docs()
