"""OLMoE: experts in every layer, and norms over all heads' queries and keys together."""

from __future__ import annotations

from torch import Tensor

from bankfull.layers.attention import Attention
from bankfull.layers.build import Build
from bankfull.layers.decoder import Decoder
from bankfull.layers.experts import Experts, ExpertsShape, RoutingRule
from bankfull.layers.norm import RMSNorm
from bankfull.models.common import TRANSFORMER, attention, heads_of, prenorm_decoder, tied_head
from bankfull.models.fields import ConfigFields
from bankfull.models.registry import Config, Family
from bankfull.ranks.splitting import split_experts
from bankfull.spread.experts import mixture

OLMOE = TRANSFORMER | {
    "rms_norm_eps": 1e-5,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
}


class JointNorm:
    """One norm over all heads of a token (tokens, heads, size)."""

    def __init__(self, norm: RMSNorm) -> None:
        self._norm = norm

    def __call__(self, x: Tensor) -> Tensor:
        return self._norm(x.flatten(1)).unflatten(1, x.shape[1:])


def build_olmoe(config: Config, build: Build) -> Decoder:
    fields = ConfigFields(config, OLMOE)
    fields.only("clip_qkv")
    fields.only("sliding_window")
    heads, bias, eps = heads_of(fields), fields.flag("attention_bias"), fields.number("rms_norm_eps")
    rule = RoutingRule(
        fields.size("num_experts"), fields.size("num_experts_per_tok"), renormalize=fields.flag("norm_topk_prob")
    )
    shape = ExpertsShape(fields.size("hidden_size"), fields.size("intermediate_size"), rule, fields.text("hidden_act"))

    def mixer(layer: int, at: Build) -> Attention:
        norms = {
            name: JointNorm(RMSNorm(at.at(name), size, eps))
            for name, size in (("q_norm", heads.queries), ("k_norm", heads.keys))
        }
        return attention(fields, at, heads, qkv_bias=bias, out_bias=bias, **norms)

    def feed_of(layer: int, at: Build) -> Experts:
        return mixture(at.at("mlp"), shape)

    return prenorm_decoder(fields, build, heads, mixer, feed_of=feed_of)


FAMILY = Family(build_olmoe, tied_head, split=split_experts)
