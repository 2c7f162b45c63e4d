"""Gemma 2 and 3: scaled embeddings, norms around each branch, sliding windows in most layers.

A multimodal Gemma 3 runs as its text tower only.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from bankfull.errors import ModelError
from bankfull.layers.attention import Heads
from bankfull.layers.build import Build
from bankfull.layers.decoder import Block, Decoder
from bankfull.layers.norm import RMSNorm
from bankfull.layers.rope import Rope
from bankfull.models import common
from bankfull.models.fields import FULL, SLIDING, ConfigFields, lacking
from bankfull.models.registry import Config, Family
from bankfull.ranks.splitting import split_transformer

GEMMA = common.TRANSFORMER | {
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "norm_weight_offset": 1.0,
}
GEMMA2 = GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
#: The published configurations of Gemma 3 contain little more than the differences to the 4B model.
GEMMA3 = GEMMA | {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "sliding_window_pattern": 6,
}

NOT_TEXT = (r"^(model\.)?vision_tower\.", r"^(model\.)?multi_modal_projector\.", r"^language_model\.lm_head\.weight$")


def build_gemma(config: Config, build: Build) -> Decoder:
    kind = config["model_type"]
    if kind == "gemma2":
        return build_text(ConfigFields(config, GEMMA2), build, build.at("model"), third=False)
    if kind == "gemma3_text":
        return build_text(ConfigFields(config, GEMMA3), build, build.at("model"), third=True)
    return build_text_tower(config, build)


def build_text_tower(config: Config, build: Build) -> Decoder:
    nested = config.get("text_config")
    if not isinstance(nested, dict):
        raise lacking("text_config")
    tied = config.get("tie_word_embeddings")
    fields = ConfigFields(nested if tied is None else nested | {"tie_word_embeddings": tied}, GEMMA3)
    # The reference ignores the cap here and applies it in the text model: a file that sets it is ambiguous.
    fields.only("final_logit_softcapping")
    # The tower's tensor names depend on the library version that saved it.
    if any(name.startswith("language_model.") for name in build.source.names()):
        outer = build.at("language_model")
        return build_text(fields, outer, outer.at("model"), third=True)
    return build_text(fields, build, build.at("model").at("language_model"), third=True)


def build_text(fields: ConfigFields, build: Build, root: Build, *, third: bool) -> Decoder:
    """`third`: Gemma 3, with norms on queries and keys and a separate RoPE for sliding-window layers."""
    fields.only("use_bidirectional_attention", False)
    if third:
        fields.only("attn_logit_softcapping")
    hidden, eps = fields.size("hidden_size"), fields.number("rms_norm_eps")
    offset, bias = fields.number("norm_weight_offset"), fields.flag("attention_bias")
    layers, period = range(fields.layers()), fields.size("sliding_window_pattern") if third else 2
    windows = common.windows_of(fields, [SLIDING if (i + 1) % period else FULL for i in layers])
    heads = common.heads_of(fields, scale=query_scale(fields), cap=fields.number_or_none("attn_logit_softcapping"))

    def block(layer: int) -> Block:
        at = root.at("layers").at(layer)
        attn = at.at("self_attn")
        window = windows[layer]

        def norm(name: str) -> RMSNorm:
            return RMSNorm(at.at(name), hidden, eps, offset)

        return Block(
            common.attention(
                fields,
                attn,
                replace(heads, window=window),
                qkv_bias=bias,
                out_bias=bias,
                rope="local" if third and window is not None else "global",
                **(common.head_norms(fields, attn, heads, offset) if third else {}),
            ),
            before_mixer=norm("input_layernorm"),
            after_mixer=norm("post_attention_layernorm"),
            feed=common.gated_mlp(fields, at.at("mlp"), activation="hidden_activation"),
            before_feed=norm("pre_feedforward_layernorm"),
            after_feed=norm("post_feedforward_layernorm"),
        )

    blocks = [block(layer) for layer in layers]
    # Rounded to the model's dtype, as in training: in bfloat16 the root of 3072 is 55.5.
    scale = torch.tensor(hidden**0.5, dtype=torch.float32).to(build.dtype).item()
    ropes = two_ropes(fields, build, heads) if third else {"global": common.rope_of(fields, build, heads)}
    return common.decoder(
        fields,
        build,
        blocks,
        ropes,
        root=root,
        embed_scale=scale,
        norm_offset=offset,
        cap=fields.number_or_none("final_logit_softcapping"),
    )


def query_scale(fields: ConfigFields) -> float:
    scalar = fields.number("query_pre_attn_scalar")
    if scalar == 0:
        raise ModelError("The model's configuration has query_pre_attn_scalar = 0, but it must be positive.")
    return scalar**-0.5


def two_ropes(fields: ConfigFields, build: Build, heads: Heads) -> dict[str, Rope]:
    """RoPE scaling applies to full-attention layers only."""
    fields.only("partial_rotary_factor", 1)
    scaling, made_for = fields.object_or_none("rope_scaling"), fields.size("max_position_embeddings")
    return {
        "global": Rope(build, heads.size, fields.number("rope_theta"), scaling, made_for),
        "local": Rope(build, heads.size, fields.number("rope_local_base_freq"), None, made_for),
    }


def ignored(config: Config) -> tuple[str, ...]:
    return (*common.tied_head(config), *(NOT_TEXT if config["model_type"] == "gemma3" else ()))


FAMILY = Family(build_gemma, ignored, split=split_transformer)
