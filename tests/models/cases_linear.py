"""Tiny models with linear attention and delta nets, beside layers with softmax attention."""

from __future__ import annotations

from typing import Any

from tests.models.shapes import Case, model

EXPERTS: dict[str, Any] = {"num_local_experts": 5, "num_experts_per_tok": 2}
LINEAR, FULL = "linear_attention", "full_attention"
DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 7,
    "head_dim": 16,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 19,
    "shared_expert_intermediate_size": 23,
}
CASES: dict[str, Case] = {
    "minimax": model("MiniMax", **EXPERTS, layer_types=[LINEAR, FULL, LINEAR], block_size=16),
    "minimax-factors": model(
        "MiniMax",
        **EXPERTS,
        head_dim=10,
        sliding_window=9,
        block_size=7,
        full_attn_alpha_factor=3.5,
        full_attn_beta_factor=0.5,
        linear_attn_alpha_factor=1.7,
        mlp_alpha_factor=2.5,
        mlp_beta_factor=1.5,
        tie_word_embeddings=True,
    ),
    "qwen3-next": model("Qwen3Next", **DELTA, full_attention_interval=2),
    "qwen3-next-mixed": model(
        "Qwen3Next",
        **{**DELTA, "linear_num_key_heads": 3, "linear_num_value_heads": 3},
        linear_conv_kernel_dim=3,
        layer_types=[FULL, LINEAR, FULL],
        mlp_only_layers=[1],
        norm_topk_prob=False,
        attention_bias=True,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
        tie_word_embeddings=True,
    ),
}
