"""What kernels of recurrences take: the inputs of a step's tokens, and the states of its sequences.

Triton examines the arguments of each launch. That takes the host about as long for a record without its fields as for
three numbers, so related operands share one record instead of having one each; a kernel takes it apart.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from bankfull.ops.recurrence.ssm import RecurrentMeta
from bankfull.ops.triton.rows import HeadRows, contiguous_rows


class ScanInputs(NamedTuple):
    """What tokens bring into a scan: channels, time steps, and the vectors into and out of the state; strides in
    elements."""

    x: Tensor
    x_token: int
    dt: Tensor
    dt_token: int
    b: Tensor
    b_token: int
    c: Tensor
    c_token: int

    @classmethod
    def of(cls, x: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> ScanInputs:
        """`x`, `b`, `c`: one contiguous vector for each token."""
        dt = contiguous_rows(dt)
        return cls(x, x.stride(0), dt, dt.stride(0), b, b.stride(0), c, c.stride(0))


class HeadInputs(NamedTuple):
    """Queries, keys and values of each head; strides in elements."""

    q: Tensor
    q_token: int
    q_head: int
    k: Tensor
    k_token: int
    k_head: int
    v: Tensor
    v_token: int
    v_head: int

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor) -> HeadInputs:
        q, k, v = (contiguous_rows(part) for part in (q, k, v))
        return cls(q, q.stride(0), q.stride(1), k, k.stride(0), k.stride(1), v, v.stride(0), v.stride(1))


class SequenceStates(NamedTuple):
    """The states of all slots, a matrix or one of each head, with strides in elements; and of the step's sequences the
    first token of each and the end of the last, the number of kept states, the slots that are read, and those that are
    written."""

    at: Tensor
    slot: int
    row: int
    column: int
    head: int
    starts: Tensor
    kepts: Tensor
    read: Tensor
    write: Tensor

    @classmethod
    def of(cls, state: Tensor, meta: RecurrentMeta) -> SequenceStates:
        slot, *heads, row, column = state.stride()
        starts, kepts = _on(state.device, meta.starts, meta.q_start), _on(state.device, meta.kepts, meta.kept)
        return cls(state, slot, row, column, heads[0] if heads else 0, starts, kepts, meta.read, meta.write)


def _on(device: torch.device, counts: Tensor | None, host: np.ndarray) -> Tensor:
    """Counts as a device tensor; callers that never capture a step may pass only the host array."""
    return torch.from_numpy(host.astype(np.int32)).to(device) if counts is None else counts


@triton.jit
def queries_of(inputs):
    return HeadRows(inputs.q, inputs.q_token, inputs.q_head)


@triton.jit
def keys_of(inputs):
    return HeadRows(inputs.k, inputs.k_token, inputs.k_head)


@triton.jit
def values_of(inputs):
    return HeadRows(inputs.v, inputs.v_token, inputs.v_head)


@triton.jit
def span(starts, kepts, sequence):
    """The first token of a sequence and the end of its last, in 64 bits, which row offsets may need; and how many
    states it keeps."""
    first, last = tl.load(starts + sequence).to(tl.int64), tl.load(starts + sequence + 1).to(tl.int64)
    return first, last, tl.load(kepts + sequence)


@triton.jit
def read_slot(states, sequence):
    return tl.load(states.read + sequence).to(tl.int64)


@triton.jit
def written_slot(states, sequence, number, write_stride):
    """The slot of a sequence's kept state `number`."""
    return tl.load(states.write + sequence * write_stride + number).to(tl.int64)
