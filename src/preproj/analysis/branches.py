"""Looking into the attention branches of an adapted model while it runs."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from preproj.adapter.sites import Site

See = Callable[[Tensor, Tensor, Tensor], None]
"""Called with x̂, x̃ and attn_out, each ``(..., hidden)``, after each pass through a branch."""


@contextmanager
def watched(branches: Iterable[tuple[Site, See]]) -> Iterator[None]:
    """Let each ``see`` look at its branch while the context is open; no hook stays behind, after an error neither.

    attn_out is what the block adds to its residual stream without the skip: after the norm and the multiplier, where
    the block has them.
    """
    with ExitStack() as stack:
        for site, see in branches:
            for handle in _hooks(site, see):
                stack.enter_context(handle)
        yield


def _hooks(site: Site, see: See) -> Iterator[Any]:
    seen: list[Tensor] = []  # x̂, then x̃

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen[:] = [site.hidden_states(args, kwargs)]

    def enter_after_ours(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(site.hidden_states(args, kwargs))

    def land(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if seen:  # other branches may go through the same module
            x_hat, x_tilde = seen
            branch = output[0] if isinstance(output, tuple | list) else output
            seen.clear()
            see(x_hat, x_tilde, site.multiplier * branch)

    yield site.attention.register_forward_pre_hook(enter, with_kwargs=True, prepend=True)
    yield site.attention.register_forward_pre_hook(enter_after_ours, with_kwargs=True)
    yield site.landing_module.register_forward_hook(land, prepend=True)
