"""The figures: well-formed, named, marked alike everywhere, and true to the numbers."""

import csv
import json
import re
from io import StringIO
from xml.etree import ElementTree

import matplotlib
import pytest

from preproj.report.curves_figure import POINTS, running_mean
from preproj.report.figures import figures
from preproj.report.load import load
from preproj.report.style import KNOWN, SPARE, styles

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def drawn(demo):
    return {figure.name: figure for figure in figures(load(demo))}


def words(svg: str) -> list[str]:
    return [element.text for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


@pytest.mark.parametrize(
    ("name", "methods"),
    [
        ("headline", {"none", "pre", "skip", "pre+skip", "lora"}),
        ("learning-curves", {"pre", "skip", "pre+skip", "lora"}),
        ("cost-quality", {"none", "pre", "skip", "pre+skip", "lora"}),
        ("skip-norm", {"skip", "pre+skip"}),
        ("skip-to-attention", {"skip", "pre+skip"}),
        ("pre-to-input", {"pre", "pre+skip"}),
    ],
)
def test_each_figure_names_and_colours_its_methods(drawn, name, methods):
    svg = drawn[name].svg
    assert {word for word in words(svg) if word in KNOWN} == methods
    for method, style in KNOWN.items():
        if method != "none":
            assert (style.colour.lower() in svg) == (method in methods), method


def test_headline_figure_prints_the_values(drawn):
    shown = words(drawn["headline"].svg)
    for value in ("34.12", "31.83", "31.90", "35.2 %", "38.9 %"):
        assert value in shown


def test_figures_read_aloud(drawn):
    for figure in drawn.values():
        root = ElementTree.fromstring(figure.svg)
        assert root.get("role") == "img"
        assert root.get("aria-label") == root.findtext(f"{SVG}title")
        assert figure.caption in root.get("aria-label", "")


def test_initial_norms_are_marked(drawn):
    assert "before training" in words(drawn["skip-norm"].svg)
    assert "before training" not in words(drawn["skip-to-attention"].svg)


def test_text_follows_light_and_dark(drawn):
    for figure in drawn.values():
        assert "prefers-color-scheme:dark" in figure.svg
        assert re.search(r'<text [^>]*style="[^"]*fill: currentColor', figure.svg)


def test_the_readers_own_matplotlib_settings_change_nothing(drawn, demo):
    run = load(demo)
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "red", "svg.fonttype": "path"}):
        assert {figure.name: figure for figure in figures(run)} == drawn
        assert matplotlib.rcParams["font.size"] == 30


def test_every_seed_has_its_line(build_run):
    curves = figures(load(build_run(methods=["skip", "lora"], seeds=(0, 1, 2))))[1]
    assert "One line per seed" in curves.caption
    # A line of width 1 carries no stroke-width; the marks and the legend do or have joins.
    assert curves.svg.count(f'stroke: {KNOWN["lora"].colour.lower()}"/>') == 3


def test_unknown_methods_get_looks_of_their_own():
    look = styles(["other", "lora", "third"])
    assert look == {"other": SPARE[0], "lora": KNOWN["lora"], "third": SPARE[1]}


@pytest.mark.parametrize("part", ["colour", "marker", "line"])
def test_each_part_of_the_look_alone_tells_methods_apart(part):
    looks = [getattr(style, part) for style in (*KNOWN.values(), *SPARE)]
    assert len(set(looks)) == len(looks)


def test_the_numbers_of_a_figure_are_those_of_the_files(drawn, demo):
    metrics = json.loads((demo / "cells/pre+skip/seed0/metrics.json").read_text())
    rows = [row for row in csv.DictReader(StringIO(drawn["skip-norm"].csv)) if row["method"] == "pre+skip"]
    assert [float(row["‖W_skip‖"]) for row in rows] == [layer["skip_norm"] for layer in metrics["layers"]]
    (cost,) = (row for row in csv.DictReader(StringIO(drawn["cost-quality"].csv)) if row["method"] == "pre+skip")
    assert float(cost["trainable parameters"]) == metrics["trainable_parameters"]
    assert float(cost["seconds"]) == metrics["seconds"]["total"]
    assert float(cost["document perplexity"]) == 31.83


def test_a_long_training_is_drawn_by_some_of_its_steps(build_run):
    curves = figures(load(build_run(methods=["skip", "lora"], steps=5 * POINTS)))[1]
    rows = [row for row in csv.DictReader(StringIO(curves.csv)) if row["method"] == "lora"]
    assert [int(row["tokens"]) for row in rows[:3]] == [13_653, 6 * 13_653, 11 * 13_653]
    assert len(rows) == POINTS
    assert "Thin: each 5th step" in curves.caption


def test_running_mean_is_centred():
    assert running_mean([0.0, 3.0, 6.0, 9.0, 30.0], 3) == [1.5, 3.0, 6.0, 15.0, 19.5]
    assert running_mean([2.0], 3) == [2.0]
