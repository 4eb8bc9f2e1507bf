"""The tables say what summary.json says, in the terminal, in Markdown and in HTML."""

import json
import re
from io import StringIO
from pathlib import Path

import pytest
from html_page import Page
from rich.console import Console

from preproj.report import print_table, units
from preproj.report.records import Interval


def expected_rows(folder: Path) -> dict[str, list[str]]:
    """What each row of the headline table must say, straight from summary.json."""
    rows = {}
    for row in json.loads((folder / "summary.json").read_text())["rows"]:
        if row["status"] != "finished":
            continue
        deltas = []
        for key in ("perplexity", "last_word_accuracy"):
            values = row["versus"].get("none", {}).get(key)
            if values is None:
                deltas.append("–")
                continue
            scale, decimals = (1, 2) if key == "perplexity" else (100, 1)
            middle, low, high = (
                f"{scale * values[end]:+.{decimals}f}".replace("-", "−") for end in ("difference", "low", "high")
            )
            wording = "\nnot distinguishable" if values["low"] <= 0 <= values["high"] else ""
            deltas.append(f"{middle}\n[{low}, {high}]{wording}")
        speed = row["tokens_per_second"]
        rows[row["method"]] = [
            f"{row['trainable_parameters']:,}",
            f"{100 * row['share_of_total']:.2f} %",
            f"{row['perplexity']:.2f}",
            deltas[0],
            f"{100 * row['last_word_accuracy']:.1f} %",
            deltas[1],
            "–" if speed is None else "0.001",
            "–" if speed is None else f"{speed:,.0f}",
            f"{row['peak_memory_bytes'] / 2**30:.2f} GiB",
            f"{row['seconds']:.0f} s",
        ]
    return rows


def test_html_table_says_what_the_summary_says(demo):
    table = Page((demo / "report.html").read_text()).tables[0]
    shown = {row[0].split(" [")[0]: row[1:] for row in table[1:]}
    assert shown.pop("lora-qkv") == ["missing [2]", *["–"] * 9]
    assert shown == expected_rows(demo)


def test_markdown_table_says_what_the_summary_says(demo):
    lines = [line for line in (demo / "report.md").read_text().splitlines() if line.startswith("| ")]
    body = lines[2 : 2 + 5]
    shown = {}
    for line in body:
        method, *cells = line.replace("\\", "").strip("| ").split(" | ")
        shown[method.split(" [")[0]] = [cell.replace("<br>", "\n") for cell in cells]
    assert shown == expected_rows(demo)


@pytest.mark.parametrize("seeds", [(0,), (0, 1)])
def test_terminal_table_fits_and_says_what_the_summary_says(build_run, seeds):
    folder = build_run(seeds=seeds)
    console = Console(width=100, record=True, file=StringIO())
    print_table(folder, console)
    printed = console.export_text()
    assert max(map(len, printed.splitlines())) <= 100
    assert ("seed" in printed.split("method", 1)[1].splitlines()[0]) == (len(seeds) > 1)
    for row in json.loads((folder / "summary.json").read_text())["rows"]:
        line = rf"{re.escape(row['method'])}\b.*{row['trainable_parameters']:,} +{row['perplexity']:.2f} "
        assert re.search(line, printed)
        for values in row["versus"].get("none", {}).values():
            points = values is row["versus"]["none"]["last_word_accuracy"]
            _, low, high = units.difference(Interval(**values), points=points)
            assert f"[{low}, {high}]" in printed


def test_differences_from_lora_are_a_second_table(demo):
    table = Page((demo / "report.html").read_text()).tables[1]
    assert table[0][1] == "trainable parameters relative to lora"
    assert [row[0] for row in table[1:]] == ["pre", "skip", "pre+skip [1]"]
    assert table[3][1:3] == ["21.0 ×", "−0.07\n[−0.28, +0.16]\nnot distinguishable"]
