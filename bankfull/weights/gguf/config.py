"""Translates GGUF metadata to the keys of a Hugging Face config.json, one small function per architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bankfull.errors import ModelError
from bankfull.weights.gguf import classic, experts, latent, linear, state_space
from bankfull.weights.gguf.fields import (
    FULL,
    MAX_SIZE,
    Config,
    Fields,
    layer_types,
    refuse_window,
    transformer_config,
    window_of,
)
from bankfull.weights.gguf.file import Container


def config_from(container: Container) -> Config:
    architecture = container.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in _TRANSLATE:
        known = ", ".join(sorted(_TRANSLATE))
        label = str(architecture)[:80]
        raise ModelError(f"{container.path.name} holds the architecture '{label}', not one of those read: {known}")
    fields = Fields(container, architecture)
    with_experts = architecture in (
        "llama",
        *experts.TRANSLATE,
        *latent.TRANSLATE,
        *linear.TRANSLATE,
        *state_space.WITH_EXPERTS,
    )
    if fields.size("expert_count", 0, least=0) and not with_experts:
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


def _llama(fields: Fields, config: Config) -> Config:
    window = window_of(fields)
    translated = transformer_config(fields, config) | {"model_type": "llama"}
    # In the Hugging Face naming, a llama with a window is a mistral, and one with experts a mixtral.
    translated = translated if window is None else translated | {"model_type": "mistral", "sliding_window": window}
    return experts.mixtral(fields, translated) if fields.size("expert_count", 0, least=0) else translated


def _smollm3(fields: Fields, config: Config) -> Config:
    refuse_window(fields)
    layers = config["num_hidden_layers"]
    return transformer_config(fields, config) | {
        "model_type": "smollm3",
        # Not stored in the file: the architecture omits RoPE in every fourth layer.
        "no_rope_layers": [int((layer + 1) % 4 != 0) for layer in range(layers)],
        "no_rope_layer_interval": 4,
        "layer_types": [FULL] * layers,
        "sliding_window": None,
    }


def _qwen(model_type: str) -> Callable[[Fields, Config], Config]:
    def translate(fields: Fields, config: Config) -> Config:
        refuse_window(fields)
        return transformer_config(fields, config) | {
            "model_type": model_type,
            "sliding_window": None,
            "layer_types": [FULL] * config["num_hidden_layers"],
        }

    return translate


def _gemma(fields: Fields, config: Config, period: int, layers_of_27b: int, theta: float | None) -> Config:
    base = transformer_config(fields, config, theta)
    layers, window = config["num_hidden_layers"], window_of(fields)
    # No key holds the query scale: it is the head size, except for the 27B models, where it is hidden size over heads.
    scalar: float = base["head_dim"]
    if fields.has("attention.scale"):
        scalar = fields.number("attention.scale", least=1e-6) ** -2
    elif layers == layers_of_27b:
        scalar = config["hidden_size"] // base["num_attention_heads"]
    return base | {
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window": window,
        "layer_types": [FULL] * layers if window is None else layer_types(fields, layers, period),
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
    return transformer_config(fields, config) | {
        "model_type": "phi3",
        "sliding_window": window_of(fields),
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
    **classic.TRANSLATE,
    **experts.TRANSLATE,
    **linear.TRANSLATE,
    **state_space.TRANSLATE,
    **latent.TRANSLATE,
}
