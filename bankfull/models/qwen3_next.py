"""Qwen3-Next: gated delta nets, gated attention with partial RoPE in every fourth layer, experts in most layers."""

from __future__ import annotations

import torch

from bankfull.axes import HEADS
from bankfull.errors import ModelError
from bankfull.layers.attention import Heads
from bankfull.layers.build import Build
from bankfull.layers.decoder import Block, Decoder, Feed
from bankfull.layers.delta import DeltaMixer, DeltaShape
from bankfull.layers.gated import GatedAttention
from bankfull.layers.linear import Linear, split_linear
from bankfull.layers.mixer import Mixer
from bankfull.layers.norm import RMSNorm
from bankfull.models.common import TRANSFORMER, decoder, gated_mlp, head_norms, heads_of, partial_rope, tied_head
from bankfull.models.fields import FULL, LINEAR, ConfigFields
from bankfull.models.qwen_moe import experts_shape, experts_with_shared, sparse_layers
from bankfull.models.registry import Config, Family
from bankfull.ranks.splitting import Splitting

QWEN3_NEXT = TRANSFORMER | {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "norm_topk_prob": True,
    "norm_weight_offset": 1.0,
}


def build_qwen3_next(config: Config, build: Build) -> Decoder:
    fields = ConfigFields(config, QWEN3_NEXT)
    hidden, eps, offset = fields.size("hidden_size"), fields.number("rms_norm_eps"), fields.number("norm_weight_offset")
    period, layers = fields.size("full_attention_interval"), range(fields.layers())
    kinds = fields.per_layer("layer_types", (FULL, LINEAR), [LINEAR if (i + 1) % period else FULL for i in layers])
    heads, shape, sparse = heads_of(fields), delta_shape(fields), sparse_layers(fields)

    def mixer(layer: int, at: Build) -> Mixer:
        if kinds[layer] == FULL:
            return gated_attention(fields, at.at("self_attn"), heads, offset)
        return DeltaMixer(at.at("linear_attn"), shape)

    def feed(layer: int, at: Build) -> Feed:
        if layer not in sparse:
            return gated_mlp(fields, at)
        return experts_with_shared(fields, at, experts_shape(fields))

    def block(layer: int) -> Block:
        at = build.at("model").at("layers").at(layer)
        return Block(
            mixer(layer, at),
            before_mixer=RMSNorm(at.at("input_layernorm"), hidden, eps, offset),
            feed=feed(layer, at.at("mlp")),
            before_feed=RMSNorm(at.at("post_attention_layernorm"), hidden, eps, offset),
        )

    blocks = [block(layer) for layer in layers]
    return decoder(fields, build, blocks, {"global": partial_rope(fields, build, heads)}, norm_offset=offset)


def delta_shape(fields: ConfigFields) -> DeltaShape:
    fields.only("hidden_act", "silu", "swish")
    key_heads, heads = fields.size("linear_num_key_heads"), fields.size("linear_num_value_heads")
    if heads % key_heads:
        raise ModelError(
            f"The model's configuration has {heads} value heads in its delta layers, which {key_heads} key heads "
            "cannot share."
        )
    return DeltaShape(
        fields.size("hidden_size"),
        key_heads,
        heads,
        fields.size("linear_key_head_dim"),
        fields.size("linear_value_head_dim"),
        fields.size("linear_conv_kernel_dim"),
        eps=fields.number("rms_norm_eps"),
    )


def gated_attention(fields: ConfigFields, build: Build, heads: Heads, offset: float) -> GatedAttention:
    """The query matrix has the rows of query and gate side by side for each head."""
    hidden, bias = fields.size("hidden_size"), fields.flag("attention_bias")
    query, kv = heads.queries, heads.keys
    order = torch.arange(2 * query).view(heads.count, 2, heads.size).transpose(0, 1).flatten()
    both, stored = (query, query), HEADS(heads.count, 2 * heads.size)
    q, gate = split_linear(build.at("q_proj"), hidden, both, bias, (True, True), order=order, stored=stored)
    return GatedAttention(
        build,
        heads,
        q,
        Linear(build.at("k_proj"), hidden, kv, bias, int8_when_batched=True),
        Linear(build.at("v_proj"), hidden, kv, bias),
        Linear(build.at("o_proj"), query, hidden, bias, int8_when_batched=True),
        gate,
        **head_norms(fields, build, heads, offset),
    )


def ignored(config: Config) -> tuple[str, ...]:
    """The module for multi-token prediction is not run."""
    return (*tied_head(config), r"^mtp\.")


def _split(s: Splitting) -> None:
    s.heads()
    s.widths()
    s.width("linear_num_key_heads")
    s.width("linear_num_value_heads")


FAMILY = Family(build_qwen3_next, ignored, split=_split)
