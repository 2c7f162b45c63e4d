"""Qwen3-Next in GGUF files: its metadata, and the Hugging Face names of its tensors.

The converter stores norms with their offset of 1, decays as -exp(A_log), and, in newer files, the convolution's input
and the gate as two matrices with the rows of all heads in order.
"""

from __future__ import annotations

from collections.abc import Callable

from bankfull.weights.gguf.experts import LAYERS as EXPERT_LAYERS
from bankfull.weights.gguf.experts import TRANSLATE as EXPERT_TRANSLATE
from bankfull.weights.gguf.fields import FULL, Config, Fields

LINEAR = "linear_attention"
LAYERS: dict[str, dict[str, str]] = {
    "qwen3_next": EXPERT_LAYERS["qwen2_moe"]
    | {
        "post_attention_norm": "post_attention_layernorm",
        "attn_qkv": "linear_attn.in_proj_qkv",
        "attn_gate": "linear_attn.in_proj_z",
        "ssm_in": "linear_attn.in_proj_qkvz",
        "ssm_ba": "linear_attn.in_proj_ba",
        "ssm_conv1d": "linear_attn.conv1d",
        "ssm_dt": "linear_attn.dt_proj",
        "ssm_a": "linear_attn.A",
        "ssm_norm": "linear_attn.norm",
        "ssm_out": "linear_attn.out_proj",
    }
}
"""Names beside those of attention, by model type."""


def _qwen3_next(fields: Fields, config: Config) -> Config:
    base = EXPERT_TRANSLATE["qwen3moe"](fields, config)
    heads, inner = fields.size("ssm.time_step_rank"), fields.size("ssm.inner_size")
    if inner % heads:
        raise fields.wrong("ssm.inner_size", f"of {inner}, which {heads} heads cannot divide")
    period, layers = fields.size("full_attention_interval", 4), range(config["num_hidden_layers"])
    return base | {
        "model_type": "qwen3_next",
        "layer_types": [LINEAR if (layer + 1) % period else FULL for layer in layers],
        "linear_conv_kernel_dim": fields.size("ssm.conv_kernel"),
        "linear_key_head_dim": fields.size("ssm.state_size"),
        "linear_num_key_heads": fields.size("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": inner // heads,
        "shared_expert_intermediate_size": fields.size(
            "expert_shared_feed_forward_length", base["moe_intermediate_size"]
        ),
        "partial_rotary_factor": base.get("partial_rotary_factor", 1.0),
        "norm_weight_offset": 0.0,
    }


TRANSLATE: dict[str, Callable[[Fields, Config], Config]] = {"qwen3next": _qwen3_next}
