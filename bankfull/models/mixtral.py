"""Mixtral: a Mistral whose feed-forward layers are mixtures of experts."""

from __future__ import annotations

from bankfull.layers.attention import Attention
from bankfull.layers.build import Build
from bankfull.layers.decoder import Decoder
from bankfull.layers.experts import MIXTRAL_NAMES, Experts, ExpertsShape, RoutingRule
from bankfull.models.common import TRANSFORMER, attention, heads_of, prenorm_decoder, same_window, tied_head
from bankfull.models.fields import ConfigFields
from bankfull.models.registry import Config, Family
from bankfull.ranks.splitting import split_experts
from bankfull.spread.experts import mixture

MIXTRAL = TRANSFORMER | {
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


def build_mixtral(config: Config, build: Build) -> Decoder:
    fields = ConfigFields(config, MIXTRAL)
    heads = heads_of(fields, window=same_window(fields))
    rule = RoutingRule(fields.size("num_local_experts"), fields.size("num_experts_per_tok"), renormalize=True)
    shape = ExpertsShape(fields.size("hidden_size"), fields.size("intermediate_size"), rule, fields.text("hidden_act"))

    def mixer(layer: int, at: Build) -> Attention:
        return attention(fields, at, heads, qkv_bias=False, out_bias=False)

    def feed_of(layer: int, at: Build) -> Experts:
        return mixture(at.at("block_sparse_moe"), shape, MIXTRAL_NAMES)

    return prenorm_decoder(fields, build, heads, mixer, feed_of=feed_of)


FAMILY = Family(build_mixtral, tied_head, split=split_experts)
