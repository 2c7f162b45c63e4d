"""Recurrent mixers: a short causal convolution and Mamba's selective scan.

Each sequence reads its previous state from one slot and writes the states after its last tokens to other slots, so
rolling back rejected draft tokens only selects another slot. A step never reads and writes the same slot.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bankfull.ops.cost import Cost, nbytes
from bankfull.ops.norm.body import wide
from bankfull.ops.registry import op
from bankfull.ops.shapes import like_first


@dataclass(frozen=True, slots=True)
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


def moved_slots(state: Tensor, meta: RecurrentMeta) -> tuple[int, int]:
    """Bytes of state read and written: each sequence reads one slot and writes `kept` slots."""
    slot = nbytes(state[0])
    return len(meta.kept) * slot, int(meta.kept.sum()) * slot


def _conv_cost(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, meta: RecurrentMeta) -> Cost:
    read, write = moved_slots(state, meta)
    return Cost(2.0 * x.numel() * weight.shape[1], nbytes(x, weight, bias) + read, nbytes(x) + write)


@op(cost=_conv_cost, shape=like_first)
def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, meta: RecurrentMeta) -> Tensor:
    """Depthwise convolution over each sequence; state (slots, channels, width - 1) holds the previous inputs."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    width = weight.shape[1]
    for i, kept in enumerate(meta.kept.tolist()):
        first, last = int(meta.q_start[i]), int(meta.q_start[i + 1])
        past = state.index_select(0, meta.read[i : i + 1])[0].to(x.dtype)
        line = torch.cat((past, x[first:last].T), dim=1)
        out[first:last] = torch.nn.functional.conv1d(line[None], weight[:, None], bias, groups=len(line))[0].T
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


@op(cost=_scan_cost, shape=like_first)
def selective_scan(
    x: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, state: Tensor, meta: RecurrentMeta
) -> Tensor:
    """h = exp(delta a) h + delta b x;  y = c h + d x, per channel; x, delta (tokens, channels), a (channels, size),
    b, c (tokens, size), state (slots, channels, size) in at least float32."""
    out = torch.empty_like(x)
    xs, ds, bs, cs, wide_a = wide(x), wide(delta), wide(b), wide(c), wide(a)
    for i, kept in enumerate(meta.kept.tolist()):
        first, last = int(meta.q_start[i]), int(meta.q_start[i + 1])
        h = state.index_select(0, meta.read[i : i + 1])[0].to(xs.dtype)
        for t in range(first, last):
            h = torch.exp(ds[t, :, None] * wide_a) * h + (ds[t] * xs[t])[:, None] * bs[t][None, :]
            out[t] = (h @ cs[t] + wide(d) * xs[t]).to(x.dtype)
            j = kept - (last - t)
            if j >= 0:
                state.index_copy_(0, meta.write[i, j : j + 1], h[None].to(state.dtype))
    return out
