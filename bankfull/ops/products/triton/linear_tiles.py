"""Dense GEMM of some rows in tensor core tiles: for shapes that the library tiles badly, and for gated layers, whose
activation the library leaves to another kernel.

A program owns some outputs for up to ROWS rows and iterates over the columns; weights are pipelined ahead of their
products. Sums are float32 and rounded once, so a row's result depends only on the plan.
"""

from __future__ import annotations

import triton
import triton.language as tl

from bankfull.ops.products.triton.linear_rows import gated
from bankfull.ops.triton.launch import INTERPRETED, start_next, wait_for_inputs

PLAIN = tl.constexpr(INTERPRETED)
"""In the interpreter, PTX instructions are replaced by plain Triton."""


@triton.jit(do_not_specialize=["count"])
def tiles_kernel(
    rows, weight, out, count, outputs, columns, EVEN: tl.constexpr, TILE: tl.constexpr, OVERLAP: tl.constexpr
):
    """EVEN: tiles divide columns and outputs, so that only rows are masked."""
    start_next(OVERLAP)
    ROWS: tl.constexpr = TILE.rows
    OUT: tl.constexpr = TILE.out
    own = tl.program_id(0) * OUT + tl.arange(0, OUT)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, TILE.depth)
    exist, used = own < outputs, row < count
    weights = weight.data + own[:, None].to(tl.int64) * weight.stride + column[None, :]
    inputs = rows.x + row[:, None].to(tl.int64) * rows.stride + column[None, :]
    wait_for_inputs(OVERLAP)
    total = tl.zeros((ROWS, OUT), tl.float32)
    for at in tl.range(0, columns, TILE.depth, num_stages=TILE.stages):
        if EVEN:
            part = tl.load(weights + at)
            lines = tl.load(inputs + at, mask=used[:, None], other=0.0)
        else:
            inside = (at + column < columns)[None, :]
            part = tl.load(weights + at, mask=exist[:, None] & inside, other=0.0)
            lines = tl.load(inputs + at, mask=used[:, None] & inside, other=0.0)
        total = tl.dot(lines, tl.trans(part), total, input_precision="ieee")
    if out.bias is not None:
        total += tl.load(out.bias + own, mask=exist, other=0.0).to(tl.float32)[None, :]
    places = out.y + row[:, None].to(tl.int64) * outputs + own[None, :]
    tl.store(places, total.to(out.y.dtype.element_ty), mask=used[:, None] & exist[None, :])


