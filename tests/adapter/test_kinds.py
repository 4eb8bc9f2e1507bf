"""One block of every kind, recomputed by hand from the modules of an untouched copy."""

import copy
import inspect
import re
from typing import Any

import pytest
import torch
from checks import IDS, TEXT, shake
from peft import get_peft_model
from tiny import tiny_of
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForSeq2SeqLM

from preproj import PreProjConfig
from preproj.adapter.layer import adapted_sites

PIXELS = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class New:
    """The new weights of one site, as two functions written out from the equations."""

    def __init__(self, layer: Any):
        self.up, self.down, self.skip = (getattr(layer, w)["default"].weight for w in ("up", "down", "skip"))

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        inner = x @ self.up.T
        x_tilde = x + (inner * torch.sigmoid(inner)) @ self.down.T
        return x_tilde, x_tilde @ self.skip.T


def llama(b: nn.Module, new: New, x: Tensor, **k: Any) -> Tensor:
    xt, skip = new(b.input_layernorm(x))
    h = x + b.self_attn(xt, **k)[0] + skip
    return h + b.mlp(b.post_attention_layernorm(h))


def cohere(b: nn.Module, new: New, x: Tensor, **k: Any) -> Tensor:
    normed = b.input_layernorm(x)
    xt, skip = new(normed)
    return x + b.self_attn(xt, **k)[0] + skip + b.mlp(normed)


def gpt_neox(b: nn.Module, new: New, x: Tensor, **k: Any) -> Tensor:
    xt, skip = new(b.input_layernorm(x))
    return x + b.attention(xt, **k)[0] + skip + b.mlp(b.post_attention_layernorm(x))


def gemma2(b: nn.Module, new: New, x: Tensor, **k: Any) -> Tensor:
    xt, skip = new(b.input_layernorm(x))
    h = x + b.post_attention_layernorm(b.self_attn(xt, **k)[0]) + skip
    return h + b.post_feedforward_layernorm(b.mlp(b.pre_feedforward_layernorm(h)))


def olmo2(b: nn.Module, new: New, x: Tensor, **k: Any) -> Tensor:
    xt, skip = new(x)
    h = x + b.post_attention_layernorm(b.self_attn(xt, **k)[0]) + skip
    return h + b.post_feedforward_layernorm(b.mlp(h))


def granite(b: nn.Module, new: New, x: Tensor, **k: Any) -> Tensor:
    xt, skip = new(b.input_layernorm(x))
    h = x + 0.3 * b.self_attn(xt, **k)[0] + skip
    return h + 0.3 * b.mlp(b.post_attention_layernorm(h))


def doge(b: nn.Module, new: New, x: Tensor, **k: Any) -> Tensor:
    xt, skip = new(b.input_layernorm(x))
    h = b.input_residual * x + b.self_attn(xt, **k)[0] + skip
    return b.post_attention_residual * h + b.mlp(b.post_attention_layernorm(h))


def minimax(b: nn.Module, new: New, x: Tensor, **k: Any) -> Tensor:
    normed = b.input_layernorm(x)
    xt, skip = new(normed)
    h = b.post_attention_layernorm(0.7 * normed + 1.3 * b.self_attn(xt, **k)[0] + skip)
    return h * b.mlp_alpha_factor + b.mlp(h) * b.mlp_beta_factor


def bloom(b: nn.Module, new: New, x: Tensor, **k: Any) -> Tensor:
    xt, skip = new(b.input_layernorm(x))
    h = b.self_attention(xt, x, **k)[0] + skip
    return b.mlp(b.post_attention_layernorm(h), h)


def bert(b: nn.Module, new: New, x: Tensor, **k: Any) -> Tensor:
    xt, skip = new(x)
    inner = b.attention
    h = inner.output.LayerNorm(x + inner.output.dense(inner.self(xt, **k)[0]) + skip)
    return b.output(b.intermediate(h), h)


def bart(b: nn.Module, new: New, x: Tensor, **k: Any) -> Tensor:
    xt, skip = new(x)
    memory, memory_mask = k.pop("encoder_hidden_states", None), k.pop("encoder_attention_mask", None)
    h = b.self_attn_layer_norm(x + b.self_attn(xt, **k)[0] + skip)
    if memory is not None:  # cross-attention is not adapted
        crossed = b.encoder_attn(h, key_value_states=memory, attention_mask=memory_mask)[0]
        h = b.encoder_attn_layer_norm(h + crossed)
    return b.final_layer_norm(h + b.fc2(b.activation_fn(b.fc1(h))))


def t5(b: nn.Module, new: New, x: Tensor, **k: Any) -> Tensor:
    xt, skip = new(b.layer_norm(x))
    return x + b.SelfAttention(xt, mask=k.pop("attention_mask"), **k)[0] + skip


def vit(b: nn.Module, new: New, x: Tensor, **k: Any) -> Tensor:
    xt, skip = new(b.layernorm_before(x))
    h = x + first(b.attention(xt, **k)) + skip
    return h + mlp_of(b)(b.layernorm_after(h))


def first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def mlp_of(b: nn.Module) -> Any:
    """The feed-forward of a vision block, which older versions of transformers keep in two modules."""
    return b.mlp if hasattr(b, "mlp") else lambda x: b.output.dense(b.intermediate(x))


def beit(b: nn.Module, new: New, x: Tensor, **k: Any) -> Tensor:
    xt, skip = new(b.layernorm_before(x))
    h = x + b.lambda_1 * first(b.attention(xt)) + skip
    return h + b.lambda_2 * mlp_of(b)(b.layernorm_after(h))


