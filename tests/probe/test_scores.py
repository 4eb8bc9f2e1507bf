"""Items on disk and what is read from them, of both formats."""

import json
import math

import pytest

from preproj.probe.files import write_json
from preproj.probe.scores import read_scores, write_items


def test_scores_are_sums_over_groups_of_items(tmp_path):
    write_json(tmp_path / "metrics.json", {"measures": {"quiz": {"acc": "accuracy", "loss": "perplexity"}}})
    write_items(
        tmp_path,
        "quiz",
        [
            {"id": "1", "group": "a", "acc": [1.0, 1], "loss": [2.0, 4]},
            {"id": "2", "group": "b", "acc": [0.0, 1], "loss": [3.0, 1]},
            {"id": "3", "group": "a", "acc": [1.0, 1], "loss": [1.0, 5]},
        ],
    )
    scores = read_scores(tmp_path)
    assert scores["quiz/acc"].groups == ("a", "b")
    assert scores["quiz/acc"].totals.tolist() == [2.0, 0.0]
    assert scores["quiz/acc"].items == 3
    assert scores["quiz/acc"].value == pytest.approx(2 / 3)
    assert scores["quiz/loss"].value == pytest.approx(math.exp(6 / 10))


def test_a_cell_of_format_1_is_read_under_the_name_of_its_protocol(tmp_path):
    (tmp_path / "metrics.json").write_text(json.dumps({"format_version": 1}))
    documents = [{"id": "a", "tokens": 10, "negative_log_likelihood": 20.0}]
    passages = [{"id": f"a#{i}", "document": "a", "correct": i == 0} for i in range(4)]
    for name, rows in (("documents", documents), ("passages", passages)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    scores = read_scores(tmp_path)
    assert scores["document_v1/perplexity"].value == pytest.approx(math.exp(2))
    assert scores["last_word/acc"].value == 0.25
