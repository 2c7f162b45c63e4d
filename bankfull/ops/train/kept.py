"""What stands in for pages and slots in a pass with gradients."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(slots=True)
class KeptRows:
    """The rows of one tensor of a paged state: those of the pass, as its layer has written them. Nothing is written in
    place, so gradients flow through them."""

    seen: Tensor | None = None
    """(tokens, tokens) which token of a sequence sees which, where that does not follow from their positions."""
    rows: Tensor | None = None

    def of_sequences(self, q_start: np.ndarray) -> Tensor:
        """(sequences, tokens, heads, size)"""
        assert self.rows is not None, "keys and values are written before they are read"
        return by_sequence(self.rows, q_start)


def by_sequence(x: Tensor, q_start: np.ndarray) -> Tensor:
    """(sequences, tokens, ...) the rows of a pass (tokens of all sequences, ...), whose sequences have one length."""
    counts = np.diff(q_start)
    if len(counts) == 0 or (counts != counts[0]).any():
        raise ValueError(f"a pass with gradients has sequences of one length, and got {counts.tolist()[:8]}")
    return x.unflatten(0, (len(counts), int(counts[0])))


def positions_of(q_start: np.ndarray, kv_len: np.ndarray, device: torch.device) -> Tensor:
    """(tokens) the positions of each sequence's tokens, which begin it."""
    counts = np.diff(q_start)
    if (counts != kv_len).any():
        raise ValueError("a pass with gradients has whole sequences, without tokens before them")
    return torch.arange(int(counts[0]), device=device)
