"""The configuration of one tensor rank: its share of the heads and widths of a model.

Each family names its fields here. What no field divides is held whole by every rank. `layers.shard` cuts the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import singledispatch
from typing import Any

from bankfull.errors import ConfigError
from bankfull.layers.based import BasedShape, ShortConvShape
from bankfull.layers.delta import DeltaShape
from bankfull.layers.latent import LatentShape
from bankfull.layers.lightning import LightningShape
from bankfull.layers.ssd import Mamba2Shape
from bankfull.layers.ssm import MambaShape
from bankfull.models.blocks import LayerPlan, plans_of
from bankfull.models.kinds import AttentionShape, FeedShape
from bankfull.models.registry import Config

Part = tuple[int, int]
Fused = dict[str, list[Part]]
NORM_ACROSS = "norm_across_ranks"
"""Field that is true where a group of the gated norm is spread over the ranks."""
EXPERT_WIDTH = "expert_width"
"""Width of an expert where it is not that of a dense layer."""
WIDTHS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size")


@dataclass(frozen=True, slots=True)
class RankConfig:
    values: dict[str, Any]
    fused: Fused
    """As `Shard.fused`."""


class _Splitting:
    """Divides the fields of one configuration."""

    def __init__(self, config: Config, ranks: int, feed_ranks: int, spread: bool) -> None:
        self.whole, self.own, self.ranks, self.feed_ranks = config, dict(config), ranks, feed_ranks
        self.spread = spread
        self.fused: Fused = {}

    def size(self, name: str, default: int | None = None) -> int:
        value = self.whole.get(name)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"The model's configuration has {name} = {repr(value)[:80]}, which cannot be split.")
        return value

    def divided(self, size: int, what: str, of_feed: bool = False) -> int:
        ranks = self.feed_ranks if of_feed else self.ranks
        if size % ranks:
            kind, axis = ("", "ffn") if of_feed and ranks != self.ranks else ("tensor ", "tp")
            raise ConfigError(
                f"The model's {what} of {size} cannot be split evenly over {ranks} {kind}ranks; choose another {axis}."
            )
        return size // ranks

    def shared(self, size: int, what: str) -> int:
        """A number of which several ranks may hold the same: heads of keys and values, groups."""
        if size % self.ranks and self.ranks % size:
            raise ConfigError(
                f"The model's {what} of {size} can be neither split nor copied evenly over {self.ranks} tensor ranks; "
                "choose another tp."
            )
        return max(1, size // self.ranks)

    def width(self, name: str, default: int | None = None) -> tuple[int, int]:
        """Divide a field of a mixer; its value in the file, and on a rank."""
        whole = self.size(name, default)
        self.own[name] = self.divided(whole, name)
        return whole, self.own[name]

    def feed_width(self, name: str, default: int | None = None) -> tuple[int, int]:
        """Divide a field of a feed-forward layer."""
        whole = self.size(name, default)
        self.own[name] = self.divided(whole, name, of_feed=True)
        return whole, self.own[name]

    def heads(
        self, count: str = "num_attention_heads", kv: str = "num_key_value_heads", hidden: str = "hidden_size"
    ) -> tuple[Part, Part]:
        """Query heads, and heads of keys and values: their columns in the file and on a rank."""
        queries = self.size(count)
        keys = self.size(kv, queries)
        each = self.size("head_dim", self.size(hidden) // queries)
        mine, kept = self.divided(queries, count), self.shared(keys, kv)
        self.own |= {count: mine, kv: kept, "head_dim": each}
        return (queries * each, mine * each), (keys * each, kept * each)

    def widths(self, of_experts: Sequence[str] = WIDTHS[1:]) -> None:
        """`of_experts`: the widths of experts and of those beside them, which stay whole where experts are spread."""
        for name in WIDTHS:
            if self.whole.get(name) and not (self.spread and name in of_experts):
                self.feed_width(name)

    def mamba2(self, heads: str, size: int, groups: str, normed: str, state: int) -> Part:
        """Heads and groups of Mamba-2: the fused parts of its projection and its convolution; channels of its heads."""
        count, shared = self.width(heads), self.size(groups, 1)
        kept = self.own[groups] = self.shared(shared, groups)
        norms = self.size(normed, shared)
        if 1 < norms < self.ranks:
            raise ConfigError(
                f"The {norms} groups of the model's gated norm are fewer than {self.ranks} tensor ranks; lower tp."
            )
        self.own |= {normed: self.shared(norms, normed), NORM_ACROSS: norms < self.ranks}
        inner, of_group = (count[0] * size, count[1] * size), (shared * state, kept * state)
        convolved = [inner, of_group, of_group]
        self.fused[r"\.in_proj\.(weight|bias)$"] = [inner, *convolved, count]
        self.fused[r"\.conv1d\.(weight|bias)$"] = convolved
        return inner


def _transformer(s: _Splitting) -> None:
    s.heads()
    s.widths()


def _only_experts(s: _Splitting) -> None:
    """No layer has a dense feed-forward layer."""
    s.heads()
    s.widths(of_experts=WIDTHS)


def _phi3(s: _Splitting) -> None:
    query, kv = s.heads()
    s.fused[r"\.qkv_proj\.weight$"] = [query, kv, kv]
    s.fused[r"\.gate_up_proj\.weight$"] = [s.feed_width("intermediate_size")] * 2


def _glm(s: _Splitting) -> None:
    s.heads()
    s.fused[r"\.gate_up_proj\.weight$"] = [s.feed_width("intermediate_size")] * 2


def _gpt2(s: _Splitting) -> None:
    query, _ = s.heads()
    s.feed_width("intermediate_size", 4 * s.size("hidden_size"))
    s.fused[r"\.c_attn\.(weight|bias)$"] = [query] * 3


def _gpt_neox(s: _Splitting) -> None:
    query, _ = s.heads()
    s.widths()
    if s.whole.get("qkv_by_head") is False:
        s.fused[r"\.query_key_value\.(weight|bias)$"] = [query] * 3


def _opt(s: _Splitting) -> None:
    s.heads()
    s.feed_width("ffn_dim")


def _llada(s: _Splitting) -> None:
    for usual, own in (
        ("num_attention_heads", "n_heads"),
        ("num_key_value_heads", "n_kv_heads"),
        ("hidden_size", "d_model"),
    ):
        s.whole = {**s.whole, usual: s.whole.get(usual) or s.whole.get(own)}
    s.heads()
    s.own |= {"n_heads": s.own["num_attention_heads"], "n_kv_heads": s.own["num_key_value_heads"]}
    s.feed_width("mlp_hidden_size", int(s.whole.get("mlp_ratio", 4) * s.size("hidden_size")))


def _deepseek(s: _Splitting) -> None:
    heads = s.size("num_attention_heads")
    s.own |= {"num_attention_heads": s.divided(heads, "num_attention_heads")}
    if s.whole.get("num_key_value_heads"):
        s.own["num_key_value_heads"] = s.own["num_attention_heads"]
    s.widths()


def _mamba(s: _Splitting) -> None:
    inner = s.width("intermediate_size", int(s.whole.get("expand", 2) * s.size("hidden_size")))
    s.fused[r"\.in_proj\.(weight|bias)$"] = [inner, inner]


def _jamba(s: _Splitting) -> None:
    s.heads()
    s.widths()
    if s.spread:  # dense layers and experts have the same width in the file
        s.own[EXPERT_WIDTH] = s.size("intermediate_size")
    inner = s.width("mamba_inner", s.size("mamba_expand", 2) * s.size("hidden_size"))
    s.fused[r"\.in_proj\.(weight|bias)$"] = [inner, inner]


def _mamba2(s: _Splitting) -> None:
    s.mamba2("num_heads", s.size("head_dim", 64), "n_groups", "norm_groups", s.size("state_size", 128))


def _hybrid_mamba2(s: _Splitting) -> None:
    hidden = s.size("hidden_size")
    inner = s.size("mamba_d_ssm", s.size("mamba_expand", 2) * hidden)
    heads = s.size("mamba_n_heads", 128)
    size = inner // heads
    state = s.size("mamba_d_state", 256)
    channels = s.mamba2("mamba_n_heads", size, "mamba_n_groups", "mamba_norm_groups", state)
    s.own |= {"mamba_d_ssm": channels[1], "mamba_d_head": size}
    s.heads()
    s.widths(of_experts=WIDTHS if s.whole.get("num_local_experts") else ())
    for name in ("input_linear", "gate_up_proj"):
        for width in ("shared_intermediate_size", "intermediate_size"):
            if s.whole.get(width):
                s.fused[rf"(?#{width})\.{name}\.weight$"] = [(s.whole[width], s.own[width])] * 2


def _qwen3_next(s: _Splitting) -> None:
    s.heads()
    s.widths()
    keys, values = s.width("linear_num_key_heads"), s.width("linear_num_value_heads")
    key, value = s.size("linear_key_head_dim"), s.size("linear_value_head_dim")
    queries = (keys[0] * key, keys[1] * key)
    channels = [queries, queries, (values[0] * value, values[1] * value)]
    s.fused[r"\.conv1d\.weight$"] = channels
    s.fused[r"\.in_proj_qkv\.weight$"] = channels


TRANSFORMERS = (
    "Dream",
    "gemma2",
    "gemma3",
    "gemma3_text",
    "granite",
    "hunyuan_v1_dense",
    "llama",
    "mistral",
    "olmo2",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "sdar",
    "smollm3",
)
FAMILIES: dict[str, Callable[[_Splitting], None]] = {
    **dict.fromkeys(TRANSFORMERS, _transformer),
    **dict.fromkeys(("gpt_oss", "minimax", "mixtral", "olmoe"), _only_experts),
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "falcon_h1": _hybrid_mamba2,
    "glm": _glm,
    "glm4": _glm,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "granitemoehybrid": _hybrid_mamba2,
    "jamba": _jamba,
    "llada": _llada,
    "mamba": _mamba,
    "mamba2": _mamba2,
    "opt": _opt,
    "phi3": _phi3,
    "qwen3_next": _qwen3_next,
}


def split_plan(plan: LayerPlan, ranks: int, feed_ranks: int, spread: bool) -> LayerPlan:
    """A rank's share of a composed model's layer; arguments as of `rank_config`."""
    mixers = tuple(replace(mixer, shape=split_shape(mixer.shape, ranks)) for mixer in plan.mixers)
    whole = spread and plan.feed.rule is not None
    return replace(plan, mixers=mixers, feed=plan.feed if whole else split_shape(plan.feed, feed_ranks))


@singledispatch
def split_shape(shape: Any, ranks: int) -> Any:
    """A rank's share of a layer; the whole layer where it cannot be split (S4)."""
    return shape


