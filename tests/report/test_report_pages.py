"""The written pages: nothing from outside, hostile text kept harmless, the same bytes every time."""

import json
import re
from xml.etree import ElementTree

import pytest
from html_page import Page

from preproj.report import write_report

HOSTILE = "<img src=x onerror=alert(1)> & *stars* | `ticks` </script> $x$"
LOADS = ("src", "srcset", "data", "poster", "action", "background")


def test_html_stands_alone(demo):
    text = (demo / "report.html").read_text()
    page = Page(text)
    assert page.tags.count("script") == 1
    assert not {"link", "iframe", "object", "embed", "img", "base"} & set(page.tags)
    for tag, name, value in page.attributes:
        assert name not in LOADS, (tag, name, value)
        assert not name.startswith("on"), (tag, name, value)
        if name.endswith("href"):
            assert value.startswith(("#", "data:text/csv")), (tag, name, value)
    assert not re.search(r"@import|@font-face|url\((?!#)", text)
    ids = [value for _, name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))


def test_page_tells_what_a_reader_needs_in_order(demo):
    text = Page((demo / "report.html").read_text()).text
    summary, corpus = (json.loads((demo / name).read_text()) for name in ("summary.json", "corpus.json"))
    parts = [
        "pre+skip scores best in document perplexity",
        "demo: pythia-160m",
        "Which method won?",
        summary["base"]["note"],
        "Difference from the untouched model in document perplexity",
        "pre+skip against the untouched model (none): better in document perplexity",
        "Results of demo on pythia-160m",
        "[1] " + next(row["notes"][0] for row in summary["rows"] if row["notes"]),
        "Learning curves",
        "Cost against quality: document perplexity",
        "Size and cost",
        "Size of the content skip",
        "Passage 1 ends in <b>this</b> word1",
        "Every pair of methods",
        summary["protocol"]["training"],
        summary["protocol"]["intervals"],
        "saw the same tokens in the same order",
        "preproj probe recipe.yaml",
        (demo / "recipe.yaml").read_text(),
        f"{corpus['splits']['test']['documents']} documents, 31,417 tokens",
        corpus["sha256"],
        "torch 2.13.0",
    ]
    places = [text.index(part) for part in parts]
    assert places == sorted(places)


def test_markdown_links_only_figures_that_exist(demo):
    linked = re.findall(r"\]\((figures/[\w-]+\.svg)\)", (demo / "report.md").read_text())
    assert len(linked) == 6
    assert sorted(linked) == sorted(str(path.relative_to(demo)) for path in demo.glob("figures/*"))
    for name in linked:
        ElementTree.parse(demo / name)


def test_two_writes_give_the_same_bytes_and_leave_no_other_files(demo):
    def contents():
        return {path: path.read_bytes() for path in demo.rglob("*") if path.is_file()}

    first = contents()
    (demo / "figures/learning-curves.svg").write_text("old")
    assert write_report(demo) == demo / "report.html"
    assert contents() == first


def test_failed_cells_and_hostile_text_are_shown_as_text(build_run):
    hostile = HOSTILE.replace("/", "")
    folder = build_run(methods=["none", "skip", hostile], failed=["skip"], reason=HOSTILE, note=HOSTILE)
    (folder / "recipe.yaml").write_text("name: |\n  ```\n  </pre><script>alert(1)</script>\n")
    text = write_report(folder).read_text()
    page = Page(text)
    assert "img" not in page.tags
    assert page.tags.count("script") == 1  # the page's own
    assert page.tables[0][2][:2] == ["skip [1]", "no result"]
    assert page.tables[0][3][0] == hostile
    assert page.tables[-1][2][:2] == ["skip [1]", "failed"]
    assert f"[1] skip, seed 0, failed: {HOSTILE}" in page.text
    assert f"About this base model. {HOSTILE}" in page.text
    assert "<script>alert(1)</script>" in page.text
    markdown = (folder / "report.md").read_text()
    assert not re.search(r"(?<!\\)<img", markdown)
    assert "````yaml" in markdown
    for path in folder.glob("figures/*.svg"):
        names = [element.text for element in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")]
        assert hostile in names


@pytest.mark.parametrize(
    ("methods", "figures", "tables"),
    [
        (["none"], set(), 2),
        (["none", "lora"], {"headline", "cost-quality", "learning-curves"}, 3),
        (["none", "pre"], {"headline", "cost-quality", "learning-curves", "pre-to-input"}, 3),
        (["skip", "lora"], {"headline", "cost-quality", "learning-curves", "skip-norm", "skip-to-attention"}, 3),
        (
            ["none", "skip", "pre", "lora"],
            {"headline", "cost-quality", "learning-curves", "skip-norm", "skip-to-attention", "pre-to-input"},
            5,
        ),
    ],
)
def test_a_run_gets_the_figures_and_tables_it_has_numbers_for(build_run, methods, figures, tables):
    folder = build_run(methods=methods)
    (folder / "figures").mkdir()
    (folder / "figures/skip-norm.svg").write_text("of an earlier report")
    page = Page(write_report(folder).read_text())
    assert {path.stem for path in folder.glob("figures/*")} == figures
    assert len(page.tables) == tables


def test_different_token_orders_are_a_warning(build_run):
    folder = build_run(methods=["skip", "lora"])
    path = folder / "cells/skip/seed0/metrics.json"
    path.write_text(path.read_text().replace("order0", "another"))
    assert "Warning: the methods of a seed did not see the same tokens" in write_report(folder).read_text()


def test_a_run_without_last_word_passages_says_nothing_of_them(build_run):
    folder = build_run(methods=["none", "skip", "lora"], last_word=False)
    page = Page(write_report(folder).read_text())
    assert [title for title in page.tables[0][0] if "last_word" in title] == []
    assert "skip against the untouched model (none): better in document perplexity" in page.text
    assert "last_word" not in page.text.split("How it was measured")[0]


def test_a_diverged_cell_is_reported_not_drawn(build_run):
    folder = build_run(methods=["none", "skip"], reference=None)
    summary = json.loads((folder / "summary.json").read_text())
    infinite = dict.fromkeys(("value", "low", "high"), float("inf"))
    summary["rows"][1]["scores"]["document/perplexity"] = float("inf")
    summary["methods"][1]["scores"]["document/perplexity"] = infinite
    summary["pairs"][0]["differences"]["document/perplexity"] = infinite
    (folder / "summary.json").write_text(json.dumps(summary))
    tables = Page(write_report(folder).read_text()).tables
    assert tables[0][2][1].startswith("not finite")
    assert tables[1][1][1].startswith("not finite")
