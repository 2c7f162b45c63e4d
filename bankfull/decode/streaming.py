"""Speculative Streaming: the model's own top layers draft, in extra streams (Bhendawade et al., 2024).

The publication runs the streams of every draft in the step that verifies it, and tunes the model. Here streams run once
per step, for the accepted token only, after it is known: a step's cost does not grow with drafts times streams, the
streams know the newest token, and the model stays as it is.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from bankfull.decode.candidate_tree import MOST_NODES, USUAL_ACCEPTANCE, CandidateTree, best_tree, chain_tree
from bankfull.decode.draft import ChosenRows
from bankfull.decode.strategy import ComputedStep, Draft, OwnModel, OwnSteps, Sampling, Scores, Strategy, Verdict, View
from bankfull.decode.stream_tree import Continuations, FixedTree, grown_tree
from bankfull.decode.streams import CANDIDATES, StreamStack, stream_lines
from bankfull.decode.verify import verify
from bankfull.errors import ConfigError
from bankfull.layers.decoder import Decoder
from bankfull.weights.streams import StreamWeights

SPARSE, CHAIN = "sparse", "chain"
NODES = 8
"""Draft tokens of a tree unless another number is given."""


class StreamDrafter(Strategy):
    """Runs the streams. A subclass makes trees of their candidates."""

    follows = True
    trees = True
    exact = True
    chances = True
    """Whether `tree_of` reads logprobs, and not only the order of candidates."""

    def __init__(self, streams: StreamWeights, depth: int) -> None:
        """`depth`: streams to run."""
        self.streams = streams
        self.ahead = depth
        self._stack: StreamStack | None = None
        self._tapped: Tensor | None = None

    @property
    def own(self) -> OwnModel | None:
        return None if self._stack is None else self._stack.own

    @property
    def stack(self) -> StreamStack:
        assert self._stack is not None, "the strategy runs with a model"
        return self._stack

    def prepare(self, target: Decoder) -> None:
        self._stack = StreamStack(target, self.streams, self.ahead)
        self.taps = (self._stack.first,)

    def attach(self, steps: OwnSteps) -> None:
        self._steps = steps

    def follow(self, step: ComputedStep) -> None:
        self._tapped = step.tapped[self.taps[0]]

    def propose(self, view: View) -> Draft | None:
        room = self._steps.room(view.host_rows, self.ahead)
        if not room.any():
            return None
        chosen = ChosenRows(view, room > 0)
        continuations = self._continuations(view, chosen, room[chosen.lines])
        tokens, parents = self.tree_of(continuations)
        if len(chosen.rows) == len(view.host_rows):
            return Draft(tokens, parents)
        # Rows without KV slots get no streams; they verify any tokens.
        every = tokens.new_zeros(len(view.host_rows), tokens.shape[1]).index_copy_(0, chosen.there, tokens)
        if isinstance(parents, Tensor):
            chain = torch.arange(-1, tokens.shape[1] - 1, device=tokens.device).expand_as(every)
            parents = chain.index_copy(0, chosen.there, parents)
        return Draft(every, parents)

    def _continuations(self, view: View, chosen: ChosenRows, room: np.ndarray) -> Continuations:
        stack, count = self.stack, self.ahead
        assert self._tapped is not None
        batch = self._steps.batch(chosen.rows, 0, room)
        lines = None if (room == count).all() else view.ship(stream_lines(room.tolist(), count))
        stack.enter(view.at_newest(self._tapped)[chosen.there], batch, view.ship(batch.q_start[:-1]), lines)
        hidden, present = self._steps.run(batch), None
        if lines is not None:
            # Fewer KV slots, fewer streams: the others' candidates have no probability.
            hidden = hidden.new_zeros(len(room) * count, hidden.shape[1]).index_copy_(0, lines, hidden)
            present = torch.arange(count, device=hidden.device) < view.ship(room)[:, None]
        return stack.continuations(hidden.view(len(room), count, -1), present, self.chances)

    @abstractmethod
    def tree_of(self, found: Continuations) -> tuple[Tensor, Tensor | np.ndarray | None]:
        """(rows, nodes) tokens, and parents as in `Draft`."""

    def verify(self, scores: Scores, sampling: Sampling) -> Verdict:
        return verify(scores, sampling)


class Streaming(StreamDrafter):
    """A tree of one shape, chosen from measured acceptance. After each node come the candidates that follow its token
    best by the early exit; the others are pruned."""

    chances = False

    def __init__(self, streams: StreamWeights, nodes: int | None = None, tree: str = SPARSE) -> None:
        """`nodes`: draft tokens, at most; without it, 8 for a tree and one per stream for a chain. `tree`: sparse or
        chain."""
        if tree not in (SPARSE, CHAIN):
            raise ConfigError(f"tree={tree[:40]!r} is unknown; use {SPARSE!r} or {CHAIN!r}.")
        _check(nodes)
        self.tree = self._shape(streams, nodes, tree)
        super().__init__(streams, self.tree.depth)
        self.trees = tree == SPARSE

    @staticmethod
    def _shape(streams: StreamWeights, nodes: int | None, tree: str) -> CandidateTree:
        if tree == CHAIN:
            return chain_tree(min(nodes or streams.count, streams.count))
        ranks = min(CANDIDATES, len(streams.vocabulary))
        table = streams.acceptance or USUAL_ACCEPTANCE[: streams.count]
        return best_tree([of_stream[:ranks] for of_stream in table], nodes or NODES)

    def width(self, load: int) -> int:
        return len(self.tree)

    @cached_property
    def _fixed(self) -> FixedTree:
        return FixedTree(self.tree, self.stack.build.device)

    def tree_of(self, found: Continuations) -> tuple[Tensor, Tensor | np.ndarray | None]:
        return self._fixed.tokens(found), self.tree.parents if self.trees else None


class TreeStreaming(StreamDrafter):
    """A tree of each row's own shape: a branch gets the next node if the product of its confidences is the highest, so
    that branches grow in proportion to their chance."""

    def __init__(self, streams: StreamWeights, nodes: int | None = None) -> None:
        """`nodes`: draft tokens, at most 10 times the number of streams; 8 without it."""
        _check(nodes)
        self._nodes = min(nodes or NODES, streams.count * min(CANDIDATES, len(streams.vocabulary)))
        super().__init__(streams, min(streams.count, self._nodes))

    def width(self, load: int) -> int:
        return self._nodes

    def tree_of(self, found: Continuations) -> tuple[Tensor, Tensor | np.ndarray | None]:
        return grown_tree(found, self._nodes)


def _check(nodes: int | None) -> None:
    if nodes is not None and not 1 <= nodes <= MOST_NODES:
        raise ConfigError(f"nodes={nodes} is not possible; choose 1 to {MOST_NODES} draft tokens.")
