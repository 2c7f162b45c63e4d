"""Sizes and files that do not suit a model, refused in one sentence each."""

from __future__ import annotations

from bankfull.decode.strategy import Strategy
from bankfull.errors import ConfigError
from bankfull.layers.decoder import Decoder
from bankfull.state.mask import Mask
from bankfull.weights.source import ModelFiles


def refuse_other_size(model: Decoder, strategy: Strategy) -> None:
    if strategy.own is not None and strategy.own.model.vocab != model.vocab:
        raise ConfigError(
            f"The draft model has {strategy.own.model.vocab} token ids and the model {model.vocab}; choose a draft "
            "model with the same vocabulary."
        )


def refuse_other_format(files: ModelFiles, wanted: str | None) -> None:
    """`wanted`: the method that the checkpoint must be quantized with, or gguf."""
    method = "gguf" if files.kind == "gguf" else (files.quantization or "none").split(",")[0]
    if wanted is not None and method != wanted:
        instead = f"is quantized with {method}" if method != "none" else "is not quantized"
        raise ConfigError(
            f"{str(files.path.name)[:80]!r} {instead}, not with {wanted}: leave quantization out, since the format "
            "of a checkpoint is detected, or choose another checkpoint."
        )


def refuse_short_context(max_len: int, strategy: Strategy) -> None:
    if strategy.own is not None and strategy.own.model.max_positions < max_len:
        context = strategy.own.model.max_positions
        raise ConfigError(
            f"The draft model's context of {context} tokens is shorter than the {max_len} tokens of the longest "
            f"sequence; set max_model_len to at most {context}, or choose another draft model."
        )


def refuse_eviction_without_use(evict: Mask | None, longest: int) -> None:
    """`longest`: tokens of the longest sequence."""
    if evict is not None and evict.global_tokens + evict.window >= longest:
        raise ConfigError(
            f"kv_evict='sinks:{evict.global_tokens},window:{evict.window}' keeps {evict.global_tokens + evict.window} "
            f"tokens, and a sequence has at most {longest}: nothing would be evicted; give a smaller window."
        )
