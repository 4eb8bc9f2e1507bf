"""Tiny random models of every type that transformers can build, from one set of small numbers."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

# Passed to every configuration, and every one inside it, that knows the name.
SMALL: dict[str, Any] = {
    "hidden_size": 32, "d_model": 32, "n_embd": 32, "n_embed": 32, "dim": 32, "dim_model": 32, "emb_dim": 32,
    "embedding_size": 32, "word_embed_proj_dim": 32, "decoder_hidden_size": 32,
    "intermediate_size": 48, "ffn_dim": 48, "decoder_ffn_dim": 48, "encoder_ffn_dim": 48, "n_inner": 48,
    "d_ff": 48, "dff": 48, "d_inner": 48, "dim_ff": 48, "ffn_hidden_size": 48, "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48, "block_ff_dim": 48, "intermediate_size_mlp": 48,
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "encoder_layers": 2,
    "decoder_layers": 2, "num_encoder_layers": 2, "num_decoder_layers": 2,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "attention_head_size": 8, "dim_head": 8, "kv_channels": 8,
    "d_head": 8, "global_head_dim": 8, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8, "v_head_dim": 8, "qk_head_dim": 16,
    "vocab_size": 64, "vocab_size_per_layer_input": 64, "max_position_embeddings": 64, "n_positions": 64,
    "n_ctx": 64, "max_seq_len": 64,
    "state_size": 8, "ssm_state_size": 8, "mamba_d_state": 8, "mamba_d_ssm": 32, "chunk_size": 16,
    "mamba_chunk_size": 16, "mamba_num_heads": 8, "mamba_head_dim": 8, "mamba_d_head": 8, "mamba_n_heads": 4,
    "n_groups": 2,
    "hidden_size_global": 32, "moe_topk": 2, "moe_shared_expert_intermediate_size": 48,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_k": 2, "n_group": 1, "topk_group": 1,
    "sliding_window": 32, "attention_dropout": 0.0, "hidden_dropout": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    "attn_pdrop": 0.0, "dropout": 0.0, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    "activation_dropout": 0.0, "resid_dropout": 0.0, "embed_dropout": 0.0,
    "residual_dropout": 0.0, "dropout_rate": 0.0, "layerdrop": 0.0,
    "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip

# For models of images besides; where a type has one of them for each stage, each stage gets it.
IMAGE: dict[str, Any] = {
    "image_size": 32, "patch_size": 8, "embed_dim": 32, "depths": 2, "depth": 2, "drop_path_rate": 0.0,
    "layer_scale_init_value": 0.5,
}  # fmt: skip

# What a type needs besides.
SWIN = {"patch_size": 4, "window_size": 4, "depths": [2, 2], "num_heads": [2, 4]}
QWEN = {
    "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}  # fmt: skip
QWEN4 = QWEN | {
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 4,
    "indexer_compress_ratio": 2, "hc_lowrank": 8, "ple_embed_dim": 32, "ngram_vocab_size_base": 100,
}  # fmt: skip
GEMMA3N = {
    "num_hidden_layers": 4, "num_kv_shared_layers": 0, "intermediate_size": [48] * 4, "laurel_rank": 8,
    "hidden_size_per_layer_input": 8, "activation_sparsity_pattern": [0.0] * 4,
}  # fmt: skip
DOTS3 = {"layer_types": ["indexed_attention", "sliding_attention"], "index_head_dim": 16, "index_n_heads": 2,
         "index_topk": 4}  # fmt: skip
BESIDES: dict[str, dict[str, Any]] = {
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "axk1": {"first_k_dense_replace": 1},
    "bailing_hybrid": {"num_hidden_layers": 6, "linear_head_dim": 8, "linear_num_heads": 4, "num_expert_group": 1},
    "bamba": {"mamba_n_heads": 4, "mamba_d_head": 16, "num_hidden_layers": 3, "attn_layer_indices": [1]},
    "bart": {"activation_dropout": 0.0},
    "donut-swin": SWIN,
    "maskformer-swin": SWIN,
    "swin": SWIN,
    "swinv2": SWIN,
    "convnext": {"patch_size": 4},
    "convnextv2": {"patch_size": 4},
    "levit": {"drop_path_rate": 0},
    "cvt": {"depth": [1, 2, 3]},
    "mobilevitv2": {"patch_size": 1},
    "musicflamingo": {"audio_config": {"model_type": "audioflamingo3_encoder"}},
    "nemo_speechlm": {"head_config": {"audio_hidden_size": 32}},
    "vitpose_backbone": {"part_features": 8},
    "shieldgemma2": {"yes_token_index": 5, "no_token_index": 6},
    "esmc": {"num_key_value_heads": 4},
    "lw_detr_vit": {"num_windows": 4},
    "codegen": {"rotary_dim": 4},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0, "kv_n_heads": 2}},
    "dots1": {"n_shared_experts": 1},
    "dots3_note": {"text_config": DOTS3},
    "dots3_note_text": DOTS3,
    "gemma3n": {"text_config": GEMMA3N},
    "gemma3n_text": GEMMA3N,
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0}},
    "encoder-decoder": {"decoder": {"is_decoder": True, "add_cross_attention": True}},
    "gptj": {"rotary_dim": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granite": {"residual_multiplier": 0.3},
    "granite_swa": {"residual_multiplier": 0.3},
    "granitemoe": {"residual_multiplier": 0.3},
    "granitemoehybrid": {"mamba_n_heads": 4, "mamba_d_head": 16, "num_hidden_layers": 3, "residual_multiplier": 0.3,
                         "layer_types": ["mamba", "attention", "mamba"]},
    "granitemoe_swa": {"residual_multiplier": 0.3},
    "granitemoeshared": {"residual_multiplier": 0.3},
    "jamba": {"num_hidden_layers": 4, "attn_layer_offset": 1, "attn_layer_period": 2},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"], "linear_head_dim": 8,
                    "linear_num_heads": 4},
    "lfm3": {"num_hidden_layers": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"expert_ffn_hidden_size": 48, "zero_expert_num": 2, "head_dim": 8},
    "luke": {"entity_vocab_size": 16, "entity_emb_size": 8},
    "mamba2": {"num_heads": 8},
    "minimax": {"full_attn_alpha_factor": 0.7, "full_attn_beta_factor": 1.3,
                "layer_types": ["linear_attention", "full_attention"]},
    "mpt": {"attn_config": {"attn_pdrop": 0}},
    "perceiver": {"num_latents": 8, "d_latents": 32, "num_self_attends_per_block": 2},
    "qwen3_5": {"text_config": QWEN},
    "qwen3_5_moe": {"text_config": QWEN},
    "qwen3_5_moe_text": QWEN,
    "qwen3_5_text": QWEN,
    "qwen3_next": QWEN,
    "qwen4_exp": {"text_config": QWEN4},
    "qwen4_exp_text": QWEN4,
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local", "lsh"], "feed_forward_size": 48},
    "xmod": {"default_language": "en_XX"},
    "xlstm": {"num_heads": 2, "qk_dim_factor": 1.0},
    "zamba": {"num_hidden_layers": 4, "layer_types": ["mamba", "hybrid", "mamba", "hybrid"]},
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2,
               "n_mamba_heads": 4, "adapter_rank": 8},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


def tiny_config(model_type: str, small: dict[str, Any] = SMALL, **besides: Any) -> PreTrainedConfig:
    """Builds a small configuration of a type, with the sub-configurations it has."""
    cls = CONFIG_MAPPING[model_type]
    return cls(**_values(cls, small, BESIDES.get(model_type, {}) | besides))


def _values(cls: type[PreTrainedConfig], small: dict[str, Any], besides: dict[str, Any]) -> dict[str, Any]:
    known = cls()
    compressed = hasattr(known, "qk_rope_head_dim")  # one latent serves all heads, whose width is the sum of two
    aliases = {*cls.attribute_map, *(["head_dim"] if compressed else [])}
    values = {
        name: _for_each_stage(value, vars(known)[name])
        for name, value in small.items()
        if name not in aliases and _settable(known, name)
    }
    if compressed and "num_key_value_heads" in values:
        values["num_key_value_heads"] = values["num_attention_heads"]
    for name in cls.sub_configs:
        inner = getattr(known, name, None)
        if isinstance(inner, PreTrainedConfig):
            values[name] = _values(type(inner), small, besides.get(name, {}))
    return {**values, **{name: value for name, value in besides.items() if name not in cls.sub_configs}}


def _for_each_stage(value: Any, default: Any) -> Any:
    return [value] * len(default) if isinstance(default, list | tuple) else value


def _settable(config: PreTrainedConfig, name: str) -> bool:
    """Whether a configuration has a value of that name that is not computed from others."""
    if isinstance(getattr(type(config), name, None), property):
        return False
    return name in vars(config)


def tiny_of(
    model_type: str,
    dtype: torch.dtype = torch.float64,
    auto: Any = AutoModelForCausalLM,
    small: dict[str, Any] | None = None,
    **besides: Any,
) -> PreTrainedModel:
    """Builds a tiny random model of a type, in eval mode and with eager attention; the random state is left alone."""
    config = tiny_config(model_type, small or SMALL | {"is_decoder": auto is AutoModelForCausalLM}, **besides)
    config.architectures = config.architectures or []  # else types with several classes cannot be built
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = auto.from_config(config, attn_implementation="eager", experts_implementation="eager")
    return model.to(dtype).eval()
