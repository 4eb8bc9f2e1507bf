"""Published numbers that a run can be held against; none of them was measured here."""

from typing import Any

PAPER = "Shinde 2026, arXiv 2604.10791 (WikiText-103, 500 items a task, half precision suspected)"
HARNESS = "EleutherAI's zero-shot results of the Pythia suite, float32, all items"

# Untouched models, by name on the Hub: value and standard error of a measure.
BASELINES: dict[str, dict[str, tuple[float, float | None]]] = {
    "EleutherAI/pythia-160m": {"lambada_openai/acc": (0.3284, 0.0065), "arc_easy/acc": (0.4352, None)},
    "EleutherAI/pythia-410m": {"lambada_openai/acc": (0.5162, None), "arc_easy/acc": (0.5210, None)},
}

# The paper's own numbers, by model and method, in its words; that of HellaSwag is a gain, and no score.
PAPER_RESULTS: dict[str, dict[str, dict[str, float]]] = {
    "EleutherAI/pythia-160m": {
        "none": {"perplexity": 78.4, "LAMBADA": 0.128},
        "pre+skip": {"perplexity": 47.9, "LAMBADA": 0.180, "HellaSwag, gain over none in %": 3.7},
    },
    "EleutherAI/pythia-410m": {
        "lora-qkv-r960": {"perplexity": 17.7, "LAMBADA": 0.488},
        "pre+skip": {"perplexity": 17.0, "LAMBADA": 0.484},
    },
}

# The measures here that they stand beside. The paper does not say how it cuts the text for its perplexity; a stream of
# windows is the usual way.
PAPER_MEASURES = {"perplexity": "stream/perplexity", "LAMBADA": "lambada_openai/acc"}


def published(model: str) -> dict[str, Any]:
    """Return what is published of a model, for summary.json: empty for a model that nobody has published.

    Args:
        model: the recipe's ``model.name``.
    """
    found: dict[str, Any] = {}
    if model in BASELINES:
        found["baseline"] = {
            "source": HARNESS,
            "scores": {
                name: {"value": value, "standard_error": error} for name, (value, error) in BASELINES[model].items()
            },
        }
    if model in PAPER_RESULTS:
        found["paper"] = {"source": PAPER, "methods": PAPER_RESULTS[model], "measures": PAPER_MEASURES}
    return found
