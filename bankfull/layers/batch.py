"""The tokens of one step, flattened over its sequences. There are no modes: a decode is a chunk of one token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from bankfull.ops.attention.body import PagedMeta, SequencePartition


@dataclass(slots=True)
class Batch:
    """n sequences, t tokens. Integers are host arrays, also when the tensors are on a device or on meta. Only
    `runtime/batch.py` makes one."""

    q_start: np.ndarray
    """(n + 1): sequence i owns tokens q_start[i] .. q_start[i + 1]."""
    kv_len: np.ndarray
    """(n): a sequence's length after this step; the step's tokens are its last ones."""
    logit_index: np.ndarray
    """Indices of the tokens whose logits are wanted."""
    tokens: Tensor
    """(t) ids."""
    positions: Tensor
    """(t) logical positions: those of the paths, where drafts are a tree."""
    pages: tuple[Tensor, ...] = ()
    """Per paged group: (n, widest) page tables."""
    kv_slots: tuple[Tensor, ...] = ()
    """Per paged group: (t) KV slots of the new tokens, page * page_tokens + offset."""
    page_tokens: tuple[int, ...] = ()
    """Per paged group: tokens of a page."""
    kept: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """Recurrent: (n) how many of a sequence's last tokens write their state to a slot of their own."""
    read: Tensor | None = None
    """Recurrent: (n) the slot that holds a sequence's state."""
    write: Tensor | None = None
    """Recurrent: (n, most kept) slots to write."""
    starts: Tensor | None = None
    """(n + 1) `q_start` as int32 on a device whose kernels read it there; else None."""
    lengths: Tensor | None = None
    """(n) `kv_len` likewise."""
    kepts: Tensor | None = None
    """(n) `kept` likewise."""
    ancestors: Tensor | None = None
    """(t) which new tokens of its sequence each token sees, as in `PagedMeta`; None if no sequence has a tree."""
    features: Tensor | None = None
    """(t, d) for a model that reads features beside tokens: an EAGLE head, that of the token before each one; streams,
    the states with which they enter the top layers."""
    partition: SequencePartition | None = None
    """Which kernel takes which sequence, for a step that is captured for any number of new tokens per sequence."""
    angles: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Cosines and sines of the positions, by the name of the model's RoPE; empty where the model computes them."""

    def paged(self, groups: Sequence[int | None], block: int = 0) -> PagedMeta:
        """What attention over the pages of one group reads. `block`: as in `PagedMeta`."""
        (group,) = groups
        assert group is not None, "attention reads pages"
        return PagedMeta(
            self.q_start,
            self.kv_len,
            self.pages[group],
            self.kv_slots[group],
            self.page_tokens[group],
            self.starts,
            self.lengths,
            self.partition,
            self.ancestors,
            block,
        )
