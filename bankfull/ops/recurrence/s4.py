"""S4's recurrence with a diagonal state of complex conjugate pairs (S4D)."""

from __future__ import annotations

import torch
from torch import Tensor

from bankfull.ops.cost import Cost, nbytes
from bankfull.ops.norm.body import wide
from bankfull.ops.recurrence.ssm import RecurrentMeta, moved_slots
from bankfull.ops.registry import op
from bankfull.ops.shapes import like_first


def _diagonal_cost(x: Tensor, decay: Tensor, out: Tensor, d: Tensor, state: Tensor, meta: RecurrentMeta) -> Cost:
    read, write = moved_slots(state, meta)
    per_token = decay.numel() / 2 * 11.0 + x.shape[1] * 2.0
    return Cost(per_token * x.shape[0], nbytes(x, decay, out, d) + read, nbytes(x) + write)


@op(cost=_diagonal_cost, shape=like_first)
def diagonal_scan(x: Tensor, decay: Tensor, out: Tensor, d: Tensor, state: Tensor, meta: RecurrentMeta) -> Tensor:
    """h = decay h + x;  y = Re(out h) + d x, per channel, with complex decay, out and h.

    x (tokens, channels); decay, out (2, pairs, channels): real and imaginary parts; one number stands for a conjugate
    pair, whose factor 2 and whose input matrix are part of `out`. state (slots, 2, pairs, channels) in at least
    float32: the recurrence diverges in 16 bits.
    """
    y = torch.empty_like(x)
    xs, (re, im), (to_re, to_im) = wide(x), wide(decay), wide(out)
    for i, kept in enumerate(meta.kept.tolist()):
        first, last = int(meta.q_start[i]), int(meta.q_start[i + 1])
        h_re, h_im = state.index_select(0, meta.read[i : i + 1])[0].to(xs.dtype)
        for t in range(first, last):
            h_re, h_im = re * h_re - im * h_im + xs[t], re * h_im + im * h_re
            y[t] = ((to_re * h_re - to_im * h_im).sum(0) + wide(d) * xs[t]).to(x.dtype)
            j = kept - (last - t)
            if j >= 0:
                after = torch.stack((h_re, h_im))[None].to(state.dtype)
                state.index_copy_(0, meta.write[i, j : j + 1], after)
    return y
