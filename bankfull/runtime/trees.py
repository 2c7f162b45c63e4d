"""The draft trees of all rows: for each new token of a row's next step its parent, depth and ancestors.

Token 0 is the row's last known token; token j + 1 is its draft j. Parents come before their children, so the first
tokens of a tree are a tree as well, and a step may verify fewer drafts than were proposed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bankfull.errors import ConfigError
from bankfull.ops.attention.body import TREE_TOKENS


@dataclass(frozen=True, slots=True)
class Paths:
    """(rows, tokens) each: the parent's index (the first token is its own parent), the depth, and the bit mask of the
    tokens on the path."""

    parents: Tensor
    depths: Tensor
    ancestors: Tensor


def paths_of(parents: Tensor) -> Paths:
    """`parents` (rows, drafts): the index of each draft's parent among its row's drafts, -1 for the last known one."""
    rows, drafts = parents.shape
    above = torch.cat((parents.new_zeros(rows, 1), parents + 1), 1)
    ancestors = (torch.ones_like(above[:1]) << torch.arange(drafts + 1, device=above.device)).expand_as(above)
    depths, up = (above != torch.arange(drafts + 1, device=above.device)).long(), above
    for _ in range(drafts.bit_length()):  # pointer jumping: each round doubles the steps that `up` goes
        ancestors = ancestors | ancestors.gather(1, up)
        depths = depths + depths.gather(1, up)
        up = up.gather(1, up)
    return Paths(above, depths, ancestors)


class RowTrees:
    """The trees of the next step. A row without a new proposal keeps an earlier one's tree: its drafts are wrong, but
    verification is exact for any drafts."""

    def __init__(self, lines: int, drafts: int, device: torch.device) -> None:
        if not 0 < drafts < TREE_TOKENS:
            raise ConfigError(
                f"A tree of {drafts} draft tokens is too large: a step verifies trees of at most {TREE_TOKENS - 1}."
            )
        self.drafts = drafts
        self._chain = paths_of(torch.arange(-1, drafts - 1, device=device)[None])
        chain = self._chain
        self.parents, self.depths, self.ancestors = (
            part.expand(lines, -1).clone() for part in (chain.parents, chain.depths, chain.ancestors)
        )
        self._known: dict[bytes, Paths] = {}

    def put(self, rows: Tensor, parents: Tensor | np.ndarray | None) -> None:
        """The trees of these rows' new drafts. An array holds one tree for all rows; it is prepared once."""
        if parents is None:
            return self._put(rows, self._chain)
        if isinstance(parents, np.ndarray):
            key = parents.tobytes()
            if key not in self._known:
                self._known[key] = paths_of(torch.from_numpy(parents.astype(np.int64)).to(self.parents.device)[None])
            return self._put(rows, self._known[key])
        self._put(rows, paths_of(parents))

    def _put(self, rows: Tensor, paths: Paths) -> None:
        width = paths.parents.shape[1]
        for name in ("parents", "depths", "ancestors"):
            getattr(self, name)[rows, :width] = getattr(paths, name).expand(len(rows), -1)

    def branch(self, row: np.ndarray, drafts: np.ndarray) -> np.ndarray:
        """Whether the first `drafts` of each row are a tree and not a chain; for rows in host memory."""
        last = self.ancestors.numpy()[row, drafts]
        return last != ((np.uint64(1) << (drafts + 1).astype(np.uint64)) - np.uint64(1)).astype(np.int64)
