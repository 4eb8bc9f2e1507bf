"""The text that every CPython carries: the language reference and the standard library's docstrings."""

import ast
import hashlib
import os
import platform
import re
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from datasets import Dataset

from preproj.probe.corpus import SPLITS, Corpus
from preproj.probe.errors import RecipeError

MIN_CHARACTERS = 200
MIN_TEST_DOCUMENTS = 40
MIN_PARAGRAPH = 60
SHINGLE_WORDS = 8

# Not the library itself: its tests, installed packages, applications, and files that hold data or other programs.
_SKIPPED = {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3", "tkinter", "turtledemo"}
_SKIPPED |= {"pydoc_data", "ensurepip", "encodings", "__pycache__"}
_SPLIT_RULE = (
    "The SHA-256 of a document's id, modulo 100, decides: below 15 test, below 25 validation, otherwise train; "
    f"a paragraph of {MIN_PARAGRAPH} characters or more is kept in one document only (test first, then validation, "
    f"then train), and one that shares {SHINGLE_WORDS} consecutive words with an earlier split is dropped."
)


# A heading ("" for none) and the paragraphs under it.
_Section = tuple[str, list[str]]


def python_docs() -> Corpus:
    """Read the language reference and the standard library's docstrings of the running Python.

    A document is one topic of the reference or one module. Within a split documents follow the hash of their id,
    so the first few are a fair sample of all.

    Raises:
        RecipeError: if this Python carries too little of it.
    """
    stdlib = Path(sysconfig.get_path("stdlib"))
    documents = dict([*_topics(), *_modules(stdlib)])
    hashes = {id: int(hashlib.sha256(id.encode()).hexdigest(), 16) for id in documents}
    members: dict[str, list[str]] = {split: [] for split in SPLITS}
    for id in sorted(documents, key=hashes.__getitem__):
        share = hashes[id] % 100
        members["test" if share < 15 else "validation" if share < 25 else "train"].append(id)

    splits = {}
    claimed: set[str] = set()
    held_out: set[tuple[str, ...]] = set()
    for split in reversed(SPLITS):
        texts = [(id, _unclaimed(documents[id], claimed, held_out)) for id in members[split]]
        splits[split] = Dataset.from_list(
            [{"id": id, "text": text} for id, text in texts if len(text) >= MIN_CHARACTERS]
        )
        held_out.update(*(shingles(text) for _, text in texts))
    if len(splits["test"]) < MIN_TEST_DOCUMENTS:
        raise RecipeError(
            f"data.source: python-docs gives {len(splits['test'])} test documents on this Python and needs "
            f"{MIN_TEST_DOCUMENTS}: {stdlib} lacks source files; use a full CPython or source: files."
        )
    description = (
        f"The language reference and the standard library's docstrings of CPython {platform.python_version()}; "
        "a document is one topic or one module."
    )
    return Corpus("python-docs", description, _SPLIT_RULE, {split: splits[split] for split in SPLITS})


def shingles(text: str) -> set[tuple[str, ...]]:
    """Return every run of eight consecutive words, lower-cased and without punctuation."""
    words = re.findall(r"\w+", text.lower())
    return set(zip(*(words[i:] for i in range(SHINGLE_WORDS)), strict=False))


def _topics() -> Iterator[tuple[str, list[_Section]]]:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return
    for name, text in topics.items():
        yield f"reference/{name}", [("", _paragraphs(text))]


def _modules(stdlib: Path) -> Iterator[tuple[str, list[_Section]]]:
    for path in _source_files(stdlib):
        try:
            with warnings.catch_warnings():
                # Under -W error a warning would become a SyntaxError and the corpus would depend on the flag.
                warnings.simplefilter("ignore")
                tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError):
            continue
        module = ".".join(path.relative_to(stdlib).with_suffix("").parts).removesuffix(".__init__")
        yield f"library/{module}", [(name, _paragraphs(doc)) for name, doc in _docstrings(tree, module)]


def _source_files(stdlib: Path) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(stdlib):
        # In place: os.walk then never enters site-packages, which may hold a hundred thousand files.
        subfolders[:] = [name for name in subfolders if name.isidentifier() and name not in _SKIPPED]
        yield from (Path(folder, name) for name in names if re.fullmatch(r"[^\W\d]\w*\.py", name))


def _docstrings(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        docstring = ast.get_docstring(node)
        if docstring:
            yield name, docstring
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _docstrings(child, f"{name}.{child.name}")
        elif isinstance(child, ast.stmt | ast.ExceptHandler):
            yield from _docstrings(child, name)


def _paragraphs(text: str) -> list[str]:
    return [paragraph.rstrip() for paragraph in re.split(r"\n\s*\n", text.strip("\n")) if paragraph.strip()]


def _unclaimed(sections: list[_Section], claimed: set[str], held_out: set[tuple[str, ...]]) -> str:
    """Join the paragraphs that no earlier document has, and claim them."""
    parts = []
    for heading, paragraphs in sections:
        kept = []
        for paragraph in paragraphs:
            key = " ".join(paragraph.split())
            if key in claimed or not held_out.isdisjoint(shingles(key)):
                continue
            if len(key) >= MIN_PARAGRAPH:
                claimed.add(key)
            kept.append(paragraph)
        if kept:
            parts += [heading, *kept] if heading else kept
    return "\n\n".join(parts)
