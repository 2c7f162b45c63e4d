"""Jamba: blocks of Mamba with an attention layer now and then, without RoPE, and mixtures of experts in between."""

from __future__ import annotations

import math
from collections.abc import Callable

from bankfull.errors import ModelError
from bankfull.layers.build import Build
from bankfull.layers.decoder import Block, Decoder, Feed
from bankfull.layers.experts import ExpertNames, ExpertsShape, RoutingRule
from bankfull.layers.mixer import Mixer
from bankfull.layers.norm import RMSNorm
from bankfull.layers.ssm import MambaMixer, MambaShape
from bankfull.models.common import TRANSFORMER, attention, decoder, gated_mlp, heads_of, tied_head
from bankfull.models.fields import ConfigFields
from bankfull.models.registry import Config, Family
from bankfull.ranks.splitting import EXPERT_WIDTH, Splitting
from bankfull.spread.experts import mixture

JAMBA = TRANSFORMER | {
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "attn_layer_period": 8,
    "attn_layer_offset": 4,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_dt_rank": "auto",
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "max_position_embeddings": 262144,
}


def build_jamba(config: Config, build: Build) -> Decoder:
    fields = ConfigFields(config, JAMBA)
    fields.only("hidden_act", "silu", "swish")
    fields.only("sliding_window")
    hidden, eps, heads = fields.size("hidden_size"), fields.number("rms_norm_eps"), heads_of(fields)
    automatic = config.get("mamba_dt_rank", "auto") == "auto"
    rank = math.ceil(hidden / 16) if automatic else fields.size("mamba_dt_rank")
    inner = fields.size_or_none("mamba_inner") or fields.size("mamba_expand") * hidden
    shape = MambaShape(hidden, inner, fields.size("mamba_d_state"), rank, fields.size("mamba_d_conv"))
    bias, conv_bias = fields.flag("mamba_proj_bias"), fields.flag("mamba_conv_bias")
    attends, mixes = every(fields, "attn_layer"), every(fields, "expert_layer")
    count = fields.size("num_experts")
    experts = None
    if count > 1:
        rule = RoutingRule(count, fields.size("num_experts_per_tok"))
        width = fields.size_or_none("expert_width") or fields.size("intermediate_size")
        experts = ExpertsShape(hidden, width, rule)

    def mixer(layer: int, at: Build) -> Mixer:
        if attends(layer):
            return attention(fields, at.at("self_attn"), heads, qkv_bias=False, out_bias=False, rope=None)
        return MambaMixer(at.at("mamba"), shape, bias=bias, conv_bias=conv_bias, norm_eps=eps)

    def feed(layer: int, at: Build) -> Feed:
        if experts is not None and mixes(layer):
            return mixture(at, experts, ExpertNames(router="router"))
        return gated_mlp(fields, at)

    def block(layer: int, at: Build) -> Block:
        return Block(
            mixer(layer, at),
            before_mixer=RMSNorm(at.at("input_layernorm"), hidden, eps),
            feed=feed(layer, at.at("feed_forward")),
            before_feed=RMSNorm(at.at("pre_ff_layernorm"), hidden, eps),
        )

    layers = build.at("model").at("layers")
    blocks = [block(layer, layers.at(layer)) for layer in range(fields.layers())]
    return decoder(fields, build, blocks, {}, norm_name="final_layernorm")


def every(fields: ConfigFields, name: str) -> Callable[[int], bool]:
    """Whether a layer is one of those that `name`_period and `name`_offset describe."""
    period, offset = fields.size(f"{name}_period"), fields.number(f"{name}_offset")
    if offset >= period:
        raise ModelError(
            f"The model's configuration has {name}_offset = {offset:g}, but it must be below {name}_period = {period}."
        )
    return lambda layer: layer % period == offset


def _split(s: Splitting) -> None:
    s.heads()
    s.widths()
    if s.spread:  # dense layers and experts have the same width in the file
        s.own[EXPERT_WIDTH] = s.size("intermediate_size")
    s.width("mamba_inner", s.size("mamba_expand", 2) * s.size("hidden_size"))


FAMILY = Family(build_jamba, tied_head, split=_split)
