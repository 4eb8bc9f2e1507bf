"""`preproj compare`: curves with chosen ratios, ranks and bands, and everything that cannot be compared."""

import csv
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.stats import spearmanr, t
from typer.testing import CliRunner

from preproj.cli import app
from preproj.report.compared_figure import draw_compared
from preproj.report.layer_curves import read_curves
from preproj.report.style import REPORT, distinct_styles

CURVE = [1.0, 2.0, 3.0, 6.0, 5.0, 8.0]
RATIO = 8 / 3  # the last over the mean of the first four: 8 / ((1 + 2 + 3 + 6) / 4)
RHO = 1 - 6 * (1 + 1) / (6 * (6**2 - 1))  # two neighbours are swapped


def rows(**measures: list) -> list[dict]:
    """Layers from curves; measures that are not named are not in the rows, as in files of earlier versions."""
    (layers,) = {len(curve) for curve in measures.values()}
    return [
        {"layer": i, "site": f"layers.{i}.attention", **{name: curve[i] for name, curve in measures.items()}}
        for i in range(layers)
    ]


def write_json(path: Path, content: dict, version: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"format_version": version, **content}))
    return path.parent


def write_run(folder: Path, cells: dict[str, list[list[dict]]], model: str = "some-model") -> Path:
    """Writes a run: for each method the layers of each seed."""
    for method, seeds in cells.items():
        for seed, layers in enumerate(seeds):
            content = {"method": method, "seed": seed, "layers": layers}
            write_json(folder / "cells" / method / f"seed{seed}" / "metrics.json", content, 2)
    recipe = {"name": folder.name, "model": {"name": model}, "methods": list(cells)}
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    return folder


def write_analysis(folder: Path, layers: list[dict], **adapter: object) -> Path:
    content = {
        "model": {"name": "some-model", "note": None},
        "adapter": {"pre_projection": True, "content_skip": True, "skip_rank": None, "init_seed": 7} | adapter,
        "text": {"source": "a-text", "tokens": 4096},
        "layers": layers,
    }
    return write_json(folder / "analysis.json", content, 1)


def compare(*arguments: object, columns: int = 80) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["compare", *map(str, arguments)], env={"COLUMNS": str(columns)})
    return done.exit_code, done.stdout, done.stderr


