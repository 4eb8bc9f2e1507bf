"""Start weights that can be rebuilt exactly at any later time."""

import hashlib
import math

import torch
from torch import Tensor

WEIGHTS = ("up", "down", "skip", "skip_a", "skip_b")


def draw_initial_weight(
    what: str, shape: tuple[int, ...], seed: int, name: str, skip_init_std: float = 1e-4, init_weights: bool = True
) -> Tensor:
    """Draw a weight's start, on the CPU in float32, from a generator keyed by seed, name and ``what``.

    So the start can be rebuilt exactly at any later time, whatever device or dtype trained.

    ============  =====================================  ======================================
    ``what``      start                                  why
    ============  =====================================  ======================================
    ``"up"``      uniform within ±1/√in_features         the default of ``nn.Linear``
    ``"down"``    zeros                                  x̃ = x̂ exactly
    ``"skip"``    normal, standard deviation             the paper's N(0, 1e-4): see below
                  ``skip_init_std``
    ``"skip_a"``  uniform within ±1/√in_features         first factor of a low-rank skip, as in LoRA
    ``"skip_b"``  zeros                                  second factor: a low-rank skip starts as a no-op
    ============  =====================================  ======================================

    The paper's 1e-4 can only be a standard deviation. The Frobenius norm of a fresh d × d matrix is about
    std · d: with 1e-4 as the standard deviation that is 0.077 at d = 768 and 0.102 at d = 1024, and training raises
    it to the reported 0.13-0.30. With 1e-4 as the variance (standard deviation 0.01) it would start at 7.7, far
    above every reported norm.

    Args:
        what: a name of the table.
        shape: ``(out_features, in_features)``.
        seed: the adapter's ``init_seed``.
        name: path of the attention module inside the model.
        skip_init_std: standard deviation for ``"skip"``.
        init_weights: False draws every weight uniformly within ±1/√in_features, so that the method acts at once.

    Raises:
        ValueError: for another ``what``.
    """
    generator = torch.Generator().manual_seed(_key(seed, name, what))
    weight = torch.zeros(shape, dtype=torch.float32)
    if what not in WEIGHTS:
        raise ValueError(f"unknown weight {what!r}: expected one of {', '.join(map(repr, WEIGHTS))}.")
    if what in {"up", "skip_a"} or not init_weights:
        bound = 1 / math.sqrt(shape[1])
        return weight.uniform_(-bound, bound, generator=generator)
    if what == "skip":
        return weight.normal_(0.0, skip_init_std, generator=generator)
    return weight


def _key(seed: int, name: str, what: str) -> int:
    """Return a 63-bit generator seed; a hash, so that neighbouring seeds and layers are independent."""
    digest = hashlib.sha256(f"{seed}/{name}/{what}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
