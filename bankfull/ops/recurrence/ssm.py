"""Recurrent mixers: a short causal convolution and Mamba's selective scan.

Each sequence reads its previous state from one slot and writes the states after its last tokens to other slots, so
rolling back rejected draft tokens only selects another slot. A step never reads and writes the same slot.

The mathematics of a recurrence is a function of whole sequences, which takes their states, returns the new ones and has
gradients: training calls it. The operation applies it to pieces of the step's sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bankfull.ops.cost import Cost, nbytes
from bankfull.ops.norm.body import wide
from bankfull.ops.registry import op
from bankfull.ops.shapes import like_first


@dataclass(frozen=True)
class RecurrentMeta:
    """q_start as in PagedMeta; sequence i reads its state from slot read[i]; the state after its j-th last token goes
    to write[i, kept[i] - j] for j = kept[i] .. 1. Slots are device tensors, counts are host arrays."""

    q_start: np.ndarray
    kept: np.ndarray
    read: Tensor
    write: Tensor
    starts: Tensor | None = None
    """q_start as int32 on the device, for device kernels."""
    kepts: Tensor | None = None
    """kept as int32 on the device."""

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return int(np.diff(self.q_start).max())


def moved_slots(state: Tensor, meta: RecurrentMeta) -> tuple[int, int]:
    """Bytes of state read and written: each sequence reads one slot and writes `kept` slots."""
    slot = nbytes(state[0])
    return len(meta.kept) * slot, int(meta.kept.sum()) * slot


CHUNK = 64
"""Tokens that are computed at once; from chunk to chunk a state is carried."""


def advance(
    out: Tensor,
    states: Sequence[Tensor],
    meta: RecurrentMeta,
    run: Callable[..., tuple[Tensor, ...]],
) -> Tensor:
    """Fill `out` (tokens, ...) sequence by sequence, and return it. `run` computes the outputs of a slice of tokens and
    the states after it from the slice and the states before it, which are in at least float32."""
    for i, kept in enumerate(meta.kept.tolist()):
        first, last = int(meta.q_start[i]), int(meta.q_start[i + 1])
        held = [state.index_select(0, meta.read[i : i + 1])[0].to(wide(out).dtype) for state in states]
        alone = max(first, min(last, last - kept + 1))  # from here on each token is a piece, whose states are kept
        for begin, end in pairwise([*range(first, alone, CHUNK), *range(alone, last + 1)]):
            y, *held = run(slice(begin, end), *held)
            out[begin:end] = y.to(out.dtype)
            if (j := kept - last + end - 1) >= 0:
                for state, after in zip(states, held, strict=True):
                    state.index_copy_(0, meta.write[i, j : j + 1], after[None].to(state.dtype))
    return out


def _conv_cost(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, meta: RecurrentMeta) -> Cost:
    read, write = moved_slots(state, meta)
    return Cost(2.0 * x.numel() * weight.shape[1], nbytes(x, weight, bias) + read, nbytes(x) + write)


def convolved(line: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(..., channels, tokens) from a line (..., channels, width - 1 + tokens), which begins with previous inputs, and
    one kernel (channels, width) for each channel."""
    return torch.nn.functional.conv1d(line, weight[:, None], bias, groups=len(weight))


@op(cost=_conv_cost, shape=like_first)
def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, meta: RecurrentMeta) -> Tensor:
    """Depthwise convolution over each sequence; state (slots, channels, width - 1) holds the previous inputs."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    width = weight.shape[1]
    for i, kept in enumerate(meta.kept.tolist()):
        first, last = int(meta.q_start[i]), int(meta.q_start[i + 1])
        past = state.index_select(0, meta.read[i : i + 1])[0].to(x.dtype)
        line = torch.cat((past, x[first:last].T), dim=1)
        out[first:last] = convolved(line, weight, bias).T
        for j in range(kept):
            end = line.shape[1] - (kept - 1 - j)
            state.index_copy_(0, meta.write[i, j : j + 1], line[None, :, end - width + 1 : end].to(state.dtype))
    return out


@op(cost=_conv_cost, shape=like_first)  # beside the products, silu is neither bytes nor a bound
def causal_conv_silu(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, meta: RecurrentMeta) -> Tensor:
    """silu of `causal_conv`: how every recurrence here reads its convolution."""
    return torch.nn.functional.silu(causal_conv.body(x, weight, bias, state, meta))


def _scan_cost(
    x: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, state: Tensor, meta: RecurrentMeta
) -> Cost:
    read, write = moved_slots(state, meta)
    per_token = a.numel() * 7.0 + x.shape[1] * 3.0
    return Cost(per_token * x.shape[0], nbytes(x, delta, a, b, c, d) + read, nbytes(x) + write)


class _Recurrence(torch.autograd.Function):
    """One fused multiply-add per token in each direction: less memory and fewer operations than a parallel scan, and
    no quotients of decays, which overflow."""

    @staticmethod
    def forward(ctx: Any, keep: Tensor, add: Tensor, state: Tensor) -> Tensor:
        h = torch.empty_like(add)
        before = state
        for t in range(len(add)):
            before = torch.addcmul(add[t], keep[t], before, out=h[t])
        ctx.save_for_backward(keep, h, state)
        return h

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, Tensor]:
        keep, h, state = ctx.saved_tensors
        grad = grads[0].clone(memory_format=torch.contiguous_format)
        for t in range(len(grad) - 2, -1, -1):
            grad[t].addcmul_(keep[t + 1], grad[t + 1])
        return grad * torch.cat((state[None], h[:-1])), grad, keep[0] * grad[0]


def recurrence(keep: Tensor, add: Tensor, state: Tensor) -> Tensor:
    """h[t] = keep[t] h[t - 1] + add[t], elementwise, from h[-1] = state. keep, add (tokens, ...), state (...)."""
    if len(add) == 1:
        return torch.addcmul(add, keep, state)
    states: Tensor = _Recurrence.apply(keep, add, state)
    return states


def selective(
    x: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """h = exp(delta a) h + delta b x;  y = c h + d x, per channel: the outputs, and the state after them.

    x, delta (tokens, ..., channels), a (channels, size), b, c (tokens, ..., size), state (..., channels, size)."""
    add = (delta * x)[..., None] * b[..., None, :]
    h = recurrence(torch.exp(delta[..., None] * a), add, torch.zeros_like(add[0]) if state is None else state)
    return (h * c[..., None, :]).sum(-1) + d * x, h[-1]


@op(cost=_scan_cost, shape=like_first)
def selective_scan(
    x: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, state: Tensor, meta: RecurrentMeta
) -> Tensor:
    """h = exp(delta a) h + delta b x;  y = c h + d x, per channel; x, delta (tokens, channels), a (channels, size),
    b, c (tokens, size), state (slots, channels, size) in at least float32."""
    xs, ds, bs, cs, rate, skip = (wide(part) for part in (x, delta, b, c, a, d))
    return advance(
        torch.empty_like(x),
        (state,),
        meta,
        lambda at, h: selective(xs[at], ds[at], rate, bs[at], cs[at], skip, h),
    )