def table(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def chosen(tmp_path: Path) -> Path:
    """A run whose three methods have one, two and three seeds: the curve, and multiples of it with another end."""
    seeds = [[*CURVE[:-1], last] for last in (8.0, 10.0, 15.0)]
    cells = {
        "none": [[]],
        "skip": [rows(skip_norm=CURVE, skip_share=[-1.0, 0.0, 0.5, 0.1, 0.2, 0.3])],
        "pre+skip": [rows(skip_norm=curve, skip_share=curve, pre_to_input=CURVE) for curve in seeds[:2]],
        "skip-r4": [rows(skip_norm=curve, skip_share=curve) for curve in seeds],
        "lora": [[]],
    }
    return write_run(tmp_path / "chosen", cells)


def test_ratios_and_ranks_are_those_of_the_curves(chosen, tmp_path):
    assert compare(chosen, "--out", tmp_path / "out")[0] == 0
    found = {(row["measure"], row["method"]): row for row in table(tmp_path / "out/compare.csv")}
    assert list(found) == [(m, n) for m in ("skip_norm", "skip_share") for n in ("skip", "pre+skip", "skip-r4")]
    one = found["skip_norm", "skip"]
    assert float(one["late_over_early"]) == pytest.approx(RATIO)
    assert float(one["spearman"]) == pytest.approx(RHO)
    assert float(found["skip_norm", "pre+skip"]["late_over_early"]) == pytest.approx(9 / 3)
    for two_or_less in ("skip", "pre+skip"):
        row = found["skip_norm", two_or_less]
        ends = [row[f"{statistic}_{end}"] for statistic in ("late_over_early", "spearman") for end in ("low", "high")]
        assert ends == ["", "", "", ""]
    assert found["skip_share", "skip"]["late_over_early"] == ""  # the early layers' mean is negative
    assert float(found["skip_share", "skip"]["spearman"]) == pytest.approx(
        spearmanr(range(6), [-1.0, 0.0, 0.5, 0.1, 0.2, 0.3]).statistic
    )


def test_three_seeds_have_an_interval_of_students_t(chosen, tmp_path):
    compare(chosen, "--out", tmp_path / "out")
    (row,) = (r for r in table(tmp_path / "out/compare.csv") if (r["measure"], r["seeds"]) == ("skip_norm", "3"))
    ratios = np.array([8.0, 10.0, 15.0]) / 3
    half = t.ppf(0.975, 2) * ratios.std(ddof=1) / math.sqrt(3)
    assert row["model"] == "some-model"
    assert float(row["late_over_early"]) == pytest.approx(11 / 3)
    assert float(row["late_over_early_low"]) == pytest.approx(11 / 3 - half)
    assert float(row["late_over_early_high"]) == pytest.approx(11 / 3 + half)
    assert [float(row[f"spearman{end}"]) for end in ("", "_low", "_high")] == pytest.approx([RHO] * 3)


def test_bands_are_the_span_of_two_seeds_and_the_interval_of_three(chosen, tmp_path):
    compare(chosen, "--out", tmp_path / "out")
    ends = {
        row["method"]: [float(row[key]) for key in ("mean", "low", "high")]
        for row in table(tmp_path / "out/curves.csv")
        if (row["measure"], row["layer"]) == ("skip_norm", "5")
    }
    half = t.ppf(0.975, 2) * math.sqrt((9 + 1 + 16) / 2) / math.sqrt(3)  # of 8, 10 and 15 around 11
    assert ends == {"skip": [8, 8, 8], "pre+skip": [9, 8, 10], "skip-r4": pytest.approx([11, 11 - half, 11 + half])}


def test_the_figure_draws_those_lines_and_bands(chosen):
    curves = read_curves([chosen])
    with REPORT.context():
        drawn = draw_compared(REPORT, "skip_norm", curves)
    (axes,) = drawn.drawing.axes
    xs = [1 / 12, 3 / 12, 5 / 12, 7 / 12, 9 / 12, 11 / 12]
    for line, last in zip(axes.lines, (8, 9, 11), strict=True):
        assert line.get_xdata() == pytest.approx(xs)
        assert line.get_ydata() == pytest.approx([*CURVE[:-1], last])
    two, three = (band.get_paths()[0].get_extents() for band in axes.collections)
    assert (two.x0, two.x1, two.y0, two.y1) == pytest.approx((1 / 12, 11 / 12, 1, 10))
    assert three.y1 > 15  # the interval of three seeds is wider than they are
    named = [text.get_text() for text in drawn.drawing.legends[0].get_texts()]
    assert named == ["skip", "pre+skip", "skip-r4"]
    assert axes.get_ylim()[0] == 0
    assert drawn.caption.endswith(
        "Lines are means over seeds, bands 95 % intervals over seeds (Student's t), or from the lower to the higher of "
        "two seeds."
    )


def test_models_of_different_depth_share_the_axis_and_have_their_own_early_layers(tmp_path):
    small = write_run(tmp_path / "small", {"skip": [rows(skip_norm=[1.0] * 8 + [5.0] * 3 + [3.0])]}, "x/pythia-160m")
    large = write_run(tmp_path / "large", {"skip": [rows(skip_norm=[1.0] * 11 + [5.0] * 12 + [2.0])]}, "x/pythia-410m")
    assert compare(small, large, "--out", tmp_path / "out")[0] == 0
    ratio = {row["run"]: float(row["late_over_early"]) for row in table(tmp_path / "out/compare.csv")}
    assert ratio == {"small": 3, "large": 2}  # layer 11 over 0-7, and 23 over 0-10
    places: dict[str, list[float]] = {}
    for row in table(tmp_path / "out/curves.csv"):
        places.setdefault(row["run"], []).append(float(row["relative_depth"]))
    assert places["small"] == pytest.approx([(i + 0.5) / 12 for i in range(12)])
    assert places["large"] == pytest.approx([(i + 0.5) / 24 for i in range(24)])
    assert "skip (small)" in (tmp_path / "out/skip-norm.svg").read_text()


def test_cells_of_earlier_versions_are_compared_by_what_they_have(tmp_path):
    old = write_run(tmp_path / "old", {"pre": [rows(skip_norm=[None, None], pre_to_input=[0.1, 0.2])]})
    new = rows(skip_norm=[1.0, 2.0], skip_change_norm=[1.0, 2.0], pre_norm=[1.0, 2.0], pre_to_input=[0.1, 0.3])
    assert compare(old, write_run(tmp_path / "new", {"pre+skip": [new]}), "--out", tmp_path / "out")[0] == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        *("compare.csv", "compare.md", "curves.csv", "pre-to-input.svg")
    ]


