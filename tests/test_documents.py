"""The README and the recipes do what they say."""

import re
from pathlib import Path

import pytest
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM

import preproj
from preproj.probe.recipe import load_recipe

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")


def test_the_readmes_example_runs(tiny_pythia, tmp_path, monkeypatch, capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert example.count("EleutherAI/pythia-160m") == 2
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(example.replace("EleutherAI/pythia-160m", str(tiny_pythia)), names)
    assert "trainable params: 7,168" in capsys.readouterr().out  # 2 layers · 3.5 · 32²
    gradients = {n: p.grad for n, p in names["model"].named_parameters() if p.requires_grad}
    assert all(g is not None for g in gradients.values())
    base = AutoModelForCausalLM.from_pretrained(tiny_pythia, dtype="float32")
    assert isinstance(PeftModel.from_pretrained(base, "my-adapter").peft_config["default"], preproj.PreProjConfig)


def test_the_readmes_table_is_that_of_the_results():
    shown = re.search(r"<!-- results/demo/report.md -->\n(.*?)\n<!-- end -->", README, re.DOTALL)
    report = (ROOT / "results/demo/report.md").read_text("utf-8")
    assert shown
    assert shown[1] in report
    assert shown[1].count("\n| ") >= 5  # a title, a rule, and four methods


def test_the_readmes_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        if not target.startswith("http"):
            assert (ROOT / target).exists(), target


def test_the_versions_in_the_readme_are_the_bounds_in_pyproject_and_the_pins():
    bounds = dict(re.findall(r'"(\w+)>=([\d.]+)"', (ROOT / "pyproject.toml").read_text("utf-8")))
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE))
    rows = re.findall(
        r"^\| (torch|transformers|peft|accelerate|datasets) \| ([\d.]+) \| ([\d.]+) \|$", README, re.MULTILINE
    )
    assert len(rows) == 5
    for name, oldest, newest in rows:
        assert oldest == f"{bounds[name]}.0"
        assert tuple(map(int, newest.split("."))) >= tuple(map(int, pins[name].split(".")))


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_recipes_are_valid_and_named_after_their_file(path):
    assert load_recipe(path).name == path.stem


def test_learning_rates_are_those_of_the_search():
    search = yaml.safe_load((ROOT / "results/demo-tuning/tuning.json").read_text("utf-8"))
    best = {method: float(rate) for method, rate in search["best"].items()}
    assert dict(load_recipe(None).training.learning_rate) == best
    assert dict(load_recipe(ROOT / "recipes/demo-all-methods.yaml").training.learning_rate) == best
    assert {len(trials) for trials in search["perplexity"].values()} == {6}
    assert search["split"] == "validation"


def test_every_public_name_has_a_docstring():
    for name in preproj.__all__:
        if not name.startswith("__"):
            assert getattr(preproj, name).__doc__, name
