"""The kinds of mixers and feed-forward layers of a composed model: from a block's settings to a checked shape."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from bankfull.errors import ModelError
from bankfull.layers.attention import Heads
from bankfull.layers.based import BasedShape, ShortConvShape
from bankfull.layers.delta import DeltaShape
from bankfull.layers.experts import RoutingRule
from bankfull.layers.latent import LatentShape
from bankfull.layers.lightning import LightningShape
from bankfull.layers.mlp import activation
from bankfull.layers.s4 import S4Shape
from bankfull.layers.ssd import Mamba2Shape
from bankfull.layers.ssm import MambaShape
from bankfull.models.fields import ConfigFields
from bankfull.models.settings import BlockSettings
from bankfull.state.mask import Mask

DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
"""Fields that a configuration may leave out."""
ROPE = "global"
"""Name of the RoPE with the configuration's `rope_theta` and `rope_scaling`."""


@dataclass(frozen=True, slots=True)
class RopeShape:
    size: int
    """Rotated dimensions of a head."""
    theta: float


@dataclass(frozen=True, slots=True)
class AttentionShape:
    heads: Heads
    rope: RopeShape | None
    qk_norm: bool
    """Whether queries and keys of each head are normed."""
    bias: bool
    owner: int | None = None
    """The earlier layer whose keys and values it reads; None: it has its own."""

    def same_pages(self, other: AttentionShape) -> bool:
        """Whether both can read the same keys and values."""
        own, its = self.heads, other.heads
        return (own.kv, own.size, own.sight, self.rope, self.qk_norm) == (
            its.kv,
            its.size,
            its.sight,
            other.rope,
            other.qk_norm,
        )


@dataclass(frozen=True, slots=True)
class FeedShape:
    kind: str
    """One of FEEDS."""
    inner: int = 0
    """Width; of one expert where there are several."""
    activation: str = "silu"
    rule: RoutingRule | None = None
    """Routing rule of a mixture of experts."""
    shared: int = 0
    """Width of the expert that every token passes; 0 = none."""


@dataclass(frozen=True, slots=True)
class MixerKind:
    main: str
    """The setting that a call's first value sets: local(1024)."""
    shape: Callable[[BlockSettings], Any]