def data2vec_vision(b: nn.Module, new: New, x: Tensor, **k: Any) -> Tensor:
    xt, skip = new(b.layernorm_before(x))
    h = x + b.lambda_1 * b.attention.output.dense(b.attention.attention(xt)[0]) + skip
    return h + b.lambda_2 * b.output(b.intermediate(b.layernorm_after(h)))


def dinov2(b: nn.Module, new: New, x: Tensor, **k: Any) -> Tensor:
    xt, skip = new(b.norm1(x))
    h = x + b.layer_scale1(first(b.attention(xt))) + skip
    return h + b.layer_scale2(b.mlp(b.norm2(h)))


def swin(b: nn.Module, new: New, x: Tensor, input_dimensions: tuple[int, int], **k: Any) -> Tensor:
    b.set_shift_and_window_size(input_dimensions)
    (n, _, c), (h, w), s, shift = x.shape, input_dimensions, b.window_size, b.shift_size
    xt, skip = new(b.layernorm_before(x))
    grid = xt.view(n, h, w, c).roll((-shift, -shift), (1, 2))
    windows = [grid[i, y : y + s, z : z + s] for i in range(n) for y in range(0, h, s) for z in range(0, w, s)]
    out = b.attention(torch.stack(windows).view(-1, s * s, c), b.get_attn_mask(h, w, x.dtype, x.device))[0]
    attended = torch.empty_like(grid)
    places = [(i, y, z) for i in range(n) for y in range(0, h, s) for z in range(0, w, s)]
    for (i, y, z), window in zip(places, out, strict=True):
        attended[i, y : y + s, z : z + s] = window.view(s, s, c)
    y = x + attended.roll((shift, shift), (1, 2)).view(n, h * w, c) + skip
    return y + mlp_of(b)(b.layernorm_after(y))


def deberta(b: nn.Module, new: New, x: Tensor, attention_mask: Tensor, rel_embeddings: Tensor, **k: Any) -> Tensor:
    xt, skip = new(x)
    inner = b.attention
    mixed = inner.self(xt, attention_mask, rel_embeddings=rel_embeddings)[0]
    h = inner.output.LayerNorm(x + inner.output.dense(mixed) + skip)
    return b.output(b.intermediate(h), h)


def ctrl(b: nn.Module, new: New, x: Tensor, **k: Any) -> Tensor:
    xt, skip = new(b.layernorm1(x))
    h = x + b.multi_head_attention(xt, xt, xt, **k)[0] + skip
    return h + b.ffn(b.layernorm2(h))


ENCODER = {"is_decoder": False}
SMALL_VIT = {"image_size": 32, "patch_size": 8}
HOSTS = {
    "llama": (llama, {}), "cohere": (cohere, {}), "gpt_neox": (gpt_neox, {}), "gemma2": (gemma2, {}),
    "olmo2": (olmo2, {}), "granite": (granite, {}), "doge": (doge, {}), "minimax": (minimax, {}),
    "bloom": (bloom, {}), "bert": (bert, {}), "roberta": (bert, {}), "bart": (bart, {}), "ctrl": (ctrl, {}),
    "bert encoder": (bert, {"auto": AutoModel, **ENCODER}), "roberta encoder": (bert, {"auto": AutoModel, **ENCODER}),
    "t5 both": (t5, {"auto": AutoModelForSeq2SeqLM, **ENCODER}),
    "bart both": (bart, {"auto": AutoModelForSeq2SeqLM, **ENCODER}),
    "deberta encoder": (deberta, {"auto": AutoModel, "relative_attention": True, **ENCODER}),
    "vit encoder": (vit, {"auto": AutoModel, **SMALL_VIT}),
    "beit encoder": (beit, {"auto": AutoModel, **SMALL_VIT, "layer_scale_init_value": 0.5}),
    "data2vec-vision encoder": (data2vec_vision, {"auto": AutoModel, **SMALL_VIT, "layer_scale_init_value": 0.5}),
    "dinov2 encoder": (dinov2, {"auto": AutoModel, **SMALL_VIT}),
    "swin encoder": (swin, {"auto": AutoModel, "image_size": 32}),
}  # fmt: skip


@pytest.mark.parametrize("host", HOSTS)
def test_block_equals_the_hand_computation(host):
    hand, options = HOSTS[host]
    base = tiny_of(host.split()[0], **options)
    shake(base)
    untouched = copy.deepcopy(base)
    model = get_peft_model(base, PreProjConfig())
    for _, _, layer in adapted_sites(model):
        shake(layer)
    inputs = {"pixel_values": PIXELS} if base.main_input_name == "pixel_values" else TEXT
    if host.endswith("both"):
        inputs = inputs | {"decoder_input_ids": IDS[:, :5]}
    done = 0
    for name, _, layer in adapted_sites(model):
        (path,) = re.findall(r"^(.*\.\d+)\.", name)
        got: list[Any] = []
        block = base.get_submodule(path)
        hooks = (
            block.register_forward_pre_hook(lambda m, a, k, got=got: got.append((a, k)), with_kwargs=True),
            block.register_forward_hook(lambda m, a, o, got=got: got.append(o)),
        )
        with torch.no_grad():
            model(**inputs)
        for hook in hooks:
            hook.remove()
        (args, kwargs), output = got
        given = inspect.signature(block.forward).bind(*args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        x = given.pop(next(iter(given)))
        with torch.no_grad():
            expected = hand(untouched.get_submodule(path), New(layer), x, **given)
        torch.testing.assert_close(output[0] if isinstance(output, tuple) else output, expected, rtol=1e-10, atol=1e-10)
        done += 1
    assert done >= 1
