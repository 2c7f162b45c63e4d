"""Phi-3, Phi-3.5 and Phi-4-mini: a Llama with fused matrices in the file, and RoPE over a part of each head."""

from __future__ import annotations

from bankfull.layers.attention import Attention
from bankfull.layers.build import Build
from bankfull.layers.decoder import Decoder
from bankfull.layers.linear import Linear, split_linear
from bankfull.layers.mlp import GatedMLP
from bankfull.models.common import TRANSFORMER, heads_of, partial_rope, prenorm_decoder, same_window, tied_head
from bankfull.models.fields import ConfigFields
from bankfull.models.registry import Config, Family
from bankfull.ranks.splitting import Splitting

PHI3 = TRANSFORMER | {"rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0}


def build_phi3(config: Config, build: Build) -> Decoder:
    fields = ConfigFields(config, PHI3)
    for bias in ("attention_bias", "mlp_bias", "lm_head_bias"):
        fields.only(bias, False)
    heads = heads_of(fields, window=same_window(fields))
    hidden, outers = fields.size("hidden_size"), (heads.queries, heads.keys, heads.keys)

    def mixer(layer: int, at: Build) -> Attention:
        q, k, v = split_linear(at.at("qkv_proj"), hidden, outers, int8_when_batched=(True, True, False))
        return Attention(at, heads, q, k, v, Linear(at.at("o_proj"), heads.queries, hidden, int8_when_batched=True))

    return prenorm_decoder(fields, build, heads, mixer, feed=fused_mlp, rope=partial_rope)


def fused_mlp(fields: ConfigFields, build: Build) -> GatedMLP:
    hidden, inner = fields.size("hidden_size"), fields.size("intermediate_size")
    return GatedMLP.read(build, hidden, inner, fields.text("hidden_act"), ("gate_up_proj", "down_proj"))


def _split(s: Splitting) -> None:
    s.heads()
    s.feed_width("intermediate_size")


FAMILY = Family(build_phi3, tied_head, split=_split)
