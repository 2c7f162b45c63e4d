"""Translates GGUF metadata to the keys of a Hugging Face config.json, one small function per architecture."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from typing import Any

from bankfull.errors import ModelError
from bankfull.weights.gguf import Container

Config = dict[str, Any]
MAX_SIZE = 1 << 31
FULL, SLIDING = "full_attention", "sliding_attention"


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


def config_from(container: Container) -> Config:
    architecture = container.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in _TRANSLATE:
        known = ", ".join(sorted(_TRANSLATE))
        label = str(architecture)[:80]
        raise ModelError(f"{container.path.name} holds the architecture '{label}', not one of those read: {known}")
    fields = Fields(container, architecture)
    if fields.size("expert_count", 0, least=0):
        raise ModelError(f"{fields.name} is a mixture of experts, which is not supported for '{architecture}' files")
    embedding = container.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{fields.name} has no matrix 'token_embd.weight': it is not a whole language model")
    config = _common(fields, *embedding.shape)
    config |= _TRANSLATE[architecture](fields, config)
    return config | _token_ids(container.metadata, fields.name)


def _common(fields: Fields, vocabulary: int, hidden: int) -> Config:
    layers = fields.size("block_count")
    # Every layer has tensors, so this also bounds all per-layer lists by the file size.
    if layers > len(fields.tensors):
        raise fields.wrong("block_count", f"of {layers}, more than its {len(fields.tensors)} tensors can fill")
    if fields.size("embedding_length") != hidden:
        raise fields.wrong("embedding_length", f"that is not the width {hidden} of its embedding")
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "max_position_embeddings": fields.size("context_length"),
        "tie_word_embeddings": "output.weight" not in fields.tensors,
    }


def _token_ids(metadata: Mapping[str, Any], name: str) -> Config:
    keys = (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    return {f"{field}_token_id": _token_id(metadata, key, name) for field, key in keys}


def _token_id(metadata: Mapping[str, Any], key: str, name: str) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{key}_token_id")
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < MAX_SIZE):
        raise ModelError(f"{name} has a 'tokenizer.ggml.{key}_token_id' that is not a token id: it is damaged")
    return value


def generation_from(container: Container) -> Config:
    """All tokens that end an answer, as in generation_config.json: end of text, of a turn, of a message."""
    ids = (_token_id(container.metadata, key, container.path.name) for key in ("eos", "eot", "eom"))
    ends = list(dict.fromkeys(token for token in ids if token is not None))
    return {"eos_token_id": ends} if ends else {}


def _transformer(fields: Fields, config: Config, theta: float | None = 10000.0) -> Config:
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


def _layer_types(fields: Fields, layers: int, default_period: int) -> list[str]:
    """A period of p means p - 1 sliding layers followed by a full one; some files list a boolean per layer."""
    key = "attention.sliding_window_pattern"
    if fields.has(key) and isinstance(pattern := fields.raw(key), list):
        if len(pattern) != layers or not all(isinstance(item, bool) for item in pattern):
            raise fields.wrong(key, f"that is not one boolean for each of {layers} layers")
        return [SLIDING if item else FULL for item in pattern]
    period = fields.size(key, default_period)
    return [FULL if (layer + 1) % period == 0 else SLIDING for layer in range(layers)]


def _window(fields: Fields) -> int | None:
    return fields.size("attention.sliding_window", 0, least=0) or None


def _llama(fields: Fields, config: Config) -> Config:
    window = _window(fields)
    made = _transformer(fields, config) | {"model_type": "llama"}
    # In the Hugging Face naming, a llama with a window is a mistral.
    return made if window is None else made | {"model_type": "mistral", "sliding_window": window}


def _smollm3(fields: Fields, config: Config) -> Config:
    _refuse_window(fields)
    layers = config["num_hidden_layers"]
    return _transformer(fields, config) | {
        "model_type": "smollm3",
        # Not stored in the file: the architecture omits RoPE in every fourth layer.
        "no_rope_layers": [int((layer + 1) % 4 != 0) for layer in range(layers)],
        "no_rope_layer_interval": 4,
        "layer_types": [FULL] * layers,
        "sliding_window": None,
    }


def _qwen(model_type: str) -> Callable[[Fields, Config], Config]:
    def translate(fields: Fields, config: Config) -> Config:
        _refuse_window(fields)
        return _transformer(fields, config) | {
            "model_type": model_type,
            "sliding_window": None,
            "layer_types": [FULL] * config["num_hidden_layers"],
        }

    return translate


def _refuse_window(fields: Fields) -> None:
    if _window(fields) is not None:
        raise fields.wrong("attention.sliding_window", "without naming its layers")


def _gemma(fields: Fields, config: Config, period: int, layers_of_27b: int, theta: float | None) -> Config:
    made = _transformer(fields, config, theta)
    layers, window = config["num_hidden_layers"], _window(fields)
    # No key holds the query scale: it is the head size, except for the 27B models, where it is hidden size over heads.
    scalar: float = made["head_dim"]
    if fields.has("attention.scale"):
        scalar = fields.number("attention.scale", least=1e-6) ** -2
    elif layers == layers_of_27b:
        scalar = config["hidden_size"] // made["num_attention_heads"]
    return made | {
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window": window,
        "layer_types": [FULL] * layers if window is None else _layer_types(fields, layers, period),
        "attn_logit_softcapping": fields.number("attn_logit_softcapping", 0.0) or None,
        "final_logit_softcapping": fields.number("final_logit_softcapping", 0.0) or None,
        # The converter stores 1 + w where the Hugging Face checkpoint stores w.
        "norm_weight_offset": 0.0,
    }


def _gemma2(fields: Fields, config: Config) -> Config:
    return _gemma(fields, config, period=2, layers_of_27b=46, theta=10000.0) | {"model_type": "gemma2"}


def _gemma3(fields: Fields, config: Config) -> Config:
    return _gemma(fields, config, period=6, layers_of_27b=62, theta=None) | {
        "model_type": "gemma3_text",
        "rope_local_base_freq": fields.number("rope.freq_base_swa", 10000.0, least=1.0),
    }


def _phi3(fields: Fields, config: Config) -> Config:
    return _transformer(fields, config) | {
        "model_type": "phi3",
        "sliding_window": _window(fields),
        "original_max_position_embeddings": fields.size(
            "rope.scaling.original_context_length", config["max_position_embeddings"]
        ),
    }


def _mamba(fields: Fields, config: Config) -> Config:
    if fields.has("ssm.dt_b_c_rms") and fields.raw("ssm.dt_b_c_rms"):
        raise ModelError(f"{fields.name} is a Falcon Mamba, whose normalised steps are not read: use a plain Mamba")
    inner = fields.size("ssm.inner_size")
    return {
        "model_type": "mamba",
        "intermediate_size": inner,
        "expand": inner / config["hidden_size"],
        "state_size": fields.size("ssm.state_size"),
        "conv_kernel": fields.size("ssm.conv_kernel"),
        "time_step_rank": fields.size("ssm.time_step_rank"),
        "layer_norm_epsilon": fields.number("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "use_bias": "blk.0.ssm_in.bias" in fields.tensors,
        "use_conv_bias": "blk.0.ssm_conv1d.bias" in fields.tensors,
    }


_TRANSLATE: dict[str, Callable[[Fields, Config], Config]] = {
    "llama": _llama,
    "smollm3": _smollm3,
    "qwen2": _qwen("qwen2"),
    "qwen3": _qwen("qwen3"),
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "mamba": _mamba,
}
