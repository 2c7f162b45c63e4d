"""Routing on a GPU: one program chooses a token's experts. Beside it the sum of a token's experts with a shared one."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bankfull.ops.experts.body import TINY, RoutingRule, add_gated, route
from bankfull.ops.triton.launch import cdiv, overlapped, power_of_two, start_next, wait_for_inputs
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
def route_kernel(logits, logits_stride, bias, weights, chosen, RULE: tl.constexpr, OVERLAP: tl.constexpr):
    width: tl.constexpr = triton.next_power_of_2(RULE.experts)
    slots: tl.constexpr = triton.next_power_of_2(RULE.per_token)
    groups: tl.constexpr = RULE.groups
    per_token: tl.constexpr = RULE.per_token
    # Whether the scores of all chosen experts are found in one pass.
    at_once: tl.constexpr = width * slots <= 4096
    start_next(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    index, slot = tl.arange(0, width), tl.arange(0, slots)
    exist = index < RULE.experts
    gone = -float("inf")
    added = (
        tl.load(bias + index, mask=exist, other=0.0).to(tl.float32)
        if bias is not None
        else tl.zeros((width,), tl.float32)
    )
    wait_for_inputs(OVERLAP)
    found = tl.load(logits + token * logits_stride + index, mask=exist, other=gone).to(tl.float32)
    if RULE.sigmoid:
        scores = 1.0 / (1.0 + tl.exp(-found))
    else:
        risen = tl.exp(found - tl.max(found))
        scores = risen / tl.sum(tl.where(exist, risen, 0.0))
    ranks = scores + added
    ranks = tl.where(ranks != ranks, float("inf"), ranks)
    ranks = tl.where(exist, ranks, gone)
    if groups > 1:
        kept_groups: tl.constexpr = RULE.groups_kept
        size: tl.constexpr = RULE.experts // groups
        group = index // size
        of_group = tl.full((width,), gone, tl.float32)
        for g in tl.static_range(groups):
            mine = (group == g) & exist
            own = tl.where(mine, ranks, gone)
            best = tl.max(own)
            if RULE.group_best == 2:
                best += tl.max(tl.where(index == first_best(own, index, width), gone, own))
            of_group = tl.where(mine, best, of_group)
        kept = index < 0
        for _ in tl.static_range(kept_groups):
            # Unkept groups whose rank is minus infinity must still differ from those that are taken.
            left = exist & (kept == 0)
            best = tl.max(tl.where(left, of_group, gone))
            lowest = tl.min(tl.where(left & (of_group == best), index, width))
            kept = kept | ((group == lowest // size) & exist)
        open = kept
    else:
        open = exist
    ids = tl.zeros((slots,), tl.int32)
    factors = tl.zeros((slots,), tl.float32)
    keys = tl.where(open, sort_keys(ranks, index), LOWEST)
    for i in tl.static_range(per_token):
        expert = (tl.max(keys) & 0xFFFFFFFF).to(tl.int32) ^ 0x7FFFFFFF
        ids = tl.where(slot == i, expert, ids)
        keys = tl.where(index == expert, LOWEST, keys)
        if not at_once:
            factors = tl.where(slot == i, tl.sum(tl.where(index == expert, scores, 0.0)), factors)
    if at_once:
        mine = (index[:, None] == ids[None, :]) & (slot < per_token)[None, :]
        factors = tl.sum(tl.where(mine, scores[:, None], 0.0), 0)
    if RULE.renormalize:
        factors = factors / (tl.sum(factors) + SMALLEST)
    places = token * per_token + slot
    tl.store(weights + places, factors * RULE.scale, mask=slot < per_token)
    tl.store(chosen + places, ids, mask=slot < per_token)


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
        shift = None if bias is None else bias.contiguous()
        arguments = (rows, rows.stride(0), shift, weights, chosen, rule.plain)
        route_kernel[(len(rows),)](*arguments, num_warps=1 if rule.experts <= 256 else 4, **overlapped(rows))
    return weights, chosen


@triton.jit
def add_gated_kernel(
    x, x_stride, delta, delta_stride, gate, gate_stride, y, columns, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
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
    count, columns = x.shape
    y, block = x.new_empty(x.shape), min(1024, power_of_two(columns))
    if count:
        stream, branch = contiguous_rows(x), contiguous_rows(delta)
        operands = stream, stream.stride(0), branch, branch.stride(0), gate, gate.stride(0), y, columns
        add_gated_kernel[(count, cdiv(columns, block))](*operands, block, num_warps=4, **overlapped(x))
    return y
