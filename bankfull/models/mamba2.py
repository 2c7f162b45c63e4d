"""Mamba-2: no attention; a recurrence per head, with a state of constant size."""

from __future__ import annotations

from math import inf

from bankfull.errors import ModelError
from bankfull.layers.build import Build
from bankfull.layers.decoder import Decoder
from bankfull.layers.ssd import GatedNorm, Mamba2Mixer, Mamba2Shape
from bankfull.models.common import tied_head
from bankfull.models.fields import ConfigFields
from bankfull.models.mamba import backbone
from bankfull.models.registry import Config, Family
from bankfull.ranks.splitting import Splitting

OPEN_LIMITS = (0.0, inf)
MAMBA2 = {
    "state_size": 128,
    "num_heads": 128,
    "head_dim": 64,
    "n_groups": 8,
    "conv_kernel": 4,
    "layer_norm_epsilon": 1e-5,
    "hidden_act": "silu",
    "use_bias": False,
    "use_conv_bias": True,
    "residual_in_fp32": True,
    "time_step_limit": OPEN_LIMITS,
    "tie_word_embeddings": False,
}


def build_mamba2(config: Config, build: Build) -> Decoder:
    fields = ConfigFields(config, MAMBA2)
    shape = Mamba2Shape(
        fields.size("hidden_size"),
        fields.size("num_heads"),
        fields.size("head_dim"),
        fields.size("n_groups"),
        fields.size("state_size"),
        fields.size("conv_kernel"),
    )
    bias, conv_bias, limits = fields.flag("use_bias"), fields.flag("use_conv_bias"), fields.limits("time_step_limit")
    norm = GatedNorm(
        fields.number("layer_norm_epsilon"),
        fields.size_or_none("norm_groups") or fields.size("n_groups"),
        across_ranks=bool(fields.raw("norm_across_ranks", False)),
    )
    return backbone(
        fields,
        build,
        lambda at: Mamba2Mixer(at, shape, norm=norm, bias=bias, conv_bias=conv_bias, limits=limits),
    )


def mamba2_shape(fields: ConfigFields, inner: int) -> Mamba2Shape:
    """The shape of a hybrid's Mamba-2 layers, whose heads have `inner` channels in all."""
    heads = fields.size("mamba_n_heads")
    size = inner // heads if fields.is_text("mamba_d_head", "auto") else fields.size("mamba_d_head")
    if size * heads != inner:
        raise ModelError(
            f"The model's configuration has {inner} Mamba channels, which {heads} heads of {size} do not make up."
        )
    return Mamba2Shape(
        fields.size("hidden_size"),
        heads,
        size,
        fields.size("mamba_n_groups"),
        fields.size("mamba_d_state"),
        fields.size("mamba_d_conv"),
    )


def _split(s: Splitting) -> None:
    s.mamba2("num_heads", "n_groups", "norm_groups")


FAMILY = Family(build_mamba2, tied_head, split=_split)
