"""Articles of WikiText: made-up lines, and the real files."""

import pytest

from preproj.probe.corpus import Document
from preproj.probe.wikitext import articles

LINES = [" \n", " = A = \n", " \n", "Text . \n", " = 1 henry = \n", "more . \n", " \n", " = = Section = = \n", " \n"]
LINES += [" = The ( film ) = 2 = \n", " \n", "End . \n"]


def test_a_title_between_blank_lines_begins_an_article_and_a_formula_or_a_section_does_not():
    assert list(articles(LINES)) == [
        Document("1 A", "".join(LINES[1:9])),
        Document("2 The ( film ) = 2", "".join(LINES[9:])),
    ]


def test_the_form_of_the_hub_gives_the_same_articles():
    assert list(articles("" if line == " \n" else line for line in LINES)) == list(articles(LINES))


def test_text_without_a_title_has_no_article():
    assert list(articles([" \n", "Text . \n", " = = Section = = \n"])) == []


@pytest.mark.data
@pytest.mark.parametrize(
    # Merity et al. 2016, table 1: 60 articles in each.
    ("name", "first", "last"),
    [("wiki.valid.raw", "Homarus gammarus", None), ("wiki.test.raw", "Robert Boulter", "The Hustler ( film )")],
)
def test_wikitexts_files_have_sixty_articles_and_lose_no_line(data_folder, name, first, last):
    with (data_folder / name).open(encoding="utf-8", newline="\n") as file:
        lines = list(file)
    found = list(articles(lines))
    assert len(found) == 60
    assert found[0].id == f"1 {first}"
    assert last is None or found[-1].id == f"60 {last}"
    assert "".join(document.text for document in found) == "".join(lines[1:])
    assert lines[0] == " \n"
