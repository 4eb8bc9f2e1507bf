"""Numerical checks of an adapted model of any architecture, which know nothing of how its blocks are built.

One block is run alone, on the arguments it gets in a whole forward. Its residual stream is seen where it must pass:
in the block's output and in what enters its other modules. A tensor is the stream if it follows the block's input
while the attention branch is frozen.
"""

import re
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import EncoderDecoderCache

from preproj.adapter.layer import PreProjLayer, adapted_sites

Inputs = dict[str, Any]
IDS = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(0))
TEXT: Inputs = {"input_ids": IDS, "use_cache": False}


def shake(model: nn.Module, scale: float = 0.1) -> None:
    """Moves every weight off its start, so that no zero or one hides a mistake."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.is_floating_point():
                weight.add_(scale * torch.randn(weight.shape, generator=generator).to(weight.dtype))


def plant(layer: PreProjLayer, *whats: str) -> None:
    """Gives the named new weights of a layer large random values, and zeroes the others."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for what in ("up", "down", "skip"):
            for linear in getattr(layer, what).values():
                values = 0.3 * torch.randn(linear.weight.shape, generator=generator)
                linear.weight.copy_(values if what in whats else torch.zeros_like(values))


def run(model: Any, inputs: Inputs) -> Tensor:
    """Runs a model and picks the tensor of its output that is looked at: logits, or the last feature map."""
    output = model(**inputs)
    return output.feature_maps[-1] if "feature_maps" in output else output.logits


def check_blocks(model: PeftModel, inputs: Inputs = TEXT) -> None:
    """Asserts the two equations at every adapted site.

    A planted skip changes the residual stream by exactly W_skip·x̃, a planted pre-projection changes attention's x̂
    to x̃ and nothing else.
    """
    base = model.get_base_model()
    for name, attention, layer in adapted_sites(model):
        (path,) = re.findall(r"^(.*\.\d+)\.", name) or [name.rpartition(".")[0]]
        block = base.get_submodule(path)
        plant(layer)
        alone = _Alone(model, inputs, block, attention, layer)
        _check_skip(alone, layer)
        _check_pre_projection(alone, layer)
        plant(layer, "up", "down", "skip")


