"""A rank's share of the layers of a composed model."""

from __future__ import annotations

from dataclasses import replace
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
from bankfull.ranks.splitting import Splitting


def split_plan(plan: LayerPlan, ranks: int, feed_ranks: int, spread: bool) -> LayerPlan:
    """A rank's share of a composed model's layer; arguments as of `Splitting`."""
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


def split_composed(s: Splitting) -> None:
    """Refuses layers that cannot be split. No field is divided: the layers are, when they are planned."""
    for plan in plans_of(s.whole):
        split_plan(plan, s.ranks, s.feed_ranks, s.spread)


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
