"""The sweep over architectures: a sample of kinds in the fast suite, every type in the slow one."""

import re
from pathlib import Path

import pytest
import transformers
from families import FAMILIES
from sweep import examine, table

ROOT = Path(__file__).parents[2]
CAUSAL, MASKED, TWO_TEXTS, IMAGES = FAMILIES
SAMPLE = [
    *((CAUSAL, model_type) for model_type in (
        "llama", "gpt2", "gpt_neox", "cohere", "falcon", "gemma2", "olmo2", "glm4", "granite", "minicpm3", "bloom",
        "bert", "bart", "opt", "mpt", "qwen3_next", "jamba", "deepseek_v3", "gpt_oss", "longcat_flash",
    )),
    *((MASKED, model_type) for model_type in ("roberta", "albert", "deberta", "modernbert")),
    *((TWO_TEXTS, model_type) for model_type in ("t5", "bart")),
    *((IMAGES, model_type) for model_type in ("vit", "beit", "swin", "data2vec-vision")),
]  # fmt: skip


@pytest.mark.parametrize(("family", "model_type"), SAMPLE, ids=[f"{f.title}-{name}" for f, name in SAMPLE])
def test_sample_of_kinds_is_exact(family, model_type):
    outcome = examine(family, model_type)
    documented = f"transformers {transformers.__version__}," in (ROOT / "docs/architectures.md").read_text("utf-8")
    if outcome.verdict == "not built" and not documented:
        pytest.skip(f"transformers {transformers.__version__} does not run {model_type}: {outcome.said}")
    assert (outcome.verdict, outcome.said) == ("exact", "")


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("family", FAMILIES, ids=[family.title for family in FAMILIES])
def test_every_type_is_exact_or_refused_and_the_page_says_so(family):
    outcomes = [examine(family, model_type) for model_type in family.auto]
    assert [o for o in outcomes if o.verdict == "wrong"] == []
    assert table(family.title, outcomes) in (ROOT / "docs/architectures.md").read_text("utf-8")


def test_enough_causal_language_models_are_exact():
    assert counts_of(CAUSAL.title)["exact"] >= 150


def counts_of(title: str) -> dict[str, int]:
    """Counts the verdicts in the rows of one family's table."""
    page = (ROOT / "docs/architectures.md").read_text("utf-8")
    rows = re.search(rf"^## {title.capitalize()}\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL).group(1)
    verdicts = [line.split(" | ")[1] for line in rows.splitlines() if line.startswith("| `")]
    return {verdict: verdicts.count(verdict) for verdict in ("exact", "refused", "not built", "wrong")} | {
        "types": len(verdicts)
    }


@pytest.mark.parametrize("family", FAMILIES, ids=[family.title for family in FAMILIES])
def test_counts_in_the_documents_are_those_of_the_tables(family):
    counts = counts_of(family.title)
    assert counts["wrong"] == 0
    page = " ".join((ROOT / "docs/architectures.md").read_text("utf-8").split())
    row = [counts[name] for name in ("types", "exact", "refused", "not built", "wrong")]
    assert f"(#{family.title.replace(' ', '-')}) | {' | '.join(map(str, row))} |" in page
    sentence = f"{counts['exact']} of {counts['types']} {family.title}"
    assert sentence in " ".join((ROOT / "README.md").read_text("utf-8").split())
