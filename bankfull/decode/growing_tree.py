"""A dynamic draft tree (EAGLE-2): grown by confidence, on the device, another one for each row.

The confidence of a node is the product of the probabilities on its path, here the sum of their logarithms. Each depth
continues its `k` most confident candidates, and each of these has k candidates. At last the best of all candidates are
kept. Nodes that are continued are numbered in the order in which the head runs them: k of each depth.
"""

from __future__ import annotations

import torch
from torch import Tensor


class GrowingTree:
    def __init__(self, ids: Tensor, confidence: Tensor) -> None:
        """`ids`, `confidence` (rows, k): tokens and log-probabilities of the candidates after the newest token."""
        rows, self._k = ids.shape
        self._ids, self._chances, self._parents = [ids], [confidence], [torch.full_like(ids, -1)]
        """The candidates of each depth, and their parents as numbers among all candidates."""
        self._first = 0
        """The number of the newest depth's first candidate."""
        self._best = ids
        self.tokens = ids.new_zeros(rows, 0)
        """(rows, nodes) tokens of the nodes that are continued."""
        self.masks = ids.new_zeros(rows, 0)
        """(rows, nodes) the nodes on the path to each node and itself, as bits."""

    @property
    def depths(self) -> Tensor:
        """(nodes) the depth of each node that is continued; 1 follows the newest token."""
        nodes = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        return nodes.div(self._k, rounding_mode="floor") + 1

    def expand(self) -> Tensor | None:
        """Continue the best candidates of the newest depth. (rows, k) their parents' numbers among the nodes; None if
        the newest token is their parent."""
        ids, chances = self._ids[-1], self._chances[-1]
        known = self.tokens.shape[1]
        self._best = chances.topk(self._k, -1).indices
        masks = torch.ones_like(self._best) << torch.arange(known, known + self._k, device=ids.device)
        up = None
        if known:  # candidate c follows node c // k of the depth before
            up = self._best.div(self._k, rounding_mode="floor") + (known - self._k)
            masks = masks | self.masks.gather(1, up)
        self.tokens = torch.cat((self.tokens, ids.gather(1, self._best)), 1)
        self.masks = torch.cat((self.masks, masks), 1)
        return up

    def add(self, ids: Tensor, confidence: Tensor) -> None:
        """`ids`, `confidence` (rows * k, k): the candidates after the nodes that were continued last."""
        best, rows = self._best, len(self._best)
        before = self._chances[-1].gather(1, best)[:, :, None]
        parents = (self._first + best)[:, :, None].expand(rows, self._k, self._k)
        self._first += self._ids[-1].shape[1]
        self._ids.append(ids.view(rows, -1))
        self._chances.append((before + confidence.view(rows, self._k, self._k)).flatten(1))
        self._parents.append(parents.flatten(1))

    def best(self, nodes: int) -> tuple[Tensor, Tensor]:
        """(rows, nodes) tokens and parents of the most confident candidates, in this order. A candidate is at most as
        confident as its parent and has a higher number, so a stable order puts every parent before its children."""
        ids, chances, above = (torch.cat(part, 1) for part in (self._ids, self._chances, self._parents))
        certain = chances.nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        order = certain.sort(dim=-1, descending=True, stable=True).indices
        number = torch.arange(order.shape[1], device=order.device).expand_as(order)
        places = torch.empty_like(order).scatter_(1, order, number)
        kept = order[:, :nodes]
        up = above.gather(1, kept)
        return ids.gather(1, kept), torch.where(up < 0, up, places.gather(1, up.clamp_min(0)))