def _attention(settings: BlockSettings) -> AttentionShape:
    fields, hidden = settings.fields, settings.hidden
    count = settings.size("heads", fields.size_or_none("num_attention_heads"))
    kv = settings.size("kv_heads", fields.size_or_none("num_key_value_heads") or count)
    size = settings.size("head_dim", fields.size_or_none("head_dim") or max(1, hidden // count))
    if count % kv:
        raise ModelError(f"Block {settings.block!r} has {count} heads, which {kv} key heads cannot share evenly.")
    window = settings.size_or_none("window")
    mask = _mask(settings, window)
    heads = Heads(count, kv, size, settings.number("scale", size**-0.5), window if mask is None else None, mask=mask)
    return AttentionShape(
        heads,
        _rope(settings, size),
        settings.flag("qk_norm", default=False),
        settings.flag("bias", default=False),
    )


def _mask(settings: BlockSettings, window: int | None) -> Mask | None:
    """A sparse mask, if the block has more than a window."""
    sizes = {name: settings.size_or_none(name) for name in ("dilation", "stride", "global_tokens", "columns")}
    given = {name: size for name, size in sizes.items() if size is not None}
    aligned = settings.flag("aligned", default=False)
    if not given and not aligned:
        return None
    if window is None:
        raise ModelError(f"Block {settings.block!r} has a sparse mask without a window; give 'window', too.")
    return Mask(window, **given, aligned=aligned)


def _rope(settings: BlockSettings, size: int) -> RopeShape | None:
    """`rope`: true (the configuration's `rope_theta`), false, or a base of its own."""
    wanted = settings.raw("rope", True)
    if wanted is None or wanted is False:
        return None
    theta = settings.fields.number("rope_theta") if wanted is True else wanted
    if not isinstance(theta, int | float) or not 1 < theta < 1e30:
        raise settings.wrong("rope", wanted, "true, false or a base above 1")
    if size % 2:
        raise ModelError(f"Block {settings.block!r} rotates heads of {size} dimensions; RoPE needs an even number.")
    return RopeShape(size, float(theta))


def _mla(settings: BlockSettings) -> LatentShape:
    """Sizes of DeepSeek's proportions, unless they are given."""
    count, size = _heads(settings)
    rope = settings.size("rope_dim", 2 * max(1, size // 4))
    if rope % 2:
        raise settings.wrong("rope_dim", rope, "even: RoPE rotates pairs")
    nope = settings.size("key_dim", size)
    return LatentShape(
        settings.hidden,
        count,
        settings.size("rank", 4 * size),
        nope,
        rope,
        size,
        settings.number("scale", (nope + rope) ** -0.5),
        settings.size_or_none("query_rank"),
        settings.size_or_none("window"),
    )


def _mamba(settings: BlockSettings) -> MambaShape:
    hidden = settings.hidden
    inner = settings.size("inner", 2 * hidden)
    rank = settings.size("rank", math.ceil(hidden / 16))
    return MambaShape(hidden, inner, settings.size("state", 16), rank, settings.convolution(4))


def _mamba2(settings: BlockSettings) -> Mamba2Shape:
    hidden = settings.hidden
    inner = settings.size("inner", 2 * hidden)
    size = settings.size("head_dim", min(64, inner))
    if inner % size:
        raise ModelError(f"Block {settings.block!r} has {inner} channels, which heads of {size} do not divide.")
    return Mamba2Shape(
        hidden,
        inner // size,
        size,
        settings.size("groups", 1),
        settings.size("state", 64),
        settings.convolution(4),
    )


def _s4(settings: BlockSettings) -> S4Shape:
    return S4Shape(settings.hidden, settings.size("state", 64), str(settings.raw("rule", "zoh")))


def _conv(settings: BlockSettings) -> ShortConvShape:
    return ShortConvShape(settings.hidden, settings.size("inner", settings.hidden), settings.convolution(3))


def _based(settings: BlockSettings) -> BasedShape:
    return BasedShape(settings.hidden, *_heads(settings), settings.size("features", 16))


def _lightning(settings: BlockSettings) -> LightningShape:
    return LightningShape(settings.hidden, *_heads(settings), eps=settings.fields.number("rms_norm_eps"))


def _delta(settings: BlockSettings) -> DeltaShape:
    count, size = _heads(settings)
    shape = DeltaShape(
        settings.hidden,
        settings.size("key_heads", count),
        count,
        settings.size("key_dim", size),
        size,
        settings.convolution(4),
        eps=settings.fields.number("rms_norm_eps"),
    )
    if count % shape.key_heads:
        raise ModelError(f"Block {settings.block!r} has {count} heads, which {shape.key_heads} key heads cannot share.")
    return shape


def _heads(settings: BlockSettings) -> tuple[int, int]:
    """Heads of linear attention and their size; they divide the hidden size unless it is given."""
    count = settings.size("heads", settings.fields.size_or_none("num_attention_heads"))
    return count, settings.size(
        "head_dim", settings.fields.size_or_none("head_dim") or max(1, settings.hidden // count)
    )


KINDS: dict[str, MixerKind] = {
    "attention": MixerKind("window", _attention),
    "based": MixerKind("features", _based),
    "conv": MixerKind("width", _conv),
    "delta": MixerKind("head_dim", _delta),
    "lightning": MixerKind("head_dim", _lightning),
    "mamba": MixerKind("state", _mamba),
    "mamba2": MixerKind("state", _mamba2),
    "mla": MixerKind("rank", _mla),
    "s4": MixerKind("state", _s4),
}
ALIASES = {"global": "attention", "local": "attention"}
"""Blocks that need no entry in `blocks`, beside the kinds themselves. `local` demands a window."""


def feed_of(block: str, own: Any, fields: ConfigFields) -> FeedShape:
    """A kind, or an object with a kind and its sizes; without one, the configuration's `feed`."""
    inner = fields.size_or_none("intermediate_size")
    given = own if own is not None else fields.raw("feed", "none" if inner is None else "gated")
    values = {"kind": given} if isinstance(given, str) else given
    if not isinstance(values, dict) or not isinstance(values.get("kind"), str):
        raise ModelError(
            f"Block {block!r} has feed = {repr(given)[:80]}, but it must be {', '.join(FEEDS)}, or an object with "
            "'kind'."
        )
    kind = values["kind"]
    if kind not in FEEDS:
        raise ModelError(f"Block {block!r} has the unknown feed-forward layer {kind[:80]!r}; use {', '.join(FEEDS)}.")
    settings = BlockSettings(f"{block}.feed", {name: value for name, value in values.items() if name != "kind"}, fields)
    shape = FEEDS[kind](settings)
    settings.finish()
    return shape


def _no_feed(settings: BlockSettings) -> FeedShape:
    return FeedShape("none")


def _wide(kind: str) -> Callable[[BlockSettings], FeedShape]:
    def shape(settings: BlockSettings) -> FeedShape:
        inner = settings.size("inner", settings.fields.size_or_none("intermediate_size"))
        chosen = settings.raw("activation", settings.fields.text("hidden_act"))
        if not isinstance(chosen, str):
            raise settings.wrong("activation", chosen, "the name of an activation")
        activation(chosen)  # refuses an unknown one
        return FeedShape(kind, inner, chosen)

    return shape


def _experts(settings: BlockSettings) -> FeedShape:
    rule = RoutingRule(
        settings.size("count"),
        settings.size("per_token"),
        renormalize=settings.flag("renormalize", default=True),
    )
    shared = settings.size_or_none("shared") or 0
    return replace(_wide("experts")(settings), rule=rule, shared=shared)


FEEDS: dict[str, Callable[[BlockSettings], FeedShape]] = {
    "gated": _wide("gated"),
    "dense": _wide("dense"),
    "experts": _experts,
    "none": _no_feed,
}
