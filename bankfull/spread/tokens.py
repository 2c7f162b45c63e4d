"""A built model whose steps are divided by tokens: over context ranks, and over tensor ranks with sp=megatron."""

from __future__ import annotations

from copy import copy
from dataclasses import replace

from bankfull.errors import ConfigError
from bankfull.layers.attention import Attention
from bankfull.layers.build import Build
from bankfull.layers.decoder import Block, Decoder, Feed
from bankfull.layers.latent import LatentAttention
from bankfull.layers.mixer import Mixer
from bankfull.layers.norm import RMSNorm
from bankfull.layers.parallel_mixer import ParallelMixer
from bankfull.layers.shared import SharedAttention
from bankfull.spread.context import ContextMixer, WholeMixer
from bankfull.spread.decoder import RankDecoder
from bankfull.spread.experts import SpreadExperts
from bankfull.spread.page_access import HeadPages, LatentPages, PageAccess
from bankfull.spread.scattered import ScatteredFeed, ScatteredMixer
from bankfull.spread.token_share import TokenShare
from bankfull.spread.ulysses import UlyssesMixer

MEGATRON, ULYSSES = "megatron", "ulysses"


def spread_tokens(model: Decoder, build: Build) -> Decoder:
    """The model with every block as `build` divides its tokens. Its layers are not usable without it any more."""
    if build.context is None and build.sequence == "off":
        return model
    assert build.sequence != MEGATRON or build.shard is not None, "the mesh has tensor ranks with sp=megatron"
    assert build.sequence != ULYSSES or build.context is not None, "the mesh has context ranks with sp=ulysses"
    scatter = build.shard.group if build.sequence == MEGATRON and build.shard is not None else None
    mixers = [one for mixer in model.mixers for one in _inside(mixer)]
    attentions = [one for one in mixers if isinstance(one, Attention | SharedAttention | LatentAttention)]
    if build.context is not None and not attentions:
        raise ConfigError(
            "Context ranks share the keys and values of attention, and this model has none; leave out cp."
        )
    # A block that sees later tokens may end in another rank's piece; shared keys and values lie in pages only.
    whole = any(isinstance(one, SharedAttention) or (isinstance(one, Attention) and one.heads.block) for one in mixers)
    share = TokenShare(build, build.context, scatter, by_heads=build.sequence == ULYSSES, fresh_apart=not whole)
    return RankDecoder.of(model, blocks=[_spread_block(build, block, share) for block in model.blocks], share=share)


def _inside(mixer: Mixer) -> tuple[Mixer, ...]:
    return mixer.mixers if isinstance(mixer, ParallelMixer) else (mixer,)


def _spread_block(build: Build, block: Block, share: TokenShare) -> Block:
    mixer, feed = block.mixer, block.feed
    if share.context is not None:
        mixer = _over_context(build, mixer, share)
    if share.scatter is not None:
        mixer = ScatteredMixer(build, mixer, share, [block.mixer])
        feed = feed if feed is None or _takes_own_tokens(feed) else ScatteredFeed(build, feed, share)
    # Mixers and feed-forward layers that exchange rows read normed ones.
    if isinstance(block.before_mixer, RMSNorm):
        block.before_mixer.reader = None
    if isinstance(block.before_feed, RMSNorm) and share.scatter is not None:
        block.before_feed.reader = None
    return replace(block, mixer=mixer, feed=feed)


def _takes_own_tokens(feed: Feed) -> bool:
    """Whether each tensor rank sends its own tokens to their experts, so that no rows need to be gathered before."""
    return isinstance(feed, SpreadExperts) and feed.ranks.tokens is None and feed.ranks.width is None


def _over_context(build: Build, mixer: Mixer, share: TokenShare) -> Mixer:
    if isinstance(mixer, ParallelMixer):
        spread = copy(mixer)
        spread.mixers = tuple(_over_context(build, one, share) for one in mixer.mixers)
        spread.states = tuple(spec for one in spread.mixers for spec in one.states)
        return spread
    if not isinstance(mixer, Attention | SharedAttention | LatentAttention):
        return WholeMixer(build, mixer, share)
    by_heads = build.sequence == ULYSSES
    access = _access(build, mixer, share, by_heads)
    return UlyssesMixer(build, access, share) if by_heads else ContextMixer(build, access, share)


def _access(
    build: Build, mixer: Attention | SharedAttention | LatentAttention, share: TokenShare, by_heads: bool
) -> PageAccess:
    assert share.context is not None
    part, parts = (share.context.index, share.context.size) if by_heads else (0, 1)
    if isinstance(mixer, LatentAttention):
        _check_heads(mixer.shape.heads, 1, parts)
        return LatentPages(build, mixer, parts)
    _check_heads(mixer.heads.count, mixer.heads.kv, parts)
    return HeadPages(build, mixer, part, parts)


def _check_heads(heads: int, kv: int, parts: int) -> None:
    if heads % parts or (kv % parts and parts % kv):
        raise ConfigError(
            f"A layer's {heads} heads, with {kv} heads of keys and values, cannot be divided over {parts} context "
            "ranks by sp=ulysses; choose another cp, or leave out sp."
        )
