"""Tiny DeepSeek models: latents of odd sizes, direct and low-rank queries, YaRN with mscale, every routing rule."""

from __future__ import annotations

from typing import Any

from tests.models.shapes import Case, model, rope

SIZES: dict[str, Any] = {
    "moe_intermediate_size": 20,
    "num_key_value_heads": 6,
    "kv_lora_rank": 20,
    "q_lora_rank": 14,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
}
EVEN = rope("yarn", factor=4.0, original_max_position_embeddings=16, mscale=0.7, mscale_all_dim=0.7)
"""As published, and the only kind that a GGUF file can hold."""
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=16, mscale=0.9, mscale_all_dim=0.7)


def deepseek(version: int, **settings: Any) -> Case:
    return model(f"DeepseekV{version}", **{**SIZES, **settings})


CASES: dict[str, Case] = {
    "deepseek-v2": deepseek(2, topk_method="group_limited_greedy", n_group=4, topk_group=2, routed_scaling_factor=1.7),
    "deepseek-v2-lite": deepseek(2, q_lora_rank=None, rope_parameters=YARN, n_shared_experts=1),
    "deepseek-v2-dense": deepseek(2, first_k_dense_replace=3, attention_bias=True, mlp_bias=True),
    "deepseek-v3": deepseek(3, n_group=3, topk_group=2, rope_parameters=EVEN, n_shared_experts=2),
    "deepseek-v3-halves": deepseek(
        3, q_lora_rank=None, n_group=1, topk_group=1, norm_topk_prob=False, rope_interleave=False, attention_bias=True
    ),
}
FAMILIES = ("deepseek-v2", "deepseek-v3")

WRONG: list[tuple[str, dict[str, Any]]] = [
    ("deepseek-v2-lite", {"rope_scaling": {**YARN, "mscale_all_dim": 0.9}}),
    ("deepseek-v2-lite", {"routed_scaling_factor": 1.1}),
    ("deepseek-v2", {"topk_group": 1}),
    ("deepseek-v2", {"topk_method": "greedy"}),
    ("deepseek-v3", {"rope_interleave": False}),
    ("deepseek-v3", {"norm_topk_prob": False}),
    ("deepseek-v3", {"topk_group": 3}),
]
"""Configurations that must give other logits."""
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("deepseek-v2", {"norm_topk_prob": True}, "norm_topk_prob = True"),
    ("deepseek-v2", {"topk_method": "noaux_tc"}, "topk_method = 'noaux_tc'"),
    ("deepseek-v2", {"n_group": 5}, "12 experts into 5 groups"),
    ("deepseek-v2", {"moe_layer_freq": 2}, "moe_layer_freq = 2"),
    ("deepseek-v2", {"num_key_value_heads": 3}, "num_key_value_heads = 3"),
    ("deepseek-v3", {"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
    ("deepseek-v3", {"num_experts_per_tok": 13}, "13 experts per token, but only 12 experts"),
    ("deepseek-v3", {"topk_group": 9}, "keeps 9 of them"),
    ("deepseek-v3", {"num_nextn_predict_layers": 10**9}, "num_nextn_predict_layers = 1e"),
    ("deepseek-v3", {"num_nextn_predict_layers": -1}, "num_nextn_predict_layers = -1"),
    ("deepseek-v3", {"rope_scaling": {**YARN, "mscale_all_dim": "x"}}, "mscale_all_dim = 'x'"),
    ("deepseek-v3", {"rope_scaling": {**YARN, "factor": -1}}, "factor = -1"),
]
"""Configurations that are refused, and a part of the message."""
