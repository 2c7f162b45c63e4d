"""Mixtures of experts in GGUF files: their metadata, and the Hugging Face names of their tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bankfull.weights.gguf.fields import (
    FULL,
    Config,
    Fields,
    layer_types,
    refuse_window,
    transformer_config,
    window_of,
)

_STACKED = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.w1",
    "ffn_up_exps": "block_sparse_moe.experts.w3",
    "ffn_down_exps": "block_sparse_moe.experts.w2",
}
_GPT_OSS = {
    "ffn_gate_inp": "mlp.router",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks": "self_attn.sinks",
    "attn_sinks.weight": "self_attn.sinks",
}
LAYERS: dict[str, dict[str, str]] = {
    "gpt_oss": _GPT_OSS,
    "mixtral": _MIXTRAL,
    "olmoe": _STACKED,
    "qwen2_moe": _STACKED,
    "qwen3_moe": _STACKED,
}
"""Names beside those of attention, by model type."""


def mixtral(fields: Fields, made: Config) -> Config:
    """A llama file with experts, from the translation of a llama file."""
    return made | {
        "model_type": "mixtral",
        "sliding_window": made.get("sliding_window"),
        "num_local_experts": fields.size("expert_count"),
        "num_experts_per_tok": fields.size("expert_used_count"),
    }


def _experts(model_type: str, renormalize: bool, **more: Any) -> Callable[[Fields, Config], Config]:
    """`renormalize`: whether the weights of the chosen experts are divided by their sum. No key holds it: it belongs to
    the architecture."""

    def translate(fields: Fields, config: Config) -> Config:
        refuse_window(fields)
        base = transformer_config(fields, config)
        inner = fields.size("expert_feed_forward_length", base["intermediate_size"])
        return base | {
            "model_type": model_type,
            "sliding_window": None,
            "layer_types": [FULL] * config["num_hidden_layers"],
            "num_experts": fields.size("expert_count"),
            "num_experts_per_tok": fields.size("expert_used_count"),
            "moe_intermediate_size": inner,
            "norm_topk_prob": renormalize,
            **{key: fields.size(source) for key, source in more.items()},
        }

    return translate


def _gpt_oss(fields: Fields, config: Config) -> Config:
    base = transformer_config(fields, config)
    if base["rope_scaling"] is not None:
        base["rope_scaling"]["truncate"] = False  # belongs to the architecture
    return base | {
        "model_type": "gpt_oss",
        "sliding_window": window_of(fields),
        "layer_types": layer_types(fields, config["num_hidden_layers"], 2),
        "num_local_experts": fields.size("expert_count"),
        "num_experts_per_tok": fields.size("expert_used_count"),
        "intermediate_size": fields.size("expert_feed_forward_length", base["intermediate_size"]),
    }


TRANSLATE: dict[str, Callable[[Fields, Config], Config]] = {
    "gpt-oss": _gpt_oss,
    "olmoe": _experts("olmoe", renormalize=False),
    "qwen2moe": _experts(
        "qwen2_moe", renormalize=False, shared_expert_intermediate_size="expert_shared_feed_forward_length"
    ),
    "qwen3moe": _experts("qwen3_moe", renormalize=True),
}
