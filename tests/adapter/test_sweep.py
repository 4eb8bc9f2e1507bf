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
    written = (Path(__file__).parents[2] / "docs/architectures.md").read_text("utf-8")
    assert page(outcomes).partition("| type |")[2] == written.partition("| type |")[2]


def test_counts_in_the_documents_are_those_of_the_table():
    root = Path(__file__).parents[2]
    written = (root / "docs/architectures.md").read_text("utf-8")
    counts = Counter(line.split(" | ")[1] for line in written.splitlines() if line.startswith("| `"))
    assert counts["wrong"] == 0
    assert written.count("\n| `") == sum(counts.values())
    sentence = (
        f"Of the {sum(counts.values())} causal language models in transformers 5.23, {counts['exact']} are exact, "
        f"{counts['refused']} are refused with a sentence, {counts['not built']} could not be built"
    )
    assert sentence in " ".join((root / "README.md").read_text("utf-8").split())
