"""Granite 3: a Llama with multipliers for the embedding, the attention scores, both branches, and the logits.

The residual stream is kept divided by the branches' multiplier: then branches need none, and norms give the same result
with their epsilon divided by its square. The last norm's weight carries the scale of the logits.
"""

from __future__ import annotations

from typing import Any

from bankfull.errors import ModelError
from bankfull.layers.attention import Attention
from bankfull.layers.build import Build
from bankfull.layers.decoder import Decoder
from bankfull.models.common import TRANSFORMER, attention, heads_of, prenorm_decoder, tied_head
from bankfull.models.fields import ConfigFields
from bankfull.models.registry import Config, Family
from bankfull.ranks.splitting import split_transformer

MULTIPLIERS = {
    "embedding_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}


def build_granite(config: Config, build: Build) -> Decoder:
    fields, scales = multiplied(ConfigFields(config, TRANSFORMER | MULTIPLIERS), config, TRANSFORMER | MULTIPLIERS)
    heads, bias = heads_of(fields, scale=positive(fields, "attention_multiplier")), fields.flag("attention_bias")

    def mixer(layer: int, at: Build) -> Attention:
        return attention(fields, at, heads, qkv_bias=bias, out_bias=bias)

    return prenorm_decoder(fields, build, heads, mixer, **scales)


def multiplied(fields: ConfigFields, config: Config, defaults: Config) -> tuple[ConfigFields, dict[str, Any]]:
    """The fields with the epsilon of a divided residual stream, and the scales as arguments of `common.decoder`."""
    branch = positive(fields, "residual_multiplier")
    eps = fields.number("rms_norm_eps") / branch**2
    scales = {
        "embed_scale": fields.number("embedding_multiplier") / branch,
        "logit_scale": 1.0 / positive(fields, "logits_scaling"),
    }
    return ConfigFields({**config, "rms_norm_eps": eps}, defaults), scales


def positive(fields: ConfigFields, name: str) -> float:
    value = fields.number(name)
    if not 1e-6 <= value <= 1e6:
        raise ModelError(f"The model's configuration has {name} = {value}, but it must be from 1e-6 to 1e6.")
    return value


FAMILY = Family(build_granite, tied_head, split=split_transformer)
