"""Every causal language model of the installed transformers: exact, or refused with a reason.

python tests/adapter/sweep.py            # writes docs/architectures.md
python tests/adapter/sweep.py llama t5   # prints single outcomes
"""

import copy
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import peft
import torch
import transformers
from checks import (
    IDS,
    cache_bytes,
    check_blocks,
    check_checkpointing,
    check_generation,
    check_gradients,
    check_start,
    check_static_cache,
    shake,
)
from peft import get_peft_model
from tiny import tiny_of
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import preproj

MODEL_TYPES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


@dataclass
class Outcome:
    """What became of one model type.

    Args:
        model_type: as in its configuration.
        verdict: ``exact``, ``refused``, ``not built`` or ``wrong``.
        kinds: the kinds of its sites.
        said: why it was refused, not built or wrong.
        host: checks that the host fails without an adapter too.
    """

    model_type: str
    verdict: str
    kinds: list[str] = field(default_factory=list)
    said: str = ""
    host: list[str] = field(default_factory=list)


def examine(model_type: str) -> Outcome:
    """Builds a type, adapts it and runs every check."""
    try:
        base, expected = _build(model_type)
    except Exception as error:  # whatever keeps a host from a forward, says its own sentence
        return Outcome(model_type, "not built", said=_sentence(error))
    untouched = copy.deepcopy(base)
    try:
        kinds = sorted({site.kind for site in preproj.sites(base)})
    except ValueError as error:
        return Outcome(model_type, "refused", said=str(error).split(" Name the")[0])
    outcome = Outcome(model_type, "exact", kinds)
    model = get_peft_model(base, preproj.PreProjConfig(skip_init_std=0))
    try:
        check_start(model, expected)
        check_gradients(model)
        check_blocks(model)
    except Exception as error:
        outcome.verdict, outcome.said = "wrong", _sentence(error)
        return outcome
    ours = lambda m: [p for n, p in m.named_parameters() if ".preproj." in n]  # noqa: E731
    untouched.get_input_embeddings().requires_grad_(False)  # as under an adapter
    theirs = lambda m: [p for p in m.parameters() if p.grad is not None]  # noqa: E731
    _both(outcome, "cache", lambda: _same_cache(model, untouched), lambda: cache_bytes(untouched))
    _both(
        outcome,
        "gradient checkpointing",
        lambda: check_checkpointing(model, ours),
        lambda: check_checkpointing(untouched, theirs),
    )
    model.float(), untouched.float()  # masks of float64 overflow where a host takes its softmax in float32
    _both(outcome, "cached generation", lambda: check_generation(model), lambda: check_generation(untouched))
    _both(outcome, "static cache", lambda: check_static_cache(model), lambda: check_static_cache(untouched))
    return outcome


def _sentence(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def _build(model_type: str) -> tuple[transformers.PreTrainedModel, torch.Tensor]:
    """Builds a type in float64 where the host can, else in float32."""
    for dtype in (torch.float64, torch.float32):
        try:
            base = tiny_of(model_type, dtype)
            shake(base)
            base.requires_grad_(False)  # as under an adapter: torch chooses kernels by it
            expected = base(input_ids=IDS, use_cache=False).logits
            if not expected.isfinite().all():
                raise ValueError("the host's own logits are not finite")
            return base.requires_grad_(True), expected
        except RuntimeError:
            if dtype == torch.float32:
                raise
    raise AssertionError


def _same_cache(model: torch.nn.Module, untouched: torch.nn.Module) -> None:
    assert cache_bytes(model) == cache_bytes(untouched), "the cache differs"


def _both(outcome: Outcome, what: str, check: Callable[[], object], host_check: Callable[[], object]) -> None:
    """Runs a check; where the host fails it without an adapter too, the adapter is not blamed."""
    try:
        check()
    except Exception as error:
        try:
            host_check()
        except Exception:
            outcome.host.append(what)
            return
        outcome.verdict, outcome.said = "wrong", f"{what}: {_sentence(error)}"


def page(outcomes: list[Outcome]) -> str:
    """Writes the outcomes as the Markdown of docs/architectures.md."""
    counts = Counter(outcome.verdict for outcome in outcomes)
    head = f"""# Architectures

Written by `python tests/adapter/sweep.py` with transformers {transformers.__version__}, torch {torch.__version__}, peft
{peft.__version__}; the slow test `tests/adapter/test_sweep.py` holds it to the code.

Of {len(outcomes)} causal language models, each built tiny and random in float64 (float32 where the host cannot),
**{counts["exact"]} are exact**, {counts["refused"]} are refused with a sentence, {counts["not built"]} could not be
built or run without preproj, and {counts["wrong"]} are wrong. What exact means, and the kinds, stand in
[method.md](method.md). "Host" names checks that the model fails without an adapter too, so that they say nothing here.

| type | outcome | kind, or reason |
|---|---|---|
"""
    return head + "".join(f"| `{o.model_type}` | {o.verdict} | {_told(o)} |\n" for o in outcomes)


def _told(outcome: Outcome) -> str:
    told = outcome.said.replace("|", "\\|") or "; ".join(outcome.kinds)
    return told + (f" (host: {', '.join(outcome.host)})" if outcome.host else "")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    outcomes = []
    for one in sys.argv[1:] or MODEL_TYPES:
        outcomes.append(examine(one))
        print(outcomes[-1], flush=True)
    if len(sys.argv) == 1:
        (Path(__file__).parents[2] / "docs/architectures.md").write_text(page(outcomes), "utf-8")
