"""Hunyuan (dense): norms of queries and keys after RoPE, and cross-layer attention where the configuration has it.

With `use_cla`, every `cla_share_factor`-th layer computes keys and values, and the layers after it share them. Each
layer has a norm weight of its own for the shared keys. A product of query and key does not change if that weight is
applied to the query instead, so one KV cache serves all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from bankfull.axes import HEAD
from bankfull.errors import ModelError
from bankfull.layers.attention import Attention, Heads
from bankfull.layers.build import Build
from bankfull.layers.decoder import Decoder
from bankfull.layers.linear import Linear
from bankfull.layers.mixer import Mixer
from bankfull.layers.norm import RMSNorm
from bankfull.layers.rope import Rope
from bankfull.layers.shared import SharedAttention, owner_of
from bankfull.models.common import TRANSFORMER, attention, heads_of, prenorm_decoder, tied_head
from bankfull.models.fields import ConfigFields
from bankfull.models.registry import Config, Family
from bankfull.ranks.splitting import split_transformer

HUNYUAN = TRANSFORMER | {"rms_norm_eps": 1e-5, "use_qk_norm": True, "use_cla": False, "cla_share_factor": 1}


def build_hunyuan(config: Config, build: Build) -> Decoder:
    fields = ConfigFields(config, HUNYUAN)
    fields.only("mlp_bias", False)
    fields.only("norm_type", "rms")
    heads, bias, normed = heads_of(fields), fields.flag("attention_bias"), fields.flag("use_qk_norm")
    factor = fields.size("cla_share_factor") if fields.flag("use_cla") else 1
    hidden, eps = fields.size("hidden_size"), fields.number("rms_norm_eps")
    mixers: list[Mixer] = []

    def norms(at: Build) -> dict[str, RMSNorm]:
        names = {"q_norm": "query_layernorm", "k_norm": "key_layernorm"} if normed else {}
        return {name: RMSNorm(at.at(stored), HEAD(heads.size), eps) for name, stored in names.items()}

    def shared(layer: int, at: Build) -> SharedAttention:
        owner = owner_of(mixers, layer, layer - layer % factor)
        own_norms = norms(at)
        if own_norms:
            assert isinstance(owner.k_norm, RMSNorm)
            own_norms["q_norm"].weight = own_norms["q_norm"].weight * _ratio(layer, own_norms["k_norm"], owner.k_norm)
        return SharedAttention(
            at,
            owner,
            layer - layer % factor,
            Linear(at.at("q_proj"), hidden, heads.queries, bias, int8_when_batched=True),
            Linear(at.at("o_proj"), heads.queries, hidden, bias, int8_when_batched=True),
            q_norm=own_norms.get("q_norm"),
            rotates_first=True,
        )

    def mixer(layer: int, at: Build) -> Mixer:
        attn: Attention | SharedAttention
        if layer % factor:
            attn = shared(layer, at)
        else:
            attn = attention(fields, at, heads, qkv_bias=bias, out_bias=bias, rotates_first=True, **norms(at))
        mixers.append(attn)
        return attn

    return prenorm_decoder(fields, build, heads, mixer, rope=stretched_rope)


def _ratio(layer: int, own: RMSNorm, owner: RMSNorm) -> torch.Tensor:
    """The factor by which a layer's norm weighs the shared keys more than their owner does."""
    if owner.weight.device.type != "meta" and not bool((owner.weight != 0).all()):
        raise ModelError(
            f"Layer {layer} shares keys whose norm has a weight of 0, so their owner's cache cannot serve it; use a "
            "checkpoint without use_cla."
        )
    if own.weight.device.type != owner.weight.device.type:  # layers of different stages, which `staged` refuses
        return torch.ones_like(own.weight)
    return own.weight / owner.weight.to(own.weight.device)


def stretched_rope(fields: ConfigFields, build: Build, heads: Heads) -> Rope:
    """Checkpoints call it "dynamic", but its `alpha` is fixed: it only stretches the base."""
    scaling: Mapping[str, Any] | None = fields.object_or_none("rope_scaling")
    theta, made_for = fields.number("rope_theta"), fields.size("max_position_embeddings")
    if scaling is not None and scaling.get("rope_type") == "dynamic":
        alpha = scaling.get("alpha")
        if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not 0 < alpha < 1e9 or heads.size < 4:
            raise ModelError(
                f"The model's configuration has a dynamic RoPE scaling with alpha = {repr(alpha)[:80]}; only a "
                "positive number is supported, with heads of at least 4 dimensions."
            )
        theta, scaling = theta * alpha ** (heads.size / (heads.size - 2)), None
    return Rope(build, heads.size, theta, scaling, made_for)


FAMILY = Family(build_hunyuan, tied_head, split=split_transformer)
