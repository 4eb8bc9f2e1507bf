"""Recipes: what is accepted, and the sentence for what is not."""

import copy

import pytest
import yaml

from preproj.probe.errors import RecipeError
from preproj.probe.recipe import load_recipe, parse_recipe

GOOD = {
    "name": "x",
    "model": {"name": "base"},
    "methods": ["none", "pre"],
    "training": {"tokens": 1024, "learning_rate": {"pre": 1e-3}},
}


def changed(path: str, value: object) -> str:
    recipe = copy.deepcopy(GOOD)
    *sections, key = path.split(".")
    place = recipe
    for section in sections:
        place = place.setdefault(section, {})
    place[key] = value
    return yaml.safe_dump(recipe)


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        ("colour", 1, "unknown key colour; allowed here: format_version, name, model, data, methods"),
        ("training.lr", 1, "unknown key training.lr; allowed here: tokens, block_size, batch_size"),
        ("training.tokens", "many", "training.tokens is 'many'; it should be a valid integer"),
        ("training.tokens", 1.5, "training.tokens is 1.5; it should be a valid integer"),
        ("training.tokens", 0, "training.tokens is 0; it should be greater than 0"),
        ("training.tokens", 1000, "training: tokens is 1000: expected a multiple of block_size · batch_size = 1024"),
        ("training.warmup_ratio", 2.0, "training.warmup_ratio is 2.0; it should be less than or equal to 1"),
        ("training.learning_rate", {}, "training.learning_rate has no value for pre"),
        ("training.learning_rate", {"pre": -1.0}, "training.learning_rate.pre is -1.0; it should be greater than 0"),
        ("training.learning_rate", {"adora": 1.0}, "training.learning_rate.adora: 'adora' is no method: a method is"),
        (
            "methods",
            ["pre", "magic"],
            "methods.1: 'magic' is no method: a method is none, full, dense-qkv, or parts joined by + in this order: "
            "pre, skip, one of lora, lora-qkv, dora, rslora; skip and the last may name a rank, as in pre+skip-r16 or "
            "lora-r8.",
        ),
        ("match", "yes", "match is 'yes'; it should be a valid boolean"),
        ("methods", [], "methods is []; list should have at least 1 item"),
        ("methods", ["pre", "pre"], "methods names an entry twice"),
        ("seeds", [0, 0], "seeds names an entry twice"),
        ("seeds", [-1], "seeds.0 is -1; it should be greater than or equal to 0"),
        ("model.dtype", "int8", "model.dtype is 'int8'; allowed: 'float32', 'bfloat16' or 'float16'"),
        ("model", "base", "model is 'base'; it should be a valid dictionary"),
        ("name", "a/b", "name is 'a/b'; it should match pattern"),
        ("data.source", "web", "data.source is 'web'; allowed: 'python-docs', 'files' or 'datasets'"),
        ("data", {"source": "files", "train": "a.txt"}, "data: source files needs train, validation, test: each"),
        ("data", {"train": "a.txt"}, "data: train goes with source: files or datasets only"),
        ("data", {"source": "datasets"}, "data: source datasets needs name, a data set on the Hub or a folder"),
        (
            "data",
            {"source": "files", "train": "a", "validation": "b", "test": "c", "revision": "main"},
            "data: revision goes with source: datasets only",
        ),
        (
            "data",
            {"source": "datasets", "name": "a/b", "streaming": True, "train": "train[:90%]"},
            "data: streaming needs train to say how many documents, like train[:1000]",
        ),
        (
            "training.learning_rate",
            {"pre": float("inf")},
            "training.learning_rate.pre is inf; it should be a finite number",
        ),
        ("training.learning_rate", {"pre": "1e-3"}, "it should be a valid number (write 1.0e-3, with a point)"),
        ("evaluation.document_tokens", 0, "evaluation.document_tokens is 0; it should be greater than 0"),
        ("evaluation.perplexity", ["words"], "evaluation.perplexity.0 is 'words'; allowed: 'document' or 'stream'"),
        ("evaluation.tasks", ["a", "a"], "evaluation: tasks names an entry twice"),
        ("evaluation.task_data", "items", "evaluation: task_data goes with tasks only"),
        ("evaluation.documents", 1, "evaluation.documents is 1; it should be greater than or equal to 2"),
        ("seeds", [2**32], "seeds.0 is 4294967296; it should be less than 4294967296"),
        ("name", "..", "name is '..'; it should match pattern"),
        ("evaluation.stride", 999, "evaluation: stride is 999: expected at most context = 256"),
        ("format_version", 0, "format_version is 0; allowed: 1"),
    ],
)
def test_a_mistake_is_one_sentence_with_the_key_and_what_is_allowed(path, value, sentence):
    with pytest.raises(RecipeError) as error:
        parse_recipe(changed(path, value), "my.yaml")
    message = str(error.value)
    assert message.startswith("recipe my.yaml: ")
    assert sentence in message
    assert "\n" not in message
    assert message.endswith(".")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_of_the_base_train_in_float32_only(dtype):
    recipe = copy.deepcopy(GOOD) | {"methods": ["none", "full", "pre", "dense-qkv"]}
    recipe["training"]["learning_rate"] = {"full": 1e-5, "dense-qkv": 1e-5, "pre": 1e-3}
    assert parse_recipe(yaml.safe_dump(recipe), "my.yaml").methods == recipe["methods"]
    recipe["model"]["dtype"] = dtype
    sentence = (
        f"my.yaml: model.dtype is {dtype}, and the base's own weights train in full, dense-qkv, which needs float32"
    )
    with pytest.raises(RecipeError, match=sentence):
        parse_recipe(yaml.safe_dump(recipe), "my.yaml")


