"""WikiText as Wikipedia has it: its lines put back together into articles."""

import re
from collections.abc import Iterable, Iterator
from itertools import chain, pairwise

from preproj.probe.corpus import Document

# A section's heading has two or more marks: = = Section = =.
_TITLE = re.compile(r" = ([^=].*) = \n?")


def articles(lines: Iterable[str]) -> Iterator[Document]:
    """Join the lines of WikiText's raw files into articles, which are documents with their number and title as id.

    A title stands between blank lines: `` = Title = ``. Blank lines are kept; joined, the articles are the file from
    its first title on. Text before that is left out.
    """
    title, number = "", 0
    article: list[str] = []
    before = " \n"
    # The copy on the Hub has "" for the files' " \n".
    for line, after in pairwise(chain((line or " \n" for line in lines), [" \n"])):
        if not before.strip() and not after.strip() and (match := _TITLE.fullmatch(line)):
            if number:
                yield Document(f"{number} {title}", "".join(article))
            title, number = match[1], number + 1
            article = []
        article.append(line)
        before = line
    if number:
        yield Document(f"{number} {title}", "".join(article))
