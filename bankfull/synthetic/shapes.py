"""Configurations of real models by name, and how to shrink a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from bankfull.errors import ConfigError
from bankfull.weights.hf_config import normalize_config, read_json
from bankfull.weights.known_shapes import known_shape, shape_names

Config = dict[str, Any]

TINY: dict[str, int] = {
    "vocab_size": 512,
    "embedding_size": 512,
    "hidden_size": 64,
    "word_embed_proj_dim": 64,
    "n_embd": 64,
    "d_model": 64,
    "intermediate_size": 96,
    "ffn_dim": 96,
    "mlp_hidden_size": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "max_sequence_length": 1024,
    "n_positions": 1024,
    "sliding_window": 64,
    "query_pre_attn_scalar": 16,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "state_size": 16,
    "time_step_rank": 8,
    "num_heads": 8,
    "mamba_d_ssm": 128,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_dt_rank": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rotary_dim": 8,
}
"""Largest value of each size in a tiny model. Fields with the same meaning in several families have one entry, so a new
family needs an entry only for a name of its own. Products that must agree do: 4 heads of 16 are the hidden size of 64,
8 recurrent heads of 16 are its double."""
HEADS = {"num_attention_heads": "num_key_value_heads", "n_head": None, "n_heads": "n_kv_heads"}
"""Fields for query heads, and for the KV heads that they share."""
TINY_HEADS = 4
LAYERS = ("num_hidden_layers", "n_layer", "n_layers")
PERIODS = ("attn_layer_period", "expert_layer_period", "full_attention_interval", "sliding_window_pattern")
"""Fields that give the length of a repeated pattern of layers."""
FEWEST_LAYERS = 2
TINY_SUFFIX = "-tiny"
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "eod_token_id")


def shape_config(shape: str) -> Config:
    """The normalized configuration of a named shape, or of a config.json or model directory. A name with "-tiny" behind
    it is the tiny model of the same architecture."""
    if (named := known_shape(shape)) is not None:
        return named
    if (named := known_shape(shape.removesuffix(TINY_SUFFIX))) is not None:
        return tiny(named)
    path = Path(shape).expanduser()
    try:
        path = path / "config.json" if path.is_dir() else path
        if path.is_file():
            return normalize_config(read_json(path))
    except OSError as error:
        raise ConfigError(f"The shape {shape[:80]!r} is not a usable path: {error.strerror or error}.") from None
    known = shape_names()
    near = get_close_matches(shape.lower(), known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else "give the path of a config.json, or one of: " + ", ".join(known)
    raise ConfigError(f"There is no shape {shape[:80]!r}: {hint}{'' if near else '.'}")


def with_layers(config: Mapping[str, Any], layers: int) -> Config:
    """The first `layers` layers of the model; lists with one value per layer are cut, too."""
    field = next((name for name in LAYERS if isinstance(config.get(name), int)), None)
    if field is None:
        raise ConfigError("The configuration has no number of layers that --layers could change; leave it out.")
    before = config[field]
    if not 1 <= layers <= before:
        raise ConfigError(f"--layers {layers} must be from 1 to {before}, the layers of the model.")
    shortened = {name: _first(value, layers, before) for name, value in config.items()}
    shortened[field] = layers
    if isinstance(dense := shortened.get("first_k_dense_replace"), int):
        shortened["first_k_dense_replace"] = min(dense, layers)
    return shortened


def _first(value: Any, layers: int, before: int) -> Any:
    return value[:layers] if isinstance(value, list) and len(value) == before else value


def tiny(config: Mapping[str, Any]) -> Config:
    """The same architecture with sizes that a test can run: every kind of layer at least once."""
    shrunk = dict(config)
    for name, most in TINY.items():
        if isinstance(value := shrunk.get(name), int):
            shrunk[name] = min(value, most)
    for query, shared in HEADS.items():
        if isinstance(heads := config.get(query), int):
            shrunk[query] = min(heads, TINY_HEADS)
            if shared is not None and isinstance(kv := config.get(shared), int) and kv > 0:
                shrunk[shared] = max(1, shrunk[query] * kv // heads)
    if isinstance(mask := shrunk.get("mask_token_id"), int) and mask >= shrunk["vocab_size"]:
        shrunk["mask_token_id"] = shrunk["vocab_size"] - SPECIALS_AFTER_MASK
    if isinstance(scaling := shrunk.get("rope_scaling"), dict) and "original_max_position_embeddings" in scaling:
        shrunk["rope_scaling"] = {**scaling, "original_max_position_embeddings": TINY["max_position_embeddings"] // 4}
    count = next((shrunk[name] for name in LAYERS if isinstance(shrunk.get(name), int)), 0)
    return with_layers(shrunk, min(count, _layers_of_every_kind(config, count))) if count else shrunk


SPECIALS_AFTER_MASK = 4
"""A tiny vocabulary has its mask token before the three special tokens at its end."""


def _layers_of_every_kind(config: Mapping[str, Any], layers: int) -> int:
    """The number of first layers that contain each kind of layer of the model."""
    needed = max(FEWEST_LAYERS, *(value for name in PERIODS if isinstance(value := config.get(name), int)), 0)
    dense = config.get("first_k_dense_replace")
    if isinstance(dense, int) and dense:
        needed = max(needed, TINY["first_k_dense_replace"] + 1)
    for value in config.values():
        if isinstance(value, list) and len(value) == layers:
            needed = max(needed, *(value.index(kind) + 1 for kind in value))
    return needed
