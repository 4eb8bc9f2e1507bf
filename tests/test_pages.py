"""The pages of docs/ for users: their code runs, their numbers are those of the sources."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from naive import tiny_model
from peft import get_peft_model
from tiny import tiny_of
from transformers import AutoModelForImageClassification, AutoModelForSeq2SeqLM, AutoModelForSequenceClassification

import preproj
from preproj import PreProjConfig
from preproj.adapter.layer import adapted_sites

ROOT = Path(__file__).parent.parent
PAGES = {name: (ROOT / "docs" / f"{name}.md").read_text("utf-8") for name in ("any-model", "size-and-learning-rate")}
TUNING = (ROOT / "results/demo-tuning/README.md").read_text("utf-8")
DEMO = (ROOT / "results/demo/report.md").read_text("utf-8")


@pytest.fixture(scope="module")
def stand_ins(tiny_pythia: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny models in place of those that the pages name."""
    folders = {"EleutherAI/pythia-160m": tiny_pythia}
    others = {
        "google-bert/bert-base-uncased": tiny_of("bert", torch.float32, AutoModelForSequenceClassification),
        "google-t5/t5-small": tiny_of("t5", torch.float32, AutoModelForSeq2SeqLM),
        "google/vit-base-patch16-224": tiny_of(
            "vit", torch.float32, AutoModelForImageClassification, image_size=32, patch_size=8
        ),
    }
    for name, model in others.items():
        folders[name] = tmp_path_factory.mktemp(name.partition("/")[2])
        model.save_pretrained(folders[name])
    return folders


def run(page: str, stand_ins: dict[str, Path], folder: Path) -> dict[str, Any]:
    """Runs the Python of a page as one script, from a file: preproj reads the source of blocks."""
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGES[page], re.DOTALL))
    for name, model in stand_ins.items():
        code = code.replace(f'"{name}"', repr(str(model)))
    assert not re.search(r"from_pretrained\(\"", code)
    (folder / "page.py").write_text(code, "utf-8")
    return runpy.run_path(str(folder / "page.py"))


def names(model: torch.nn.Module) -> list[str]:
    return [name for name, _, _ in adapted_sites(model)]


def test_any_model_does_what_it_says(stand_ins, tmp_path, capsys):
    made = run("any-model", stand_ins, tmp_path)
    assert "trainable params: 7,168" in capsys.readouterr().out  # 2 layers · 3.5 · 32²

    first, second = (f"gpt_neox.layers.{i}.attention" for i in range(2))
    chosen = {"named": [first, second], "pattern": [first], "without": [second], "some": [first]}
    for choice, expected in chosen.items():
        assert names(get_peft_model(tiny_model("gpt_neox"), made[choice])) == expected

    assert names(made["classifier"]) == [f"bert.encoder.layer.{i}.attention.self" for i in range(2)]
    assert names(made["translator"]) == [
        f"{part}.block.{i}.layer.0.SelfAttention" for part in ("encoder", "decoder") for i in range(2)
    ]
    assert names(made["vision"]) == [f"vit.layers.{i}.attention" for i in range(2)]
    for model, head in ((made["classifier"], "classifier"), (made["vision"], "classifier")):
        assert any(head in name for name, p in model.named_parameters() if p.requires_grad)
    assert names(made["adapted"]) == ["0.attention", "1.attention"]
    assert made["seen"]["x"].abs().max() > 0.1


def test_the_sites_shown_are_those_of_pythia():
    config = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
    with torch.device("meta"):
        shell = tiny_of("gpt_neox", torch.float32, **config)
    title, *lines = str(preproj.sites(shell)).splitlines()
    assert len(lines) == 12
    assert f"```text\n{title}\n{lines[0]}\n```" in PAGES["any-model"]


def test_torchs_own_encoder_layer_is_refused():
    layer = torch.nn.TransformerEncoderLayer(32, 4, batch_first=True)
    with pytest.raises(ValueError, match="does not call it directly"):
        preproj.sites(torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))


def test_size_and_learning_rate_does_what_it_says(stand_ins, tmp_path, capsys):
    made = run("size-and-learning-rate", stand_ins, tmp_path)
    assert re.search("new parameters +6,144 ", capsys.readouterr().out)  # 2 layers · (2.5 · 32² + 2 · 8 · 32)
    groups = [
        (group["lr"], sum(weight.numel() for weight in group["params"])) for group in made["optimizer"].param_groups
    ]
    assert groups == [(1e-3, 2 * 1024), (pytest.approx(3e-5), 2 * 2560)]
    assert {p.dtype for p in made["model"].parameters()} == {torch.bfloat16}


def test_new_weights_are_float32_beside_a_half_precision_base():
    model = get_peft_model(tiny_model("gpt_neox").bfloat16(), PreProjConfig())
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert model(torch.tensor([[1, 2, 3]])).logits.dtype == torch.bfloat16
    weight = torch.tensor(0.03, dtype=torch.bfloat16)
    assert weight + 3e-5 == weight


def test_the_counts_are_those_of_the_adapter():
    rows = re.findall(r"^\| .* \| (\d+) \| (\d+) \| `(.*)` \| ([\d,]+) \|$", PAGES["size-and-learning-rate"], re.M)
    assert len(rows) == 6
    for width, layers, configuration, count in rows:
        with torch.device("meta"):
            shell = tiny_of("llama", torch.float32, hidden_size=int(width), num_hidden_layers=int(layers))
        model = get_peft_model(shell, eval(configuration, {"PreProjConfig": PreProjConfig}))
        assert model.get_nb_trainable_parameters()[0] == int(count.replace(",", "")), (width, configuration)


def test_the_measured_numbers_are_those_of_the_results():
    page = PAGES["size-and-learning-rate"]
    measured = re.findall(r"^\| (?:pre|skip|pre\+skip|lora) \|(?: [\d.*]+ \|){6}$", page, re.M)
    assert len(measured) == 4
    assert all(row in TUNING for row in measured)
    memory = re.findall(r"^\| ([\w+]+) \| ([\d,]+) \| ([\d.]+ GiB) \|$", page, re.M)
    assert len(memory) == 3
    for method, parameters, peak in memory:
        assert re.search(rf"^\| {re.escape(method)} .*\| {parameters} \|.*\| {peak} \|", DEMO, re.M)


@pytest.mark.parametrize("page", ["any-model", "size-and-learning-rate", "troubleshooting"])
def test_the_pages_links_lead_somewhere(page):
    text = (ROOT / "docs" / f"{page}.md").read_text("utf-8")
    targets = re.findall(r"\]\(([^)]+)\)", text)
    assert targets
    for target in targets:
        file, _, heading = target.partition("#")
        assert (ROOT / "docs" / file).exists(), target
        if heading:
            titles = re.findall(r"^#+ (.*)$", (ROOT / "docs" / file).read_text("utf-8"), re.M)
            assert heading in [title.lower().replace(" ", "-") for title in titles], target
