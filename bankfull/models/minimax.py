"""MiniMax-Text-01: lightning attention with softmax attention in some layers, and experts in all of them.

The residual of each branch is the normed stream times `alpha`; the branch has a factor `beta`. The norm of
alpha x + beta y is the norm of x + (beta / alpha) y with eps / alpha^2, so only the branch is scaled.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bankfull.errors import ModelError
from bankfull.layers.build import Build
from bankfull.layers.decoder import Block, Decoder
from bankfull.layers.experts import MIXTRAL_NAMES, ExpertsShape, RoutingRule
from bankfull.layers.lightning import LightningMixer, LightningShape, lightning_slopes
from bankfull.layers.mixer import Mixer
from bankfull.layers.mlp import activation
from bankfull.layers.norm import RMSNorm
from bankfull.layers.rope import Rope
from bankfull.models.common import TRANSFORMER, attention, decoder, heads_of, tied_head
from bankfull.models.fields import FULL, LINEAR, ConfigFields
from bankfull.models.registry import Config, Family
from bankfull.ops import scale_columns
from bankfull.ranks.splitting import split_experts
from bankfull.spread.experts import mixture

MINIMAX = TRANSFORMER | {
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "full_attn_alpha_factor": 1,
    "full_attn_beta_factor": 1,
    "linear_attn_alpha_factor": 1,
    "linear_attn_beta_factor": 1,
    "mlp_alpha_factor": 1,
    "mlp_beta_factor": 1,
}
BUFFERS = (r"\.self_attn\.(slope_rate|query_decay|key_decay|diagonal_decay)$",)
"""Files hold these tensors, which follow from the configuration."""


def build_minimax(config: Config, build: Build) -> Decoder:
    fields = ConfigFields(config, MINIMAX)
    hidden, eps, layers = fields.size("hidden_size"), fields.number("rms_norm_eps"), fields.layers()
    kinds = fields.per_layer("layer_types", (FULL, LINEAR), [LINEAR if i % 2 else FULL for i in range(layers)])
    heads = heads_of(fields, window=fields.size_or_none("sliding_window"))
    lightning = LightningShape(hidden, heads.count, heads.size, activation(fields.text("hidden_act")))
    factors = {kind: residual(fields, name) for kind, name in ((FULL, "full_attn"), (LINEAR, "linear_attn"))}
    feed_eps, feed_scale = residual(fields, "mlp")
    rule = RoutingRule(
        fields.size("num_local_experts"), fields.size("num_experts_per_tok"), renormalize=True, scale=feed_scale
    )
    experts = ExpertsShape(hidden, fields.size("intermediate_size"), rule, fields.text("hidden_act"))

    def mixer(layer: int, at: Build) -> Mixer:
        if kinds[layer] == FULL:
            return attention(fields, at, heads, qkv_bias=False, out_bias=False)
        return LightningMixer(at, lightning, lightning_slopes(heads.count * build.tensor_ranks, layer, layers))

    def block(layer: int) -> Block:
        at = build.at("model").at("layers").at(layer)
        mixed_eps, scale = factors[kinds[layer]]
        return Block(
            mixer(layer, at.at("self_attn")),
            before_mixer=RMSNorm(at.at("input_layernorm"), hidden, eps if layer == 0 else eps * feed_eps),
            after_mixer=None if scale == 1 else scaled(build, hidden, scale),
            feed=mixture(at.at("block_sparse_moe"), experts, MIXTRAL_NAMES),
            before_feed=RMSNorm(at.at("post_attention_layernorm"), hidden, eps * mixed_eps),
            normed_stream=True,
        )

    blocks = [block(layer) for layer in range(layers)]
    rotated = fields.size_or_none("rotary_dim") or heads.size
    if rotated > heads.size:
        raise ModelError(f"The model's configuration has rotary_dim = {rotated}, but heads of {heads.size} elements.")
    fields.only("partial_rotary_factor", 1)
    scaling, made_for = fields.object_or_none("rope_scaling"), fields.size("max_position_embeddings")
    rope = Rope(build, rotated, fields.number("rope_theta"), scaling, made_for)
    last = ConfigFields({**config, "rms_norm_eps": eps * feed_eps}, MINIMAX)
    return decoder(last, build, blocks, {"global": rope})


def residual(fields: ConfigFields, name: str) -> tuple[float, float]:
    """Factors of a branch: of the next norm's eps, and of the branch."""
    alpha, beta = fields.number(f"{name}_alpha_factor"), fields.number(f"{name}_beta_factor")
    if not 1e-6 <= alpha <= 1e6:
        raise ModelError(
            f"The model's configuration has {name}_alpha_factor = {alpha}, but it must be from 1e-6 to 1e6."
        )
    return alpha**-2, beta / alpha


def scaled(build: Build, hidden: int, factor: float) -> Callable[[Tensor], Tensor]:
    scale, factors = build.bind(scale_columns), torch.full((hidden,), factor, dtype=build.dtype, device=build.device)
    return lambda branch: scale(branch, factors)


def ignored(config: Config) -> tuple[str, ...]:
    return (*tied_head(config), *BUFFERS)


FAMILY = Family(build_minimax, ignored, split=split_experts)
