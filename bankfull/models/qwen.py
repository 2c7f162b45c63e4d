"""Qwen 2/2.5 (biases on queries, keys and values) and dense Qwen 3 (norms on queries and keys)."""

from __future__ import annotations

from dataclasses import replace

from bankfull.layers.attention import Attention
from bankfull.layers.build import Build
from bankfull.layers.decoder import Decoder
from bankfull.models.common import TRANSFORMER, attention, head_norms, heads_of, prenorm_decoder, tied_head, windows_of
from bankfull.models.fields import FULL, SLIDING, ConfigFields
from bankfull.models.registry import Config, Family
from bankfull.ranks.splitting import split_transformer

QWEN2 = TRANSFORMER | {"sliding_window": 4096, "max_window_layers": 28}
QWEN3 = QWEN2 | {"head_dim": 128}


def build_qwen(config: Config, build: Build) -> Decoder:
    third = config["model_type"] == "qwen3"
    fields = ConfigFields(config, QWEN3 if third else QWEN2)
    windows = qwen_windows(fields)
    heads = heads_of(fields)
    qkv_bias, out_bias = (fields.flag("attention_bias"),) * 2 if third else (True, False)

    def mixer(layer: int, at: Build) -> Attention:
        norms = head_norms(fields, at, heads) if third else {}
        layer_heads = replace(heads, window=windows[layer])
        return attention(fields, at, layer_heads, qkv_bias=qkv_bias, out_bias=out_bias, **norms)

    return prenorm_decoder(fields, build, heads, mixer)


def qwen_windows(fields: ConfigFields) -> list[int | None]:
    """`sliding_window` applies only with `use_sliding_window`, and then from layer `max_window_layers` on."""
    layers = fields.layers()
    if not fields.flag("use_sliding_window") or fields.size_or_none("sliding_window") is None:
        fields.per_layer("layer_types", (FULL,), [FULL] * layers)
        return [None] * layers
    first = fields.number("max_window_layers")
    return windows_of(fields, [SLIDING if i >= first else FULL for i in range(layers)])


FAMILY = Family(build_qwen, tied_head, split=split_transformer)
