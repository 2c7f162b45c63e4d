"""GGUF metadata and tensor names of GPT-2, GPT-NeoX, OLMo 2, Granite 3 and GLM-4."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bankfull.weights.gguf.fields import Fields, transformer_config

Config = dict[str, Any]


def _plain(fields: Fields) -> Config:
    return {
        "num_attention_heads": fields.size("attention.head_count"),
        "intermediate_size": fields.size("feed_forward_length"),
    }


def _gpt2(fields: Fields, config: Config) -> Config:
    return _plain(fields) | {
        "model_type": "gpt2",
        "layer_norm_epsilon": fields.number("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
    }


def _gpt_neox(fields: Fields, config: Config) -> Config:
    base = _plain(fields)
    size = max(1, config["hidden_size"] // base["num_attention_heads"])
    rotary = fields.size("rope.dimension_count", size)
    if rotary > size or rotary % 2:
        raise fields.wrong("rope.dimension_count", f"of {rotary}, which is odd or over the head size {size}")
    return base | {
        "model_type": "gpt_neox",
        "layer_norm_eps": fields.number("attention.layer_norm_epsilon"),
        "rope_theta": fields.number("rope.freq_base", 10000.0, least=1.0),
        "partial_rotary_factor": rotary / size,
        "use_parallel_residual": fields.flag("use_parallel_residual", True),
        "attention_bias": "blk.0.attn_qkv.bias" in fields.tensors,
        # The converter stores queries, keys and values one after the other.
        "qkv_by_head": False,
        "hidden_act": "gelu",
    }


def _olmo2(fields: Fields, config: Config) -> Config:
    return transformer_config(fields, config) | {"model_type": "olmo2"}


def _granite(fields: Fields, config: Config) -> Config:
    return transformer_config(fields, config) | {
        "model_type": "granite",
        "attention_multiplier": fields.number("attention.scale"),
        "embedding_multiplier": fields.number("embedding_scale"),
        "residual_multiplier": fields.number("residual_scale"),
        "logits_scaling": fields.number("logit_scale"),
    }


def _glm4(fields: Fields, config: Config) -> Config:
    base = transformer_config(fields, config)
    return base | {"model_type": "glm4", "partial_rotary_factor": base.get("partial_rotary_factor", 1.0)}


TRANSLATE: dict[str, Callable[[Fields, Config], Config]] = {
    "gpt2": _gpt2,
    "gptneox": _gpt_neox,
    "olmo2": _olmo2,
    "granite": _granite,
    "glm4": _glm4,
}
_MATRICES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
LAYERS: dict[str, dict[str, str]] = {
    "gpt2": {
        "attn_norm": "ln_1",
        "attn_qkv": "attn.c_attn",
        "attn_output": "attn.c_proj",
        "ffn_norm": "ln_2",
        "ffn_up": "mlp.c_fc",
        "ffn_down": "mlp.c_proj",
    },
    "gpt_neox": {
        "attn_norm": "input_layernorm",
        "attn_qkv": "attention.query_key_value",
        "attn_output": "attention.dense",
        "ffn_norm": "post_attention_layernorm",
        "ffn_up": "mlp.dense_h_to_4h",
        "ffn_down": "mlp.dense_4h_to_h",
    },
    "olmo2": _MATRICES
    | {
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    "glm4": _MATRICES
    | {
        "attn_norm": "input_layernorm",
        "post_attention_norm": "post_self_attn_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "ffn_up": "mlp.gate_up_proj",
        "post_ffw_norm": "post_mlp_layernorm",
    },
}
OUTER: dict[str, dict[str, str]] = {
    "gpt2": {
        "token_embd": "transformer.wte",
        "position_embd": "transformer.wpe",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
    },
    "gpt_neox": {
        "token_embd": "gpt_neox.embed_in",
        "output_norm": "gpt_neox.final_layer_norm",
        "output": "embed_out",
    },
}
PREFIX = {"gpt2": "transformer.h", "gpt_neox": "gpt_neox.layers"}
"""Architecture -> prefix of its layers."""
INTERLEAVED = ("granite",)
