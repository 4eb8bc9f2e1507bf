"""Whole causal language models, with pre-projection and content skip, in plain torch.

The independent oracle of the test suite. It reads weights from `model.state_dict()` and numbers from
`model.config`, runs none of the host's modules and nothing of the package under test. No caching, no
padding, no fusing: one function per architecture, one line per equation.

Shape suffixes:
    B  batch            D  hidden width of the model      H  query heads
    T  query position   M  inner width of the host's MLP  G  key/value heads (H is a multiple of G)
    S  key position     V  vocabulary                     K  width of one head
"""

import math

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "phi", "gpt_neox", "gpt2")

# Passed to every configuration that knows the name. Without an end-of-sequence token, generation always
# runs to the length asked for, and without a padding token no id is special.
TINY = {
    "hidden_size": 32, "intermediate_size": 48, "n_inner": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64,
    "attention_dropout": 0.0, "hidden_dropout": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
TINY_OF = {
    "mistral": {"sliding_window": None},
    "qwen3": {"head_dim": 16},  # as published: heads times head width is not the hidden width
    "gpt_neox": {"rotary_pct": 0.5},
}


def tiny_model(architecture: str, seed: int = 0, **overrides: object) -> PreTrainedModel:
    """Builds a tiny random host in float64, eval mode and eager attention.

    Args:
        architecture: One of `ARCHITECTURES`.
        seed: Seed of the weights; the global random state is left alone.
        **overrides: Configuration values that replace the tiny ones.

    Returns:
        The model, every parameter drawn with standard deviation 0.3, norm weights around one.
    """
    known = AutoConfig.for_model(architecture)
    sizes = {name: value for name, value in TINY.items() if hasattr(known, name)}
    config = AutoConfig.for_model(architecture, **{**sizes, **TINY_OF.get(architecture, {}), **overrides})
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").double().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            is_norm_weight = weight.ndim == 1 and name.endswith("weight")
            noise = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
            weight.copy_(0.3 * noise + float(is_norm_weight))
    return model


def silu(x: Tensor) -> Tensor:
    """Computes x · σ(x)."""
    return x * torch.sigmoid(x)


def gelu(x: Tensor) -> Tensor:
    """Computes x · Φ(x), Φ the exact normal distribution function."""
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def gelu_new(x: Tensor) -> Tensor:
    """Computes the tanh approximation of `gelu`."""
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def linear(w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    """Computes x Wᵀ + b, with b only where the host has one."""
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)


def norm(c: PreTrainedConfig, w: dict[str, Tensor], name: str, x: Tensor, island: torch.dtype) -> Tensor:
    """Computes LayerNorm, or RMSNorm where the configuration names its epsilon, over the last dimension."""
    if hasattr(c, "rms_norm_eps"):
        y = x.to(island)  # the hosts normalise in float32 whatever the dtype of the model
        y = y * torch.rsqrt((y**2).mean(-1, keepdim=True) + c.rms_norm_eps)
        return y.to(x.dtype) * w[f"{name}.weight"]
    eps = c.layer_norm_epsilon if c.model_type == "gpt2" else c.layer_norm_eps
    centred = x - x.mean(-1, keepdim=True)
    y = centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + eps)
    return y * w[f"{name}.weight"] + w[f"{name}.bias"]


