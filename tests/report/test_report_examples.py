"""The items shown as won and lost are those of the files."""

import json
import shutil

import pytest

from preproj.report import ReportError, write_report
from preproj.report.examples import examples
from preproj.report.load import load


@pytest.fixture
def run(build_run):
    """pre+skip leads; its rival is the untouched model. Right of 8 passages: 0, 1, 2, 7 and 0, 2, 4, 6."""
    return build_run(methods=["none", "pre+skip"])


def test_items_are_counted_and_shown_by_their_difference(run):
    document, passage = examples(load(run), run)
    assert (passage.ours, passage.theirs) == ("pre+skip", "none")
    assert (passage.items, passage.wins, passage.losses) == (8, 2, 2)
    assert [example.id for example in passage.won] == ["page1#0", "page7#0"]
    assert [example.id for example in passage.lost] == ["page4#0", "page6#0"]
    assert passage.won[0].text == "Passage 1 ends in <b>this</b>"
    assert passage.won[0].target == " word1"
    assert [answer.words for answer in passage.won[0].answers] == ["word1 (right)", "slip1 (wrong)"]
    # The loss of page i is 3 + 0.1 · i · (letters of the method's name) nats per token.
    assert (document.wins, document.losses) == (0, 7)
    assert [example.id for example in document.lost] == ["page7", "page6", "page5"]
    assert [answer.words for answer in document.lost[0].answers] == ["8.600 nats per token", "5.800 nats per token"]


def test_a_folder_without_texts_shows_answers_alone_and_one_without_items_nothing(run):
    shutil.rmtree(run / "texts")
    _, passage = examples(load(run), run)
    assert (passage.won[0].text, passage.won[0].target) == (None, " word1")
    for items in run.glob("cells/*/*/items"):
        shutil.rmtree(items)
    assert examples(load(run), run) == ()
    assert "Items won and lost" not in write_report(run).read_text()


@pytest.mark.parametrize(
    ("response", "choices", "said"),
    [
        ([[-4.0, False], [-2.5, True], [-3.0, False]], ["red", "green", "blue"], "green"),
        ([[-4.0, False], [-2.5, True]], [], "choice 2"),
        ([[-2.5, False]], [], "log-likelihood -2.50"),
        (["forty-two"], [], "forty-two"),
    ],
)
def test_what_a_model_answered_in_the_harness_is_put_into_words(run, response, choices, said):
    for path in run.glob("cells/*/*/items/last_word.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        rows = [{key: row[key] for key in ("id", "group", "acc")} | {"response": response} for row in rows]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = [{"id": f"page{i}#0", "text": "A prompt", "choices": choices, "target": "blue"} for i in range(8)]
    (run / "texts/last_word.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    _, passage = examples(load(run), run)
    assert passage.won[0].target == "blue"
    assert passage.won[0].answers[0].said == said


def test_a_damaged_item_is_one_sentence(run):
    path = run / "cells/none/seed0/items/last_word.jsonl"
    path.write_text(path.read_text().replace("[1.0, 1]", "[1.0]"))
    with pytest.raises(ReportError, match="'acc' should be a pair of numbers, not"):
        examples(load(run), run)
