"""Routing on a GPU: one program chooses a token's experts. Beside it the sum of a token's experts with a shared one."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bankfull.ops.experts.body import SIGMOID, TINY, RoutingRule, add_gated, route
from bankfull.ops.triton.launch import overlapped, power_of_two, start_next, wait_for_inputs
from bankfull.ops.triton.rows import accepts, contiguous_rows, supported

SMALLEST = tl.constexpr(TINY)
LOWEST = tl.constexpr(-(2**63))
"""A key below all others."""
MOST_EXPERTS, MOST_PER_TOKEN = 4096, 64
"""A program holds the scores of all experts, and chooses one after the other."""


@triton.jit
def first_best(ranks, index, WIDTH: tl.constexpr):
    """The lowest index among the highest ranks. NaN ranks highest."""
    return tl.min(tl.where(ranks == tl.max(ranks), index, WIDTH))


@triton.jit
def sort_keys(ranks, index):
    """Integers in the order of ranks, equal ranks in the reverse order of indices: one maximum finds rank and index."""
    bits = ranks.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (index ^ 0x7FFFFFFF).to(tl.int64)


@triton.jit
def route_kernel(
    logits,
    logits_stride,
    bias,
    weights,
    chosen,
    EXPERTS: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    BEST: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    SCALE: tl.constexpr,
    BIAS: tl.constexpr,
    WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """WIDTH, SLOTS: powers of two of at least EXPERTS and PER_TOKEN. AT_ONCE: the scores of all chosen experts are
    found in one pass over WIDTH x SLOTS numbers."""
    start_next(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    index, slot = tl.arange(0, WIDTH), tl.arange(0, SLOTS)
    exist = index < EXPERTS
    gone = -float("inf")
    added = tl.load(bias + index, mask=exist, other=0.0).to(tl.float32) if BIAS else tl.zeros((WIDTH,), tl.float32)
    wait_for_inputs(OVERLAP)
    found = tl.load(logits + token * logits_stride + index, mask=exist, other=gone).to(tl.float32)
    if IS_SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-found))
    else:
        risen = tl.exp(found - tl.max(found))
        scores = risen / tl.sum(tl.where(exist, risen, 0.0))
    ranks = scores + added
    ranks = tl.where(ranks != ranks, float("inf"), ranks)
    ranks = tl.where(exist, ranks, gone)
    if GROUPS > 1:
        size: tl.constexpr = EXPERTS // GROUPS
        group = index // size
        of_group = tl.full((WIDTH,), gone, tl.float32)
        for g in tl.static_range(GROUPS):
            mine = (group == g) & exist
            own = tl.where(mine, ranks, gone)
            best = tl.max(own)
            if BEST == 2:
                best += tl.max(tl.where(index == first_best(own, index, WIDTH), gone, own))
            of_group = tl.where(mine, best, of_group)
        kept = index < 0
        for _ in tl.static_range(KEPT):
            # Unkept groups whose rank is minus infinity must still differ from those that are taken.
            left = exist & (kept == 0)
            best = tl.max(tl.where(left, of_group, gone))
            lowest = tl.min(tl.where(left & (of_group == best), index, WIDTH))
            kept = kept | ((group == lowest // size) & exist)
        open = kept
    else:
        open = exist
    ids = tl.zeros((SLOTS,), tl.int32)
    factors = tl.zeros((SLOTS,), tl.float32)
    keys = tl.where(open, sort_keys(ranks, index), LOWEST)
    for i in tl.static_range(PER_TOKEN):
        expert = (tl.max(keys) & 0xFFFFFFFF).to(tl.int32) ^ 0x7FFFFFFF
        ids = tl.where(slot == i, expert, ids)
        keys = tl.where(index == expert, LOWEST, keys)
        if not AT_ONCE:
            factors = tl.where(slot == i, tl.sum(tl.where(index == expert, scores, 0.0)), factors)
    if AT_ONCE:
        mine = (index[:, None] == ids[None, :]) & (slot < PER_TOKEN)[None, :]
        factors = tl.sum(tl.where(mine, scores[:, None], 0.0), 0)
    if RENORMALIZE:
        factors = factors / (tl.sum(factors) + SMALLEST)
    places = token * PER_TOKEN + slot
    tl.store(weights + places, factors * SCALE, mask=slot < PER_TOKEN)
    tl.store(chosen + places, ids, mask=slot < PER_TOKEN)


def _accepts_route(*, experts: int = 0, **facts: Any) -> bool:
    return accepts(**facts) and 0 < experts <= MOST_EXPERTS


@route.provider("triton", on="cuda", accepts=_accepts_route)
def run_route(logits: Tensor, bias: Tensor | None, rule: RoutingRule) -> tuple[Tensor, Tensor]:
    if rule.group_best > 2 or rule.per_token > MOST_PER_TOKEN or not supported(logits):
        result: tuple[Tensor, Tensor] = route.body(logits, bias, rule)
        return result
    rows = contiguous_rows(logits)
    weights = rows.new_empty(len(rows), rule.per_token, dtype=torch.float32)
    chosen = rows.new_empty(len(rows), rule.per_token, dtype=torch.int32)
    if len(rows):
        route_kernel[(len(rows),)](
            rows,
            rows.stride(0),
            rows if bias is None else bias.contiguous(),
            weights,
            chosen,
            rule.experts,
            rule.per_token,
            rule.groups,
            rule.groups_kept,
            rule.group_best,
            rule.scores == SIGMOID,
            rule.renormalize,
            rule.scale,
            bias is not None,
            power_of_two(rule.experts),
            power_of_two(rule.per_token),
            power_of_two(rule.experts) * power_of_two(rule.per_token) <= 4096,
            num_warps=1 if rule.experts <= 256 else 4,
            **overlapped(rows),
        )
    return weights, chosen


@triton.jit
def add_gated_kernel(
    x, delta, gate, y, columns, x_stride, delta_stride, gate_stride, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    start_next(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exist = column < columns
    wait_for_inputs(OVERLAP)
    factor = 1.0 / (1.0 + tl.exp(-tl.load(gate + row * gate_stride).to(tl.float32)))
    first = tl.load(x + row * x_stride + column, mask=exist).to(tl.float32)
    second = tl.load(delta + row * delta_stride + column, mask=exist).to(tl.float32)
    tl.store(y + row * columns + column, (first + factor * second).to(y.dtype.element_ty), mask=exist)


@add_gated.provider("triton", on="cuda", accepts=accepts)
def run_add_gated(x: Tensor, delta: Tensor, gate: Tensor) -> Tensor:
    rows, branch = contiguous_rows(x), contiguous_rows(delta)
    count, columns = rows.shape
    y = rows.new_empty(rows.shape)
    block = min(1024, power_of_two(columns))
    if count:
        add_gated_kernel[(count, -(-columns // block))](
            rows,
            branch,
            gate,
            y,
            columns,
            rows.stride(0),
            branch.stride(0),
            gate.stride(0),
            block,
            num_warps=4,
            **overlapped(rows),
        )
    return y
