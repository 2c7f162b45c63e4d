"""GLM-4 (`glm`), and its successor with norms after each branch (`glm4`): RoPE of adjacent pairs over half a head."""

from __future__ import annotations

import torch
from torch import Tensor

from bankfull.layers.attention import Attention
from bankfull.layers.build import Build
from bankfull.layers.decoder import Block, Decoder
from bankfull.layers.linear import Linear, split_linear
from bankfull.layers.norm import RMSNorm
from bankfull.models.common import TRANSFORMER, decoder, heads_of, partial_rope, rotated_size, tied_head
from bankfull.models.fields import ConfigFields
from bankfull.models.phi3 import fused_mlp
from bankfull.models.registry import Config, Family
from bankfull.ranks.splitting import Splitting

GLM = TRANSFORMER | {
    "rms_norm_eps": 1.5625e-7,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
}


def build_glm(config: Config, build: Build) -> Decoder:
    fields = ConfigFields(config, GLM)
    fields.only("mlp_bias", False)
    heads = heads_of(fields)
    hidden, eps, bias = fields.size("hidden_size"), fields.number("rms_norm_eps"), fields.flag("attention_bias")
    after = config["model_type"] == "glm4"
    rotated = rotated_size(fields, heads)

    def mixer(at: Build) -> Attention:
        (q,), (k,) = (
            split_linear(at.at(name), hidden, [outer], bias, (True,), halves_of_pairs(outer.count, heads.size, rotated))
            for name, outer in (("q_proj", heads.queries), ("k_proj", heads.keys))
        )
        v = Linear(at.at("v_proj"), hidden, heads.keys, bias)
        out = Linear(at.at("o_proj"), heads.queries, hidden, int8_when_batched=True)
        return Attention(at, heads, q, k, v, out)

    def block(layer: int) -> Block:
        at = build.at("model").at("layers").at(layer)

        def norm(name: str) -> RMSNorm:
            return RMSNorm(at.at(name), hidden, eps)

        return Block(
            mixer(at.at("self_attn")),
            before_mixer=norm("input_layernorm"),
            after_mixer=norm("post_self_attn_layernorm") if after else None,
            feed=fused_mlp(fields, at.at("mlp")),
            before_feed=norm("post_attention_layernorm"),
            after_feed=norm("post_mlp_layernorm") if after else None,
        )

    blocks = [block(layer) for layer in range(fields.layers())]
    return decoder(fields, build, blocks, {"global": partial_rope(fields, build, heads)})


def halves_of_pairs(count: int, size: int, rotated: int) -> Tensor:
    """Rows of queries or keys in the order that turns a RoPE of adjacent pairs into one of two halves. Both get the
    same order, so their products do not change."""
    pairs = torch.arange(rotated).view(-1, 2).T.flatten()
    order = torch.cat((pairs, torch.arange(rotated, size)))
    return (torch.arange(count)[:, None] * size + order).flatten()


def _split(s: Splitting) -> None:
    s.heads()
    s.feed_width("intermediate_size")


FAMILY = Family(build_glm, tied_head, split=_split)