@triton.jit
def prefetch_l2(places, LINES: tl.constexpr):
    """Prefetch the first LINES cache lines (128 bytes) at each of these addresses into L2."""
    if not PLAIN and LINES > 0:
        lines = places + tl.arange(0, LINES)[None, :] * (128 // (places.dtype.element_ty.primitive_bitwidth // 8))
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
            "=r,l",
            [lines.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def is_last_split(total, sums, arrived, split, SIZE: tl.constexpr, SPLITS: tl.constexpr):
    """Store a split's sums, SIZE numbers of a tile, and count it as arrived. Whether it is the last of SPLITS."""
    tl.store(sums + split * SIZE, total)
    tl.debug_barrier()
    return tl.atomic_add(arrived, 1, sem="acq_rel") == SPLITS - 1


@triton.jit
def sum_of_splits(sums, arrived, SIZE: tl.constexpr, SPLITS: tl.constexpr):
    """The sums of all splits, added in their order, by the last one."""
    # Bypass L1: other programs wrote these.
    whole = tl.load(sums, cache_modifier=".cg")
    for i in tl.static_range(1, SPLITS):
        whole += tl.load(sums + i * SIZE, cache_modifier=".cg")
    # Reset for the next launch, which may be a replay of this one.
    tl.store(arrived, 0)
    return whole


@triton.jit
def store_split(total, out, sums, count, outputs, SPLITS: tl.constexpr):
    """Store a tile [OUT, ROWS] of the program's index in the first dimension, of which there are SPLITS in the second.
    The last one to finish adds their sums in a fixed order."""
    OUT: tl.constexpr = total.shape[0]
    ROWS: tl.constexpr = total.shape[1]
    tile, split = tl.program_id(0), tl.program_id(1)
    within, row = tl.arange(0, OUT), tl.arange(0, ROWS)
    own, used = tile * OUT + within, row < count
    places = out.y + row[None, :].to(tl.int64) * outputs + own[:, None]
    kind: tl.constexpr = out.y.dtype.element_ty
    if SPLITS == 1:
        if out.bias is not None:
            total += tl.load(out.bias + own).to(tl.float32)[:, None]
        tl.store(places, total.to(kind), mask=used[None, :])
    else:
        parts = sums.partial + tile * (SPLITS * OUT * ROWS) + within[:, None] * ROWS + row[None, :]
        if is_last_split(total, parts, sums.arrivals + tile, split, OUT * ROWS, SPLITS):
            whole = sum_of_splits(parts, sums.arrivals + tile, OUT * ROWS, SPLITS)
            if out.bias is not None:
                whole += tl.load(out.bias + own).to(tl.float32)[:, None]
            tl.store(places, whole.to(kind), mask=used[None, :])


@triton.jit(do_not_specialize=["count"])
def split_tiles_kernel(
    rows, weight, out, sums, count, outputs, share, EARLY: tl.constexpr, TILE: tl.constexpr, OVERLAP: tl.constexpr
):
    """Split-K with the weight as first operand, as in `gated_tiles_kernel`. Programs process `share` columns of a tile
    each (`store_split`). EARLY: cache lines of each output that they prefetch before the input is ready. Tiles divide
    the matrix evenly."""
    start_next(OVERLAP)
    ROWS: tl.constexpr = TILE.rows
    OUT: tl.constexpr = TILE.out
    split = tl.program_id(1)
    own = tl.program_id(0) * OUT + tl.arange(0, OUT)
    row = tl.arange(0, ROWS)
    column = split * share + tl.arange(0, TILE.depth)
    used = row < count
    starts = weight.data + own[:, None].to(tl.int64) * weight.stride
    prefetch_l2(starts + split * share, EARLY)
    weights = starts + column[None, :]
    inputs = rows.x + row[:, None].to(tl.int64) * rows.stride + column[None, :]
    wait_for_inputs(OVERLAP)
    total = tl.zeros((OUT, ROWS), tl.float32)
    for at in tl.range(0, share, TILE.depth, num_stages=TILE.stages):
        lines = tl.trans(tl.load(inputs + at, mask=used[:, None], other=0.0))
        total = tl.dot(tl.load(weights + at, eviction_policy="evict_first"), lines, total, input_precision="ieee")
    store_split(total, out, sums, count, outputs, TILE.splits)


@triton.jit(do_not_specialize=["count"])
def gated_tiles_kernel(
    rows, weight, out, count, outputs, columns, KIND: tl.constexpr, TILE: tl.constexpr, OVERLAP: tl.constexpr
):
    """f(gate) * up. The weight is the first operand, because tensor cores need at least 64 rows there and allow few in
    the second. Tiles divide the matrix evenly."""
    start_next(OVERLAP)
    ROWS: tl.constexpr = TILE.rows
    OUT: tl.constexpr = TILE.out
    own = tl.program_id(0) * OUT + tl.arange(0, OUT)
    row = tl.arange(0, ROWS)
    column = tl.arange(0, TILE.depth)
    used = row < count
    gate_weights = weight.data + own[:, None].to(tl.int64) * weight.stride + column[None, :]
    up_weights = weight.data + (outputs + own)[:, None].to(tl.int64) * weight.stride + column[None, :]
    inputs = rows.x + row[:, None].to(tl.int64) * rows.stride + column[None, :]
    wait_for_inputs(OVERLAP)
    gate = tl.zeros((OUT, ROWS), tl.float32)
    up = tl.zeros((OUT, ROWS), tl.float32)
    for at in tl.range(0, columns, TILE.depth, num_stages=TILE.stages):
        lines = tl.trans(tl.load(inputs + at, mask=used[:, None], other=0.0))
        gate = tl.dot(tl.load(gate_weights + at, eviction_policy="evict_first"), lines, gate, input_precision="ieee")
        up = tl.dot(tl.load(up_weights + at, eviction_policy="evict_first"), lines, up, input_precision="ieee")
    dtype: tl.constexpr = out.y.dtype.element_ty
    result = gated(gate, up, KIND, dtype)
    places = out.y + row[None, :].to(tl.int64) * outputs + own[:, None]
    tl.store(places, result.to(dtype), mask=used[None, :])
