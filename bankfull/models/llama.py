"""Llama 2/3/3.x, models of the same structure (SmolLM2), and Mistral: a Llama with an optional sliding window."""

from __future__ import annotations

from bankfull.layers.attention import Attention
from bankfull.layers.build import Build
from bankfull.layers.decoder import Decoder
from bankfull.models.common import TRANSFORMER, attention, heads_of, prenorm_decoder, same_window, tied_head
from bankfull.models.fields import ConfigFields
from bankfull.models.registry import Config, Family
from bankfull.ranks.splitting import split_transformer

MISTRAL = TRANSFORMER | {"sliding_window": 4096}


def build_llama(config: Config, build: Build) -> Decoder:
    mistral = config["model_type"] == "mistral"
    fields = ConfigFields(config, MISTRAL if mistral else TRANSFORMER)
    if not mistral:
        fields.only("sliding_window")
    heads, bias = heads_of(fields, window=same_window(fields)), fields.flag("attention_bias")

    def mixer(layer: int, at: Build) -> Attention:
        return attention(fields, at, heads, qkv_bias=bias, out_bias=bias)

    return prenorm_decoder(fields, build, heads, mixer)


FAMILY = Family(build_llama, tied_head, split=split_transformer)
