"""Last-word prediction in the manner of LAMBADA: a few sentences of prose, and the word that ends them."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from string import ascii_uppercase

from preproj.probe.corpus import Document

MIN_CONTEXT_WORDS = 30
MAX_CONTEXT_WORDS = 90
PER_DOCUMENT = 6

RULE = (
    "A passage is whole sentences of adjoining prose paragraphs; the target is the last word (four or more of the "
    "letters a to z, lower case after the first) and the context is everything before it, "
    f"{MIN_CONTEXT_WORDS} to {MAX_CONTEXT_WORDS} words in as few sentences as reach that; passages do not overlap, a "
    f"document gives at most {PER_DOCUMENT}, each with another target, and documents take turns."
)

_ABBREVIATIONS = ("e.g.", "i.e.", "etc.", "vs.", "cf.", "Mr.", "Mrs.", "Ms.", "Dr.", "St.")
_SENTENCE_END = re.compile(
    r"(?:(?<=[.!?])|(?<=[.!?][\"”'’)]))"
    + "".join(rf"(?<!\b{re.escape(word)})" for word in (*_ABBREVIATIONS, *(f"{c}." for c in ascii_uppercase)))
    + r"\s+(?=[A-Z\"“‘'`(*_])"
)
_TARGET = re.compile(r"^(.*\S)( [A-Za-z][a-z]{3,})\.$")


@dataclass(frozen=True)
class Passage:
    """A context and the word that follows it; the space between them belongs to ``target``."""

    id: str
    document: str
    context: str
    target: str


def last_word_passages(documents: Iterable[Document], limit: int) -> list[Passage]:
    """Choose up to ``limit`` passages by :data:`RULE`, the same ones every time."""
    turns = zip_longest(*(_of_document(document) for document in documents))
    return [passage for turn in turns for passage in turn if passage is not None][:limit]


def _of_document(document: Document) -> list[Passage]:
    passages: list[Passage] = []
    targets: set[str] = set()
    for sentences in _prose(document.text):
        start = 0  # Passages of one document share no sentence.
        for end, sentence in enumerate(sentences):
            match = _TARGET.match(sentence)
            if match is None or match[2].lower() in targets:
                continue
            first = _first_sentence(sentences, start, end)
            if first is None:
                continue
            targets.add(match[2].lower())
            context = " ".join([*sentences[first:end], match[1]])
            passages.append(Passage(f"{document.id}#{len(passages)}", document.id, context, match[2]))
            start = end + 1
            if len(passages) == PER_DOCUMENT:
                return passages
    return passages


def _first_sentence(sentences: list[str], start: int, end: int) -> int | None:
    words = len(sentences[end].split()) - 1
    for first in range(end - 1, start - 1, -1):
        words += len(sentences[first].split())
        if words >= MIN_CONTEXT_WORDS:
            return first if words <= MAX_CONTEXT_WORDS else None
    return None


def _prose(text: str) -> Iterator[list[str]]:
    """Yield the sentences of each run of adjoining prose paragraphs."""
    run: list[str] = []
    # Where lines are long, text is not wrapped by hand and a line is a paragraph.
    separator = r"\n" if max(map(len, text.splitlines()), default=0) > 200 else r"\n\s*\n"
    for paragraph in [*re.split(separator, text), ""]:
        if _is_prose(paragraph):
            run += _SENTENCE_END.split(" ".join(paragraph.split()))
        elif run:
            yield run
            run = []


def _is_prose(paragraph: str) -> bool:
    lines = paragraph.splitlines()
    return (
        re.match(r"\s*[A-Z\"“‘'`(*_]", paragraph) is not None
        and re.search(r"[.!?][\"”'’)]?\s*$", paragraph) is not None
        and re.search(r">>>|[{}|=<>\\]|--|\S {3,}\S", paragraph) is None
        and re.search(r"^\s*[-*+•] ", paragraph, re.MULTILINE) is None
        and len({len(line) - len(line.lstrip()) for line in lines}) == 1
    )
