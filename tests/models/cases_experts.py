"""Tiny mixtures of experts: counts that no vector length divides, and few enough experts that all are chosen."""

from __future__ import annotations

from typing import Any

from tests.models.shapes import WHOLE_BLOCKS, Case, model, rope

EXPERTS: dict[str, Any] = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 19}
CASES: dict[str, Case] = {
    "gpt-oss": model(
        "GptOss",
        num_local_experts=5,
        num_experts_per_tok=2,
        head_dim=8,
        sliding_window=6,
        num_hidden_layers=2,
        rope_parameters=rope(
            "yarn", factor=4.0, beta_fast=32.0, beta_slow=1.0, truncate=False, original_max_position_embeddings=16
        ),
    ),
    "mixtral": model("Mixtral", num_local_experts=5, num_experts_per_tok=3, sliding_window=7, num_hidden_layers=2),
    "olmoe": model("Olmoe", num_experts=7, num_experts_per_tok=3, num_key_value_heads=3),
    "qwen2-moe": model("Qwen2Moe", **EXPERTS, shared_expert_intermediate_size=23),
    "qwen2-moe-mixed": model(
        "Qwen2Moe",
        **EXPERTS,
        shared_expert_intermediate_size=23,
        norm_topk_prob=True,
        num_hidden_layers=4,
        decoder_sparse_step=2,
        mlp_only_layers=[3],
        qkv_bias=False,
    ),
    "qwen3-moe": model("Qwen3Moe", **EXPERTS, norm_topk_prob=True, head_dim=10),
}
BLOCKED: dict[str, Case] = {
    "gpt-oss-blocks": model(
        "GptOss", num_local_experts=3, num_experts_per_tok=2, **WHOLE_BLOCKS, head_dim=16, num_hidden_layers=1
    ),
    "qwen3-moe-blocks": model(
        "Qwen3Moe", **{**EXPERTS, "moe_intermediate_size": 32}, **WHOLE_BLOCKS, norm_topk_prob=True, head_dim=16
    ),
}
"""Rows that are whole numbers of quantization blocks."""
