"""Every causal language model of the installed transformers: exact, or refused with a reason.

    python tests/adapter/sweep.py            # writes docs/architectures.md
    python tests/adapter/sweep.py llama t5   # prints single outcomes
"""

import copy
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

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
        return Outcome(model_type, "not built", said=f"{type(error).__name__}: {str(error).splitlines()[0]}")
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
        outcome.verdict, outcome.said = "wrong", f"{type(error).__name__}: {error}".splitlines()[0]
        return outcome
    ours = lambda m: [p for n, p in m.named_parameters() if ".preproj." in n]  # noqa: E731
    untouched.get_input_embeddings().requires_grad_(False)  # as under an adapter
    theirs = lambda m: [p for p in m.parameters() if p.grad is not None]  # noqa: E731
    _both(outcome, "cached generation", lambda: check_generation(model), lambda: check_generation(untouched))
    _both(outcome, "static cache", lambda: check_static_cache(model), lambda: check_static_cache(untouched))
    _both(outcome, "cache", lambda: _same_cache(model, untouched), lambda: cache_bytes(untouched))
    _both(
        outcome,
        "gradient checkpointing",
        lambda: check_checkpointing(model, ours),
        lambda: check_checkpointing(untouched, theirs),
    )
    return outcome


def _build(model_type: str) -> tuple[transformers.PreTrainedModel, torch.Tensor]:
    """Builds a type in float64 where the host can, else in float32."""
    for dtype in (torch.float64, torch.float32):
        try:
            base = tiny_of(model_type, dtype)
            shake(base)
            with torch.no_grad():
                return base, base(input_ids=IDS, use_cache=False).logits
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
        outcome.verdict, outcome.said = "wrong", f"{what}: {type(error).__name__}: {error}".splitlines()[0]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    for one in sys.argv[1:] or MODEL_TYPES:
        print(examine(one), flush=True)
