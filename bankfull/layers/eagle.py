"""The layers of an EAGLE head that other models do not have: a block over embedding and feature, and a head over a
reduced vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bankfull.layers.build import Build
from bankfull.layers.decoder import Block, Decoder, Head, Stream
from bankfull.layers.linear import Projection, StoredRows
from bankfull.layers.mixer import Angles
from bankfull.layers.norm import RMSNorm
from bankfull.ops import Unnormed
from bankfull.state.storage import LayerStates

Features = Callable[[Tensor, Mapping[int, Tensor]], Tensor]
"""The function from a step's last hidden states and its taps to the features of its tokens."""


@dataclass(frozen=True, slots=True)
class EagleHead:
    """A head that is ready to run."""

    model: Decoder
    """Its `forward` gives the predicted feature of each token, its `head` the scores of the token after it."""
    features: Features
    taps: tuple[int, ...]
    """Layers of the target model that `features` reads; empty for EAGLE-1."""


@dataclass(slots=True, kw_only=True)
class FusedBlock(Block):
    """EAGLE-3's layer: its stream is (tokens, 2 d), the embedding and the feature. The attention reads the norms of
    both; the residual stream is the feature."""

    before_embedding: RMSNorm

    def run(
        self,
        stream: Stream,
        states: LayerStates,
        meta: Any,
        angles: Angles | None,
        entering: list[Tensor] | None = None,
    ) -> Stream:
        assert self.feed is not None and self.before_feed is not None and isinstance(self.before_mixer, RMSNorm)
        embedded, feature = (part.contiguous() for part in stream[0].chunk(2, -1))
        both = torch.cat((self.before_embedding(embedded), self.before_mixer(feature)), -1)
        x, inner = self.before_feed.join(feature, self.mixer.run(both, states, meta, angles))
        return x, self.feed(inner)


class DraftLogits(Head):
    """Scores over the whole vocabulary from a head that has some of its token ids; the others get -inf."""

    def __init__(
        self,
        build: Build,
        project: Projection,
        stored: StoredRows,
        vocab: int,
        ids: Tensor | None,
        norm: RMSNorm | None,
        cap: float | None = None,
    ) -> None:
        """`ids`: the token id of each row of `project`; None: row i is token i. `norm`: before the projection."""
        super().__init__(build, project, stored, cap)
        self._vocab, self._norm = vocab, norm
        self._ids = None if ids is None else ids.to(build.device)

    def __call__(self, hidden: Tensor) -> Tensor:
        scores = self._scores(self._normed(hidden))
        if self._ids is None:
            return scores
        whole = scores.new_full((len(scores), self._vocab), -torch.inf)
        return whole.index_copy_(1, self._ids, scores)

    def best(self, hidden: Tensor | Unnormed) -> Tensor:
        assert isinstance(hidden, Tensor)
        best = super().best(self._normed(hidden))
        return best if self._ids is None else torch.where(best < 0, best, self._ids[best.clamp_min(0)])

    def highest(self, hidden: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """(rows, count) log-probabilities within the reduced vocabulary and token ids, the most likely first."""
        scores = self._scores(self._normed(hidden)).float()
        values, rows = scores.log_softmax(-1).topk(count, -1)
        return values, rows if self._ids is None else self._ids[rows]

    @property
    def candidates(self) -> int:
        """Token ids that the head can propose."""
        return self._vocab if self._ids is None else len(self._ids)

    def norms(self, rows: int) -> bool:
        return False

    def _normed(self, hidden: Tensor) -> Tensor:
        return hidden if self._norm is None else self._norm(hidden)
