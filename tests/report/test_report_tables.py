"""The tables say what summary.json says, in the terminal, in Markdown and in HTML."""

import json
import re
from io import StringIO
from pathlib import Path

import pytest
from html_page import Page
from rich.console import Console

from preproj.report import print_table, write_report

MEASURES = ("document/perplexity", "last_word/acc")


def shown(number: float, name: str, *, signed: bool = False) -> str:
    scale, decimals = (1, 2) if name == "document/perplexity" else (100, 1)
    text = f"{scale * number:{'+' if signed else ''}.{decimals}f}".replace("-", "−")
    return text if signed or scale == 1 else f"{text} %"


def cell(interval: dict, name: str, *, signed: bool = False) -> str:
    middle, low, high = (shown(interval[end], name, signed=signed) for end in ("value", "low", "high"))
    return f"{middle}\n[{low}, {high}]" + (f"\n{verdict(interval, name)}" if signed else "")


def verdict(interval: dict, name: str) -> str:
    if interval["low"] <= 0 <= interval["high"]:
        return "not distinguishable"
    return "better" if (interval["high"] < 0) == (name == "document/perplexity") else "worse"


def expected_scores(folder: Path) -> dict[str, list[str]]:
    """What each row of the first table must say, straight from summary.json."""
    summary = json.loads((folder / "summary.json").read_text())
    return {
        method["method"]: [cell(method["scores"][name], name) for name in MEASURES] for method in summary["methods"]
    }


def expected_differences(folder: Path, other: str) -> dict[str, list[str]]:
    """What each row of a table of differences must say."""
    rows = {}
    for pair in json.loads((folder / "summary.json").read_text())["pairs"]:
        if other not in (pair["ours"], pair["theirs"]):
            continue
        turned = pair["ours"] == other
        cells = []
        for name in MEASURES:
            interval = pair["differences"][name]
            if turned:
                ends = {"value": "value", "low": "high", "high": "low"}
                interval = {end: -interval[opposite] for end, opposite in ends.items()}
            cells.append(cell(interval, name, signed=True))
        rows[pair["theirs"] if turned else pair["ours"]] = cells
    return rows


def by_method(table: list[list[str]]) -> dict[str, list[str]]:
    return {row[0].split(" [")[0]: row[1:] for row in table[1:]}


def test_html_tables_say_what_the_summary_says(demo):
    scores, from_none, from_lora, cost, pairs = Page((demo / "report.html").read_text()).tables
    found = by_method(scores)
    assert found.pop("lora-qkv") == ["no result", "–"]
    assert found == expected_scores(demo)
    assert by_method(from_none) == expected_differences(demo, "none")
    lora = by_method(from_lora)
    assert {method: row[1:] for method, row in lora.items()} == {
        method: row for method, row in expected_differences(demo, "lora").items() if method != "none"
    }
    assert lora["pre+skip"][0] == "21.0 ×\nnot an equal budget"
    assert by_method(cost)["lora"][:2] == ["1,179,648", "0.72 %"]
    assert by_method(cost)["lora-qkv"] == ["missing", *["–"] * 5]
    assert [row[0] for row in pairs[1:]][-1] == "lora − pre+skip"
    assert {row[1] for row in pairs[1:]} == {"no\nnot an equal budget"}
    assert {row[2].split("\n")[1] for row in pairs[1:]} == {"p = 0.042"}


def test_markdown_table_says_what_the_summary_says(demo):
    lines = [line for line in (demo / "report.md").read_text().splitlines() if line.startswith("| ")]
    found = {}
    for line in lines[2 : 2 + 5]:
        method, *cells = line.replace("\\", "").strip("| ").split(" | ")
        found[method.split(" [")[0]] = [text.replace("<br>", "\n") for text in cells]
    assert found == expected_scores(demo)


