"""The clipped texts of items."""

import json

from preproj.probe.texts import beginning, ending, write_texts


def test_texts_are_clipped_where_they_say_least():
    text = "a" * 200 + "b" * 200
    assert beginning(text) == "a" * 200 + "b" * 99 + "…"
    assert ending(text) == "…" + "a" * 99 + "b" * 200
    assert beginning(text[:300]) == ending(text[:300]) == text[:300]
    assert beginning(text, 3) == "aa…"


def test_the_first_cell_writes_the_texts_of_a_run(tmp_path):
    write_texts(tmp_path, "document", [{"id": "a", "text": "first"}])
    write_texts(tmp_path, "document", [{"id": "a", "text": "second"}])
    assert json.loads((tmp_path / "texts/document.jsonl").read_text()) == {"id": "a", "text": "first"}