def test_a_number_that_is_not_finite_is_no_number(tmp_path):
    lost = rows(skip_norm=[1.0, math.nan], pre_to_input=[0.1, 0.2])
    kept = rows(skip_norm=[1.0, 2.0], pre_to_input=[0.1, 0.2])
    first, second = (write_run(tmp_path / n, {"pre+skip": [r]}) for n, r in (("a", lost), ("b", kept)))
    assert compare(first, second, "--out", tmp_path / "out")[0] == 0
    assert {row["measure"] for row in table(tmp_path / "out/compare.csv")} == {"pre_to_input"}


def test_a_run_a_cell_and_the_adapter_in_it_are_the_same_layers(chosen):
    cell = chosen / "cells/skip/seed0"
    (cell / "adapter").mkdir()
    (cell / "adapter/adapter_config.json").write_text("{}")
    of_run, of_cell, of_adapter = (read_curves([path])[0] for path in (chosen, cell, cell / "adapter"))
    assert of_run == of_cell == of_adapter
    assert [layer["skip_norm"] for layer in of_run.seeds[0]] == CURVE


def test_cells_of_one_method_are_seeds_of_one_curve(chosen):
    two, one = (chosen / f"cells/pre+skip/seed{seed}" for seed in (1, 0))
    (curves,) = read_curves([two, one])
    assert list(curves.seeds) == [0, 1]


@pytest.mark.parametrize(
    ("parts", "method"),
    [
        ({"content_skip": False}, "pre"),
        ({"pre_projection": False}, "skip"),
        ({}, "pre+skip"),
        ({"skip_rank": 8}, "pre+skip-r8"),
    ],
)
def test_an_analysed_adapter_is_named_by_its_folder_and_its_parts(tmp_path, parts, method):
    layers = rows(skip_norm=CURVE)
    write_analysis(tmp_path / "mine/analysis", layers, **parts)
    elsewhere = write_analysis(tmp_path / "elsewhere", layers, **parts)
    by_adapter, by_analysis, by_out = (
        read_curves([path])[0] for path in (tmp_path / "mine", tmp_path / "mine/analysis", elsewhere)
    )
    assert by_adapter == by_analysis
    assert (by_adapter.name, by_adapter.method, by_adapter.model) == ("mine", method, "some-model")
    assert by_adapter.text == "4,096 tokens of a-text"
    assert by_out.name == "elsewhere"


def test_analyses_of_cells_are_seeds_of_one_curve_beside_the_runs_own(chosen):
    analyses = [
        write_analysis(chosen / f"cells/pre+skip/seed{seed}/analysis", rows(skip_norm=CURVE)) for seed in (0, 1)
    ]
    *_, of_run, analysed = read_curves([chosen / "cells/pre+skip/seed0", *analyses])
    assert (of_run.name, list(of_run.seeds)) == ("chosen", [0])
    assert (analysed.name, analysed.method, list(analysed.seeds)) == ("chosen, analysed", "pre+skip", [0, 1])


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path):
    runs = [write_run(tmp_path / place / "demo", {"skip": [rows(skip_norm=CURVE)]}) for place in ("a", "b")]
    assert [one.name for one in read_curves(runs)] == [f"demo in {run}" for run in runs]


def test_the_terminal_shows_the_tables_in_80_columns(chosen, tmp_path):
    status, printed, _ = compare(chosen, "--out", tmp_path / "out")
    lines = printed.splitlines()
    assert status == 0
    assert max(map(len, lines[: lines.index(str(tmp_path / "out/skip-norm.svg"))])) <= 80
    assert re.search(r"^ skip +1 +2\.67 +0\.94 +$", printed, re.MULTILINE)
    assert re.search(r"^ skip +1 +– +0\.66 +$", printed, re.MULTILINE)
    assert lines[-5:] == [
        str(tmp_path / "out" / name)
        for name in ("skip-norm.svg", "skip-share.svg", "compare.md", "compare.csv", "curves.csv")
    ]


def test_the_page_says_what_is_compared_and_shows_figures_with_their_tables(chosen, tmp_path):
    compare(chosen, "--out", tmp_path)
    page = (tmp_path / "compare.md").read_text()
    assert "- **chosen**: pre+skip on some-model, 6 layers, 2 seeds (0, 1); function measured on the run's" in page
    assert re.findall(r"^!\[.*\]\((.*)\)$", page, re.MULTILINE) == ["skip-norm.svg", "skip-share.svg"]
    assert f"| skip | 1 | {RATIO:.2f} | {RHO:.2f} |" in page


