"""Last-word passages: made-up texts whose passages are known, and the real test split."""

import re

import pytest

from preproj.probe.corpus import Document
from preproj.probe.passages import RULE, Passage, last_word_passages
from preproj.probe.python_docs import python_docs

# Seventeen words, so a sentence alone has too little context and a second one has 17 + 16 words of it.
RIVER = "The river had risen in the night and nobody in the village dared to cross it {}."


def story(*endings):
    return " ".join(RIVER.format(word) for word in endings)


@pytest.fixture(scope="module")
def held_out():
    return [Document(**row) for row in python_docs().splits["test"]]


def test_a_passage_ends_before_the_last_word_of_as_few_sentences_as_make_30_words():
    sentence = RIVER.format("again")
    passages = last_word_passages([Document("d", f"A heading\n\n{story('again', 'again', 'alone')}")], 10)
    # The third sentence has nothing left before it that the first passage does not use.
    assert passages == [Passage("d#0", "d", f"{sentence} {sentence[:-7]}", " again")]
    assert len(passages[0].context.split()) == 33


def test_line_breaks_are_folded_and_paragraphs_joined():
    text = story("tonight") + "\n\n" + story("alone")
    (passage,) = last_word_passages([Document("d", text.replace(" the ", "\nthe "))], 10)
    assert passage.context + passage.target + "." == story("tonight", "alone")
    assert passage.target == " alone"


@pytest.mark.parametrize(
    "ending",
    ["it", "42", "TypeError", "self.x", '"quoted"', "HTTP", "call()"],
    ids=str,
)
def test_only_plain_words_of_four_letters_are_targets(ending):
    assert last_word_passages([Document("d", story("there", ending))], 10) == []


@pytest.mark.parametrize(
    "break_",
    [">>> f(1)", "x = 1.", "- A list item.", "a   table   of.", "grammar ::= rule.", "heading", "Ends so:"],
)
def test_code_tables_lists_and_headings_end_the_prose(break_):
    assert last_word_passages([Document("d", f"{story('there')}\n\n{break_}\n\n{story('alone')}")], 10) == []
    assert len(last_word_passages([Document("d", f"{story('there')}\n\nProse.\n\n{story('alone')}")], 10)) == 1


def test_abbreviations_do_not_end_a_sentence():
    visit = "They went to see Mr. Brown, i.e. The man who owned ropes, etc. Near the mill J. R. Smith sold a ladder."
    (passage,) = last_word_passages([Document("d", f"{story('there')} {visit}")], 10)
    assert passage.target == " ladder"
    assert passage.context.startswith("The river")


def test_long_sentences_are_passed_over():
    words = " ".join(["very"] * 89)
    assert last_word_passages([Document("d", f"Short start. It was {words} late.")], 10) == []
    assert len(last_word_passages([Document("d", f"Short start. It was {words[:-15]} late.")], 10)) == 1


def test_text_with_a_paragraph_a_line_is_understood():
    paragraphs = [story("there", "alone", "below"), "= Heading =", story("again", "later", "above")]
    targets = [p.target for p in last_word_passages([Document("d", "\n".join(paragraphs))], 10)]
    assert targets == [" alone", " later"]


def test_documents_take_turns_and_give_six_at_most():
    letters = "abcdefghijklmnop"
    many = Document("many", story(*(word for c in letters for word in (f"off{c}", f"word{c}"))))
    few = Document("few", story("there", "alone"))
    passages = last_word_passages([many, few, Document("none", "Nothing.")], 100)
    assert [p.id for p in passages] == ["many#0", "few#0", *(f"many#{i}" for i in range(1, 6))]
    assert [p.target for p in passages if p.document == "many"] == [f" word{c}" for c in letters[:6]]
    assert last_word_passages([many, few], 3) == passages[:3]


def test_a_document_has_each_target_once():
    repeated = Document("d", story("there", "alone", "there", "alone", "there", "below"))
    assert [p.target for p in last_word_passages([repeated], 10)] == [" alone", " there"]


def test_the_real_test_split_gives_a_hundred_passages_of_prose(held_out):
    passages = last_word_passages(held_out, 100)
    flat = {document.id: " ".join(document.text.split()) for document in held_out}
    assert len(passages) == 100
    assert len({p.id for p in passages}) == 100
    assert len({p.document for p in passages}) >= 35
    for passage in passages:
        assert re.fullmatch(r" [A-Za-z][a-z]{3,}", passage.target)
        assert 30 <= len(passage.context.split()) <= 90
        assert not re.search(r">>>|[={}|\n]", passage.context)
        # A document may join prose over a paragraph break, never reorder or invent.
        assert f"{passage.context}{passage.target}." in flat[passage.document]


def test_passages_of_a_document_share_no_sentence(held_out):
    for document in held_out:
        taken = [p.context + p.target for p in last_word_passages([document], 100)]
        flat = " ".join(document.text.split())
        ends = 0
        for text in taken:
            start = flat.index(text, ends)
            ends = start + len(text)


def test_the_rule_is_one_sentence_with_its_numbers():
    assert RULE.count(".") == 1
    assert all(number in RULE for number in ("30 to 90 words", "at most 6"))
