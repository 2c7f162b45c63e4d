"""Falcon-H1: attention and Mamba-2 side by side in every layer, with a multiplier for almost every product.

Multipliers of the attention's input and keys are part of the scale of its scores and of its result; the last norm's
weight carries that of the logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bankfull.layers.build import Build
from bankfull.layers.decoder import Block, Decoder, Feed
from bankfull.layers.mlp import GatedMLP
from bankfull.layers.norm import RMSNorm
from bankfull.layers.parallel_mixer import ParallelMixer
from bankfull.layers.placement import Role
from bankfull.layers.ssd import GatedNorm, Mamba2Mixer
from bankfull.models.common import TRANSFORMER, attention, decoder, gated_mlp, heads_of, rope_of, tied_head
from bankfull.models.fields import ConfigFields
from bankfull.models.granite import positive
from bankfull.models.mamba2 import OPEN_LIMITS, mamba2_shape
from bankfull.models.registry import Config, Family
from bankfull.ops import scale_columns
from bankfull.ranks.splitting import split_hybrid_mamba2

FALCON_H1 = TRANSFORMER | {
    "rms_norm_eps": 1e-5,
    "mamba_d_ssm": 1024,
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_head": "auto",
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "mamba_norm_before_gate": True,
    "mamba_rms_norm": False,
    "projectors_bias": False,
    "time_step_limit": OPEN_LIMITS,
    "max_position_embeddings": 8192,
    "lm_head_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "key_multiplier": 1.0,
    "attention_in_multiplier": 1.0,
    "attention_out_multiplier": 1.0,
    "ssm_in_multiplier": 1.0,
    "ssm_out_multiplier": 1.0,
    "ssm_multipliers": (1.0,) * 5,
    "mlp_multipliers": (1.0,) * 2,
}


class ScaledMLP:
    """down(f(gate(x) * first) * up(x)) * second"""

    def __init__(self, build: Build, inner: GatedMLP, first: float, second: float) -> None:
        build = build.of(Role.FEED)

        def factors(count: int, factor: float) -> Tensor:
            return torch.full((count,), factor, dtype=build.dtype, device=build.device)

        self.inner, self.down = inner, inner.down
        self.first, self.second = factors(inner.gate.outer, first), factors(inner.down.outer, second)
        self._scale = build.bind(scale_columns)

    def __call__(self, x: Any) -> Tensor:
        inner = self.inner
        hidden = inner.multiply(self._scale(inner.gate(x), self.first), inner.up(x))
        scaled: Tensor = self._scale(inner.down(hidden), self.second)
        return scaled


def build_falcon_h1(config: Config, build: Build) -> Decoder:
    fields = ConfigFields(config, FALCON_H1)
    fields.only("hidden_act", "silu", "swish")
    for unscaled in ("attention_bias", "mlp_bias", "mamba_proj_bias"):
        fields.only(unscaled, False)  # the multipliers would have to skip it
    hidden, eps = fields.size("hidden_size"), fields.number("rms_norm_eps")
    enters, plain = positive(fields, "attention_in_multiplier"), heads_of(fields)
    heads = heads_of(fields, scale=plain.scale * enters**2 * positive(fields, "key_multiplier"))
    branches = enters * fields.number("attention_out_multiplier"), fields.number("ssm_out_multiplier")
    inner = fields.size_or_none("mamba_d_ssm") or fields.size("mamba_expand") * hidden
    shape, limits = mamba2_shape(fields, inner), fields.limits("time_step_limit")
    norm = None
    if fields.flag("mamba_rms_norm"):
        across = bool(fields.raw("norm_across_ranks", False))
        norm = GatedNorm(eps, shape.groups, fields.flag("mamba_norm_before_gate"), across)
    conv_bias, out_bias = fields.flag("mamba_conv_bias"), fields.flag("projectors_bias")
    scales = [fields.number("ssm_in_multiplier") * factor for factor in fields.numbers("ssm_multipliers", 5)]
    gate_scale, down_scale = fields.numbers("mlp_multipliers", 2)

    def mixer(at: Build) -> ParallelMixer:
        mamba = Mamba2Mixer(
            at.at("mamba"),
            shape,
            norm=norm,
            out_bias=out_bias,
            conv_bias=conv_bias,
            limits=limits,
            scales=scales,
        )
        attends = attention(fields, at.at("self_attn"), heads, qkv_bias=False, out_bias=False)
        return ParallelMixer(at, (attends, mamba), hidden, branches)

    def feed(at: Build) -> Feed:
        if gate_scale == down_scale == 1.0:
            return gated_mlp(fields, at)
        return ScaledMLP(at, gated_mlp(fields, at, stacks=False), gate_scale, down_scale)

    def block(at: Build) -> Block:
        return Block(
            mixer(at),
            before_mixer=RMSNorm(at.at("input_layernorm"), hidden, eps),
            feed=feed(at.at("feed_forward")),
            before_feed=RMSNorm(at.at("pre_ff_layernorm"), hidden, eps),
        )

    layers = build.at("model").at("layers")
    blocks = [block(layers.at(layer)) for layer in range(fields.layers())]
    ropes = {"global": rope_of(fields, build, heads)}
    return decoder(
        fields,
        build,
        blocks,
        ropes,
        norm_name="final_layernorm",
        embed_scale=fields.number("embedding_multiplier"),
        logit_scale=positive(fields, "lm_head_multiplier"),
    )


FAMILY = Family(build_falcon_h1, tied_head, split=split_hybrid_mamba2)
