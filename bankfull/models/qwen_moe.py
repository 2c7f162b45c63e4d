"""Qwen 2 MoE (a shared expert with a gate) and Qwen 3 MoE: Qwen 2 and 3 with mixtures of experts in most layers."""

from __future__ import annotations

from dataclasses import replace

from bankfull.axes import PARTS
from bankfull.layers.attention import Attention
from bankfull.layers.build import Build
from bankfull.layers.decoder import Decoder, Feed
from bankfull.layers.experts import Experts, ExpertsShape, RoutingRule
from bankfull.layers.linear import Linear
from bankfull.layers.placement import Role
from bankfull.models.common import attention, gated_mlp, head_norms, heads_of, prenorm_decoder, tied_head
from bankfull.models.fields import ConfigFields
from bankfull.models.qwen import QWEN2, QWEN3, qwen_windows
from bankfull.models.registry import Config, Family
from bankfull.ranks.splitting import split_transformer
from bankfull.spread.experts import mixture

SPARSE = {"decoder_sparse_step": 1, "num_experts_per_tok": 8, "norm_topk_prob": False, "mlp_only_layers": []}
QWEN2_MOE = QWEN2 | SPARSE | {"num_experts_per_tok": 4, "qkv_bias": True}
QWEN3_MOE = QWEN3 | SPARSE


def build_qwen_moe(config: Config, build: Build) -> Decoder:
    third = config["model_type"] == "qwen3_moe"
    fields = ConfigFields(config, QWEN3_MOE if third else QWEN2_MOE)
    windows, heads = qwen_windows(fields), heads_of(fields)
    qkv_bias, out_bias = (fields.flag("attention_bias"),) * 2 if third else (fields.flag("qkv_bias"), False)
    sparse = sparse_layers(fields)
    shape = experts_shape(fields)

    def mixer(layer: int, at: Build) -> Attention:
        norms = head_norms(fields, at, heads) if third else {}
        layer_heads = replace(heads, window=windows[layer])
        return attention(fields, at, layer_heads, qkv_bias=qkv_bias, out_bias=out_bias, **norms)

    def feed_of(layer: int, at: Build) -> Feed:
        if layer not in sparse:
            return gated_mlp(fields, at.at("mlp"))
        return mixture(at.at("mlp"), shape) if third else experts_with_shared(fields, at.at("mlp"), shape)

    return prenorm_decoder(fields, build, heads, mixer, feed_of=feed_of)


def sparse_layers(fields: ConfigFields) -> set[int]:
    """Layers with experts: every `decoder_sparse_step`-th one, without `mlp_only_layers`."""
    layers, step = fields.layers(), fields.size("decoder_sparse_step")
    dense = fields.layer_numbers("mlp_only_layers")
    return {layer for layer in range(layers) if (layer + 1) % step == 0 and layer not in dense}


def experts_shape(fields: ConfigFields) -> ExpertsShape:
    # Newer files of Qwen 3 name the number of experts as Mixtral's do.
    count = "num_experts" if fields.size_or_none("num_experts") is not None else "num_local_experts"
    rule = RoutingRule(
        fields.size(count), fields.size("num_experts_per_tok"), renormalize=fields.flag("norm_topk_prob")
    )
    inner = fields.size("moe_intermediate_size")
    return ExpertsShape(fields.size("hidden_size"), inner, rule, fields.text("hidden_act"))


def experts_with_shared(fields: ConfigFields, build: Build, shape: ExpertsShape) -> Experts:
    """Experts beside one that every token passes, scaled by the sigmoid of a gate."""
    shared = gated_mlp(fields, build.at("shared_expert"), inner=fields.size("shared_expert_intermediate_size"))
    gate = Linear(build.of(Role.FEED).at("shared_expert_gate"), shape.hidden, PARTS(1))
    return mixture(build, shape, shared=shared, shared_gate=gate)


FAMILY = Family(build_qwen_moe, tied_head, split=split_transformer)
