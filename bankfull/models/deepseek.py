"""DeepSeek-V2 and -V3: latent attention, dense layers first, then mixtures of experts with shared experts."""

from __future__ import annotations

import math
from collections.abc import Callable

from bankfull.errors import ModelError
from bankfull.layers.attention import Heads
from bankfull.layers.build import Build
from bankfull.layers.decoder import Block, Decoder, Feed
from bankfull.layers.experts import ExpertNames, ExpertsShape, RoutingRule
from bankfull.layers.latent import LatentAttention, LatentShape
from bankfull.layers.norm import RMSNorm
from bankfull.layers.rope import Rope
from bankfull.models.common import TRANSFORMER, decoder, gated_mlp, rope_of, tied_head
from bankfull.models.fields import ConfigFields
from bankfull.models.registry import Config, Family
from bankfull.ranks.splitting import Splitting
from bankfull.spread.experts import mixture

LATENT = TRANSFORMER | {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_layer_freq": 1,
    "rope_interleave": True,
}
V2 = LATENT | {
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1407,
    "first_k_dense_replace": 0,
    "routed_scaling_factor": 1.0,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
}
V3 = LATENT | {
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
}
GREEDY, GROUPED, BIASED = "greedy", "group_limited_greedy", "noaux_tc"
"""Ways to choose experts: of all, of the best groups, and of the best groups by scores with a trained bias."""
MOST_MODULES = 16
"""Modules for multi-token prediction that a file may have."""
BIAS = "gate.e_score_correction_bias"


def fields_of(config: Config) -> ConfigFields:
    return ConfigFields(config, V3 if config["model_type"] == "deepseek_v3" else V2)


def build_deepseek(config: Config, build: Build) -> Decoder:
    fields = fields_of(config)
    block = block_of(config, build.at("model").at("layers"))
    # RoPE comes last: by then the file's tensors have confirmed the sizes that it allocates.
    blocks = [block(layer) for layer in range(fields.layers())]
    return decoder(fields, build, blocks, {"global": latent_rope(fields, build)})


def block_of(config: Config, layers: Build) -> Callable[[int], Block]:
    """Makes a layer by its number; `layers`: the place of all layers' tensors."""
    fields = fields_of(config)
    third = config["model_type"] == "deepseek_v3"
    shape, rule = latent_shape(fields), routing_rule(fields, third)
    hidden, eps, bias = shape.hidden, fields.number("rms_norm_eps"), fields.flag("attention_bias")
    dense = fields.number("first_k_dense_replace")
    fields.only("moe_layer_freq", 1)
    fields.only("rope_local_base_freq")
    if third:
        fields.only("mlp_bias", False)

    def feed(layer: int, at: Build) -> Feed:
        if layer < dense:
            return gated_mlp(fields, at)
        inner = fields.size("moe_intermediate_size")
        shared = fields.size("n_shared_experts") * inner
        return mixture(
            at,
            ExpertsShape(hidden, inner, rule, fields.text("hidden_act")),
            ExpertNames(choice_bias=BIAS if third else None),
            shared=gated_mlp(fields, at.at("shared_experts"), inner=shared),
        )

    def block(layer: int) -> Block:
        at = layers.at(layer)
        interleaved = fields.flag("rope_interleave")
        return Block(
            LatentAttention(at.at("self_attn"), shape, bias=bias, interleaved=interleaved),
            before_mixer=RMSNorm(at.at("input_layernorm"), hidden, eps),
            feed=feed(layer, at.at("mlp")),
            before_feed=RMSNorm(at.at("post_attention_layernorm"), hidden, eps),
        )

    return block


def latent_shape(fields: ConfigFields) -> LatentShape:
    heads, nope, rope = (fields.size(name) for name in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim"))
    fields.only("num_key_value_heads", heads)
    fields.only("head_dim", rope)
    fields.only("qk_head_dim", nope + rope)
    return LatentShape(
        fields.size("hidden_size"),
        heads,
        fields.size("kv_lora_rank"),
        nope,
        rope,
        fields.size("v_head_dim"),
        softmax_scale(fields, nope + rope),
        fields.size_or_none("q_lora_rank"),
    )


def softmax_scale(fields: ConfigFields, size: int) -> float:
    """YaRN sharpens the scores by the square of its mscale, which these checkpoints apply here, not to the angles."""
    scale, scaling = size**-0.5, fields.object_or_none("rope_scaling")
    mscale = (scaling or {}).get("mscale_all_dim")
    if scaling is None or not mscale:
        return scale
    factor = scaling.get("factor")
    for name, value in (("mscale_all_dim", mscale), ("factor", factor)):
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e300:
            raise ModelError(f"RoPE scaling has {name} = {repr(value)[:80]}, but it must be a positive number.")
    assert isinstance(factor, int | float)
    return scale * (0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0) ** 2


def routing_rule(fields: ConfigFields, third: bool) -> RoutingRule:
    """`third`: DeepSeek-V3, whose groups are ranked by their two best experts."""
    fields.only("scoring_func", "sigmoid" if third else "softmax")
    fields.only("topk_method", *((BIASED,) if third else (GREEDY, GROUPED)))
    if not third:
        fields.only("norm_topk_prob", False)
    grouped = third or fields.text("topk_method") == GROUPED
    groups = fields.size_or_none("n_group") or 1 if grouped else 1
    kept = fields.size_or_none("topk_group") or 1 if groups > 1 else 1
    return RoutingRule(
        fields.size("n_routed_experts"),
        fields.size("num_experts_per_tok"),
        scores="sigmoid" if third else "softmax",
        renormalize=third and fields.flag("norm_topk_prob"),
        scale=fields.number("routed_scaling_factor"),
        groups=groups,
        groups_kept=kept,
        group_best=2 if third and groups > 1 else 1,
    )


def latent_rope(fields: ConfigFields, build: Build) -> Rope:
    shape = latent_shape(fields)
    return rope_of(fields, build, Heads(shape.heads, 1, shape.rope, shape.scale))


def ignored(config: Config) -> tuple[str, ...]:
    """The modules for multi-token prediction come after the last layer and are read only where they draft."""
    fields = fields_of(config)
    modules = "|".join(str(fields.layers() + i) for i in range(prediction_modules(fields)))
    return (*tied_head(config), *((rf"^model\.layers\.({modules})\.",) if modules else ()))


def prediction_modules(fields: ConfigFields) -> int:
    """Modules for multi-token prediction that the configuration declares."""
    count = fields.number_or_none("num_nextn_predict_layers") or 0.0
    if count > MOST_MODULES or count != int(count):
        raise ModelError(
            f"The model's configuration has num_nextn_predict_layers = {count:g}, but it must be a whole number up to "
            f"{MOST_MODULES}."
        )
    return int(count)


def _split(s: Splitting) -> None:
    heads = s.size("num_attention_heads")
    s.own |= {"num_attention_heads": s.divided(heads, "num_attention_heads")}
    if s.whole.get("num_key_value_heads"):
        s.own["num_key_value_heads"] = s.own["num_attention_heads"]
    s.widths()


FAMILY = Family(build_deepseek, ignored, split=_split)