@split_shape.register
def _(shape: AttentionShape, ranks: int) -> AttentionShape:
    heads = shape.heads
    own = replace(heads, count=_divided(heads.count, "heads", ranks), kv=_copied(heads.kv, "key heads", ranks))
    return replace(shape, heads=own)


@split_shape.register
def _(shape: LatentShape, ranks: int) -> LatentShape:
    return replace(shape, heads=_divided(shape.heads, "heads", ranks))


@split_shape.register(MambaShape)
@split_shape.register(ShortConvShape)
def _(shape: MambaShape | ShortConvShape, ranks: int) -> MambaShape | ShortConvShape:
    return replace(shape, inner=_divided(shape.inner, "channels", ranks))


@split_shape.register
def _(shape: Mamba2Shape, ranks: int) -> Mamba2Shape:
    heads, groups = _divided(shape.heads, "Mamba heads", ranks), _copied(shape.groups, "groups", ranks)
    return replace(shape, heads=heads, groups=groups)


@split_shape.register
def _(shape: DeltaShape, ranks: int) -> DeltaShape:
    keys = _divided(shape.key_heads, "key heads of delta layers", ranks)
    return replace(shape, heads=_divided(shape.heads, "heads", ranks), key_heads=keys)


@split_shape.register(LightningShape)
@split_shape.register(BasedShape)
def _(shape: LightningShape | BasedShape, ranks: int) -> LightningShape | BasedShape:
    return replace(shape, heads=_divided(shape.heads, "heads", ranks))


