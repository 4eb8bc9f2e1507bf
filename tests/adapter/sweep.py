"""Every language and image model of the installed transformers: exact, or refused with a reason.

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
    Inputs,
    cache_bytes,
    check_blocks,
    check_checkpointing,
    check_cross_attention,
    check_generation,
    check_gradients,
    check_mixed_batch,
    check_start,
    check_static_cache,
    loss,
    run,
    shake,
)
from families import FAMILIES, Family
from peft import PeftModel, get_peft_model
from tiny import tiny_of
from transformers import PreTrainedModel

import preproj

VERDICTS = ("exact", "refused", "not built", "wrong")


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


def examine(family: Family, model_type: str) -> Outcome:
    """Builds a type, adapts it and runs every check."""
    try:
        base, inputs, expected = _build(family, model_type)
    except Exception as error:  # whatever keeps a host from a forward, says its own sentence
        return Outcome(model_type, "not built", said=_sentence(error))
    untouched = copy.deepcopy(base)
    try:
        kinds = sorted({site.kind for site in preproj.sites(base)})
    except ValueError as error:
        return Outcome(model_type, "refused", said=str(error).split(" Name the")[0])
    if idle := _idle(untouched, inputs):
        return Outcome(model_type, "not built", said=f"the host's own {idle[0]} has no effect on its output")
    outcome = Outcome(model_type, "exact", kinds)
    model = get_peft_model(base, preproj.PreProjConfig(skip_init_std=0))
    try:
        check_start(model, inputs, expected)
        check_gradients(model, inputs)
        check_blocks(model, inputs)
        check_mixed_batch(model, inputs)
    except Exception as error:
        outcome.verdict, outcome.said = "wrong", _sentence(error)
        return outcome
    if family.generates:
        _check_caches(outcome, model, untouched, inputs)
    _check_training(outcome, model, untouched, inputs)  # last, because hosts do not undo all of checkpointing
    return outcome


def _idle(untouched: PreTrainedModel, inputs: Inputs) -> list[str]:
    """Lists attention modules that do nothing, for example because their CUDA kernel is missing."""
    loss(untouched, inputs).backward()
    idle = [
        site.name
        for site in preproj.sites(untouched)
        if not any(p.grad is not None and p.grad.count_nonzero() for p in site.attention.parameters())
    ]
    untouched.zero_grad()
    return idle


def _check_training(outcome: Outcome, model: PeftModel, untouched: PreTrainedModel, inputs: Inputs) -> None:
    untouched.requires_grad_(False)
    for site in preproj.sites(untouched):
        site.attention.requires_grad_(True)  # all that trains, as under an adapter
    ours = lambda m: [p for n, p in m.named_parameters() if ".preproj." in n]  # noqa: E731
    theirs = lambda m: [p for p in m.parameters() if p.grad is not None]  # noqa: E731
    _both(
        outcome,
        "gradient checkpointing",
        lambda: check_checkpointing(model, inputs, ours),
        lambda: check_checkpointing(untouched, inputs, theirs),
    )


def _check_caches(outcome: Outcome, model: PeftModel, untouched: PreTrainedModel, inputs: Inputs) -> None:
    _both(
        outcome,
        "cache",
        lambda: _same_cache(model, untouched, inputs),
        lambda: cache_bytes(untouched, inputs),
    )
    if "decoder_input_ids" in inputs:
        _both(
            outcome,
            "cross-attention",
            lambda: check_cross_attention(model, untouched, inputs),
            lambda: cache_bytes(untouched, inputs),
        )
    dtype = untouched.dtype
    model.float(), untouched.float()  # masks of float64 overflow where a host takes its softmax in float32
    _both(outcome, "cached generation", lambda: check_generation(model), lambda: check_generation(untouched))
    _both(outcome, "static cache", lambda: check_static_cache(model), lambda: check_static_cache(untouched))
    model.to(dtype), untouched.to(dtype)


def _sentence(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def _build(family: Family, model_type: str) -> tuple[PreTrainedModel, Inputs, torch.Tensor]:
    """Builds a type in float64 where the host can, else in float32."""
    for dtype in (torch.float64, torch.float32):
        try:
            base = tiny_of(model_type, dtype, family.auto[model_type], family.small)
            shake(base)
            base.requires_grad_(False)  # as under an adapter: torch chooses kernels by it
            inputs = family.inputs(model_type, base)
            expected = run(base, inputs)
            if not expected.isfinite().all():
                raise ValueError("the host's own output is not finite")
            return base.requires_grad_(True), inputs, expected
        except RuntimeError:
            if dtype == torch.float32:
                raise
    raise AssertionError


def _same_cache(model: PeftModel, untouched: PreTrainedModel, inputs: Inputs) -> None:
    assert cache_bytes(model, inputs) == cache_bytes(untouched, inputs), "the cache differs"


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


def page(outcomes: dict[str, list[Outcome]]) -> str:
    """Writes the outcomes of each family as the Markdown of docs/architectures.md."""
    head = f"""# Architectures

Written by `python tests/adapter/sweep.py` with transformers {transformers.__version__}, torch {torch.__version__}, peft
{peft.__version__}; the slow tests `tests/adapter/test_sweep.py` hold it to the code.

Each type is built tiny and random in float64 (float32 where the host cannot). What exact means, and the kinds, stand in
[method.md](method.md). "Not built" types could not be built or run without preproj. "Host" names checks that the model
fails without an adapter too, so that they say nothing here.

| | types | exact | refused | not built | wrong |
|---|---|---|---|---|---|
"""
    totals = [f"| [{title}](#{title.replace(' ', '-')}) {_counts(found)}\n" for title, found in outcomes.items()]
    return head + "".join(totals) + "".join(f"\n{table(title, found)}" for title, found in outcomes.items())


def _counts(outcomes: list[Outcome]) -> str:
    counts = Counter(outcome.verdict for outcome in outcomes)
    return f"| {len(outcomes)} | " + " | ".join(str(counts[verdict]) for verdict in VERDICTS) + " |"


def table(title: str, outcomes: list[Outcome]) -> str:
    """Writes the outcomes of one family."""
    rows = "".join(f"| `{o.model_type}` | {o.verdict} | {_told(o)} |\n" for o in outcomes)
    return f"## {title.capitalize()}\n\n| type | outcome | kind, or reason |\n|---|---|---|\n{rows}"


def _told(outcome: Outcome) -> str:
    told = outcome.said.replace("|", "\\|") or "; ".join(outcome.kinds)
    return told + (f" (host: {', '.join(outcome.host)})" if outcome.host else "")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    outcomes = {}
    for family in FAMILIES:
        outcomes[family.title] = []
        for one in family.auto:
            if one in sys.argv[1:] or len(sys.argv) == 1:
                outcomes[family.title].append(examine(family, one))
                print(family.title, outcomes[family.title][-1], flush=True)
    if len(sys.argv) == 1:
        (Path(__file__).parents[2] / "docs/architectures.md").write_text(page(outcomes), "utf-8")
