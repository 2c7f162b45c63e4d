"""Metadata of a GGUF file from a Hugging Face configuration: the inverse of `gguf.config`, for some architectures."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bankfull.errors import ConfigError
from bankfull.weights.writing.gguf_header import Field

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "smollm3": "smollm3",
}
"""GGUF architecture by model_type, of models that can be converted."""
WITH_EXPERTS = {"gpt_oss": "gpt-oss", "mixtral": "llama", "olmoe": "olmoe", "qwen3_moe": "qwen3moe"}
"""The same with experts, which a file stacks: for random models only."""
QUANTIZATION_VERSION = 2
FILE_TYPES = {
    "f32": 0,
    "f16": 1,
    "q4_0": 2,
    "q4_1": 3,
    "q8_0": 7,
    "q5_0": 8,
    "q5_1": 9,
    "q2_k": 10,
    "q3_k": 12,
    "q4_k": 15,
    "q5_k": 17,
    "q6_k": 18,
    "bf16": 32,
    "mxfp4": 38,
}
"""Number of the file type in which most matrices have this type."""


def architecture_fields(name: str, config: Mapping[str, Any], kind: str) -> dict[str, Field]:
    """Everything but the tokenizer. `kind`: the type of most matrices."""
    architecture = (ARCHITECTURES | WITH_EXPERTS)[config["model_type"]]
    heads = int(config["num_attention_heads"])
    size = int(config.get("head_dim") or config["hidden_size"] // heads)
    specific: dict[str, Field] = {
        "vocab_size": int(config["vocab_size"]),
        "context_length": int(config.get("max_position_embeddings") or 2048),
        "embedding_length": int(config["hidden_size"]),
        "block_count": int(config["num_hidden_layers"]),
        "feed_forward_length": int(config["intermediate_size"]),
        "attention.head_count": heads,
        "attention.head_count_kv": int(config.get("num_key_value_heads") or heads),
        "attention.key_length": size,
        "attention.value_length": size,
        "attention.layer_norm_rms_epsilon": float(config.get("rms_norm_eps") or 1e-5),
        "rope.dimension_count": _rotary(config, size),
        "rope.freq_base": float(config.get("rope_theta") or 10000.0),
    }
    if config["model_type"] in ("mistral", "gpt_oss") and config.get("sliding_window"):
        specific["attention.sliding_window"] = int(config["sliding_window"])
    experts = config.get("num_experts") or config.get("num_local_experts")
    if experts:
        specific |= {"expert_count": int(experts), "expert_used_count": int(config["num_experts_per_tok"])}
        inner = (
            config["intermediate_size"] if config["model_type"] == "gpt_oss" else config.get("moe_intermediate_size")
        )
        if inner:
            specific["expert_feed_forward_length"] = int(inner)
    general: dict[str, Field] = {
        "general.architecture": architecture,
        "general.name": name,
        "general.file_type": FILE_TYPES.get(kind, FILE_TYPES["f32"]),
        "general.quantization_version": QUANTIZATION_VERSION,
    }
    return general | {f"{architecture}.{key}": value for key, value in specific.items()}


def refuse_inexpressible(config: Mapping[str, Any]) -> None:
    """Refuses what a GGUF file of these architectures cannot say."""
    kind = config.get("model_type")
    if kind not in ARCHITECTURES:
        raise ConfigError(
            f"A GGUF file of the architecture {str(kind)[:40]!r} cannot be written; leave --format gguf out, or use a "
            f"model of {', '.join(ARCHITECTURES)}."
        )
    layers = int(config["num_hidden_layers"])
    windows = config.get("use_sliding_window") or "sliding_attention" in (config.get("layer_types") or ())
    default_ropes = [int((layer + 1) % 4 != 0) for layer in range(layers)]
    wrong = {
        "sliding windows": kind != "mistral" and bool(windows),
        f"the activation {config.get('hidden_act')!r}": config.get("hidden_act", "silu") != "silu",
        "this choice of layers without RoPE": kind == "smollm3"
        and config.get("no_rope_layers", default_ropes) != default_ropes,
        f"RoPE scaling {_scaling(config).get('rope_type')!r}": _scaling(config).get("rope_type", "default")
        not in ("default", *SCALINGS),
    }
    for what, true in wrong.items():
        if true:
            raise ConfigError(
                f"A GGUF file of the architecture {kind!r} has no form for {what}; leave --format gguf out."
            )


SCALINGS = ("linear", "llama3", "yarn", "factors")


def scaling_fields(config: Mapping[str, Any]) -> tuple[dict[str, Field], dict[str, Tensor]]:
    """Metadata and tensors of a scaled RoPE."""
    how, kind = _scaling(config), _scaling(config).get("rope_type", "default")
    stem = f"{ARCHITECTURES[config['model_type']]}.rope.scaling"
    if kind == "linear":
        return {f"{stem}.type": "linear", f"{stem}.factor": float(how["factor"])}, {}
    if kind == "factors":
        return {}, {"rope_freqs.weight": torch.tensor([float(number) for number in how["factors"]])}
    if kind == "llama3":
        return {}, {"rope_freqs.weight": _llama3_factors(config, how)}
    if kind != "yarn":
        return {}, {}
    context = int(config.get("max_position_embeddings") or 2048)
    original = int(how.get("original_max_position_embeddings") or context)
    fields: dict[str, Field] = {
        f"{stem}.type": "yarn",
        f"{stem}.factor": float(how.get("factor") or context / original),
        f"{stem}.original_context_length": original,
    }
    for key, name in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
        if how.get(key) is not None:
            fields[f"{stem}.{name}"] = float(how[key])
    if how.get("attention_factor") is not None:
        fields[f"{stem}.yarn_attn_factor"] = float(how["attention_factor"])
    return fields, {}


def _llama3_factors(config: Mapping[str, Any], how: Mapping[str, Any]) -> Tensor:
    """Divisors of the frequencies: long wavelengths are divided by the factor, short ones kept, others blended."""
    heads = int(config["num_attention_heads"])
    rotary = _rotary(config, int(config.get("head_dim") or config["hidden_size"] // heads))
    theta = float(config.get("rope_theta") or 10000.0)
    frequency = theta ** -(torch.arange(0, rotary, 2, dtype=torch.float64) / rotary)
    low, high, factor = (float(how[key]) for key in ("low_freq_factor", "high_freq_factor", "factor"))
    rounds = float(how["original_max_position_embeddings"]) * frequency / (2 * math.pi)
    blend = ((rounds - low) / (high - low)).clamp(0, 1)
    return (1 / ((1 - blend) / factor + blend)).to(torch.float32)


def _rotary(config: Mapping[str, Any], size: int) -> int:
    return int(size * float(config.get("partial_rotary_factor") or 1.0))


def _scaling(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config.get("rope_scaling") or {}