def heads(x: Tensor, count: int) -> Tensor:
    """Splits (B, T, count · width) into (B, count, T, width)."""
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def rope(x_BHTK: Tensor, config: PreTrainedConfig, island: torch.dtype) -> Tensor:
    """Rotates the pairs (i, i + R/2) of the first R dimensions by position · θ^(-2i/R); the rest passes."""
    parameters = config.rope_parameters
    R = int(x_BHTK.shape[-1] * parameters.get("partial_rotary_factor", 1.0))
    # The hosts keep frequencies and angles in float32 whatever the dtype of the model.
    frequency = 1.0 / parameters["rope_theta"] ** (torch.arange(0, R, 2, dtype=island) / R)
    angle = torch.arange(x_BHTK.shape[-2], dtype=island)[:, None] * frequency
    cos, sin = angle.cos().to(x_BHTK.dtype), angle.sin().to(x_BHTK.dtype)
    a, b, rest = x_BHTK[..., : R // 2], x_BHTK[..., R // 2 : R], x_BHTK[..., R:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


def attention(q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, island: torch.dtype) -> Tensor:
    """Computes softmax(QKᵀ/√K + causal mask) V, each key/value head serving H/G query heads."""
    H, T, K = q_BHTK.shape[1:]
    k_BHSK = k_BGSK.repeat_interleave(H // k_BGSK.shape[1], dim=1)
    v_BHSK = v_BGSK.repeat_interleave(H // v_BGSK.shape[1], dim=1)
    scores_BHTS = q_BHTK @ k_BHSK.transpose(-1, -2) / math.sqrt(K)
    future_TS = torch.ones(T, T, dtype=torch.bool).triu(1)
    scores_BHTS = scores_BHTS.masked_fill(future_TS, float("-inf"))
    # Most hosts take the softmax in float32 whatever the dtype of the model.
    weights_BHTS = torch.softmax(scores_BHTS.to(island), dim=-1).to(v_BHSK.dtype)
    return (weights_BHTS @ v_BHSK).transpose(1, 2).flatten(-2)


def pre_projected(new: dict[str, Tensor], x_BTD: Tensor) -> Tensor:
    """Computes x̃ = x̂ + W_down · SiLU(W_up · x̂)."""
    return x_BTD + silu(x_BTD @ new["up"].T) @ new["down"].T if "up" in new else x_BTD


def skipped(new: dict[str, Tensor], xt_BTD: Tensor) -> Tensor | float:
    """Computes W_skip · x̃, what content skip adds to the output of the attention branch."""
    return xt_BTD @ new["skip"].T if "skip" in new else 0.0


def llama_block(c: PreTrainedConfig, w: dict, new: dict, x_BTD: Tensor, island: torch.dtype) -> Tensor:
    """Computes one block of llama, mistral, qwen2 (biases on q, k, v) or qwen3 (norms on q, k)."""
    xt_BTD = pre_projected(new, norm(c, w, "input_layernorm", x_BTD, island))
    q_BHTK = heads(linear(w, "self_attn.q_proj", xt_BTD), c.num_attention_heads)
    k_BGSK = heads(linear(w, "self_attn.k_proj", xt_BTD), c.num_key_value_heads)
    v_BGSK = heads(linear(w, "self_attn.v_proj", xt_BTD), c.num_key_value_heads)
    if c.model_type == "qwen3":
        q_BHTK = norm(c, w, "self_attn.q_norm", q_BHTK, island)
        k_BGSK = norm(c, w, "self_attn.k_norm", k_BGSK, island)
    mixed = attention(rope(q_BHTK, c, island), rope(k_BGSK, c, island), v_BGSK, island)
    x_BTD = x_BTD + linear(w, "self_attn.o_proj", mixed) + skipped(new, xt_BTD)
    h_BTD = norm(c, w, "post_attention_layernorm", x_BTD, island)
    m_BTM = silu(linear(w, "mlp.gate_proj", h_BTD)) * linear(w, "mlp.up_proj", h_BTD)
    return x_BTD + linear(w, "mlp.down_proj", m_BTM)


def phi_block(c: PreTrainedConfig, w: dict, new: dict, x_BTD: Tensor, island: torch.dtype) -> Tensor:
    """Computes one block of phi: attention and MLP in parallel behind one shared norm."""
    h_BTD = norm(c, w, "input_layernorm", x_BTD, island)
    xt_BTD = pre_projected(new, h_BTD)
    q_BHTK = heads(linear(w, "self_attn.q_proj", xt_BTD), c.num_attention_heads)
    k_BGSK = heads(linear(w, "self_attn.k_proj", xt_BTD), c.num_key_value_heads)
    v_BGSK = heads(linear(w, "self_attn.v_proj", xt_BTD), c.num_key_value_heads)
    mixed = attention(rope(q_BHTK, c, island), rope(k_BGSK, c, island), v_BGSK, island)
    attn_BTD = linear(w, "self_attn.dense", mixed) + skipped(new, xt_BTD)
    mlp_BTD = linear(w, "mlp.fc2", gelu_new(linear(w, "mlp.fc1", h_BTD)))  # h, not x̃
    return x_BTD + attn_BTD + mlp_BTD


def gpt_neox_block(c: PreTrainedConfig, w: dict, new: dict, x_BTD: Tensor, island: torch.dtype) -> Tensor:
    """Computes one block of gpt_neox: a norm each for attention and MLP, in parallel or in sequence."""
    xt_BTD = pre_projected(new, norm(c, w, "input_layernorm", x_BTD, island))
    # The fused projection runs head by head: q, k, v of head 0, then q, k, v of head 1, ...
    qkv = heads(linear(w, "attention.query_key_value", xt_BTD), c.num_attention_heads)
    q_BHTK, k_BHSK, v_BHSK = qkv.chunk(3, dim=-1)
    mixed = attention(rope(q_BHTK, c, island), rope(k_BHSK, c, island), v_BHSK, island)
    after_BTD = x_BTD + linear(w, "attention.dense", mixed) + skipped(new, xt_BTD)
    mlp_input_BTD = x_BTD if c.use_parallel_residual else after_BTD
    h_BTD = norm(c, w, "post_attention_layernorm", mlp_input_BTD, island)
    return after_BTD + linear(w, "mlp.dense_4h_to_h", gelu(linear(w, "mlp.dense_h_to_4h", h_BTD)))


def gpt2_block(c: PreTrainedConfig, w: dict, new: dict, x_BTD: Tensor, island: torch.dtype) -> Tensor:
    """Computes one block of gpt2, whose softmax alone stays in the dtype of the model."""
    # Conv1D stores its weight (in, out), the transpose of a linear layer's.
    w = {name: tensor.T if tensor.ndim == 2 else tensor for name, tensor in w.items()}
    xt_BTD = pre_projected(new, norm(c, w, "ln_1", x_BTD, island))
    qkv = linear(w, "attn.c_attn", xt_BTD).chunk(3, dim=-1)
    q_BHTK, k_BHSK, v_BHSK = (heads(part, c.num_attention_heads) for part in qkv)
    mixed = attention(q_BHTK, k_BHSK, v_BHSK, x_BTD.dtype)
    x_BTD = x_BTD + linear(w, "attn.c_proj", mixed) + skipped(new, xt_BTD)
    h_BTD = norm(c, w, "ln_2", x_BTD, island)
    return x_BTD + linear(w, "mlp.c_proj", gelu_new(linear(w, "mlp.c_fc", h_BTD)))


# The block, and where the embedding, the layers and the final norm lie.
PARTS = {
    **dict.fromkeys(
        ("llama", "mistral", "qwen2", "qwen3"),
        (llama_block, "model.embed_tokens", "model.layers", "model.norm"),
    ),
    "phi": (phi_block, "model.embed_tokens", "model.layers", "model.final_layernorm"),
    "gpt_neox": (gpt_neox_block, "gpt_neox.embed_in", "gpt_neox.layers", "gpt_neox.final_layer_norm"),
    "gpt2": (gpt2_block, "transformer.wte", "transformer.h", "transformer.ln_f"),
}


def naive_logits(
    model: PreTrainedModel,
    input_ids: Tensor,
    new_weights: list[dict[str, Tensor | None]] | None = None,
    island: torch.dtype = torch.float32,
) -> Tensor:
    """Computes the logits of a host, adapted or not, from its weights alone.

    Host weights enter detached, `new_weights` as they are, so gradients reach the new weights only.

    Args:
        model: An unmodified host; only its state dict and configuration are read.
        input_ids: Token ids, (B, T), without padding and, if the host has a window, no longer than it.
        new_weights: One entry per layer with optional `up` (hidden, D), `down` (D, hidden) and
            `skip` (D, D), in the layout of `Linear.weight`. None leaves the host as it is.
        island: The dtype the hosts switch to inside RMSNorm, rotary angles and softmax whatever the
            dtype of the model. Float64 gives the plain mathematics instead, 1e-6 to 2e-5 away.

    Returns:
        Logits, (B, T, V), in the dtype of the weights.
    """
    c, w = model.config, model.state_dict()
    block, embedding, layers, final_norm = PARTS[c.model_type]
    x_BTD = w[f"{embedding}.weight"][input_ids]
    if c.model_type == "gpt2":
        x_BTD = x_BTD + w["transformer.wpe.weight"][: input_ids.shape[1]]
    for i in range(c.num_hidden_layers):
        prefix = f"{layers}.{i}."
        own = {name.removeprefix(prefix): tensor for name, tensor in w.items() if name.startswith(prefix)}
        given = (new_weights[i] if new_weights else None) or {}
        x_BTD = block(c, own, {name: t for name, t in given.items() if t is not None}, x_BTD, island)
    head = "lm_head" if "lm_head.weight" in w else "embed_out"  # gpt_neox in older versions of the host
    return linear(w, head, norm(c, w, final_norm, x_BTD, island))
