"""The README and the recipes do what they say."""

import inspect
import re
import tomllib
from dataclasses import Field, fields
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
import yaml
from peft import PeftConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import preproj
import preproj.analysis
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


def run_page(name: str, base: Path) -> dict:
    """Runs the code of a page of docs/, and returns its variables."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / name).read_text("utf-8"), re.DOTALL)
    variables: dict = {}
    exec(code.replace("EleutherAI/pythia-160m", str(base)), variables)
    return variables


def test_the_recipe_for_lora_beside_us_runs(tiny_pythia, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = run_page("beside-lora.md", tiny_pythia)
    for folder, ours in (("pair/preproj", True), ("pair/lora", False)):
        keys = load_file(tmp_path / folder / "adapter_model.safetensors")
        assert keys
        assert {".preproj." in key for key in keys} == {ours}
    pair = page["ours"](**page["prompt"]).logits  # LoRA merged
    for alone in ("only_lora", "only_ours"):
        assert (pair - page[alone]).abs().max() > 1e-6
    assert page["both"].shape[1] > page["prompt"].input_ids.shape[1]


def test_the_page_on_several_adapters_runs(tiny_pythia, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = run_page("many-adapters.md", tiny_pythia)
    model, prompts = page["model"], page["prompts"]
    assert {path.name for path in (tmp_path / "adapters").iterdir() if path.is_dir()} == {
        "law",
        "code",
        "small",
        "first",
    }
    assert set(model.peft_config) == {"law", "small"}
    torch.testing.assert_close(page["mixed"][0], model(**prompts).logits[0])
    with model.disable_adapter():
        torch.testing.assert_close(page["mixed"][2], model(**prompts).logits[2])
    assert page["together"].shape == page["mixed"].shape


@pytest.mark.quantised
def test_the_page_on_compiled_and_quantised_models_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs/compiled-and-quantised.md").read_text("utf-8")
    scripts = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", text, re.DOTALL)
    assert len(scripts) == 2
    names: dict = {}
    for code, output in scripts:
        exec(code.replace("torch.compile(model)", "torch.compile(model, backend='eager')"), names)
        words = [re.sub(r"\d+\.\d+", "0", said) for said in (capsys.readouterr().out, output)]
        assert words[0] == words[1]  # losses may differ from machine to machine


def test_the_readmes_table_is_that_of_the_results():
    shown = re.search(r"<!-- results/demo/report.md -->\n(.*?)\n<!-- end -->", README, re.DOTALL)
    report = (ROOT / "results/demo/report.md").read_text("utf-8")
    assert shown
    assert shown[1] in report
    assert shown[1].count("\n| ") >= 5  # a title, a rule, and four methods


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target, _, heading in re.findall(r"\]\(([^)#]*)(#([^)]+))?\)", page.read_text("utf-8")):
        if not target.startswith("http"):
            there = page.parent / target if target else page
            assert there.exists(), target
            assert not heading or heading in headings(there), f"{target}#{heading}"


def headings(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    titles = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


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
    # Pairs were not searched: they have the rate of the pre-projection.
    pairs = dict.fromkeys(("pre+lora", "pre+skip+lora"), best["pre"])
    assert dict(load_recipe(ROOT / "recipes/demo-all-methods.yaml").training.learning_rate) == best | pairs
    assert {len(trials) for trials in search["perplexity"].values()} == {6}
    assert search["split"] == "validation"


def own_fields() -> list[Field]:
    inherited = {field.name for field in fields(PeftConfig)}
    return [field for field in fields(preproj.PreProjConfig) if field.name not in inherited]


def test_the_page_on_the_analysis_runs(tiny_pythia, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    base = AutoModelForCausalLM.from_pretrained(tiny_pythia, dtype="float32")
    get_peft_model(base, preproj.PreProjConfig()).save_pretrained("my-adapter")
    page = run_page("analysis.md", tiny_pythia)
    assert capsys.readouterr().out.startswith("0 ")
    rows = page["analysis"].layers
    assert [row["tokens"] for row in rows] == [len("Content goes around attention.It has 3 parts.")] * 2
    text = (ROOT / "docs/analysis.md").read_text("utf-8")
    classes = {row["token_class"] for row in page["analysis"].token_classes}
    assert classes == set(
        re.findall(r"^\| `(\w+)` \| ", text.partition("**Classes")[2].partition("**Depth")[0], re.MULTILINE)
    )
    stems = re.findall(r"^\| .* \| `(\w+_)` \| ", text, re.MULTILINE)
    ends = re.findall(r"^\| `(\w+)` \| ", text.partition("key ends in")[2].partition("**Function")[0], re.MULTILINE)
    assert (len(stems), len(ends)) == (3, 4)
    written = {stem + end for stem in stems for end in ends} | set(re.findall(r"`(\w+)`", text))
    assert set(rows[0]) <= written


def test_the_concepts_claims_hold_as_code():
    page = run_page("concept.md", Path())  # asserts them
    weights = [part.weight.detach() for part in (page["pre"].up, page["pre"].down, page["skip"].skip)]
    up, down, skip = weights
    inner = page["x_hat"] @ up.T
    x_tilde = page["x_hat"] + (inner / (1 + torch.exp(-inner))) @ down.T
    torch.testing.assert_close(page["x_tilde"].detach(), x_tilde)
    torch.testing.assert_close(page["added"].detach(), x_tilde @ skip.T)


def luminance(colour: str) -> float:
    """The relative luminance of a colour by WCAG 2."""
    digits = colour.strip("#")
    digits = digits if len(digits) == 6 else "".join(2 * digit for digit in digits)
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_the_drawing_reads_in_light_and_dark_and_without_seeing_it():
    text = (ROOT / "docs/concept.svg").read_text("utf-8")
    drawing = ElementTree.fromstring(text)
    name = "{http://www.w3.org/2000/svg}"
    assert drawing.attrib["aria-labelledby"].split() == [
        drawing.find(f"{name}{tag}").get("id") for tag in ("title", "desc")
    ]
    assert "pre-projection" in drawing.find(f"{name}desc").text
    words = ["".join(element.itertext()) for element in drawing.iter(f"{name}text")]
    assert {"norm", "pre-projection", "attention", "content skip", "RoPE", "x̂", "x̃", "Wskip"} <= set(words)
    assert not re.search(r"href|url\((?!#)|@import|<script|<image", text)
    assert set(re.findall(r"(?:fill|stroke): ([^;]+);", text)) <= {
        f"var(--{c})" for c in ("paper", "ink", "faint", "frozen", "new", "edge")
    } | {"none"}
    light, dark = (dict(re.findall(r"--(\w+): (#\w+);", rule)) for rule in re.findall(r"svg \{(.*?)\}", text))
    assert set(light) == set(dark)
    for colours in (light, dark):
        for ink, ground in (("ink", "paper"), ("ink", "frozen"), ("ink", "new"), ("faint", "paper")):
            low, high = sorted(luminance(colours[which]) for which in (ink, ground))
            assert (high + 0.05) / (low + 0.05) >= 4.5  # WCAG 2, level AA


def test_the_public_names_are_pinned():
    assert preproj.analysis.__all__ == ["Analysis", "analyze"]
    assert preproj.__all__ == [
        "ContentSkip",
        "PreProjConfig",
        "PreProjModel",
        "PreProjection",
        "__version__",
        "create_optimizer",
        "hotswap_adapter",
        "params",
        "sites",
    ]
    assert {field.name for field in own_fields()} == {
        "activation",
        "content_skip",
        "exclude_modules",
        "expansion",
        "expansion_pattern",
        "format_version",
        "init_seed",
        "init_weights",
        "layers_pattern",
        "layers_to_transform",
        "modules_to_save",
        "pre_projection",
        "skip_init_std",
        "skip_rank",
        "target_modules",
    }


def test_everything_public_has_a_docstring():
    """In the sources too: the linter's rules D100 to D103 hold every module, class, method and function to it."""
    for name in set(preproj.__all__) - {"__version__"}:
        public = getattr(preproj, name)
        assert public.__doc__, name
        for method, own in vars(public).items():
            if inspect.isfunction(own) and not method.startswith("_"):
                assert own.__doc__, f"{name}.{method}"
    assert all(field.metadata.get("help") for field in own_fields())
    rules = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["ruff"]["lint"]
    assert "D" in rules["select"]
    assert not {"D", "D1", "D100", "D101", "D102", "D103"} & {*rules["ignore"]}
