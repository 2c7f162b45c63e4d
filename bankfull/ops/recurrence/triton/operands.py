"""What kernels of recurrences take: the slots' states, and the tokens and slots of a step's sequences."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from bankfull.ops.recurrence.ssm import RecurrentMeta


class States(NamedTuple):
    """The states of all slots, a matrix or one of each head; strides in elements."""

    at: Tensor
    slot: int
    row: int
    column: int = 0
    head: int = 0

    @classmethod
    def of(cls, state: Tensor) -> States:
        slot, *heads, row, column = state.stride()
        return cls(state, slot, row, column, *heads)


class SequenceSlots(NamedTuple):
    """The first token of each sequence and the end of the last, its number of kept states, and its slots: the one that
    is read, and those that are written."""

    starts: Tensor
    kepts: Tensor
    read: Tensor
    write: Tensor

    @classmethod
    def of(cls, meta: RecurrentMeta, device: torch.device) -> SequenceSlots:
        starts, kepts = _on(device, meta.starts, meta.q_start), _on(device, meta.kepts, meta.kept)
        return cls(starts, kepts, meta.read, meta.write)


def _on(device: torch.device, counts: Tensor | None, host: np.ndarray) -> Tensor:
    """Counts as a device tensor; callers that never capture a step may pass only the host array."""
    return torch.from_numpy(host.astype(np.int32)).to(device) if counts is None else counts


@triton.jit
def span(own, sequence):
    """The first token of a sequence and the end of its last, in 64 bits, which row offsets may need; and how many
    states it keeps."""
    first, last = tl.load(own.starts + sequence).to(tl.int64), tl.load(own.starts + sequence + 1).to(tl.int64)
    return first, last, tl.load(own.kepts + sequence)


@triton.jit
def read_slot(own, sequence):
    return tl.load(own.read + sequence).to(tl.int64)


@triton.jit
def written_slot(own, sequence, number, write_stride):
    """The slot of a sequence's kept state `number`."""
    return tl.load(own.write + sequence * write_stride + number).to(tl.int64)
