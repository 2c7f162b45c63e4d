"""Trees of draft tokens from candidates of each depth and estimates of how likely one follows another.

A node is a candidate of its depth after a candidate of the depth before. All such trees have the same depth, so every
step here runs on the device for all rows at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bankfull.decode.candidate_tree import CandidateTree


@dataclass(frozen=True, slots=True)
class Continuations:
    """Candidates for the tokens after the newest one. Logprobs are finite or -inf, at most 0. For a `FixedTree`, which
    reads their order only, logits may stand in their place."""

    tokens: Tensor
    """(rows, depth, most) token ids."""
    first: Tensor
    """(rows, most) logprobs of the candidates of the first depth, in descending order."""
    following: Tensor
    """(rows, depth - 1, most, most) [:, j, p, c]: logprob of candidate c of depth j + 2 after candidate p of depth
    j + 1."""


class FixedTree:
    """A tree of one shape for all rows: a node is its parent's candidate of a fixed rank."""

    def __init__(self, tree: CandidateTree, device: torch.device) -> None:
        within = np.zeros(len(tree), np.int64)
        by_depth = [np.flatnonzero(tree.heads == depth) for depth in range(tree.depth)]
        for nodes in by_depth:
            within[nodes] = np.arange(len(nodes))
        self._levels = [
            tuple(torch.from_numpy(part).to(device) for part in (within[tree.parents[nodes]], tree.ranks[nodes]))
            for nodes in by_depth
        ]
        """The nodes of each depth: the place of each one's parent among the nodes of the depth before, and its rank."""
        self._order = torch.from_numpy(np.argsort(np.concatenate(by_depth))).to(device)

    def tokens(self, found: Continuations) -> Tensor:
        """(rows, nodes) in the order of the tree."""
        most, by_depth, chosen = found.first.shape[1], [], found.tokens[:, 0]
        for depth, (above, ranks) in enumerate(self._levels):
            if not depth:
                chosen = ranks.expand(len(found.first), -1)
            else:
                ranked = found.following[:, depth - 1].argsort(dim=-1, descending=True, stable=True)
                children = ranked.gather(1, chosen[:, above][:, :, None].expand(-1, -1, most))
                chosen = children.gather(2, ranks[None, :, None].expand(len(children), -1, 1))[:, :, 0]
            by_depth.append(found.tokens[:, depth].gather(1, chosen))
        return torch.cat(by_depth, 1)[:, self._order]


def grown_tree(found: Continuations, nodes: int) -> tuple[Tensor, Tensor]:
    """(rows, nodes) tokens and parents of the nodes with the highest products of probabilities along their paths, the
    highest first. Each depth keeps as many nodes as it has candidates; `nodes` is at most depth * candidates.

    A path's product never exceeds that of a part of it, so a node's parent comes before it, and the first n nodes of a
    row are its best tree of n nodes."""
    rows, depth, most = found.tokens.shape
    score, chosen = found.first, torch.arange(most, device=found.first.device).expand(rows, -1)
    scores, tokens, parents = [score], [found.tokens[:, 0]], [torch.full_like(chosen, -1)]
    for below in range(1, depth):
        after = found.following[:, below - 1].gather(1, chosen[:, :, None].expand(-1, -1, most))
        score, place = (score[:, :, None] + after).flatten(1).topk(most)
        chosen = place % most
        scores.append(score)
        tokens.append(found.tokens[:, below].gather(1, chosen))
        parents.append((below - 1) * most + place // most)
    # Stable: among equal products a parent stays before its children, which are in a later depth.
    order = torch.cat(scores, 1).sort(dim=1, descending=True, stable=True).indices
    place = torch.empty_like(order).scatter_(1, order, torch.arange(depth * most, device=order.device).expand_as(order))
    order, above = order[:, :nodes], torch.cat(parents, 1)
    above = torch.where(above < 0, -1, place.gather(1, above.clamp_min(0)))
    return torch.cat(tokens, 1).gather(1, order), above.gather(1, order)