class _Alone:
    """One block, run again and again on the arguments of a whole forward."""

    def __init__(self, model: PeftModel, inputs: Inputs, block: nn.Module, attention: nn.Module, layer: PreProjLayer):
        self.block, self.attention = block, attention
        inside = [m for m in attention.modules() if m is not attention and m in _hooked_by(layer, attention)]
        self.branch = inside[0] if inside else attention
        # Inside attention only the norm over its own residual sum (ALBERT) sees the stream.
        self.hidden = {m for m in attention.modules() if not (layer.site.is_residual and isinstance(m, nn.LayerNorm))}
        calls: list[Any] = []
        with block.register_forward_pre_hook(lambda m, a, k: calls.append((a, dict(k))), with_kwargs=True):
            model(**inputs)
        self.args, self.kwargs = calls[0]

    @torch.no_grad()
    def __call__(self, moved: float = 0.0, frozen: Any = None) -> tuple[dict[Any, Tensor], tuple[Any, Any], Any]:
        """Runs the block.

        Args:
            moved: added to the block's input, times a fixed random direction.
            frozen: what the attention branch returns instead of its own output.

        Returns:
            Every tensor where the stream may be seen, by place; the arguments attention got; what the branch returned.
        """
        size = _first(self.args, self.kwargs).numel()

        def see(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            for name, t in (*enumerate(args), *kwargs.items()):
                if isinstance(t, Tensor) and t.is_floating_point() and t.numel() == size:
                    number = sum(key[0] is module for key in seen)
                    seen[module, name, number] = t.clone()

        seen: dict[Any, Tensor] = {}
        got: list[Any] = []
        out: list[Any] = []
        with ExitStack() as stack:
            for module in self.block.modules():
                if module is not self.block and module not in self.hidden:
                    stack.enter_context(module.register_forward_pre_hook(see, with_kwargs=True))
            stack.enter_context(
                self.attention.register_forward_pre_hook(lambda m, a, k: got.append((a, k)), with_kwargs=True)
            )
            stack.enter_context(
                self.branch.register_forward_hook(lambda m, a, o: out.append(o) or frozen, prepend=True)
            )
            args, kwargs = self._moved(moved)
            output = self.block(*args, **kwargs)
        seen[self.block, "output", 0] = output[0] if isinstance(output, tuple | list) else output
        return seen, got[0], out[0]

    def _moved(self, scale: float) -> tuple[tuple[Any, ...], dict[str, Any]]:
        x = _first(self.args, self.kwargs)
        y = x + scale * torch.randn(x.shape, generator=torch.Generator().manual_seed(3)).to(x.dtype)
        return (
            tuple(y if a is x else a for a in self.args),
            {k: y if v is x else v for k, v in self.kwargs.items()},
        )


def _check_skip(alone: _Alone, layer: PreProjLayer) -> None:
    before, _, out = alone()
    still, _, _ = alone(frozen=out)
    moved, _, _ = alone(moved=0.1, frozen=out)
    stream = [key for key in still.keys() & moved.keys() if not torch.equal(still[key], moved[key])]
    assert stream
    plant(layer, "skip")
    after, (args, kwargs), _ = alone()
    added = _hidden(layer, args, kwargs) @ next(iter(layer.skip.values())).weight.T
    assert added.abs().max() > 0.1
    exact = [_same_tokens(after[key] - before[key], added, after[key]) for key in stream if key in after]
    assert any(exact), "the planted skip does not change the residual stream by W_skip·x̃"
    _check_it_reaches_the_output(alone, layer)


@torch.no_grad()
def _check_it_reaches_the_output(alone: _Alone, layer: PreProjLayer) -> None:
    """Asserts that the skip is in the stream itself: it leaves the block even where all other branches are zero."""
    own = {id(p) for p in alone.attention.parameters()}
    others = [p for p in alone.block.parameters() if p.ndim > 1 and id(p) not in own]
    kept = [p.clone() for p in others]
    for p in others:
        p.zero_()
    place = (alone.block, "output", 0)
    after = alone()[0][place]
    plant(layer)
    before = alone()[0][place]
    for p, value in zip(others, kept, strict=True):
        p.copy_(value)
    assert not torch.equal(after, before), "the planted skip does not leave the block"


def _check_pre_projection(alone: _Alone, layer: PreProjLayer) -> None:
    before, (args, kwargs), out = alone()
    x = _hidden(layer, args, kwargs)
    plant(layer, "up", "down")
    (up,), (down,) = layer.up.values(), layer.down.values()
    inner = x @ up.weight.T
    expected = x + (inner * torch.sigmoid(inner)) @ down.weight.T
    after, (new_args, new_kwargs), _ = alone(frozen=out)
    assert before.keys() == after.keys()
    same = torch.equal if not layer.site.is_residual else lambda a, b: _equal(a, b, a)  # which subtracts x̃ - x̂ again
    assert all(same(before[key], after[key]) for key in before), "more than attention sees x̃"
    old, new = [*args, *kwargs.values()], [*new_args, *new_kwargs.values()]
    for a, b in zip(old, new, strict=True):
        if a is not b and isinstance(a, Tensor):
            assert _equal(b, expected if torch.equal(a, x) else a, b), "attention got something else than x̃"
    assert not torch.equal(_hidden(layer, new_args, new_kwargs), x)
    plant(layer)


def _hooked_by(layer: PreProjLayer, attention: nn.Module) -> list[nn.Module]:
    return [
        m for m in attention.modules() if any(getattr(h, "__self__", None) is layer for h in m._forward_hooks.values())
    ]


def _hidden(layer: PreProjLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Picks what attention reads: its first tensor of the right width."""
    return next(t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.shape[-1] == layer.in_features)


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return next(t for t in (*args, kwargs.get("hidden_states"), *kwargs.values()) if isinstance(t, Tensor))


def _equal(a: Tensor, b: Tensor, scale: Tensor) -> bool:
    """Whether two tensors are equal to rounding, whatever their batch dimensions are folded to."""
    if a.numel() != b.numel() or not a.numel():
        return False
    tolerance = 64 * torch.finfo(scale.dtype).eps * (1 + scale.abs().max().item())
    return (a.reshape(b.shape) - b).abs().max().item() <= tolerance


def _same_tokens(change: Tensor, added: Tensor, scale: Tensor) -> bool:
    """Whether every token of the change is one of those added, which may stand in windows, reordered and padded."""
    if change.numel() == added.numel() and _equal(change, added, scale):
        return True
    width = added.shape[-1]
    if change.numel() > added.numel() or change.shape[-1] != width:
        return False
    tolerance = 64 * torch.finfo(scale.dtype).eps * (1 + scale.abs().max().item())
    left = added.reshape(-1, width)
    for token in change.reshape(-1, width):
        distance, nearest = (left - token).abs().amax(-1).min(0)
        if distance > tolerance:
            return False
        left = torch.cat((left[:nearest], left[nearest + 1 :]))
    return True


def check_start(model: PeftModel, inputs: Inputs, expected: Tensor) -> None:
    """Asserts that a fresh adapter without skip noise is the base bit for bit."""
    with torch.no_grad():
        assert torch.equal(run(model, inputs), expected)


def check_gradients(model: PeftModel, inputs: Inputs) -> None:
    """Asserts that after one step every new weight, and nothing else, has a gradient."""
    new = {n: p for n, p in model.named_parameters() if ".preproj." in n}
    assert {n for n, p in model.named_parameters() if p.requires_grad} == new.keys()
    optimizer = torch.optim.SGD(new.values(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        loss(model, inputs).backward()
        if step == 0:
            optimizer.step()
    without = [n for n, p in new.items() if p.grad is None or not torch.count_nonzero(p.grad)]
    assert not without, f"no gradient: {without[:2]}"
    optimizer.zero_grad()


def loss(model: Any, inputs: Inputs) -> Tensor:
    """Runs a model and makes one number of what it returns."""
    output = run(model, inputs)
    return output.log_softmax(-1)[..., 1:5].mean() if output.shape[-1] > 5 else output.square().mean()


def check_mixed_batch(model: PeftModel, inputs: Inputs) -> None:
    """Asserts that in a mixed batch each sample goes through its own adapter, or that the batch is refused."""
    model.eval()
    # Of a length that the batch divides, so that mixing up positions and samples shows.
    inputs = {name: v[:, :4] if name in ("input_ids", "decoder_input_ids") else v for name, v in inputs.items()}
    with_adapter = run(model, inputs)
    with model.disable_adapter():
        without = run(model, inputs)
    try:
        mixed = run(model, inputs | {"adapter_names": ["default", "__base__"]})
    except ValueError as error:
        if "adapter_names does not work in this model" in str(error):
            return
        raise
    expected = torch.stack([with_adapter[0], without[1]])
    assert _equal(mixed, expected, expected), "a mixed batch mixes its samples up"


def check_generation(model: Any) -> None:
    """Asserts that cached generation is the uncached: greedy, beams, left padding."""
    padded = torch.ones_like(IDS)
    padded[0, :3] = 0
    for options in ({}, {"attention_mask": padded}, {"num_beams": 2}):
        _assert_generates_the_same(model, {"use_cache": True}, options)


def check_static_cache(model: Any) -> None:
    """Asserts that generation with a static cache is the uncached."""
    _assert_generates_the_same(model, {"cache_implementation": "static", "disable_compile": True}, {})


def _assert_generates_the_same(model: Any, cached: dict[str, Any], options: dict[str, Any]) -> None:
    """Compares tokens, and logits too: a host's mistake need not move the largest of them."""
    first = {"decoder_start_token_id": 1} if model.config.is_encoder_decoder else {}
    common = first | {
        "input_ids": IDS, "attention_mask": torch.ones_like(IDS), "max_new_tokens": 5, "min_new_tokens": 5,
        "do_sample": False, "return_dict_in_generate": True, "output_logits": True,
    }  # fmt: skip
    one = model.generate(**common | options | cached)
    two = model.generate(**common | options | {"use_cache": False})
    assert torch.equal(one.sequences, two.sequences), f"other tokens with {options}"
    ours, plain = torch.stack(one.logits), torch.stack(two.logits)
    assert (ours - plain).abs().max() <= 1e-4 * plain.abs().max(), f"other logits with {options}"


def cache_bytes(model: Any, inputs: Inputs) -> list[Any]:
    """Lists shapes, dtypes and bytes of every tensor in the cache of one forward."""
    tensors = [t for cache in caches(model, inputs) for t in _tensors(cache)]
    assert tensors
    return [(t.shape, t.dtype, t.nbytes) for t in tensors]


def caches(model: Any, inputs: Inputs) -> list[Any]:
    """Returns the cache that one forward leaves; of an encoder and decoder two, for self- and cross-attention."""
    cache = model(**inputs | {"use_cache": True}).past_key_values
    if isinstance(cache, EncoderDecoderCache):
        return [cache.self_attention_cache, cache.cross_attention_cache]
    return [cache]


def _tensors(cache: Any) -> list[Tensor]:
    layers = cache.layers if hasattr(cache, "layers") else [cache]
    return [t for layer in layers for t in vars(layer).values() if isinstance(t, Tensor)]


def _keys_and_values(cache: Any) -> list[Tensor]:
    return [t for t in _tensors(cache) if t.is_floating_point()]  # without lengths


def check_cross_attention(model: Any, untouched: Any, inputs: Inputs) -> None:
    """Asserts that for the same encoder output, cross-attention has the base's keys and values."""
    with torch.no_grad():
        states = untouched.get_encoder()(input_ids=inputs["input_ids"])
        ours, theirs = (caches(m, inputs | {"encoder_outputs": states}) for m in (model, untouched))
    (own, crossed), (own_of_base, crossed_of_base) = (map(_keys_and_values, pair) for pair in (ours, theirs))
    assert crossed
    assert all(_equal(a, b, b) for a, b in zip(crossed, crossed_of_base, strict=True)), (
        "cross-attention reads something else"
    )
    assert not any(_equal(a, b, b) for a, b in zip(own, own_of_base, strict=True))


def check_checkpointing(model: Any, inputs: Inputs, weights: Callable[[Any], list[Tensor]]) -> None:
    """Asserts that gradient checkpointing of both kinds leaves every gradient as it is."""

    def gradients() -> list[Tensor]:
        model.zero_grad()
        loss(model, inputs).backward()
        return [p.grad.clone() for p in weights(model)]

    model.train()
    plain = gradients()
    for reentrant in (False, True):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
        for a, b in zip(gradients(), plain, strict=True):
            assert _equal(a, b, b), f"use_reentrant={reentrant}"
        model.gradient_checkpointing_disable()
    model.eval()