def test_match_goes_with_pre():
    recipe = copy.deepcopy(GOOD) | {"match": True}
    assert parse_recipe(yaml.safe_dump(recipe), "my.yaml").match
    recipe |= {"methods": ["none", "skip"], "training": {"tokens": 1024, "learning_rate": {"skip": 1e-3}}}
    with pytest.raises(RecipeError, match="match goes with the method pre only, which it widens to the size of pre"):
        parse_recipe(yaml.safe_dump(recipe), "my.yaml")


@pytest.mark.parametrize("key", ["name", "model", "methods", "training"])
def test_missing_keys_are_named(key):
    recipe = {k: v for k, v in GOOD.items() if k != key}
    with pytest.raises(RecipeError, match=f"recipe my.yaml: {key} is missing."):
        parse_recipe(yaml.safe_dump(recipe), "my.yaml")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "is empty or not a mapping: expected keys format_version, name"),
        ("- a", "is empty or not a mapping"),
        ("name: x\nseeds: [0]\nname: y", "is not valid YAML \\(line 3\\): name stands twice"),
        ("a: [", "is not valid YAML \\(line 1\\)"),
    ],
)
def test_files_that_are_no_recipe(text, sentence):
    with pytest.raises(RecipeError, match=sentence):
        parse_recipe(text, "my.yaml")


def test_unreadable_files(tmp_path):
    with pytest.raises(RecipeError, match=r"gone.yaml cannot be read: No such file or directory\."):
        load_recipe(tmp_path / "gone.yaml")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecipeError, match=r"bytes.yaml cannot be read: not UTF-8 text\."):
        load_recipe(tmp_path / "bytes.yaml")


def test_defaults_are_the_papers_and_the_resolved_recipe_reads_back():
    recipe = parse_recipe(yaml.safe_dump(GOOD), "x")
    assert recipe.model.dtype == "float32"
    assert recipe.training.steps == 1
    assert parse_recipe(recipe.to_yaml(), "x") == recipe
    assert "warmup_ratio: 0.1" in recipe.to_yaml()
    streamed = {"source": "datasets", "name": "a/b", "streaming": True, "articles": True, "revision": "main"}
    streamed |= {split: f"{split}[:100]" for split in ("train", "validation", "test")}
    streamed = parse_recipe(changed("data", streamed), "x")
    assert parse_recipe(streamed.to_yaml(), "x") == streamed
    everything = {"document_tokens": None, "documents": None, "limit": None}  # where some have a number by default
    unlimited = parse_recipe(changed("evaluation", everything), "x")
    assert parse_recipe(unlimited.to_yaml(), "x") == unlimited


def test_a_place_ends_in_a_part_or_is_whole():
    data = parse_recipe(
        changed("data", {"source": "datasets", "name": "a/b", "train": "train[:90%]", "test": "odd[1]name"}), "x"
    ).data
    assert [data.place(split) for split in ("train", "validation", "test")] == [
        ("train", "[:90%]"),
        ("validation", ""),
        ("odd[1]name", ""),
    ]


def test_the_demo_compares_the_four_methods_with_one_seed():
    demo = load_recipe(None)
    assert demo.methods == ["none", "lora", "pre", "pre+skip"]
    assert demo.seeds == [0]
    assert demo.evaluation.split == "test"
    assert demo.evaluation.documents >= 40
    assert set(demo.methods) - {"none"} <= set(demo.training.learning_rate)
