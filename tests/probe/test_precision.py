"""The precision check, and published numbers."""

import pytest
import yaml
from rich.console import Console
from transformers import AutoModelForCausalLM

from preproj.probe.files import read_json
from preproj.probe.precision import _warning
from preproj.probe.published import published
from preproj.probe.recipe import parse_recipe
from preproj.probe.runner import run_probe


@pytest.mark.parametrize(
    ("perplexity", "accuracy", "said"),
    [
        (20.3, 0.50, None),
        (20.5, 0.50, "perplexity 20.50 instead of 20.00"),
        (19.5, 0.50, "perplexity 19.50 instead of 20.00"),  # better is as suspect as worse
        (20.0, 0.35, "last-word accuracy 35.0% instead of 50.0%"),  # Wilson's interval of 50 in 100 ends at 0.404
        (20.0, 0.42, None),
        (47.9, 0.10, "perplexity 47.90 instead of 20.00 and last-word accuracy 10.0% instead of 50.0%"),
    ],
)
def test_damage_is_told_from_rounding(perplexity, accuracy, said):
    scores = {
        "float32": {"perplexity": 20.0, "documents": 16, "last_word": 0.50, "passages": 100},
        "float16": {"perplexity": perplexity, "documents": 16, "last_word": accuracy, "passages": 100},
    }
    warning = _warning("float16", scores)
    if said is None:
        assert warning is None
    else:
        assert warning.startswith(f"The untouched model is damaged by float16: {said} in float32.")
        assert "do not report its gain" in warning


def test_without_passages_perplexity_alone_is_compared():
    scores = {dtype: {"perplexity": value, "documents": 9} for dtype, value in (("float32", 9.0), ("bfloat16", 9.1))}
    assert _warning("bfloat16", scores) is None


def test_a_model_that_its_dtype_damages_is_found_out(tiny_recipe, tmp_path, tiny_base):
    damaged = tmp_path / "damaged"
    model = AutoModelForCausalLM.from_pretrained(tiny_base, dtype="float32")
    for layer in model.model.layers:  # as much goes in as comes out, but in float16 it overflows on the way
        layer.mlp.up_proj.weight.data.mul_(1e6)
        layer.mlp.down_proj.weight.data.mul_(1e-6)
    model.save_pretrained(damaged)
    for file in tiny_base.glob("tokenizer*"):
        (damaged / file.name).write_bytes(file.read_bytes())
    content = {**tiny_recipe, "model": {"name": str(damaged), "dtype": "float16"}, "methods": ["none"]}
    console = Console(record=True, width=200)
    run = tmp_path / "run"
    assert run_probe(parse_recipe(yaml.safe_dump(content), "recipe"), run, console).good
    check = read_json(run / "precision.json")
    assert 200 < check["scores"]["float32"]["perplexity"] < 600  # of 384 tokens
    assert "The untouched model is damaged by float16" in console.export_text()
    assert check["warning"].startswith("The untouched model is damaged by float16: perplexity nan instead of")
    assert read_json(run / "summary.json")["precision"]["warning"] == check["warning"]


def test_published_numbers_are_those_of_their_sources():
    known = published("EleutherAI/pythia-160m")
    assert known["baseline"]["scores"]["lambada_openai/acc"] == {"value": 0.3284, "standard_error": 0.0065}
    assert known["paper"]["methods"]["none"] == {"perplexity": 78.4, "LAMBADA": 0.128}
    assert published("smollm2-135m-instruct") == {}
