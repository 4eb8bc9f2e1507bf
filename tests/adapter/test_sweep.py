"""The sweep over architectures: a sample of kinds in the fast suite, every type in the slow one."""

from collections import Counter
from pathlib import Path

import pytest
from sweep import MODEL_TYPES, examine, page

SAMPLE = (
    "llama", "gpt2", "gpt_neox", "cohere", "falcon", "gemma2", "olmo2", "glm4", "granite", "minicpm3", "bloom", "bert",
    "bart", "opt", "mpt", "qwen3_next", "jamba", "deepseek_v3", "gpt_oss", "longcat_flash",
)  # fmt: skip


@pytest.mark.parametrize("model_type", SAMPLE)
def test_sample_of_kinds_is_exact(model_type):
    outcome = examine(model_type)
    assert (outcome.verdict, outcome.said) == ("exact", "")


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_every_type_is_exact_or_refused_and_the_page_says_so():
    outcomes = [examine(model_type) for model_type in MODEL_TYPES]
    assert [o for o in outcomes if o.verdict == "wrong"] == []
    assert Counter(o.verdict for o in outcomes)["exact"] >= 150
    assert page(outcomes) == (Path(__file__).parents[2] / "docs/architectures.md").read_text("utf-8")
