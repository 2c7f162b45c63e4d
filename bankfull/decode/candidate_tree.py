"""Static trees of draft tokens over the candidates of several heads, chosen from measured acceptance.

Head d proposes candidates for the token at depth d + 1, ranked by its scores. `acceptance[d][r]` is the measured
frequency with which candidate r of head d is the token that the model chooses. Heads are treated as independent: a
path is accepted with the product of its frequencies, and the sum of these products over the nodes is the expected
number of accepted tokens. Adding the most likely node that has its parent in the tree, again and again, maximizes that
sum for every number of nodes. The first n nodes of a tree are therefore the best tree of n nodes.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bankfull.errors import ConfigError
from bankfull.ops.attention.body import TREE_TOKENS

MOST_NODES = TREE_TOKENS - 1
"""Draft tokens of the largest tree: one bit of the ancestor mask is the last known token's."""
USUAL_ACCEPTANCE = tuple(tuple(0.55 * 0.8**head / (1 + rank) ** 1.7 for rank in range(10)) for head in range(16))
"""Frequencies for heads without a measurement: they fall with the head's distance and with the rank."""


@dataclass(frozen=True, slots=True)
class CandidateTree:
    """Arrays over the nodes; a parent comes before its children."""

    parents: np.ndarray
    """The index of each node's parent, -1 for the last known token."""
    heads: np.ndarray
    """The head that proposes each node's token: the node's depth minus 1."""
    ranks: np.ndarray
    """The rank of the node's token among the head's candidates."""

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def depth(self) -> int:
        return int(self.heads.max()) + 1

    @property
    def widest(self) -> int:
        """Candidates of a head that the tree reads, at most."""
        return int(self.ranks.max()) + 1

    @property
    def is_chain(self) -> bool:
        return bool((self.parents == np.arange(-1, len(self) - 1)).all())

    def first(self, nodes: int) -> CandidateTree:
        return CandidateTree(self.parents[:nodes], self.heads[:nodes], self.ranks[:nodes])


def best_tree(acceptance: Sequence[Sequence[float]], nodes: int) -> CandidateTree:
    """The tree of at most `nodes` nodes with the most accepted tokens; candidates that were never right are left
    out."""
    _check(acceptance, nodes)
    orders = [sorted(range(len(of_head)), key=lambda rank, p=of_head: (-p[rank], rank)) for of_head in acceptance]  # type: ignore[misc]
    chosen: list[tuple[int, int, int]] = []
    # (-probability of the path, age, parent, its probability, head, place of the rank in the head's order)
    waiting: list[tuple[float, int, int, float, int, int]] = []

    def offer(parent: int, before: float, head: int, place: int) -> None:
        if head < len(orders) and place < len(orders[head]):
            chance = before * acceptance[head][orders[head][place]]
            if chance > 0:
                heapq.heappush(waiting, (-chance, len(chosen) * 64 + place, parent, before, head, place))

    offer(-1, 1.0, 0, 0)
    while waiting and len(chosen) < nodes:
        chance, _, parent, before, head, place = heapq.heappop(waiting)
        chosen.append((parent, head, orders[head][place]))
        offer(parent, before, head, place + 1)
        offer(len(chosen) - 1, -chance, head + 1, 0)
    return _tree(chosen or [(-1, 0, 0)])


def chain_tree(depth: int) -> CandidateTree:
    """The most likely candidate of each head."""
    return _tree([(head - 1, head, 0) for head in range(depth)])


def accepted_nodes(tree: CandidateTree, ranks: Tensor) -> Tensor:
    """(positions) how many nodes verification accepts, where `ranks` (positions, heads) are those of the right
    tokens."""
    reached = [torch.ones(len(ranks), dtype=torch.bool, device=ranks.device)]
    for parent, head, rank in zip(tree.parents.tolist(), tree.heads.tolist(), tree.ranks.tolist(), strict=True):
        reached.append(reached[parent + 1] & (ranks[:, head] == rank))
    return torch.stack(reached[1:]).sum(0)


def expected_tokens(tree: CandidateTree, acceptance: Sequence[Sequence[float]]) -> float:
    """Tokens per step if heads are right independently of each other: accepted nodes, and the model's own token."""
    chances: list[float] = []
    for parent, head, rank in zip(tree.parents.tolist(), tree.heads.tolist(), tree.ranks.tolist(), strict=True):
        chances.append((chances[parent] if parent >= 0 else 1.0) * acceptance[head][rank])
    return 1.0 + sum(chances)


def _tree(nodes: Sequence[tuple[int, int, int]]) -> CandidateTree:
    parents, heads, ranks = np.array(nodes, np.int64).T.copy()
    return CandidateTree(parents, heads, ranks)


def _check(acceptance: Sequence[Sequence[float]], nodes: int) -> None:
    if not 1 <= nodes <= MOST_NODES:
        raise ConfigError(f"A tree of {nodes} draft tokens is not possible; choose 1 to {MOST_NODES} nodes.")
    if not acceptance or not all(0 <= chance <= 1 for of_head in acceptance for chance in of_head):
        raise ConfigError("The acceptance of draft heads must be lists of frequencies between 0 and 1, one per head.")