@split_shape.register
def _(shape: FeedShape, ranks: int) -> FeedShape:
    inner, shared = (_divided(width, "feed-forward width", ranks) for width in (shape.inner, shape.shared))
    return replace(shape, inner=inner, shared=shared)


def _composed_parts(config: Config, ranks: int) -> Fused:
    """Fused tensors of each layer of a composed model."""
    fused: Fused = {}
    for number, plan in enumerate(plans_of(config)):
        for place, mixer in enumerate(plan.mixers):
            below = rf"\.layers\.{number}\.mixer\." + (rf"{place}\." if len(plan.mixers) > 1 else "")
            for name, parts in _fused_parts(mixer.shape, split_shape(mixer.shape, ranks)).items():
                fused[below + name] = parts
    return fused


def _fused_parts(whole: Any, mine: Any) -> Fused:
    def part(size: Callable[[Any], int]) -> Part:
        return size(whole), size(mine)

    if isinstance(whole, MambaShape):
        return {r"in_proj\.weight$": [part(lambda s: s.inner)] * 2}
    if isinstance(whole, Mamba2Shape):
        inner, group = part(lambda s: s.inner), part(lambda s: s.groups * s.state)
        return {
            r"in_proj\.weight$": [inner, inner, group, group, part(lambda s: s.heads)],
            r"conv1d\.(weight|bias)$": [inner, group, group],
        }
    if isinstance(whole, DeltaShape):
        queries, values = part(lambda s: s.key_heads * s.key), part(lambda s: s.heads * s.value)
        return {name: [queries, queries, values] for name in (r"conv1d\.weight$", r"in_proj_qkv\.weight$")}
    return {}


