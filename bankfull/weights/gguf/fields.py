"""Typed access to GGUF metadata, and the part of the translation that transformer architectures share."""

from __future__ import annotations

import math
import struct
from typing import Any

from bankfull.errors import ModelError
from bankfull.weights.gguf.file import Container

Config = dict[str, Any]
FULL, SLIDING = "full_attention", "sliding_attention"
MAX_SIZE = 1 << 31


class Fields:
    """Typed access to the metadata of one architecture; keys are given without their `<architecture>.` prefix."""

    def __init__(self, container: Container, architecture: str) -> None:
        self.name = container.path.name
        self.tensors = container.tensors
        self.architecture = architecture
        self._metadata = container.metadata

    def has(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self._metadata

    def raw(self, key: str) -> Any:
        return self._metadata[f"{self.architecture}.{key}"]

    def wrong(self, key: str, problem: str) -> ModelError:
        return ModelError(f"{self.name} has '{self.architecture}.{key}' {problem}: it is damaged or not supported")

    def lacking(self, key: str) -> ModelError:
        return ModelError(f"{self.name} lacks the metadata key '{self.architecture}.{key}': convert the model again")

    def size(self, key: str, default: int | None = None, least: int = 1) -> int:
        """A count or length. Some writers store one value per layer: accepted if all are equal."""
        if not self.has(key):
            if default is None:
                raise self.lacking(key)
            return default
        value = self.raw(key)
        if isinstance(value, list):
            if not value or any(item != value[0] for item in value):
                raise self.wrong(key, "with different values for different layers")
            value = value[0]
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < MAX_SIZE:
            raise self.wrong(key, f"that is not a whole number from {least} to {MAX_SIZE - 1}")
        return value

    def number(self, key: str, default: float | None = None, least: float = 0.0) -> float:
        if not self.has(key):
            if default is None:
                raise self.lacking(key)
            return default
        value = self.raw(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value < math.inf:
            raise self.wrong(key, f"that is not a number from {least:g} up")
        single = self._metadata.is_float32(f"{self.architecture}.{key}")
        return shortest_float32(float(value)) if single else float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.raw(key) if self.has(key) else default
        if not isinstance(value, bool):
            raise self.wrong(key, "that is neither true nor false")
        return value

    def text(self, key: str, default: str) -> str:
        value = self.raw(key) if self.has(key) else default
        if not isinstance(value, str):
            raise self.wrong(key, "that is not text")
        return value

    def vector(self, tensor: str, length: int) -> list[float]:
        info = self.tensors[tensor]
        if info.shape != (length,):
            raise ModelError(f"{self.name} has '{tensor}' of shape {info.shape} instead of ({length},): it is damaged")
        values: list[float] = info.load().dequantize().tolist()
        if not all(math.isfinite(value) and value > 0 for value in values):
            raise ModelError(f"{self.name} has numbers in '{tensor}' that are not positive and finite: it is damaged")
        return values


def shortest_float32(value: float) -> float:
    """The shortest decimal that rounds to this float32, as its author wrote it: 1e-05, not 9.999999747378752e-06."""
    bits = struct.pack("<f", value)
    for digits in range(1, 9):
        candidate = float(f"{value:.{digits}g}")
        if abs(candidate) < 3.4e38 and struct.pack("<f", candidate) == bits:
            return candidate
    return value


def transformer_config(fields: Fields, config: Config, theta: float | None = 10000.0) -> Config:
    heads = fields.size("attention.head_count")
    kv_heads = fields.size("attention.head_count_kv", heads)
    head_dim = fields.size("attention.key_length", max(1, config["hidden_size"] // heads))
    if heads % kv_heads:
        raise fields.wrong("attention.head_count_kv", f"of {kv_heads}, which does not divide the {heads} heads")
    if fields.size("attention.value_length", head_dim) != head_dim:
        raise fields.wrong("attention.value_length", f"that differs from the key length {head_dim}")
    rotary = fields.size("rope.dimension_count", head_dim)
    if rotary > head_dim or rotary % 2:
        raise fields.wrong("rope.dimension_count", f"of {rotary}, which is odd or over the head size {head_dim}")
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": fields.size("feed_forward_length"),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": fields.number("rope.freq_base", theta, least=1.0),
        "rope_scaling": _rope_scaling(fields, rotary, config["max_position_embeddings"]),
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in fields.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in fields.tensors,
    } | ({} if rotary == head_dim else {"partial_rotary_factor": rotary / head_dim})


def _rope_scaling(fields: Fields, rotary: int, context: int) -> Config | None:
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 1.0)) or 1.0
    kind = fields.text("rope.scaling.type", "linear")
    original = fields.size("rope.scaling.original_context_length", context)
    if "rope_factors_long.weight" in fields.tensors and "rope_factors_short.weight" in fields.tensors:
        scaling: Config = {
            "rope_type": "longrope",
            "long_factor": fields.vector("rope_factors_long.weight", rotary // 2),
            "short_factor": fields.vector("rope_factors_short.weight", rotary // 2),
            "original_max_position_embeddings": original,
            "factor": context / original,
        }
        if fields.has("rope.scaling.attn_factor"):
            scaling["attention_factor"] = fields.number("rope.scaling.attn_factor")
        return scaling
    if fields.number("rope.scaling.attn_factor", 1.0) != 1.0:
        raise fields.wrong("rope.scaling.attn_factor", "without the factors that it belongs to")
    if kind == "yarn":
        return _yarn(fields, factor, original)
    if kind not in ("linear", "none"):
        raise fields.wrong("rope.scaling.type", f"'{kind}' without the tensors or rules that it needs")
    factor = factor if kind == "linear" else 1.0
    if "rope_freqs.weight" in fields.tensors:
        divisors = fields.vector("rope_freqs.weight", rotary // 2)
        return {"rope_type": "factors", "factors": [divisor * factor for divisor in divisors]}
    return None if factor == 1.0 else {"rope_type": "linear", "factor": factor}


def _yarn(fields: Fields, factor: float, original: int) -> Config:
    if "rope_freqs.weight" in fields.tensors:
        raise fields.wrong("rope.scaling.type", "'yarn' beside a tensor of frequency factors")
    for key, only in (("yarn_ext_factor", 1.0), ("yarn_log_multiplier", 0.0)):
        if fields.number(f"rope.scaling.{key}", only, least=-math.inf) != only:
            raise fields.wrong(f"rope.scaling.{key}", f"other than {only:g}")
    scaling: Config = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    for name, key in (("beta_fast",) * 2, ("beta_slow",) * 2, ("attention_factor", "attn_factor")):
        if fields.has(f"rope.scaling.yarn_{key}"):
            scaling[name] = fields.number(f"rope.scaling.yarn_{key}")
    return scaling


def window_of(fields: Fields) -> int | None:
    return fields.size("attention.sliding_window", 0, least=0) or None


def refuse_window(fields: Fields) -> None:
    if window_of(fields) is not None:
        raise fields.wrong("attention.sliding_window", "without naming its layers")


def layer_types(fields: Fields, layers: int, default_period: int) -> list[str]:
    """A period of p means p - 1 sliding layers followed by a full one; some files list a boolean per layer."""
    key = "attention.sliding_window_pattern"
    if fields.has(key) and isinstance(pattern := fields.raw(key), list):
        if len(pattern) != layers or not all(isinstance(item, bool) for item in pattern):
            raise fields.wrong(key, f"that is not one boolean for each of {layers} layers")
        return [SLIDING if item else FULL for item in pattern]
    period = fields.size(key, default_period)
    return [FULL if (layer + 1) % period == 0 else SLIDING for layer in range(layers)]
