"""The notebook of the analysis, run as a reader runs it.

It is kept without outputs: figures of a random model show nothing, and would change with every version.
"""

import base64
import io
import os
from pathlib import Path

import matplotlib.pyplot as plt
import nbformat
import pandas as pd
import pytest
from nbclient import NotebookClient
from peft import get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import preproj

NOTEBOOK = Path(__file__).parent.parent / "examples/analysis.ipynb"
LAYERS = 6


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The outputs of each cell by its id, and the folder of temporary files that the notebook wrote into."""
    folder = tmp_path_factory.mktemp("notebook")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "IPYTHONDIR": str(folder / "ipython"),
        "PYTHONPATH": str(Path(preproj.__file__).parents[1]),
        "TMPDIR": str(folder),
    }
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute(cwd=str(folder), env=environment)
    return {cell.id: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}, folder


def table(outputs) -> pd.DataFrame:
    (html,) = (output.data["text/html"] for output in outputs if "data" in output)
    return pd.read_html(io.StringIO(html), index_col=0)[0]


def printed(outputs) -> str:
    return "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")


def test_the_notebook_is_kept_without_outputs():
    cells = [cell for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"]
    assert len(cells) > 5
    assert not any(cell.outputs or cell.execution_count for cell in cells)


def test_every_figure_is_drawn(ran):
    figures = {
        name: base64.b64decode(output.data["image/png"])
        for name, outputs in ran[0].items()
        for output in outputs
        if "image/png" in output.get("data", {})
    }
    assert set(figures) == {name for name in ran[0] if name.endswith("-figure")}
    assert len(figures) == 4
    assert all(picture.startswith(b"\x89PNG") and len(picture) > 8000 for picture in figures.values())


def test_the_layer_table_has_every_layer_with_the_norms_of_the_saved_weights(ran):
    outputs, folder = ran
    layers = table(outputs["layers"])
    assert list(layers["layer"]) == list(range(LAYERS))
    (adapter,) = folder.glob("*/adapter/adapter_model.safetensors")
    weights = load_file(adapter)
    norms = [weight.norm().item() for name, weight in sorted(weights.items()) if ".skip." in name]
    assert len(norms) == LAYERS
    assert list(layers["skip_norm"]) == pytest.approx(norms, abs=6e-5)  # shown to four digits
    assert (layers["skip_change_norm"] > layers["initial_skip_norm"]).all()


def test_the_toy_learns_and_its_skip_knows_no_positions(ran):
    outputs, _ = ran
    words = printed(outputs["toy"]).split()
    start, end = float(words[1]), float(words[5])
    assert end < start - 1
    assert float(printed(outputs["position-figure"]).split()[7]) < 1e-5


def test_groups_of_layers_are_ablated_for_both_parts(ran):
    groups = table(ran[0]["groups"])
    assert list(groups["part"]) == ["skip"] * 4 + ["pre_projection"] * 4
    assert list(groups["group"]) == ["early", "middle", "late", "all"] * 2
    assert (groups["low"] <= groups["high"]).all()


def test_two_changed_lines_and_no_toy_read_another_adapter(tiny_pythia, tmp_path, monkeypatch):
    base = AutoModelForCausalLM.from_pretrained(tiny_pythia, dtype="float32")
    get_peft_model(base, preproj.PreProjConfig()).save_pretrained(tmp_path / "my-adapter")
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    lines = "\n".join(cell.source for cell in cells if cell.cell_type == "code" and cell.id != "toy").splitlines()
    mine = {"BASE = ": str(tiny_pythia), "ADAPTER = ": str(tmp_path / "my-adapter")}
    for number, line in enumerate(lines):
        for start in [start for start in mine if line.startswith(start)]:
            lines[number] = f"{start}{mine.pop(start)!r}"
    assert not mine
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    variables: dict = {}
    with plt.rc_context({"backend": "agg"}):
        exec("\n".join(lines), variables)
    plt.close("all")
    assert list(variables["layers"]["layer"]) == [0, 1]
    assert list(variables["layers"]["skip_change_norm"]) == [0, 0]  # the adapter is fresh
