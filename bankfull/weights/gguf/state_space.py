"""GGUF metadata and tensor names of Mamba-2, Falcon-H1, Granite 4 hybrid and Jamba."""

from __future__ import annotations

from collections.abc import Callable

from bankfull.errors import ModelError
from bankfull.weights.gguf.fields import Config, Fields, transformer_config


def _heads(fields: Fields) -> tuple[int, int]:
    """The number of heads, which files call the rank of the time steps, and the channels of a head."""
    heads, inner = fields.size("ssm.time_step_rank"), fields.size("ssm.inner_size")
    if inner % heads:
        raise fields.wrong("ssm.inner_size", f"of {inner}, which {heads} heads cannot share")
    return heads, inner // heads


def _mamba2(fields: Fields, config: Config) -> Config:
    heads, size = _heads(fields)
    groups = fields.size("ssm.group_count")
    return {
        "model_type": "mamba2",
        "num_heads": heads,
        "head_dim": size,
        "expand": heads * size / config["hidden_size"],
        "n_groups": groups,
        # Files are made for a norm of each group, as in the paper's code.
        "norm_groups": groups,
        "state_size": fields.size("ssm.state_size"),
        "conv_kernel": fields.size("ssm.conv_kernel"),
        "layer_norm_epsilon": fields.number("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "use_bias": "blk.0.ssm_in.bias" in fields.tensors,
        "use_conv_bias": "blk.0.ssm_conv1d.bias" in fields.tensors,
    }


def _falcon_h1(fields: Fields, config: Config) -> Config:
    """The converter multiplies the weights by all of the model's multipliers."""
    heads, size = _heads(fields)
    if "blk.0.ssm_in.bias" in fields.tensors:
        raise ModelError(f"{fields.name} has biases in its Mamba projections, which are not read for Falcon-H1")
    return transformer_config(fields, config) | {
        "model_type": "falcon_h1",
        "mamba_d_ssm": heads * size,
        "mamba_n_heads": heads,
        "mamba_d_head": size,
        "mamba_n_groups": fields.size("ssm.group_count"),
        "mamba_d_state": fields.size("ssm.state_size"),
        "mamba_d_conv": fields.size("ssm.conv_kernel"),
        "mamba_conv_bias": "blk.0.ssm_conv1d.bias" in fields.tensors,
        "mamba_rms_norm": "blk.0.ssm_norm.weight" in fields.tensors,
        "mamba_norm_before_gate": False,
        "projectors_bias": "blk.0.ssm_out.bias" in fields.tensors,
    }


def _mixed(fields: Fields, config: Config) -> tuple[Config, list[bool]]:
    """The sizes of a hybrid's attention, and which layers have it: the others have 0 key heads."""
    key, layers = "attention.head_count_kv", config["num_hidden_layers"]
    counts = fields.raw(key) if fields.has(key) else None
    if not isinstance(counts, list) or len(counts) != layers or not all(isinstance(n, int) for n in counts):
        raise fields.wrong(key, f"that is not one number for each of {layers} layers")
    heads, used = fields.size("attention.head_count"), {n for n in counts if n}
    if len(used) > 1 or any(n < 0 or heads % n for n in used):
        raise fields.wrong(key, f"that {heads} heads cannot share, or that differs between layers")
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": next(iter(used), heads),
        "head_dim": fields.size("attention.key_length", max(1, config["hidden_size"] // heads)),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
    }, [n > 0 for n in counts]


def _granite_hybrid(fields: Fields, config: Config) -> Config:
    heads, size = _heads(fields)
    base, attends = _mixed(fields, config)
    width = fields.size("feed_forward_length")
    experts = fields.size("expert_count", 0, least=0)
    return base | {
        "model_type": "granitemoehybrid",
        "layer_types": ["full_attention" if attention else "linear_attention" for attention in attends],
        "position_embedding_type": "rope" if fields.flag("rope.scaling.finetuned", False) else None,
        "rope_theta": fields.number("rope.freq_base", 10000.0, least=1.0),
        "attention_bias": any(name.endswith(".attn_q.bias") for name in fields.tensors),
        "mamba_expand": heads * size // config["hidden_size"],
        "mamba_n_heads": heads,
        "mamba_d_head": size,
        "mamba_n_groups": fields.size("ssm.group_count"),
        "mamba_norm_groups": fields.size("ssm.group_count"),
        "mamba_d_state": fields.size("ssm.state_size"),
        "mamba_d_conv": fields.size("ssm.conv_kernel"),
        "mamba_conv_bias": any(name.endswith(".ssm_conv1d.bias") for name in fields.tensors),
        "mamba_proj_bias": any(name.endswith(".ssm_in.bias") for name in fields.tensors),
        "num_local_experts": experts,
        "num_experts_per_tok": fields.size("expert_used_count", 0, least=0),
        "intermediate_size": fields.size("expert_feed_forward_length", width) if experts else width,
        "shared_intermediate_size": fields.size("expert_shared_feed_forward_length", width),
        "attention_multiplier": fields.number("attention.scale"),
        "embedding_multiplier": fields.number("embedding_scale"),
        "residual_multiplier": fields.number("residual_scale"),
        "logits_scaling": fields.number("logit_scale"),
    }


def _jamba(fields: Fields, config: Config) -> Config:
    base, attends = _mixed(fields, config)
    layers = config["num_hidden_layers"]
    routed = [f"blk.{layer}.ffn_gate_inp.weight" in fields.tensors for layer in range(layers)]
    inner, experts = fields.size("ssm.inner_size"), fields.size("expert_count", 0, least=0)
    return base | {
        "model_type": "jamba",
        **_every(fields, "attn_layer", attends),
        **_every(fields, "expert_layer", routed),
        "intermediate_size": fields.size("feed_forward_length"),
        "mamba_expand": inner // config["hidden_size"],
        "mamba_d_state": fields.size("ssm.state_size"),
        "mamba_d_conv": fields.size("ssm.conv_kernel"),
        "mamba_dt_rank": fields.size("ssm.time_step_rank"),
        "mamba_conv_bias": any(name.endswith(".ssm_conv1d.bias") for name in fields.tensors),
        "mamba_proj_bias": any(name.endswith(".ssm_in.bias") for name in fields.tensors),
        "num_experts": experts or 1,
        "num_experts_per_tok": fields.size("expert_used_count", 1),
    }


def _every(fields: Fields, name: str, chosen: list[bool]) -> Config:
    """The period and the offset of the chosen layers, as a Hugging Face configuration has them."""
    places = [layer for layer, is_chosen in enumerate(chosen) if is_chosen]
    period = places[1] - places[0] if len(places) > 1 else len(chosen) + 1
    offset = places[0] if places else len(chosen)
    if any(is_chosen != (layer % period == offset) for layer, is_chosen in enumerate(chosen)):
        raise ModelError(f"{fields.name} has layers of a kind ({name}) at no regular distance, which is not read")
    return {f"{name}_period": period, f"{name}_offset": offset}


TRANSLATE: dict[str, Callable[[Fields, Config], Config]] = {
    "mamba2": _mamba2,
    "falcon-h1": _falcon_h1,
    "granitehybrid": _granite_hybrid,
    "jamba": _jamba,
}
WITH_EXPERTS = ("granitehybrid", "jamba")
"""Architectures that may have experts."""


def _mixer(at: str) -> dict[str, str]:
    return {
        "ssm_in": f"{at}.in_proj",
        "ssm_conv1d": f"{at}.conv1d",
        "ssm_dt.bias": f"{at}.dt_bias",
        # The file holds -exp(A_log), so it is named A.
        "ssm_a": f"{at}.A",
        "ssm_d": f"{at}.D",
        "ssm_norm": f"{at}.norm",
        "ssm_out": f"{at}.out_proj",
    }


LAYERS: dict[str, dict[str, str]] = {
    "mamba2": {"attn_norm": "norm", **_mixer("mixer")},
    "falcon_h1": {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        **_mixer("mamba"),
        "ffn_norm": "pre_ff_layernorm",
        "ffn_norm.": "pre_ff_layernorm.weight",  # files leave out the suffix of this one
        "ffn_gate": "feed_forward.gate_proj",
        "ffn_up": "feed_forward.up_proj",
        "ffn_down": "feed_forward.down_proj",
    },
}
_HYBRID = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
LAYERS |= {
    "granitemoehybrid": {
        **_HYBRID,
        **_mixer("mamba"),
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate_inp": "block_sparse_moe.router.layer",
        "ffn_gate_exps": "block_sparse_moe.experts.gate_proj",
        "ffn_up_exps": "block_sparse_moe.experts.up_proj",
        "ffn_down_exps": "block_sparse_moe.output_linear",
        # The converter splits the first matrix of the shared layer.
        **{f"ffn_{part}{kind}": f"shared_mlp.{part}_proj" for part in ("gate", "up") for kind in ("", "_shexp")},
        **{f"ffn_down{kind}": "shared_mlp.output_linear" for kind in ("", "_shexp")},
    },
    "jamba": {
        **_HYBRID,
        "ssm_in": "mamba.in_proj",
        "ssm_conv1d": "mamba.conv1d",
        "ssm_x": "mamba.x_proj",
        "ssm_dt": "mamba.dt_proj",
        "ssm_a": "mamba.A",
        "ssm_d": "mamba.D",
        "ssm_out": "mamba.out_proj",
        "ssm_dt_norm": "mamba.dt_layernorm",
        "ssm_b_norm": "mamba.b_layernorm",
        "ssm_c_norm": "mamba.c_layernorm",
        "ffn_norm": "pre_ff_layernorm",
        "ffn_gate_inp": "feed_forward.router",
        **{f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
        **{f"ffn_{part}_exps": f"feed_forward.experts.{part}_proj" for part in ("gate", "up", "down")},
    },
}
OUTER: dict[str, dict[str, str]] = {
    "mamba2": {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head"},
} | {
    kind: {"token_embd": "model.embed_tokens", "output_norm": "model.final_layernorm", "output": "lm_head"}
    for kind in ("falcon_h1", "jamba")
}
PREFIX = {"mamba2": "backbone.layers"}
"""Architecture -> prefix of its layers."""
CONVOLVED = ("mamba", *LAYERS)
"""Architectures whose convolution has lost a dimension in the file."""
INTERLEAVED = ("granitemoehybrid",)
WITH_HEADS = ("mamba2", "falcon_h1", "granitemoehybrid")
"""Architectures with Mamba-2's heads."""
FLATTENED = (".mixer.A", ".mixer.D", ".mixer.norm.weight", ".mamba.A", ".mamba.D", ".mamba.norm.weight")
"""Ends of the names of Mamba-2's vectors, which files store with two dimensions."""
