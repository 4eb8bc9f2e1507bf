"""What `preproj analyze` found of a run's cells, in the report of the run."""

import csv
import json
from io import StringIO

import pytest
from run_folder import write_run

from preproj.report.fields import ReportError
from preproj.report.figures import figures
from preproj.report.load import load
from preproj.report.page import build_page
from preproj.report.tables import tables


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "analysed"
    return load(write_run(folder, ("none", "skip", "pre+skip"), analysed=("skip", "pre+skip"), layers=6))


def test_each_layers_worth_is_drawn_with_its_interval(run):
    drawn = {figure.name: figure for figure in figures(run)}
    rows = list(csv.DictReader(StringIO(drawn["without-skip"].csv)))
    assert [row["method"] for row in rows] == ["skip"] * 6 + ["pre+skip"] * 6
    for i, row in enumerate(rows[:6]):
        numbers = [float(row[key]) for key in ("layer", "Δ perplexity without it", "low", "high")]
        assert numbers == pytest.approx([i, 0.1 * i, 0.1 * i - 0.05, 0.1 * i + 0.07])
    assert {row["method"] for row in csv.DictReader(StringIO(drawn["without-pre"].csv))} == {"pre+skip"}


def test_the_worth_of_groups_is_listed(run):
    table = next(table for table in tables(run) if table.name == "ablations")
    assert [cell.text for cell in table.rows[0]] == ["skip", "0", "skip", "late: 5–5", "+0.50"]
    assert table.rows[1][3:][0].text == "all: 0–5"
    assert table.rows[1][4].lines == ("+1.50", "[+1.45, +1.57]")
    assert [row[2].text for row in table.rows[2:]] == ["skip", "skip", "pre-projection", "pre-projection"]


def test_the_protocol_says_what_it_was_measured_on(run):
    said = dict(build_page(run, ()).protocol)["ablations"]
    assert "8 pieces of 128 tokens of pages.txt (SHA-256 0123456789ab…)" in said


def test_a_run_that_was_not_analysed_says_nothing_of_it(demo):
    run = load(demo)
    assert "ablations" not in run.protocol
    assert not {"without-skip", "without-pre"} & {figure.name for figure in figures(run)}
    assert "ablations" not in {table.name for table in tables(run)}


def test_an_analysis_of_a_newer_format_or_of_an_unknown_part_gives_one_sentence(tmp_path):
    folder = write_run(tmp_path / "run", ("none", "skip"), analysed=("skip",), layers=2)
    file = folder / "cells/skip/seed0/analysis/analysis.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | {"format_version": 2}))
    with pytest.raises(ReportError, match=r"analysis.json has format version 2, .* reads up to version 1"):
        load(folder)
    content["cause"]["ablations"][0]["part"] = "gate"
    file.write_text(json.dumps(content))
    with pytest.raises(ReportError, match=r"'part' is 'gate', which is no known part; run `preproj analyze \S+` again"):
        load(folder)
