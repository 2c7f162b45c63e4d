"""Tiny models of every family, in shapes that tell mistakes apart: odd sizes, windows shorter than the text, stretched
contexts, and no weight at its usual starting value."""

from __future__ import annotations

from typing import Any

import transformers as tf

from tests.models import cases_classic, cases_experts, cases_latent, cases_linear, cases_recurrent, cases_shared
from tests.models.shapes import LENGTH, SIZES, WHOLE_BLOCKS, Case, model, rope

__all__ = ["BLOCKED", "CASES", "FAMILIES", "LENGTH", "SIZES", "Case", "model", "rope"]

LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
LONG = rope(
    "longrope",
    long_factor=[3.0, 5.5, 9.0],
    short_factor=[1.0, 1.25, 1.5],
    partial_rotary_factor=0.75,
    original_max_position_embeddings=16,
)
GEMMA = {"head_dim": 12, "query_pre_attn_scalar": 20, "sliding_window": 6}
GEMMA3 = {
    **GEMMA,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}
PHI3 = {"original_max_position_embeddings": 16}
OPT: dict[str, Any] = {"ffn_dim": 41, "num_attention_heads": 4}
MAMBA: dict[str, Any] = {
    "vocab_size": 53,
    "hidden_size": 40,
    "num_hidden_layers": 2,
    "state_size": 5,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def gemma3(tied: bool) -> Case:
    def make() -> Any:
        vision = {
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        }
        text = {**SIZES, **GEMMA3, "tie_word_embeddings": tied}
        config = tf.Gemma3Config(
            text_config=text,
            vision_config=vision,
            mm_tokens_per_image=1,
            image_token_index=52,
            tie_word_embeddings=tied,
        )
        return tf.Gemma3ForConditionalGeneration(config)

    return make


def mamba(**settings: Any) -> Case:
    return lambda: tf.MambaForCausalLM(tf.MambaConfig(**{**MAMBA, **settings}))


CASES: dict[str, Case] = {
    "llama": model("Llama", head_dim=10),
    "llama-tied-biased": model(
        "Llama", num_key_value_heads=6, tie_word_embeddings=True, attention_bias=True, mlp_bias=True
    ),
    "llama-one-key-head": model("Llama", num_key_value_heads=1, hidden_act="gelu"),
    "llama-linear": model("Llama", rope_parameters=rope("linear", factor=3.0)),
    "llama-llama3": model("Llama", rope_parameters=LLAMA3),
    "llama-yarn": model(
        "Llama", head_dim=16, rope_parameters=rope("yarn", factor=4.0, original_max_position_embeddings=16)
    ),
    "llama-yarn-tuned": model(
        "Llama",
        head_dim=16,
        rope_parameters=rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=16,
            beta_fast=2.0,
            beta_slow=0.5,
            attention_factor=1.7,
            truncate=False,
        ),
    ),
    "llama-yarn-mscale": model(
        "Llama",
        head_dim=16,
        rope_parameters=rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=16,
            mscale=2.0,
            mscale_all_dim=0.7,
        ),
    ),
    "mistral": model("Mistral", sliding_window=7),
    "mistral-open": model("Mistral", sliding_window=None, num_key_value_heads=3),
    "smollm3": model("SmolLM3", num_hidden_layers=4, no_rope_layers=[1, 0, 1, 0]),
    "smollm3-window": model(
        "SmolLM3", num_hidden_layers=4, use_sliding_window=True, sliding_window=5, tie_word_embeddings=False
    ),
    "qwen2": model("Qwen2"),
    "qwen2-window": model(
        "Qwen2", use_sliding_window=True, sliding_window=9, max_window_layers=1, tie_word_embeddings=True
    ),
    "qwen3": model("Qwen3", head_dim=10, tie_word_embeddings=True),
    "qwen3-window": model(
        "Qwen3",
        head_dim=10,
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "gemma2": model("Gemma2", **GEMMA, attn_logit_softcapping=4.0, final_logit_softcapping=9.0),
    "gemma2-uncapped": model(
        "Gemma2",
        **GEMMA,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        attention_bias=True,
        tie_word_embeddings=False,
    ),
    "gemma3-text": model("Gemma3Text", **GEMMA3),
    "gemma3-text-capped": model("Gemma3Text", **GEMMA, final_logit_softcapping=9.0, tie_word_embeddings=False),
    "gemma3": gemma3(tied=True),
    "gemma3-untied": gemma3(tied=False),
    "phi3": model("Phi3", **PHI3, sliding_window=11),
    "phi3-long": model("Phi3", **PHI3, rope_parameters=LONG, tie_word_embeddings=True),
    "opt": model("OPT", **OPT),
    "opt-350m": model("OPT", **OPT, do_layer_norm_before=False, word_embed_proj_dim=30),
    "opt-projected": model("OPT", **OPT, word_embed_proj_dim=30, tie_word_embeddings=False, activation_function="gelu"),
    "opt-old": model("OPT", **OPT, _remove_final_layer_norm=True),
    "opt-bare": model("OPT", **OPT, enable_bias=False, layer_norm_elementwise_affine=False),
    "mamba": mamba(),
    "mamba-odd": mamba(
        expand=3,
        conv_kernel=3,
        time_step_rank=7,
        use_bias=True,
        use_conv_bias=False,
        tie_word_embeddings=False,
        residual_in_fp32=False,
    ),
    **cases_classic.CASES,
    **cases_experts.CASES,
    **cases_latent.CASES,
    **cases_linear.CASES,
    **cases_recurrent.CASES,
    **cases_shared.CASES,
}

FAMILIES = (
    "llama",
    "mistral",
    "smollm3",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3-text",
    "gemma3",
    "phi3-long",
    "opt",
    "mamba",
    "mamba2",
    "jamba",
    "granitemoehybrid",
    "falcon-h1",
    "gpt2",
    "gpt-neox",
    "olmo2",
    "granite",
    "glm4",
    "hunyuan-shared",
    "qwen2-moe",
    *cases_latent.FAMILIES,
    "minimax-factors",
    "qwen3-next-mixed",
)
"""One case of each kind, for tests that try many things with it."""

BLOCKED: dict[str, Case] = {
    "llama-blocks": model("Llama", **WHOLE_BLOCKS),
    "gemma2-blocks": model("Gemma2", **{**GEMMA, **WHOLE_BLOCKS, "head_dim": 16}),
    "phi3-blocks": model("Phi3", **PHI3, **WHOLE_BLOCKS),
    "mamba-blocks": mamba(hidden_size=64, time_step_rank=32),
    **cases_experts.BLOCKED,
}
"""Rows that are whole numbers of quantization blocks."""
