"""Tiny models of the classic families: learned positions, parallel residuals, norms after branches, multipliers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers as tf

SIZES: dict[str, Any] = {
    "vocab_size": 53,
    "hidden_size": 48,
    "intermediate_size": 41,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
GPT2: dict[str, Any] = {
    "vocab_size": 53,
    "n_embd": 48,
    "n_layer": 3,
    "n_head": 6,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GRANITE = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.22,
    "logits_scaling": 0.7,
}


def model(kind: str, sizes: dict[str, Any], **settings: Any) -> Callable[[], Any]:
    def make() -> Any:
        config = getattr(tf, f"{kind}Config")(**{**sizes, **settings})
        head = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
        return getattr(tf, f"{kind}{head}")(config)

    return make


CASES: dict[str, Callable[[], Any]] = {
    "gpt2": model("GPT2", GPT2),
    "gpt2-odd": model(
        "GPT2",
        GPT2,
        n_inner=41,
        activation_function="gelu",
        tie_word_embeddings=False,
        scale_attn_by_inverse_layer_idx=True,
        layer_norm_epsilon=1e-3,
    ),
    "gpt-neox": model("GPTNeoX", SIZES, rotary_pct=0.5),
    "gpt-neox-in-turn": model("GPTNeoX", SIZES, use_parallel_residual=False, attention_bias=False, hidden_act="relu"),
    "olmo2": model("Olmo2", GROUPED),
    "olmo2-biased": model("Olmo2", GROUPED, attention_bias=True, tie_word_embeddings=True, num_key_value_heads=6),
    "granite": model("Granite", GROUPED, **GRANITE, tie_word_embeddings=True),
    "granite-biased": model(
        "Granite", GROUPED, **GRANITE, attention_bias=True, mlp_bias=True, tie_word_embeddings=False
    ),
    "glm": model("Glm", GROUPED, head_dim=12, partial_rotary_factor=0.5),
    "glm4": model("Glm4", GROUPED, head_dim=12, attention_bias=False, partial_rotary_factor=0.5),
    "glm4-whole": model("Glm4", GROUPED, head_dim=8, attention_bias=True, partial_rotary_factor=1.0),
}
