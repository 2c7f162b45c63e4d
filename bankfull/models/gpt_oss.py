"""gpt-oss: experts with biases and a clamped gate, a sink logit per head, and windows in every other layer."""

from __future__ import annotations

from dataclasses import replace

from bankfull.axes import HEADS
from bankfull.layers.attention import Attention
from bankfull.layers.build import Build
from bankfull.layers.decoder import Decoder
from bankfull.layers.experts import CLAMPED_SWIGLU, ExpertNames, Experts, ExpertsShape, RoutingRule
from bankfull.models.common import TRANSFORMER, attention, heads_of, prenorm_decoder, tied_head, windows_of
from bankfull.models.fields import FULL, SLIDING, ConfigFields
from bankfull.models.registry import Config, Family
from bankfull.ops.experts.body import SWIGLU_LIMIT, SWIGLU_SLOPE
from bankfull.ranks.splitting import split_experts
from bankfull.spread.experts import mixture

GPT_OSS = TRANSFORMER | {
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "head_dim": 64,
    "sliding_window": 128,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "attention_bias": True,
}
NAMES = ExpertNames(router="router")


def build_gpt_oss(config: Config, build: Build) -> Decoder:
    fields = ConfigFields(config, GPT_OSS)
    fields.only("swiglu_limit", SWIGLU_LIMIT)
    fields.only("swiglu_alpha", SWIGLU_SLOPE)
    fields.only("hidden_act", "silu")
    layers, heads, bias = fields.layers(), heads_of(fields), fields.flag("attention_bias")
    windows = windows_of(fields, [FULL if layer % 2 else SLIDING for layer in range(layers)])
    per_token = fields.size_or_none("experts_per_token") or fields.size("num_experts_per_tok")
    rule = RoutingRule(fields.size("num_local_experts"), per_token, renormalize=True)
    shape = ExpertsShape(
        fields.size("hidden_size"), fields.size("intermediate_size"), rule, CLAMPED_SWIGLU, router_bias=True, bias=True
    )

    def mixer(layer: int, at: Build) -> Attention:
        sinks = at.tensor("sinks", (HEADS(heads.count),))
        layer_heads = replace(heads, window=windows[layer])
        return attention(fields, at, layer_heads, qkv_bias=bias, out_bias=bias, sinks=sinks)

    def feed_of(layer: int, at: Build) -> Experts:
        return mixture(at.at("mlp"), shape, NAMES)

    return prenorm_decoder(fields, build, heads, mixer, feed_of=feed_of)


FAMILY = Family(build_gpt_oss, tied_head, split=split_experts)
