"""A pytest plugin for PEFT's own test files: runs what is generic in them with ``PreProjConfig``.

All that differs from the host's own run stands here: the configurations, the patches, the skips, each with its reason.
"""

import importlib.machinery
import sys
import types
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import attention_models
import pytest
from host_tests import PACKAGE
from peft import PeftModel
from tiny_hub import save_tiny_models

from preproj import PreProjConfig

# Dense and low rank; in both a fresh adapter is the identity, as the host expects.
OPTIONS: tuple[dict[str, Any], ...] = ({"skip_init_std": 0}, {"skip_rank": 2})
TASKS: dict[str, dict[str, Any]] = {
    "test_decoder_models": {"task_type": "CAUSAL_LM"},
    "test_encoder_decoder_models": {"task_type": "SEQ_2_SEQ_LM"},
    # Named, because preproj does not place the skip in DeBERTa by itself.
    "test_feature_extraction_models": {"task_type": "FEATURE_EXTRACTION", "target_modules": ["attention.self"]},
    "test_seq_classifier": {"task_type": "SEQ_CLS"},
}
IN_LORAS_PLACE = (
    "test_mixed_adapter_batches",
    "test_generate_with_mixed_adapter_batches",
    "test_load_model_low_cpu_mem_usage",
)

OTHER_METHOD = "tests another PEFT method, which it names itself"
NO_MERGE = "a pre-projection adapter cannot be merged"
NO_MERGE_FROM_HERE = f"{NO_MERGE}; what the test does before merging passed"


def pytest_configure() -> None:
    pytest.register_assert_rewrite(f"{PACKAGE}.testing_common")
    diffusers_is_not_needed()


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Changes a test file of the host between its import and the collection of its tests."""
    if isinstance(collector, pytest.Module):
        module = collector.obj
        our_configurations(module)
        the_hub_is_not_asked(module)
        conv1d_is_supported(module)
        merging_is_skipped(module)
        if hasattr(module, "MockTransformerWrapper"):
            custom_models_have_attention(module)
        for name in dir(module):
            if name.endswith("_MODELS_TO_TEST"):
                save_tiny_models(getattr(module, name), Path.cwd())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what is of other methods, and what does nothing but merge."""
    for item in items:
        values = item.callspec.params.values() if hasattr(item, "callspec") else ()
        ours = any(value is PreProjConfig or isinstance(value, PreProjConfig) for value in values)
        if not ours and item.name not in IN_LORAS_PLACE:
            item.add_marker(pytest.mark.skip(OTHER_METHOD))
        elif "merge" in item.name or "merging" in item.name:
            item.add_marker(pytest.mark.skip(NO_MERGE))


def diffusers_is_not_needed() -> None:
    """`diffusers` is a stub: the host's helpers import one class of it, for tests of another file."""
    stub = types.ModuleType("diffusers")
    stub.__spec__ = importlib.machinery.ModuleSpec("diffusers", None)
    stub.StableDiffusionPipeline = type("StableDiffusionPipeline", (), {})
    sys.modules.setdefault("diffusers", stub)


def our_configurations(module: types.ModuleType) -> None:
    """The lists of configurations hold ours alone; the host adds `init_weights=False` where it wants an effect."""
    task = TASKS.get(module.__name__.rpartition(".")[2])
    if task:
        module.ALL_CONFIGS[:] = [(PreProjConfig, task | options) for options in OPTIONS]
    else:
        loud = {"target_modules": ["lin0"], "init_weights": False}
        first = {"target_modules": ["layers.0.lin0"], "init_weights": False}
        module.TEST_CASES[:] = [
            (f"{block} {options}", block, PreProjConfig, options)
            for block in attention_models.BLOCKS
            for options in (*OPTIONS, OPTIONS[0] | {"target_modules": ["lin0"], "modules_to_save": ["lin1"]})
        ]
        module.ALL_PEFT_CONFIG_CLASSES[:] = [PreProjConfig]
        module.MULTIPLE_ACTIVE_ADAPTERS_TEST_CASES[:] = [
            ("preproj same", "preproj", PreProjConfig, loud, loud | {"init_seed": 1}),
            ("preproj different", "preproj", PreProjConfig, loud, first | {"init_seed": 1}),
        ]
        module.MIXED_ADAPTER_TEST_CASES[:] = [
            ("preproj", PreProjConfig(**loud), PreProjConfig(**loud)),
            ("preproj in other layers", PreProjConfig(**loud), PreProjConfig(**first)),
        ]


@pytest.fixture(autouse=True)
def in_loras_place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that skip every method but LoRA, or name LoRA as their example, run with ours in its place."""
    if request.node.originalname in IN_LORAS_PLACE:
        for module in (request.module, sys.modules[f"{PACKAGE}.testing_common"]):
            monkeypatch.setattr(module, "LoraConfig", PreProjConfig)


@pytest.fixture(autouse=True)
def another_seed_for_another_adapter(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixed batches: a second adapter gets another `init_seed`, for two with the same seed start alike."""
    add_adapter = PeftModel.add_adapter

    def add(model: PeftModel, name: str, config: PreProjConfig, **besides: Any) -> None:
        add_adapter(model, name, replace(config, init_seed=config.init_seed + 1), **besides)

    if "with_mixed_adapter_batches" in request.node.name or request.node.name.startswith("test_mixed_adapter_batches"):
        monkeypatch.setattr(PeftModel, "add_adapter", add)


def the_hub_is_not_asked(module: types.ModuleType) -> None:
    """The host's guard against asking the Hub twice does nothing: all models are local."""
    for place in (module, sys.modules[f"{PACKAGE}.testing_common"]):
        place.hub_online_once = lambda model_id: nullcontext()


def conv1d_is_supported(module: types.ModuleType) -> None:
    """GPT-2 is not skipped: its `Conv1D` layers are inside attention, which we do not replace."""
    for place in (module, sys.modules[f"{PACKAGE}.testing_common"]):
        for name in ("_skip_if_conv1d_not_supported", "_skip_if_not_conv1d_supported"):
            if hasattr(place, name):
                setattr(place, name, lambda *args: None)


def merging_is_skipped(module: types.ModuleType) -> None:
    """Tests that merge at their end stop there; those that do nothing else are skipped as a whole."""
    for place in (module, sys.modules[f"{PACKAGE}.testing_common"]):
        if hasattr(place, "_skip_if_merging_not_supported"):
            place._skip_if_merging_not_supported = lambda *args: pytest.skip(NO_MERGE_FROM_HERE)


def custom_models_have_attention(module: types.ModuleType) -> None:
    """Custom models are small ones with attention, in plain torch: we refuse the host's MLPs and convolutions."""
    module.MockTransformerWrapper.from_pretrained = staticmethod(attention_models.from_pretrained)
    module.MLP = lambda bias=True: attention_models.Classifier()
    module.DeepMLP = lambda size: attention_models.Classifier(layers=3)


PATCHES = (
    our_configurations,
    in_loras_place,
    another_seed_for_another_adapter,
    the_hub_is_not_asked,
    conv1d_is_supported,
    merging_is_skipped,
    custom_models_have_attention,
    diffusers_is_not_needed,
)