@pytest.mark.parametrize(("file_format", "begins"), [("pdf", b"%PDF"), ("svg", b"<svg"), ("png", b"\x89PNG")])
def test_every_format_and_the_same_bytes_again(chosen, tmp_path, file_format, begins):
    for out in ("a", "b"):
        assert compare(chosen, "--format", file_format, "--out", tmp_path / out)[0] == 0
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()
    figure = tmp_path / "a" / f"skip-norm.{file_format}"
    assert figure.read_bytes().startswith(begins)
    assert f"](skip-norm.{file_format})" in (tmp_path / "a/compare.md").read_text()
    if file_format == "png":
        assert Image.open(figure).width == 7 * 300


def test_every_curve_has_a_look_of_its_own():
    methods = ["pre+skip", "skip", "pre+skip", "pre", "pre+skip", "skip-r4"]
    looks = distinct_styles(methods)
    for part in ("colour", "marker", "line"):
        assert len({str(getattr(look, part)) for look in looks}) == len(methods)
    assert looks[:2] == distinct_styles(["pre+skip", "skip"])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["gone"], "gone is no folder; give a run, a cell of one, or an adapter that was analysed."),
        (["empty"], "empty is no run, no finished cell and no adapter; give one that is."),
        (["run", "mine"], "mine has not been analysed; run `preproj analyze mine` first."),
        (["loras"], "loras has no finished cell with a pre-projection or a skip to compare."),
        (
            ["run/cells/lora/seed0"],
            "run/cells/lora/seed0 has no layers to compare: lora has no pre-projection and no skip.",
        ),
        (
            ["run/cells/skip/seed0"],
            "run/cells/skip/seed0 has the layers of skip alone; name another run or adapter too.",
        ),
        (
            ["run/cells/skip/seed0", "run/cells/pre/seed0"],
            "no two of skip, pre have a measure in common to compare.",
        ),
        (
            ["run", "run/cells/skip/seed0"],
            "{here}/run/cells/skip/seed0/metrics.json is named twice; name each run, cell and adapter once.",
        ),
        (["alone"], "{here}/alone is a cell without its run: {above}/recipe.yaml is missing."),
        (
            ["uneven"],
            "{here}/uneven/cells/skip/seed1/metrics.json has another number of layers than "
            "{here}/uneven/cells/skip/seed0/metrics.json, another seed of it.",
        ),
        (
            ["newer"],
            "{here}/newer/analysis.json has format version 2, and this preproj reads up to version 1; install a newer "
            "preproj to read it.",
        ),
        (
            ["broken"],
            "{here}/broken/analysis.json has no 'format_version'; run `preproj analyze` on {here}/broken again.",
        ),
        (
            ["words"],
            "{here}/words/analysis.json: layers[0]: 'skip_norm' should be a number or null, not 'large'; run `preproj "
            "analyze` on {here}/words again.",
        ),
        (["run", "--format", "gif"], "--format is 'gif': expected one of pdf, svg, png."),
        (["run", "--out", "file"], "--out is 'file', which is a file: expected a folder."),
    ],
)
def test_what_cannot_be_compared_is_one_sentence_and_writes_nothing(tmp_path, monkeypatch, arguments, sentence):
    here = tmp_path / "x" / "here"
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    (here / "empty").mkdir()
    (here / "file").write_text("")
    (here / "mine").mkdir()
    (here / "mine/adapter_config.json").write_text("{}")
    cells = {"skip": [rows(skip_norm=CURVE)], "pre": [rows(pre_to_input=CURVE)], "lora": [[]]}
    write_run(here / "run", cells)
    write_run(here / "loras", {"lora": [[]]})
    write_run(here / "uneven", {"skip": [rows(skip_norm=CURVE), rows(skip_norm=CURVE[:-1])]})
    write_json(here / "alone/metrics.json", {"method": "skip", "seed": 0, "layers": []}, 2)
    write_json(here / "newer/analysis.json", {}, 2)
    write_analysis(here / "words", rows(skip_norm=["large"]))
    (here / "broken").mkdir()
    (here / "broken/analysis.json").write_text("{}")
    before = sorted(here.rglob("*"))
    places = {"here": here.resolve(), "above": here.resolve().parents[1]}
    assert compare(*arguments) == (2, "", f"preproj: {sentence.format(**places)}\n")
    assert sorted(here.rglob("*")) == before
