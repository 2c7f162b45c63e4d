"""SmolLM3: a Llama in which some layers have no RoPE."""

from __future__ import annotations

from dataclasses import replace

from bankfull.layers.attention import Attention
from bankfull.layers.build import Build
from bankfull.layers.decoder import Decoder
from bankfull.models.common import TRANSFORMER, attention, heads_of, prenorm_decoder, tied_head, windows_of
from bankfull.models.fields import FULL, SLIDING, ConfigFields
from bankfull.models.registry import Config, Family
from bankfull.ranks.splitting import split_transformer

SMOLLM3 = TRANSFORMER | {"rope_theta": 2000000.0, "tie_word_embeddings": True, "no_rope_layer_interval": 4}


def build_smollm3(config: Config, build: Build) -> Decoder:
    fields = ConfigFields(config, SMOLLM3)
    layers, interval = range(fields.layers()), fields.size("no_rope_layer_interval")
    # 1 is a layer with RoPE, although the field's name suggests the opposite.
    rotated = fields.per_layer("no_rope_layers", (0, 1), [int((i + 1) % interval != 0) for i in layers])
    sliding = fields.flag("use_sliding_window") and fields.size_or_none("sliding_window") is not None
    windows = windows_of(fields, [SLIDING if sliding and not rotates else FULL for rotates in rotated])
    if not sliding:
        fields.per_layer("layer_types", (FULL,), [FULL] * len(layers))
    heads, bias = heads_of(fields), fields.flag("attention_bias")

    def mixer(layer: int, at: Build) -> Attention:
        rope = "global" if rotated[layer] else None
        layer_heads = replace(heads, window=windows[layer])
        return attention(fields, at, layer_heads, qkv_bias=bias, out_bias=bias, rope=rope)

    return prenorm_decoder(fields, build, heads, mixer)


FAMILY = Family(build_smollm3, tied_head, split=split_transformer)
