"""Options that do not suit a model, refused in one sentence each."""

from __future__ import annotations

from bankfull.decode.strategy import Strategy
from bankfull.errors import ConfigError
from bankfull.layers.decoder import Decoder
from bankfull.ranks.mesh import MeshSpec
from bankfull.state.mask import Mask
from bankfull.state.spec import Layout
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


def refuse_eviction_without_use(layout: Layout, evict: Mask | None, longest: int) -> None:
    """`longest`: tokens of the longest sequence."""
    if evict is None:
        return
    asked = f"kv_evict='sinks:{evict.global_tokens},window:{evict.window}'"
    if not any(group.window == evict for group in layout.paged):
        raise ConfigError(f"{asked} has no use here: no layer of this model has full attention; leave it out.")
    if evict.global_tokens + evict.window >= longest:
        raise ConfigError(
            f"{asked} keeps {evict.global_tokens + evict.window} tokens, and a sequence has at most {longest}: nothing "
            "would be evicted; give a smaller window."
        )


def refuse_pages_without_use(layout: Layout, kv_dtype: str) -> None:
    if kv_dtype != "auto" and not layout.paged:
        raise ConfigError(f"kv_dtype={kv_dtype!r} has no use here: this model keeps no keys and values; leave it out.")


def refuse_feed_ranks_without_use(model: Decoder, mesh: MeshSpec) -> None:
    if mesh.ffn and not any(block.feed is not None for block in model.blocks):
        where = "a stage of this model" if mesh.pp > 1 else "this model"
        raise ConfigError(
            f"The layout {mesh} gives feed-forward layers ranks of their own, but {where} has none; leave out ffn."
        )
