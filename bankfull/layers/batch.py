"""What one step runs, flattened: the tokens of all sequences in a row. No modes: a decode is a chunk of one."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from bankfull.ops.reference.attention import Shares


@dataclass(slots=True)
class Batch:
    """Integers are host arrays, also when the tensors are on a device or on meta. n sequences, t tokens."""

    q_start: np.ndarray
    """(n + 1): sequence i owns tokens q_start[i] .. q_start[i + 1]."""
    kv_len: np.ndarray
    """(n): its length once these tokens have run; they are the last ones of it."""
    logit_index: np.ndarray
    """Tokens whose scores are wanted."""
    tokens: Tensor
    """(t) ids."""
    positions: Tensor
    """(t) logical positions."""
    pages: tuple[Tensor, ...] = ()
    """Per paged group: (n, widest) page tables."""
    slots: tuple[Tensor, ...] = ()
    """Per paged group: (t) flat places for the new tokens' state."""
    page_tokens: tuple[int, ...] = ()
    kept: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """Recurrent: (n) how many of a sequence's last tokens leave their state in a slot of their own."""
    read: Tensor | None = None
    """Recurrent: (n) the slot that holds a sequence's state."""
    write: Tensor | None = None
    """Recurrent: (n, most kept) slots to write."""
    starts: Tensor | None = None
    """q_start, and with it lengths (kv_len) and kepts (kept), as int32 on the device, where kernels read them there."""
    lengths: Tensor | None = None
    kepts: Tensor | None = None
    shares: Shares | None = None
    """Where not even the numbers of new tokens are the host's, because the step is captured for any."""
    angles: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Of the model's rotary embeddings, by name, where they came with the positions; else the model finds them."""
