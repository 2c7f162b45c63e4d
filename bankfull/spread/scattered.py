"""Tensor ranks that divide the tokens between their split layers (Megatron's sequence parallelism).

Rows are gathered before a mixer or a feed-forward layer, and the sum of the ranks' results is scattered after it. So
norms and residuals run on a part of the tokens, and an all-reduce becomes an all-gather and a reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from bankfull.layers.batch import Batch
from bankfull.layers.build import Build
from bankfull.layers.decoder import Feed
from bankfull.layers.experts import Experts
from bankfull.layers.mixer import Angles, Mixer
from bankfull.layers.parallel_mixer import ParallelMixer
from bankfull.ops import gather_rows, reduce_scatter
from bankfull.ranks.group import RankGroup
from bankfull.spread.experts import SpreadExperts
from bankfull.spread.token_share import TokenShare, own_rows
from bankfull.state.storage import LayerStates


class ScatteredMixer:
    """`ends`: the mixers whose results are the branch."""

    def __init__(self, build: Build, mixer: Mixer, share: TokenShare, ends: Sequence[Any]) -> None:
        assert share.scatter is not None
        self.mixer, self.share, self.group = mixer, share, share.scatter
        self.states, self.rope = mixer.states, mixer.rope
        self._gather = build.bind(gather_rows)
        self._scatter = scattering(build, ends, self.group)

    def plan(self, batch: Batch, groups: Sequence[int | None]) -> tuple[int, Any]:
        return self.share.rows(batch), self.mixer.plan(batch, groups)

    def run(self, x: Any, states: LayerStates, meta: tuple[int, Any], angles: Angles | None) -> Tensor:
        rows, inner = meta
        return self._scatter(self.mixer.run(self._gather(x, self.group, rows), states, inner, angles))


class ScatteredFeed:
    def __init__(self, build: Build, feed: Feed, share: TokenShare) -> None:
        assert share.scatter is not None
        self.feed, self.group = feed, share.scatter
        self._gather = build.bind(gather_rows)
        self._scatter = scattering(build, [feed], self.group)

    def __call__(self, x: Tensor) -> Tensor:
        """Rows that pad the last rank's are computed, too."""
        return self._scatter(self.feed(self._gather(x, self.group, self.group.size * len(x))))


def scattering(build: Build, ends: Sequence[Any], group: RankGroup) -> Callable[[Tensor], Tensor]:
    """The function from a branch to this rank's rows of it. Where all layers that end the branch add up their ranks'
    products, they leave that to the scattering; else the branch is whole on every rank already."""
    summing = [layer for end in ends for layer in _last_layers(end)]
    if not summing or any(layer.sum_of_ranks is None for layer in summing):
        return lambda x: own_rows(x, group)
    for layer in summing:
        layer.sum_of_ranks = None
    run = build.bind(reduce_scatter)
    return lambda x: run(x, group)


def _last_layers(branch: Any) -> list[Any]:
    """The layers whose products are a branch's result; none where that is not known."""
    if isinstance(branch, ParallelMixer):
        by_mixer = [_last_layers(mixer) for mixer in branch.mixers]
        return [layer for layers in by_mixer for layer in layers] if all(by_mixer) else []
    if isinstance(branch, SpreadExperts):
        return []  # they exchange and add up their results themselves
    if isinstance(branch, Experts):
        shared = [] if branch.shared is None else _last_layers(branch.shared)
        return [] if branch.shared is not None and not shared else [branch, *shared]
    last = getattr(branch, "out", None) or getattr(branch, "down", None)
    return [last] if hasattr(last, "sum_of_ranks") else []
