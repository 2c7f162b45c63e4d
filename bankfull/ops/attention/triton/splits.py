"""Host side of the decode kernel: how sequences are split into programs, and the scratch memory of the splits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bankfull.ops.attention.triton.tile import Softmax, store_heads
from bankfull.ops.triton.launch import cdiv, multiprocessors, stream_of

FEW_PAIRS = 32
"""Largest number of (sequence, KV head) pairs that counts as few."""


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """How the work is split into programs."""

    tile_bytes: int
    """Bytes of keys, and again of values, per loop iteration of a program."""
    stages: int
    warps: int
    programs: int
    """Minimum programs per multiprocessor, while sequences are long enough to split."""
    most_splits: int = 1 << 30
    """Maximum splits of a sequence: merging takes longer with each."""
    least: int = 1
    """Minimum tiles of a split, except the last one: a shorter sequence is not split."""
    at_once: int = 8
    """Partial results loaded together when merging."""


FEW = SplitPlan(32768, 1, 8, 4, 16)
"""The plan for few pairs. Latency to the first tile dominates, and most programs have only one. No stages in shared
memory, so that neighbouring kernels stay resident on the multiprocessor. Idle programs usefully delay the next kernel,
which would otherwise compete for memory bandwidth."""
FEW_QUERIES = SplitPlan(16384, 1, 8, 2, 32, at_once=16)
"""FEW with at most two queries per KV head, as in 0.6B models: up to 2,048 tokens each program has one tile."""
MANY = SplitPlan(8192, 3, 4, 4)
"""Four programs with three stages fit on a multiprocessor; their loads in flight exceed latency times bandwidth."""
SOME = SplitPlan(16384, 3, 8, 2, least=16)
"""The plan for up to two pairs per multiprocessor, too many to start early. One program per pair, until the sequence is
so long that splitting gains more than merging costs."""
LATE = SplitPlan(8192, 3, 4, 2)
"""MANY for programs that cannot start before their inputs are ready."""
LATE_WIDE, WIDE = SplitPlan(8192, 3, 4, 2, least=2), 64
"""LATE for tiles of that many queries, as trees have: merging such a tile costs more than reading another tile of
keys."""
MERGED = 4096
"""Elements of partial results loaded together."""


class Scratch(NamedTuple):
    """Partial results, and the number of finished programs per pair (sequence, tile of rows)."""

    acc: Tensor
    peak: Tensor
    total: Tensor
    arrivals: Tensor


def allocated(device: torch.device, lines: int, values: int) -> Scratch:
    """Sized for the maximum number of programs with split sequences, so that one allocation serves every batch and
    keeps its address for captured steps. Each stream has its own."""
    most = max(plan.programs for plan in (FEW, FEW_QUERIES, MANY, SOME, LATE, LATE_WIDE))
    programs = 2 * most * multiprocessors(device)
    acc, peak, total = (torch.empty(programs * lines * n, dtype=torch.float32, device=device) for n in (values, 1, 1))
    return Scratch(acc, peak, total, torch.zeros(programs, dtype=torch.int32, device=device))


_scratches: dict[tuple[torch.device, int, int, int], Scratch] = {}


def scratch(device: torch.device, lines: int, values: int) -> Scratch:
    key = device, stream_of(device), lines, values
    if key in _scratches:
        return _scratches[key]
    buffers = allocated(device, lines, values)
    # During capture nothing runs, so the zeros exist only once the graph is replayed: do not share this allocation.
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        _scratches[key] = buffers
    return buffers


def split_count(pairs: int, most_tokens: int, block: int, programs: int) -> int:
    """Depends only on what a captured step fixes: sequences, heads, and the width of its page tables."""
    return min(cdiv(programs, pairs), max(1, cdiv(most_tokens, block)))


def most_queries(padded: int, product_bytes: int) -> int:
    """Rows of a query tile. Float32 products do not use tensor cores: small tiles, to fit into registers."""
    return 16 if product_bytes == 4 else min(64, max(16, 8192 // padded))


def tile_keys(padded: int, product_bytes: int, page_bytes: int, tile_bytes: int) -> int:
    return 16 if product_bytes == 4 else min(128, max(16, tile_bytes // (padded * page_bytes)))


def split_plan(pairs: int, live: int, multiprocessors: int, fused: bool) -> SplitPlan:
    """The plan for `pairs` of sequence and KV head, with `live` queries per KV head."""
    if not fused or pairs > 2 * multiprocessors:
        return LATE if fused or live < WIDE else LATE_WIDE
    if pairs > multiprocessors:
        return SOME
    return MANY if pairs > FEW_PAIRS else FEW_QUERIES if live <= 2 else FEW


@triton.jit
def merged(scratch, first, count, real, TILE: tl.constexpr):
    """Merge the partial results first .. first + count in this order; padding rows were never stored. Several are
    loaded together, because each round costs a memory latency. Loads bypass L1: other programs wrote the data."""
    AT_ONCE: tl.constexpr = TILE.at_once
    row = tl.arange(0, TILE.live)
    numbers = tl.arange(0, TILE.padded_values)
    peak = tl.full([TILE.live], float("-inf"), tl.float32)
    total = tl.full([TILE.live], 0.0, tl.float32)
    acc = tl.full([TILE.live, TILE.padded_values], 0.0, tl.float32)
    for at in range(0, count, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            there = real & (at + i < count)
            line = (first + at + i) * TILE.rows + row
            other_peak = tl.load(scratch.peak + line, mask=there, other=float("-inf"), cache_modifier=".cg")
            other_total = tl.load(scratch.total + line, mask=there, other=0.0, cache_modifier=".cg")
            places = scratch.acc + line[:, None] * TILE.padded_values + numbers[None, :]
            other_acc = tl.load(places, mask=there[:, None], other=0.0, cache_modifier=".cg")
            highest = tl.maximum(peak, other_peak)
            safe = tl.where(highest == float("-inf"), 0.0, highest)
            rescale, weight = tl.exp2(peak - safe), tl.exp2(other_peak - safe)
            total = total * rescale + other_total * weight
            acc = acc * rescale[:, None] + other_acc * weight[:, None]
            peak = highest
    return Softmax(peak, total, acc)


@triton.jit
def store_or_merge(out, softmax, scores, scratch, stored, live, pair, split, splits, active, TILE: tl.constexpr):
    """Store the result of a pair that has one active split; else that of this split, and of all if it is the last one
    to finish. `stored`, `live`: all rows of the tile, and those in use."""
    if active == 1:
        store_heads(out, softmax, scores, stored, TILE)
    else:
        line = (pair * splits + split) * TILE.rows + tl.arange(0, TILE.rows)
        numbers = tl.arange(0, TILE.padded_values)
        tl.store(scratch.peak + line, softmax.peak, mask=stored.real)
        tl.store(scratch.total + line, softmax.total, mask=stored.real)
        places = scratch.acc + line[:, None] * TILE.padded_values + numbers[None, :]
        tl.store(places, softmax.acc, mask=stored.real[:, None])
        # All warps must have finished their stores before one thread increments the counter.
        tl.debug_barrier()
        arrived = tl.atomic_add(scratch.arrivals + pair, 1, sem="acq_rel")
        if arrived == active - 1:
            store_heads(out, merged(scratch, pair * splits, active, live.real, TILE), scores, live, TILE)
            # Reset for the next launch, which may be a replay of this one.
            tl.store(scratch.arrivals + pair, 0)
