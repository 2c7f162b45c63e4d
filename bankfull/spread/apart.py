"""Attention and feed-forward apart: some ranks run the mixers of a model, the others its feed-forward layers.

The ranks with mixers run the model as usual (embedding, norms, mixers, head, and the state), but each feed-forward
layer is a `RemoteFeed`. The others run the feed-forward layers of every step in order (`Feeds`). A rank reads only the
weights of its own side.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from bankfull.layers.build import Build
from bankfull.layers.decoder import Block, Decoder, Feed
from bankfull.layers.experts import Experts
from bankfull.layers.linear import Linear
from bankfull.layers.norm import RMSNorm
from bankfull.layers.placement import Home, Role
from bankfull.ops import Sides, cross


@dataclass(frozen=True, slots=True)
class OneSide:
    """A placement (`layers.placement`): only the weights of one side of the model are read here."""

    role: Role

    @staticmethod
    def of(sides: Sides) -> OneSide:
        return OneSide(Role.MIXER if sides.runs_mixers else Role.FEED)

    @property
    def roles(self) -> frozenset[Role]:
        return frozenset((self.role,))

    def home(self, module: str, role: Role, here: Home) -> Home:
        return here if role is self.role else here.elsewhere


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
