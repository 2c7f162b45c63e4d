"""S4's recurrence with a diagonal state of complex conjugate pairs (S4D).

It stands here twice, because its dynamics do not depend on the input: over whole sequences without a state before them
it is a convolution, which takes a logarithmic number of steps, and raises decays to high powers; for a step it is a
recurrence, which is exact and needs the state alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bankfull.ops.cost import Cost, nbytes
from bankfull.ops.norm.body import wide
from bankfull.ops.recurrence.ssm import RecurrentMeta, advance, moved_slots
from bankfull.ops.registry import op
from bankfull.ops.shapes import like_first


def _diagonal_cost(x: Tensor, decay: Tensor, out: Tensor, d: Tensor, state: Tensor, meta: RecurrentMeta) -> Cost:
    read, write = moved_slots(state, meta)
    per_token = decay.numel() / 2 * 11.0 + x.shape[1] * 2.0
    return Cost(per_token * x.shape[0], nbytes(x, decay, out, d) + read, nbytes(x) + write)


def diagonal_convolution(x: Tensor, decay: Tensor, out: Tensor, d: Tensor) -> Tensor:
    """`diagonal_scan` over whole sequences x (..., tokens, channels), with complex decay and out (channels, pairs): a
    convolution with the recurrence's response to one impulse, by FFT."""
    tokens = x.shape[-2]
    powers = torch.exp(torch.log(decay)[..., None] * torch.arange(tokens, device=x.device))
    response = torch.einsum("cp,cpt->ct", out, powers).real
    size = 2 * tokens  # without wrapping around
    product = torch.fft.rfft(x.mT, size) * torch.fft.rfft(response, size)
    return torch.fft.irfft(product, size)[..., :tokens].mT + d * x


@op(cost=_diagonal_cost, shape=like_first)
def diagonal_scan(x: Tensor, decay: Tensor, out: Tensor, d: Tensor, state: Tensor, meta: RecurrentMeta) -> Tensor:
    """h = decay h + x;  y = Re(out h) + d x, per channel, with complex decay, out and h.

    x (tokens, channels); decay, out (2, pairs, channels): real and imaginary parts; one number stands for a conjugate
    pair, whose factor 2 and whose input matrix are part of `out`. state (slots, 2, pairs, channels) in at least
    float32: the recurrence diverges in 16 bits.
    """
    xs, skip, (re, im), (to_re, to_im) = wide(x), wide(d), wide(decay), wide(out)

    def run(at: slice, h: Tensor) -> tuple[Tensor, Tensor]:
        h_re, h_im = h
        ys = []
        for row in xs[at]:
            h_re, h_im = re * h_re - im * h_im + row, re * h_im + im * h_re
            ys.append((to_re * h_re - to_im * h_im).sum(0) + skip * row)
        return torch.stack(ys), torch.stack((h_re, h_im))

    return advance(torch.empty_like(x), (state,), meta, run)