def _divided(size: int, what: str, ranks: int) -> int:
    if size % ranks:
        raise ConfigError(f"The {size} {what} of a layer cannot be split over {ranks} tensor ranks; choose another tp.")
    return size // ranks


def _copied(size: int, what: str, ranks: int) -> int:
    if size % ranks and ranks % size:
        raise ConfigError(
            f"The {size} {what} of a layer can be neither split nor copied evenly over {ranks} tensor ranks; choose "
            "another tp."
        )
    return max(1, size // ranks)


def stages_of(config: Config, stages: int) -> int:
    """The layers of a model that can be cut into so many stages."""
    layers = layer_count(config)
    if stages > layers:
        raise ConfigError(f"The layout has {stages} stages, but the model has only {layers} layers; lower pp.")
    return layers


def layer_count(config: Config) -> int:
    """The layers of a model."""
    if config.get("model_type") == "bankfull":
        return len(plans_of(config))
    nested = config.get("text_config")
    for fields in (config, nested if isinstance(nested, dict) else {}):
        for name in ("num_hidden_layers", "n_layers"):
            if isinstance(fields.get(name), int):
                return int(fields[name])
    raise ConfigError("The model's configuration does not say how many layers it has, so that no stages can be made.")


def rank_config(config: Config, ranks: int, feed_ranks: int, spread: bool) -> RankConfig:
    """The configuration that a rank builds its model from. `ranks` split its mixers, `feed_ranks` its feed-forward
    layers. `spread`: experts are spread over ranks, which split their width themselves."""
    kind = config.get("model_type")
    if kind == "bankfull":  # its layers are split when they are planned
        return RankConfig(dict(config), _composed_parts(config, ranks))
    split = FAMILIES.get(str(kind))
    if split is None:
        if ranks == feed_ranks == 1:
            return RankConfig(dict(config), {})
        raise ConfigError(
            f"Architecture {str(kind)[:80]!r} cannot be split over tensor ranks or feed-forward ranks yet; use pp, or "
            "say in models/splitting.py how (CONTRIBUTING.md has the recipe)."
        )
    splitting = _Splitting(config, ranks, feed_ranks, spread)
    split(splitting)
    return RankConfig(splitting.own, splitting.fused)
