"""Granite 4: Mamba-2 with an attention layer now and then, and a shared feed-forward layer beside experts."""

from __future__ import annotations

from bankfull.layers.build import Build
from bankfull.layers.decoder import Block, Decoder, Feed
from bankfull.layers.experts import ExpertNames, ExpertsShape, RoutingRule
from bankfull.layers.mixer import Mixer
from bankfull.layers.mlp import GatedMLP
from bankfull.layers.norm import RMSNorm
from bankfull.layers.ssd import GatedNorm, Mamba2Mixer
from bankfull.models.common import TRANSFORMER, attention, decoder, heads_of, rope_of, tied_head
from bankfull.models.fields import ConfigFields
from bankfull.models.granite import MULTIPLIERS, multiplied, positive
from bankfull.models.mamba2 import OPEN_LIMITS, mamba2_shape
from bankfull.models.registry import Config, Family
from bankfull.ranks.splitting import split_hybrid_mamba2
from bankfull.spread.experts import mixture

MAMBA, ATTENTION = ("mamba", "linear_attention"), ("attention", "full_attention")
"""Both names of a layer's kind in files."""
ROPE = "rope"
GRANITE_HYBRID = (
    TRANSFORMER
    | MULTIPLIERS
    | {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 1024,
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_head": "auto",
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "time_step_limit": OPEN_LIMITS,
        "max_position_embeddings": 2048,
    }
)


def build_granite_hybrid(config: Config, build: Build) -> Decoder:
    given = ConfigFields(config, GRANITE_HYBRID)
    fields, scales = multiplied(given, config, GRANITE_HYBRID)
    given.only("hidden_act", "silu", "swish")
    given.only("position_embedding_type", ROPE, "nope")
    hidden, eps = fields.size("hidden_size"), fields.number("rms_norm_eps")
    heads, bias = heads_of(fields, scale=positive(fields, "attention_multiplier")), fields.flag("attention_bias")
    rotates = config.get("position_embedding_type") == ROPE
    kinds = fields.per_layer("layer_types", (*MAMBA, *ATTENTION), [MAMBA[0]] * fields.layers())
    inner = fields.size_or_none("mamba_d_ssm") or fields.size("mamba_expand") * hidden
    shape, limits = mamba2_shape(fields, inner), fields.limits("time_step_limit")
    proj_bias, conv_bias = fields.flag("mamba_proj_bias"), fields.flag("mamba_conv_bias")
    # The stream is divided, and so is the epsilon of its norms; that of the gated norm is not.
    norm = GatedNorm(
        given.number("rms_norm_eps"),
        fields.size_or_none("mamba_norm_groups") or fields.size("mamba_n_groups"),
        across_ranks=bool(fields.raw("norm_across_ranks", False)),
    )
    experts = None
    if fields.number("num_local_experts") > 0:
        rule = RoutingRule(fields.size("num_local_experts"), fields.size("num_experts_per_tok"), renormalize=True)
        experts = ExpertsShape(hidden, fields.size("intermediate_size"), rule)

    def mixer(kind: str, at: Build) -> Mixer:
        if kind in ATTENTION:
            rope = "global" if rotates else None
            return attention(fields, at.at("self_attn"), heads, qkv_bias=bias, out_bias=bias, rope=rope)
        return Mamba2Mixer(at.at("mamba"), shape, norm=norm, bias=proj_bias, conv_bias=conv_bias, limits=limits)

    def feed(at: Build) -> Feed:
        below, width = at.at("shared_mlp"), fields.size("shared_intermediate_size")
        apart = below.has("gate_proj.weight")  # a GGUF file
        enter = ("gate_proj", "up_proj") if apart else ("input_linear",)
        shared = GatedMLP.read(below, hidden, width, "silu", (*enter, "output_linear"))
        if experts is None:
            return shared
        sparse = at.at("block_sparse_moe")
        both = None if sparse.has("experts.gate_proj.weight") else "input_linear"
        names = ExpertNames(router="router.layer", gate_up=both, down="output_linear")
        return mixture(sparse, experts, names, shared=shared)

    def block(kind: str, at: Build) -> Block:
        return Block(
            mixer(kind, at),
            before_mixer=RMSNorm(at.at("input_layernorm"), hidden, eps),
            feed=feed(at),
            before_feed=RMSNorm(at.at("post_attention_layernorm"), hidden, eps),
        )

    layers = build.at("model").at("layers")
    blocks = [block(kind, layers.at(layer)) for layer, kind in enumerate(kinds)]
    ropes = {"global": rope_of(fields, build, heads)} if rotates else {}
    return decoder(fields, build, blocks, ropes, **scales)


FAMILY = Family(build_granite_hybrid, tied_head, split=split_hybrid_mamba2)
