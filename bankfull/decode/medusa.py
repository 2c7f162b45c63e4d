"""Medusa: extra heads on the model's last hidden state propose a static tree of draft tokens.

One pass over the heads gives the candidates of every depth at once; no draft depends on another draft. A node's token
is a candidate of the head of its depth, whatever its parent is. Verification is exact for greedy and sampled requests,
unless typical acceptance is chosen.
Medusa-2 checkpoints have the same heads, trained together with the model that they come with.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import silu

from bankfull.decode.candidate_tree import MOST_NODES, USUAL_ACCEPTANCE, best_tree, chain_tree
from bankfull.decode.rules import AcceptanceRule, SameTokens
from bankfull.decode.strategy import Draft, Sampling, Scores, Strategy, Verdict, View
from bankfull.errors import ConfigError
from bankfull.layers.adapted import own_matrix
from bankfull.layers.decoder import Decoder, Head
from bankfull.layers.linear import Projection
from bankfull.spread.gathered import GatheredLinear, gathered_linear
from bankfull.weights.medusa import Block, MedusaHeads
from bankfull.weights.qtensor import QTensor

SPARSE, CHAIN = "sparse", "chain"
NODES = 8
"""Draft tokens of a tree unless another number is given."""


class MedusaStack:
    """The first heads, ready to run: one product for their first blocks, and one for their projections where these are
    the rows of one matrix."""

    def __init__(self, head: Head, heads: MedusaHeads, count: int) -> None:
        """`head`: the model's own; its build chooses kernels, dtype and device. `count`: heads to run."""
        self.build, self.count, self.hidden = head.build, count, heads.hidden
        blocks = heads.blocks[:count]
        self._first = self._linear([of_head[0] for of_head in blocks])
        self._later = [
            [self._linear([block]) for block in layer] for layer in zip(*(b[1:] for b in blocks), strict=True)
        ]
        self.vocabulary: Tensor | None = None
        if heads.projections is not None:
            self._projections = [self._spread([projection]) for projection in heads.projections[:count]]
            return
        assert heads.vocabulary is not None
        ids = heads.vocabulary
        self.vocabulary = ids.to(self.build.device)

        def chosen(rows: Tensor | None = None) -> QTensor:
            return head.stored(ids if rows is None else ids[rows])

        self._projections = [gathered_linear(self.build, self.hidden, len(ids), stored=chosen)]

    def candidates(self, hidden: Tensor, most: int) -> Tensor:
        """(rows, heads, most) token ids, the most likely first. `hidden` (rows, hidden): the input of the model's
        head."""
        rows = len(hidden)
        x = silu(self._first(hidden).view(rows, self.count, self.hidden)) + hidden[:, None]
        for layer in self._later:
            x = torch.stack([x[:, k] + silu(block(x[:, k].contiguous())) for k, block in enumerate(layer)], 1)
        if len(self._projections) == 1:
            best = _highest(self._projections[0], x.reshape(rows * self.count, self.hidden), most)
        else:
            each = [_highest(projection, x[:, k].contiguous(), most) for k, projection in enumerate(self._projections)]
            best = torch.stack(each, 1)
        ids = best if self.vocabulary is None else self.vocabulary[best]
        return ids.view(rows, self.count, most)

    def _linear(self, blocks: Sequence[Block]) -> Projection:
        return self._spread([weight for weight, _ in blocks], torch.cat([bias for _, bias in blocks]))

    def _spread(self, matrices: Sequence[Tensor], bias: Tensor | bool = False) -> Projection:
        """One layer with the rows of several matrices."""
        each = len(matrices[0])

        def stored(rows: Tensor | None = None) -> QTensor:
            parts = list(matrices)
            if rows is not None:  # they ascend, so that those of a matrix come before those of the next one
                parts = [matrix[rows[rows // each == k] - k * each] for k, matrix in enumerate(parts)]
            return own_matrix(self.build, torch.cat(parts))

        return gathered_linear(self.build, self.hidden, each * len(matrices), bias, stored)


class Medusa(Strategy):
    def __init__(
        self,
        heads: MedusaHeads,
        nodes: int | None = None,
        tree: str = SPARSE,
        rule: AcceptanceRule | None = None,
    ) -> None:
        """`nodes`: draft tokens, at most; without it, 8 for a tree and one per head for a chain. `tree`: sparse, or
        chain, which models with recurrent state need. `rule`: `SameTokens` unless given."""
        self.heads, self._rule = heads, rule or SameTokens()
        self.exact = isinstance(self._rule, SameTokens)
        if tree not in (SPARSE, CHAIN):
            raise ConfigError(f"tree={tree[:40]!r} is unknown; use {SPARSE!r} or {CHAIN!r}.")
        if nodes is not None and not 1 <= nodes <= MOST_NODES:
            raise ConfigError(f"nodes={nodes} is not possible; choose 1 to {MOST_NODES} draft tokens.")
        count = len(heads.blocks)
        if tree == CHAIN:
            self.tree = chain_tree(min(nodes or count, count))
        else:
            ranks = heads.vocab if heads.vocabulary is None else len(heads.vocabulary)
            acceptance = [of_head[:ranks] for of_head in heads.acceptance or USUAL_ACCEPTANCE[:count]]
            self.tree = best_tree(acceptance, nodes or NODES)
        self.trees = tree == SPARSE
        self._stack: MedusaStack | None = None

    def prepare(self, target: Decoder) -> None:
        self.heads.suit(target.hidden, target.vocab)
        self._stack = MedusaStack(target.head, self.heads, self.tree.depth)

    def width(self, load: int) -> int:
        return len(self.tree)

    def propose(self, view: View) -> Draft | None:
        assert self._stack is not None, "the strategy runs with a model"
        tree = self.tree
        candidates = self._stack.candidates(view.hidden, tree.widest)
        heads, ranks = self._places
        return Draft(candidates[:, heads, ranks], tree.parents if self.trees else None)

    @cached_property
    def _places(self) -> tuple[Tensor, Tensor]:
        """Head and rank of each node, where the candidates are."""
        assert self._stack is not None
        device = self._stack.build.device
        return torch.from_numpy(self.tree.heads).to(device), torch.from_numpy(self.tree.ranks).to(device)

    def verify(self, scores: Scores, sampling: Sampling) -> Verdict:
        return self._rule.verify(scores, sampling)


def _highest(project: Projection, x: Tensor, most: int) -> Tensor:
    """(rows, most) the outputs with the highest values; any valid ones where no value is finite."""
    if isinstance(project, GatheredLinear):
        return project.highest(x, most)
    if most == 1:
        return project.best(x).clamp_min(0)[:, None]
    return project(x).topk(most, -1).indices
