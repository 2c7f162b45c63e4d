"""Recurrences over whole sequences, with gradients: each begins with a state of zeros, and keeps none after it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad, silu

from bankfull.ops.norm.body import wide
from bankfull.ops.recurrence.delta import delta_rule, gated_delta
from bankfull.ops.recurrence.linear_attention import decayed_attention, linear_attention, normalized, with_ones
from bankfull.ops.recurrence.s4 import diagonal_convolution, diagonal_scan
from bankfull.ops.recurrence.ssd import Limits, ssd_scan, state_space, time_steps
from bankfull.ops.recurrence.ssm import (
    RecurrentMeta,
    causal_conv,
    causal_conv_silu,
    convolved,
    selective,
    selective_scan,
)
from bankfull.ops.registry import ANYWHERE, TRAIN
from bankfull.ops.train.kept import by_sequence


def _sequences(meta: RecurrentMeta, *operands: Tensor) -> list[Tensor]:
    """(sequences, tokens, ...) each operand, in the precision of recurrences."""
    return [by_sequence(wide(x), meta.q_start) for x in operands]


@causal_conv.provider(TRAIN, on=ANYWHERE)
def whole_conv(x: Tensor, weight: Tensor, bias: Tensor | None, state: object, meta: RecurrentMeta) -> Tensor:
    line = pad(by_sequence(x, meta.q_start).mT, (weight.shape[1] - 1, 0))
    return convolved(line, weight, bias).mT.flatten(0, 1)


@causal_conv_silu.provider(TRAIN, on=ANYWHERE)
def whole_conv_silu(x: Tensor, weight: Tensor, bias: Tensor | None, state: object, meta: RecurrentMeta) -> Tensor:
    return silu(whole_conv(x, weight, bias, state, meta))


@selective_scan.provider(TRAIN, on=ANYWHERE)
def whole_selective(
    x: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, state: object, meta: RecurrentMeta
) -> Tensor:
    xs, ds, bs, cs = (part.transpose(0, 1) for part in _sequences(meta, x, delta, b, c))
    y, _ = selective(xs, ds, wide(a), bs, cs, wide(d))
    return y.transpose(0, 1).flatten(0, 1).to(x.dtype)


@ssd_scan.provider(TRAIN, on=ANYWHERE)
def whole_ssd(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    bias: Tensor,
    limits: Limits,
    state: object,
    meta: RecurrentMeta,
) -> Tensor:
    xs, steps, bs, cs = _sequences(meta, x, time_steps(dt, bias, limits), b, c)
    return state_space(xs, steps, wide(a), bs, cs, wide(d))[0].flatten(0, 1).to(x.dtype)


@linear_attention.provider(TRAIN, on=ANYWHERE)
def whole_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, state: object, normalizer: object | None, meta: RecurrentMeta
) -> Tensor:
    qs, ks, vs = (part.transpose(1, 2) for part in _sequences(meta, q, k, v))
    log_keep = -wide(slopes)[:, None].expand(-1, vs.shape[2])
    if normalizer is None:
        y, _ = decayed_attention(qs, ks, vs, log_keep)
    else:
        y = normalized(decayed_attention(qs, ks, with_ones(vs), log_keep)[0])
    return y.transpose(1, 2).flatten(0, 1).to(v.dtype)


@diagonal_scan.provider(TRAIN, on=ANYWHERE)
def whole_diagonal(x: Tensor, decay: Tensor, out: Tensor, d: Tensor, state: object, meta: RecurrentMeta) -> Tensor:
    dynamics, leave = (torch.complex(*wide(part)).T for part in (decay, out))
    (xs,) = _sequences(meta, x)
    return diagonal_convolution(xs, dynamics, leave, wide(d)).flatten(0, 1).to(x.dtype)


@delta_rule.provider(TRAIN, on=ANYWHERE)
def whole_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    rate: Tensor,
    shift: Tensor,
    state: object,
    meta: RecurrentMeta,
) -> Tensor:
    qs, ks, vs, keeps, betas = _sequences(meta, q, k, v, a, b)
    y, _ = gated_delta(qs, ks, vs, keeps, betas, wide(rate), wide(shift))
    return y.flatten(0, 1).to(v.dtype)
