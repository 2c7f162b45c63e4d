"""OLMo 2: norms after each branch instead of before it, and norms over all heads of the queries and of the keys."""

from __future__ import annotations

from torch import Tensor

from bankfull.layers.build import Build
from bankfull.layers.decoder import Block, Decoder
from bankfull.layers.norm import AddThen, RMSNorm
from bankfull.models import common
from bankfull.models.fields import ConfigFields
from bankfull.models.registry import Config, Family
from bankfull.ranks.splitting import split_transformer

OLMO2 = common.TRANSFORMER | {"rms_norm_eps": 1e-5}


class NormOfHeads:
    """An RMS norm over all heads of a token together."""

    def __init__(self, build: Build, size: int, eps: float) -> None:
        self._norm = RMSNorm(build, size, eps)

    def __call__(self, x: Tensor) -> Tensor:
        return self._norm(x.flatten(1)).view(x.shape)


def build_olmo2(config: Config, build: Build) -> Decoder:
    fields = ConfigFields(config, OLMO2)
    fields.only("mlp_bias", False)
    fields.only("sliding_window")
    heads, bias = common.heads_of(fields), fields.flag("attention_bias")
    hidden, eps = fields.size("hidden_size"), fields.number("rms_norm_eps")

    def block(layer: int) -> Block:
        at = build.at("model").at("layers").at(layer)
        attn = at.at("self_attn")
        norms = {
            "q_norm": NormOfHeads(attn.at("q_norm"), heads.queries, eps),
            "k_norm": NormOfHeads(attn.at("k_norm"), heads.keys, eps),
        }
        return Block(
            common.attention(fields, attn, heads, qkv_bias=bias, out_bias=bias, **norms),
            before_mixer=AddThen(at, unchanged),
            after_mixer=RMSNorm(at.at("post_attention_layernorm"), hidden, eps),
            feed=common.gated_mlp(fields, at.at("mlp")),
            before_feed=AddThen(at, unchanged),
            after_feed=RMSNorm(at.at("post_feedforward_layernorm"), hidden, eps),
        )

    blocks = [block(layer) for layer in range(fields.layers())]
    return common.decoder(fields, build, blocks, {"global": common.rope_of(fields, build, heads)})


def unchanged(x: Tensor) -> Tensor:
    return x


FAMILY = Family(build_olmo2, common.tied_head, split=split_transformer)
