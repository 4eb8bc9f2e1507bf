"""The names of methods: a small grammar.

    method = none | full | dense-qkv | part { + part }
    part   = pre | skip [-rN] | lora [-rN] | lora-qkv [-rN] | dora [-rN] | rslora [-rN]

Parts stand in this order, each at most once, and of the last four at most one. What a name means is in docs/recipes.md.
"""

from dataclasses import dataclass, replace

LORAS = {"lora": "LoRA", "lora-qkv": "LoRA", "dora": "DoRA", "rslora": "rsLoRA"}
"""The low-rank methods of PEFT, with what their authors call them."""
OF_THE_BASE = ("full", "dense-qkv")
"""Methods that train weights of the base itself."""

GRAMMAR = (
    f"a method is none, {', '.join(OF_THE_BASE)}, or parts joined by + in this order: pre, skip, one of "
    f"{', '.join(LORAS)}; skip and the last may name a rank, as in pre+skip-r16 or lora-r8"
)


@dataclass(frozen=True)
class Method:
    """What a method's name says; with nothing set it is the untouched model, ``none``.

    Attributes:
        pre: whether there is a pre-projection.
        skip: whether there is a content skip.
        skip_rank: its rank; None for a dense skip.
        lora: a key of ``LORAS``, or None.
        lora_rank: its rank; None for the one that has the budget.
        base: one of ``OF_THE_BASE``, or None.
    """

    pre: bool = False
    skip: bool = False
    skip_rank: int | None = None
    lora: str | None = None
    lora_rank: int | None = None
    base: str | None = None


def parse_method(name: str) -> Method:
    """Read the name of a method.

    Raises:
        ValueError: if it is none, with the grammar.
    """
    method = Method()
    if name == "none":
        return method
    if name in OF_THE_BASE:
        return replace(method, base=name)
    for part in name.split("+"):
        kind, rank = _kind_and_rank(part)
        if kind == "pre" and rank is None and method == Method():
            method = replace(method, pre=True)
        elif kind == "skip" and not (method.skip or method.lora):
            method = replace(method, skip=True, skip_rank=rank)
        elif kind in LORAS and not method.lora:
            method = replace(method, lora=kind, lora_rank=rank)
        else:
            raise ValueError(f"{name!r} is no method: {GRAMMAR}")
    return method


def _kind_and_rank(part: str) -> tuple[str, int | None]:
    """Split ``lora-r8`` into ``("lora", 8)``; what has no rank, or none that is written so, stays whole."""
    kind, _, digits = part.rpartition("-r")
    if digits.isascii() and digits.isdigit() and not digits.startswith("0"):  # one spelling, one folder
        return kind, int(digits)
    return part, None
