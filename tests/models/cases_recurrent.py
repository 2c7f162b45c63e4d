"""State spaces and hybrids, in shapes that tell mistakes apart."""

from __future__ import annotations

from typing import Any

import transformers as tf

from tests.models.shapes import any_width

MAMBA2: dict[str, Any] = {
    "vocab_size": 53,
    "hidden_size": 40,
    "num_hidden_layers": 2,
    "num_heads": 8,
    "head_dim": 10,
    "n_groups": 2,
    "state_size": 6,
    "chunk_size": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("mamba2", {"n_groups": 3}, "8 Mamba heads, which 3 groups cannot share"),
    ("mamba2", {"num_heads": -8}, "num_heads = -8"),
    ("mamba2", {"state_size": 10**12}, "state_size = 1000000000000"),
    ("mamba2", {"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000"),
    ("mamba2", {"time_step_limit": [1.0, 0.5]}, "the second not below the first"),
    ("mamba2", {"time_step_limit": [0.0]}, "time_step_limit = .*a list of two numbers"),
    ("mamba2", {"time_step_limit": [0.0, {"__float__": "NaN"}]}, "a list of two numbers"),
    ("mamba2", {"norm_groups": 7}, "80 Mamba channels, which do not divide into 7 groups"),
    ("mamba2", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    ("mamba2", {"conv_kernel": 5}, "conv1d.weight has shape .*, but the model's configuration needs"),
    ("jamba", {"attn_layer_offset": 3}, "attn_layer_offset = 3, but it must be below attn_layer_period = 3"),
    ("jamba", {"num_experts_per_tok": 9}, "9 experts per token, but only 3 experts"),
    ("jamba", {"mamba_dt_rank": -1}, "mamba_dt_rank = -1"),
    ("granitemoehybrid", {"layer_types": ["mamba", "attention", "delta"]}, "'delta'"),
    ("granitemoehybrid", {"mamba_n_heads": 5}, "96 Mamba channels, which 5 heads of 12 do not make up"),
    ("granitemoehybrid", {"residual_multiplier": 0}, "residual_multiplier = 0.0"),
    ("granitemoehybrid", {"position_embedding_type": "alibi"}, "position_embedding_type = 'alibi'"),
    ("falcon-h1", {"ssm_multipliers": [1.0, 2.0]}, "ssm_multipliers = .*a list of 5 numbers"),
    ("falcon-h1", {"mlp_multipliers": [-1.0, 2.0]}, "a list of 2 numbers from 0 up"),
    ("falcon-h1", {"attention_bias": True}, "attention_bias = True"),
    ("falcon-h1", {"mamba_d_head": 11}, "40 Mamba channels, which 4 heads of 11 do not make up"),
]
"""Name of a case, changes, and the message."""


def mamba2(**settings: Any) -> Any:
    return lambda: tf.Mamba2ForCausalLM(tf.Mamba2Config(**{**MAMBA2, **settings}))


SIZES: dict[str, Any] = {
    "vocab_size": 53,
    "hidden_size": 48,
    "intermediate_size": 41,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
KINDS = ["linear_attention", "full_attention", "linear_attention"]
GRANITE: dict[str, Any] = {
    **SIZES,
    "intermediate_size": 44,
    "mamba_n_heads": 8,
    "mamba_d_state": 6,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 8,
    "layer_types": KINDS,
    "shared_intermediate_size": 20,
    "num_local_experts": 5,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.4,
    "logits_scaling": 1.5,
}
FALCON: dict[str, Any] = {
    **SIZES,
    "mamba_d_ssm": 40,
    "mamba_n_heads": 4,
    "mamba_d_state": 6,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 8,
}


def jamba(**settings: Any) -> Any:
    # transformers' grouped products need whole multiples of 16 bytes
    own = {
        "num_experts": 3,
        "intermediate_size": 44,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "mamba_d_state": 5,
    }
    return lambda: any_width(tf.JambaForCausalLM(tf.JambaConfig(**{**SIZES, **own, **settings})))


def granite(**settings: Any) -> Any:
    return lambda: any_width(tf.GraniteMoeHybridForCausalLM(tf.GraniteMoeHybridConfig(**{**GRANITE, **settings})))


def falcon(**settings: Any) -> Any:
    return lambda: tf.FalconH1ForCausalLM(tf.FalconH1Config(**{**FALCON, **settings}))


CASES: dict[str, Any] = {
    "mamba2": mamba2(),
    "mamba2-odd": mamba2(
        expand=3,
        num_heads=12,
        n_groups=1,
        conv_kernel=3,
        use_bias=True,
        use_conv_bias=False,
        tie_word_embeddings=True,
        residual_in_fp32=False,
        time_step_limit=(0.3, 0.9),
    ),
    "jamba": jamba(),
    "jamba-dense": jamba(
        num_experts=1, mamba_dt_rank=7, mamba_conv_bias=False, mamba_proj_bias=True, tie_word_embeddings=True
    ),
    "granitemoehybrid": granite(),
    "granitemoehybrid-dense": granite(
        num_local_experts=0,
        position_embedding_type="rope",
        attention_bias=True,
        mamba_proj_bias=True,
        mamba_conv_bias=False,
        time_step_limit=(0.2, 0.8),
        tie_word_embeddings=True,
    ),
    "falcon-h1": falcon(
        embedding_multiplier=2.0,
        lm_head_multiplier=0.7,
        key_multiplier=0.6,
        attention_in_multiplier=1.3,
        attention_out_multiplier=0.8,
        ssm_in_multiplier=1.2,
        ssm_out_multiplier=0.9,
        ssm_multipliers=[0.5, 0.8, 1.2, 0.9, 1.4],
        mlp_multipliers=[0.7, 1.3],
        mamba_rms_norm=True,
    ),
    "falcon-h1-plain": falcon(
        mamba_rms_norm=True, mamba_norm_before_gate=False, projectors_bias=True, mamba_conv_bias=False
    ),
    "granitemoehybrid-one-group": granite(mamba_n_groups=1),
    "granitemoehybrid-turned": granite(mamba_n_groups=1, num_local_experts=0, position_embedding_type="rope"),
    "mamba2-one-group": mamba2(n_groups=1),
    "falcon-h1-unscaled": falcon(mamba_rms_norm=True, mamba_norm_before_gate=False),
    "falcon-h1-gated": falcon(tie_word_embeddings=True, mamba_d_ssm=None, mamba_n_heads=6, mamba_n_groups=1),
}
