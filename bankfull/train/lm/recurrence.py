"""Differentiable forms of recurrences over whole sequences."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK = 64
"""Tokens of a chunk: inside it all pairs are computed at once, between chunks a state is carried."""


class _Recurrence(torch.autograd.Function):
    """One fused multiply-add per token in each direction: less memory and fewer operations than a parallel scan, and
    no quotients of decays, which overflow."""

    @staticmethod
    def forward(ctx: Any, keep: Tensor, add: Tensor) -> Tensor:
        h = torch.empty_like(add)
        h[0] = add[0]
        for t in range(1, len(add)):
            torch.addcmul(add[t], keep[t], h[t - 1], out=h[t])
        ctx.save_for_backward(keep, h)
        return h

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor]:
        keep, h = ctx.saved_tensors
        grad = grads[0].clone(memory_format=torch.contiguous_format)
        for t in range(len(grad) - 2, -1, -1):
            grad[t].addcmul_(keep[t + 1], grad[t + 1])
        of_keep = torch.zeros_like(keep)
        of_keep[1:] = grad[1:] * h[:-1]
        return of_keep, grad


def recurrence(keep: Tensor, add: Tensor) -> Tensor:
    """h[t] = keep[t] h[t - 1] + add[t], elementwise, from h[-1] = 0. Both (tokens, ...) of one shape."""
    states: Tensor = _Recurrence.apply(keep, add)
    return states


def decayed_attention(q: Tensor, k: Tensor, v: Tensor, log_keep: Tensor) -> Tensor:
    """y[t] = sum over j <= t of exp(log_keep[j + 1] + ... + log_keep[t]) (q[t] k[j]) v[j], in chunks.

    q, k (..., tokens, key), v (..., tokens, value), log_keep (..., tokens), at most 0.
    """
    state: Tensor | None = None
    parts = []
    for qs, ks, vs, steps in zip(*(x.split(CHUNK, -2) for x in (q, k, v)), log_keep.split(CHUNK, -1), strict=True):
        total = steps.cumsum(-1)
        y = (qs @ ks.transpose(-1, -2) * decays(total)) @ vs
        rest = (total[..., -1:] - total).exp()[..., None]
        own = (ks * rest).transpose(-1, -2) @ vs
        if state is None:
            state = own
        else:
            y = y + total.exp()[..., None] * (qs @ state)
            state = total[..., -1:, None].exp() * state + own
        parts.append(y)
    return torch.cat(parts, -2)


def decays(total: Tensor) -> Tensor:
    """(..., tokens, tokens) exp(total[t] - total[j]) for j <= t, 0 elsewhere; `total` never rises."""
    differences = total[..., :, None] - total[..., None, :]
    future = torch.ones(differences.shape[-2:], dtype=torch.bool, device=total.device).triu(1)
    return differences.masked_fill(future, -torch.inf).exp()


def delta_attention(q: Tensor, k: Tensor, v: Tensor, log_keep: Tensor, beta: Tensor) -> Tensor:
    """The gated delta rule, h = exp(log_keep) h;  h = h + k (beta (v - k h))^T;  y = q h, in chunks.

    Within a chunk the corrected values u solve a unit lower triangular system: each one depends on those before it
    through the products of their keys. q, k (..., tokens, key), v (..., tokens, value), log_keep, beta (..., tokens).
    """
    state = v.new_zeros(*v.shape[:-2], k.shape[-1], v.shape[-1])
    parts = []
    pieces = [x.split(CHUNK, -2) for x in (q, k, v)] + [x.split(CHUNK, -1) for x in (log_keep, beta)]
    for qs, ks, vs, steps, rates in zip(*pieces, strict=True):
        total = steps.cumsum(-1)
        decay, kept = decays(total), total.exp()[..., None]
        pairs = ks @ ks.transpose(-1, -2) * decay * rates[..., None]
        wanted = rates[..., None] * (vs - kept * (ks @ state))
        u = torch.linalg.solve_triangular(pairs.tril(-1), wanted, upper=False, unitriangular=True)
        parts.append(kept * (qs @ state) + (qs @ ks.transpose(-1, -2) * decay) @ u)
        rest = (total[..., -1:] - total).exp()[..., None]
        state = kept[..., -1:, :] * state + (ks * rest).transpose(-1, -2) @ u
    return torch.cat(parts, -2)


def causal_convolution(x: Tensor, kernel: Tensor, bias: Tensor | None = None) -> Tensor:
    """Depthwise, over the last tokens; x (sequences, tokens, channels), kernel (channels, 1, width)."""
    line = torch.nn.functional.pad(x.transpose(1, 2), (kernel.shape[-1] - 1, 0))
    return torch.nn.functional.conv1d(line, kernel, bias, groups=len(kernel)).transpose(1, 2)
