"""Attention and feed-forward apart: some ranks run the mixers of a model, the others its feed-forward layers.

The ranks with mixers run the model as usual (embedding, norms, mixers, head, and the state), but each feed-forward
layer is a `RemoteFeed`. The others run the feed-forward layers of every step in order (`Feeds`). A rank reads only the
weights of its own side.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from bankfull.layers.build import Build
from bankfull.layers.decoder import Block, Decoder, Feed
from bankfull.layers.experts import Experts
from bankfull.layers.linear import Linear
from bankfull.layers.norm import RMSNorm
from bankfull.ops import Sides, cross
from bankfull.ops.registry import Kit
from bankfull.weights.blank_source import META
from bankfull.weights.qtensor import QTensor

OF_FEEDS = re.compile(
    r"\.\d+\.(mlp|block_sparse_moe|shared_mlp|feed_forward|feed|fc1|fc2|ff_proj|up_proj|ff_out)(\.|$)"
)
"""Modules of a layer that are its feed-forward layer, in all families."""


@dataclass(frozen=True, slots=True)
class SideBuild(Build):
    """Builds the whole structure of a model, but reads only the weights of one side."""

    mixers: bool = True
    """Whether this rank runs mixers."""
    home: torch.device = META
    """The device of what this rank runs."""
    own: Kit | None = None

    # Build is named explicitly: a dataclass with slots is a new class, so a bare super() fails.

    @staticmethod
    def of(build: Build, sides: Sides) -> SideBuild:
        known = {field.name: getattr(build, field.name) for field in fields(Build)}
        return SideBuild(**known, mixers=sides.runs_mixers, home=build.device, own=build.kit)._placed(build.prefix)

    @property
    def split(self) -> tuple[int, int]:
        ranks = self.tensor_ranks
        return (ranks, 1) if self.mixers else (1, ranks)

    def at(self, name: str | int) -> SideBuild:
        return self._placed(self._full(str(name)))

    def _placed(self, prefix: str) -> SideBuild:
        assert self.own is not None
        of_stage = self.stage is None or self.stage.holds(prefix)
        if of_stage and (OF_FEEDS.search(prefix) is None) == self.mixers:
            return replace(self, prefix=prefix, device=self.home, kit=self.own)
        return replace(self, prefix=prefix, device=META, kit=Kit(self.own.device, ()))

    @property
    def together(self) -> Build:
        assert self.own is not None
        known = {field.name: getattr(self, field.name) for field in fields(Build)}
        return Build(**{**known, "device": self.home, "kit": self.own})

    @property
    def blank(self) -> SideBuild:
        assert self.own is not None
        return replace(self, device=META, home=META, kit=Kit(self.own.device, ()))

    @property
    def _reads(self) -> bool:
        return self.device != META

    def _left(self, name: str) -> None:
        """A tensor of the other side. Of experts, a file may name all of them, or fuse some."""
        module = name.partition(".{}.")[0] if "{}" in name else name.rpartition(".")[0]
        self.elsewhere.add(self._full(module) if module else self.prefix)

    def rows_of(self, name: str, shape: tuple[int, ...], rows: Tensor, for_linear: bool = False) -> QTensor:
        if self._reads:
            return Build.rows_of(self, name, shape, rows, for_linear)
        return self.weight(name, (len(rows), *shape[1:]), for_linear)

    def weight(self, name: str, shape: tuple[int, ...], for_linear: bool = False) -> QTensor:
        if self._reads:
            return Build.weight(self, name, shape, for_linear)
        self._left(name)
        return QTensor.dense(torch.empty(shape, dtype=self.dtype, device=META))

    def stacked(self, name: str, count: int, shape: tuple[int, int]) -> QTensor:
        if self._reads:
            return Build.stacked(self, name, count, shape)
        return self.held(name, count, shape, range(count))

    def held(self, name: str, count: int, shape: tuple[int, int], experts: Sequence[int], fused: int = 1) -> QTensor:
        if self._reads:
            return Build.held(self, name, count, shape, experts, fused)
        self._left(name)
        return QTensor.dense(torch.empty((len(experts), *shape), dtype=self.dtype, device=META))

    def held_bias(self, name: str, count: int, size: int, experts: Sequence[int]) -> Tensor:
        if self._reads:
            return Build.held_bias(self, name, count, size, experts)
        self._left(name)
        return torch.empty(len(experts), size, dtype=self.dtype, device=META)

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        if self._reads:
            return Build.tensor(self, name, shape, dtype)
        self._left(name)
        return torch.empty(shape, dtype=dtype or self.dtype, device=META)


@runtime_checkable
class DenseFeed(Protocol):
    down: Linear


class RemoteFeed:
    """A feed-forward layer (`Feed`) that other ranks run: hidden states cross to them, and the results back."""

    def __init__(self, build: Build, sides: Sides) -> None:
        self.sides = sides
        self._cross = build.bind(cross)

    def __call__(self, x: Tensor) -> Tensor:
        none: Tensor = self._cross(x, len(x), self.sides, True)
        back: Tensor = self._cross(none, len(x), self.sides, False)
        return back


class Feeds:
    """The feed-forward layers of a model on a rank that runs nothing else."""

    def __init__(self, build: Build, model: Decoder, sides: Sides) -> None:
        self.sides = sides
        self._feeds: list[Feed] = [block.feed for block in model.blocks if block.feed is not None]
        self._none = [
            torch.empty(0, _stream_width(feed), dtype=build.dtype, device=build.device) for feed in self._feeds
        ]
        self._cross = build.bind(cross)

    def run(self, tokens: int) -> None:
        """Run one step of this many tokens."""
        for feed, none in zip(self._feeds, self._none, strict=True):
            rows = self._cross(none, tokens, self.sides, True)
            self._cross(feed(rows), tokens, self.sides, False)


def _stream_width(feed: Feed) -> int:
    if isinstance(feed, Experts):
        return feed.shape.hidden
    assert isinstance(feed, DenseFeed)
    return feed.down.outer


def with_remote_feeds(build: Build, model: Decoder, sides: Sides) -> Decoder:
    """The model of a rank that runs mixers."""
    return replace(model, blocks=[_remote(block, RemoteFeed(build, sides)) for block in model.blocks])


def _remote(block: Block, feed: RemoteFeed) -> Block:
    if block.feed is None:
        return block
    if isinstance(block.before_feed, RMSNorm):
        block.before_feed.reader = None  # rows cross normed
    return replace(block, feed=feed)