@pytest.mark.parametrize("seeds", [(0,), (0, 1)])
def test_terminal_tables_fit_and_say_what_the_summary_says(build_run, seeds):
    folder = build_run(seeds=seeds)
    console = Console(width=100, record=True, file=StringIO())
    print_table(folder, console)
    printed = console.export_text()
    assert max(map(len, printed.splitlines())) <= 100
    for method, (perplexity, accuracy) in expected_scores(folder).items():
        values = [text.split("\n")[0] for text in (perplexity, accuracy)]
        assert re.search(rf"{re.escape(method)}\b.* {values[0]} +{values[1]}", printed)
    for row in expected_differences(folder, "none").values():
        for text in row:
            assert text.split("\n")[1] in printed


def test_every_seed_has_its_row(build_run):
    folder = build_run(methods=["none", "skip"], seeds=(0, 3))
    summary = json.loads((folder / "summary.json").read_text())
    console = Console(width=100, record=True, file=StringIO())
    print_table(folder, console)
    printed = console.export_text().split("Every seed")[1]
    for row in summary["rows"]:
        seed = "all" if row["method"] == "none" else row["seed"]
        value = shown(row["scores"]["document/perplexity"], "document/perplexity")
        assert re.search(rf"{row['method']} +{seed} +{value}", printed)


def test_published_numbers_stand_beside_the_measured_ones(build_run):
    baseline = {"source": "a page", "scores": {"last_word/acc": {"value": 0.36, "standard_error": 0.01}}}
    paper = {
        "source": "the paper",
        "methods": {"pre+skip": {"perplexity": 47.9, "HellaSwag": 3.7}},
        "measures": {"perplexity": "document/perplexity"},
    }
    folder = build_run(published={"baseline": baseline, "paper": paper})
    table = Page(write_report(folder).read_text()).tables[-1]
    assert table[1] == ["none", "last_word acc", "36.0 %", "35.2 %\n[31.3 %, 39.1 %]", "a page"]
    assert table[2][:3] == ["pre+skip", "perplexity", "47.90"]
    value, interval = expected_scores(folder)["pre+skip"][0].split("\n")
    assert table[2][3] == f"{value}\ndocument perplexity\n{interval}\ndiffers beyond its interval"
    assert table[3] == ["pre+skip", "HellaSwag", "3.7", "–", "the paper"]
    baseline["scores"]["last_word/acc"]["value"] = 0.5
    table = Page(write_report(build_run("other", published={"baseline": baseline})).read_text()).tables[-1]
    assert "differs beyond its interval" in table[1][3]


def test_interactions_have_their_table(build_run):
    folder = build_run()
    summary = json.loads((folder / "summary.json").read_text())
    gain = {"document/perplexity": {"value": 0.5, "low": 0.1, "high": 0.9}}
    summary["interactions"] = [{"name": "pre × skip", "differences": gain}]
    (folder / "summary.json").write_text(json.dumps(summary))
    table = Page(write_report(folder).read_text()).tables[-1]
    assert table[1] == ["pre × skip", "+0.50\n[+0.10, +0.90]\nworse", "–"]


def test_whatever_else_differs_in_a_pair_stands_in_its_row(build_run):
    folder = build_run(methods=["none", "pre", "skip", "lora"])
    summary = json.loads((folder / "summary.json").read_text())
    for pair in summary["pairs"]:
        if pair["ours"] == "skip":
            pair["differs"] = ["parameters", "dtype", "device", "data"]
    (folder / "summary.json").write_text(json.dumps(summary))
    _, from_none, from_lora, *_, pairs = Page(write_report(folder).read_text()).tables
    others = "another dtype\nanother device\nnot the same tokens"
    assert [row[0] for row in from_none[1:]] == ["pre", f"skip\n{others}", "lora"]
    assert [row[1].split("\n", 1)[1] for row in from_lora[1:]] == ["not an equal budget"] * 2
    assert {row[0]: row[1] for row in pairs[1:]}["skip − pre"] == f"no\nnot an equal budget\n{others}"
