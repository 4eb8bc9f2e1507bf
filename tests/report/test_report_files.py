"""`preproj figures`: every figure as a file, with a caption that a paper can print."""

import re
from xml.etree import ElementTree

import pytest
from PIL import Image
from typer.testing import CliRunner

from preproj.cli import app
from preproj.report import write_figures
from preproj.report.figures import FIGURES


@pytest.fixture
def analysed(build_run):
    """A run that has every figure."""
    return build_run(analysed=["pre+skip"])


@pytest.mark.parametrize(("file_format", "begins"), [("pdf", b"%PDF"), ("svg", b"<"), ("png", b"\x89PNG")])
def test_every_figure_becomes_a_file_and_again_the_same_one(analysed, tmp_path, file_format, begins):
    written = write_figures(analysed, tmp_path / "a", file_format, "paper")
    assert [path.name for path in written] == [*(f"{name}.{file_format}" for name in FIGURES), "captions.md"]
    for path, again in zip(written, write_figures(analysed, tmp_path / "b", file_format, "paper"), strict=True):
        assert path.read_bytes() == again.read_bytes()
        assert path.name == "captions.md" or path.read_bytes().startswith(begins)


def test_paper_means_columns_eight_points_true_type_and_no_background(demo, tmp_path):
    for path in write_figures(demo, tmp_path / "svg", "svg", "paper")[:-1]:
        root, text = ElementTree.parse(path).getroot(), path.read_text()
        assert root.get("width") in ("234pt", "486pt")  # 3.25 and 6.75 inches of 72 points
        assert {float(size) for size in re.findall(r"font: ([\d.]+)px", text)} <= {7.0, 8.0}
        assert "prefers-color-scheme" not in text
    for path in write_figures(demo, tmp_path / "pdf", "pdf", "paper")[:-1]:
        assert b"/FontFile2" in path.read_bytes()  # TrueType
        assert b"/Type3" not in path.read_bytes()
    png = Image.open(write_figures(demo, tmp_path / "png", "png", "paper")[0])
    assert png.width == round(6.75 * 300)
    assert png.convert("RGBA").getpixel((0, 0))[3] == 0


def test_captions_state_n_seeds_and_protocol(build_run, tmp_path):
    folder = build_run(methods=["none", "skip", "lora"], seeds=(0, 1, 4))
    captions = write_figures(folder, tmp_path / "out")[-1].read_text()
    parts = dict(re.findall(r"## ([\w-]+)\n\n(.*)\n", captions))
    assert "n = 400 (document), 400 (last_word)." in parts["headline"]
    assert "Token-weighted over 48 test documents" in parts["headline"]
    assert "Paired bootstrap over documents" in parts["cost-quality"]
    assert "n = 400 (document)." in parts["cost-quality"]
    for name in ("headline", "learning-curves", "cost-quality", "skip-norm", "skip-to-attention"):
        assert "3 seeds (0, 1, 4)." in parts[name]
        assert "Base model pythia-160m in float32." in parts[name]
        assert "One pass over 800,000 tokens" in parts[name]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--format", "gif"], "--format is 'gif': expected one of pdf, svg, png."),
        (["--style", "slides"], "--style is 'slides': expected one of report, paper."),
        (["--out", "file"], "--out is 'file', which is a file: expected a folder."),
    ],
)
def test_wrong_arguments_are_one_sentence_and_write_nothing(demo, tmp_path, monkeypatch, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    done = CliRunner().invoke(app, ["figures", str(demo), *arguments])
    assert (done.exit_code, done.stderr) == (2, f"preproj: {sentence}\n")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_run_without_figures_says_so(build_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["figures", str(build_run(methods=["none"]))])
    assert done.exit_code == 2
    assert "has no figures yet: fewer than two cells have finished" in done.stderr
    assert not (tmp_path / "figures").exists()


def test_the_command_lists_what_it_wrote(analysed, tmp_path):
    done = CliRunner().invoke(app, ["figures", str(analysed), "--out", str(tmp_path / "out")])
    assert done.exit_code == 0
    assert done.stdout.split() == [
        str(tmp_path / "out" / name) for name in (*(f"{n}.svg" for n in FIGURES), "captions.md")
    ]
