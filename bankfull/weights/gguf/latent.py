"""DeepSeek-V2 and -V3 in GGUF files (`deepseek2`): their metadata, and the Hugging Face names of their tensors.

Files hold the projection from latents to keys and values as one tensor (older ones), or split by heads, with the part
for keys transposed. RoPE rotates adjacent numbers, as in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable

from bankfull.weights.gguf.fields import Config, Fields, refuse_window

SOFTMAX, SIGMOID = 1, 2
"""Values of `expert_gating_func`."""
_NAMES = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
    "ffn_gate_inp": "mlp.gate",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
LAYERS: dict[str, dict[str, str]] = {"deepseek_v2": _NAMES, "deepseek_v3": _NAMES}
"""Names beside those of attention, by model type."""


def _deepseek(fields: Fields, config: Config) -> Config:
    refuse_window(fields)
    heads, rank, rope = (
        fields.size(key) for key in ("attention.head_count", "attention.kv_lora_rank", "rope.dimension_count")
    )
    split = fields.has("attention.key_length_mla")
    key, value = (f"attention.{name}_length" + ("_mla" if split else "") for name in ("key", "value"))
    nope = fields.size(key) - rope
    if nope < 1:
        raise fields.wrong(key, f"that is not over the {rope} numbers of RoPE")
    gating = fields.size("expert_gating_func", SOFTMAX)
    if gating not in (SOFTMAX, SIGMOID):
        raise fields.wrong("expert_gating_func", f"of {gating}, which is neither softmax (1) nor sigmoid (2)")
    third = gating == SIGMOID
    groups = fields.size("expert_group_count", 1)
    return {
        "model_type": "deepseek_v3" if third else "deepseek_v2",
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": fields.size("feed_forward_length"),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "q_lora_rank": fields.size("attention.q_lora_rank", 0, least=0) or None,
        "kv_lora_rank": rank,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": fields.size(value),
        "rope_theta": fields.number("rope.freq_base", 10000.0, least=1.0),
        "rope_scaling": _scaling(fields, config["max_position_embeddings"]),
        "first_k_dense_replace": fields.size("leading_dense_block_count", 0, least=0),
        "n_routed_experts": fields.size("expert_count"),
        "num_experts_per_tok": fields.size("expert_used_count"),
        "n_shared_experts": fields.size("expert_shared_count"),
        "moe_intermediate_size": fields.size("expert_feed_forward_length"),
        "routed_scaling_factor": fields.number("expert_weights_scale", 1.0),
        "norm_topk_prob": fields.flag("expert_weights_norm", third),
        "topk_method": "noaux_tc" if third else "group_limited_greedy" if groups > 1 else "greedy",
        "n_group": groups,
        "topk_group": fields.size("expert_group_used_count", 1),
    }


def _scaling(fields: Fields, context: int) -> Config | None:
    """The file has one multiplier for both mscale values: angles are not scaled, scores by its square."""
    kind = fields.text("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind != "yarn":
        raise fields.wrong("rope.scaling.type", f"'{kind}', which DeepSeek files do not have")
    mscale = fields.number("rope.scaling.yarn_log_multiplier", 0.0) * 10
    scaling: Config = {
        "rope_type": "yarn",
        "factor": fields.number("rope.scaling.factor", 1.0, least=1e-6),
        "original_max_position_embeddings": fields.size("rope.scaling.original_context_length", context),
        "attention_factor": 1.0,
    }
    return scaling | ({"mscale": mscale, "mscale_all_dim": mscale} if mscale else {})


TRANSLATE: dict[str, Callable[[Fields, Config], Config]] = {"deepseek2": _deepseek}
