"""Kernels of 8-bit weights times 8-bit activations: rounding the activations, and tiles on tensor cores.

The weight is read as its bytes, in the column order of `quantized_layout`; rounding stores the activations in the same
order, so no code moves. Sums are int32 or float32; both scales are applied once, at the end.

Outlier columns (LLM.int8()) are not rounded: rounding leaves them out of a row's maximum and codes, and stores them
`beside` (rows, KEPT), in x's dtype. Products add `beside` times the weight's columns `kept` after the scales. KEPT is
a power of two of at least STEP, 0 without outliers; what is not a column is zero.
"""

from __future__ import annotations

import triton
import triton.language as tl

from bankfull.ops.norm.triton import weighted
from bankfull.ops.products.triton.linear_rows import gated
from bankfull.ops.products.triton.linear_tiles import is_last_split, prefetch_l2, sum_of_splits
from bankfull.ops.products.triton.quantized.fp8_rows import append
from bankfull.ops.triton.launch import INTERPRETED, start_next, wait_for_inputs

ROUND = tl.constexpr(1.5 * 2.0**23)
"""Added and subtracted, it rounds a small float32 to an integer."""
SMALL = tl.constexpr(1.5 * 2.0**14)
"""Added and subtracted, it rounds a small float32 to a multiple of 2 ** -9, the smallest float8."""
PLAIN = tl.constexpr(INTERPRETED)
STEP = tl.constexpr(16)
"""The fewest columns that tensor cores multiply in 16 bits."""


@triton.jit
def stored_column(position, GROUP: tl.constexpr):
    """The column of a byte of a row of 8-bit words (`quantized_layout`)."""
    inside = position % GROUP
    word, byte = inside // 4, inside % 4
    return position - inside + 2 * ((byte % 2) * (GROUP // 4) + word) + byte // 2


@triton.jit
def to_float8(numbers):
    """Rounded to the nearest float8_e4m3fn, among two to the even one. Numbers are at most 448."""
    if PLAIN:  # the interpreter's conversion is wrong where rounding carries into the exponent
        bits = numbers.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
        numbers = tl.where(tl.abs(numbers) < 2.0**-6, (numbers + SMALL) - SMALL, normal)
    return numbers.to(tl.float8e4nv)


@triton.jit
def round_rows_kernel(
    rows,
    rounded,
    kept,
    columns,
    GROUP: tl.constexpr,
    FLOATS: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One row per program; what is done to it first is rounded like the separate operations."""
    start_next(OVERLAP)
    kind: tl.constexpr = rows.x.dtype.element_ty
    position = tl.arange(0, BLOCK)
    inside = position < columns
    column = stored_column(position, GROUP)
    row = tl.program_id(0).to(tl.int64)
    if rows.gain is not None:
        gain = tl.load(rows.gain + column, inside, 0.0)
    if KEPT > 0:
        marked = tl.load(kept.marks + position, inside, 0) != 0
        own = tl.load(kept.columns + tl.arange(0, KEPT))
    wait_for_inputs(OVERLAP)
    numbers = tl.load(rows.x + row * rows.stride + column, inside, 0.0).to(tl.float32)
    if KEPT > 0:
        outliers = tl.load(rows.x + row * rows.stride + own, own >= 0, 0.0).to(tl.float32)
        if rows.gain is not None:
            more = tl.load(rows.delta + row * rows.delta_stride + own, own >= 0, 0.0).to(tl.float32)
            outliers = (outliers + more).to(kind).to(tl.float32)
    if rows.gain is not None:
        shifted: tl.constexpr = rows.offset is not None
        branch = tl.load(rows.delta + row * rows.delta_stride + column, inside, 0.0).to(tl.float32)
        stream = (numbers + branch).to(kind)
        tl.store(rows.joined + row * columns + column, stream, inside)
        numbers = stream.to(tl.float32)
        inverse = tl.rsqrt(tl.sum(numbers * numbers, 0) / columns + rows.eps)
        numbers = weighted(numbers, inverse, gain, rows.offset, shifted, kind).to(kind).to(tl.float32)
    if KEPT > 0:
        if rows.gain is not None:
            own_gain = tl.load(rows.gain + own, own >= 0, 0.0)
            outliers = weighted(outliers, inverse, own_gain, rows.offset, shifted, kind)
        tl.store(rounded.beside + row * KEPT + tl.arange(0, KEPT), outliers.to(kind))
        numbers = tl.where(marked, 0.0, numbers)
    largest = tl.max(tl.abs(numbers), 0)
    finite = tl.sum(numbers * 0.0, 0) == 0.0
    limit: tl.constexpr = 448.0 if FLOATS else 127.0
    factor = tl.where(largest > 0, limit / largest, 0.0)
    places = rounded.codes + row * columns + position
    if FLOATS:
        tl.store(places, to_float8(numbers * factor), inside)
    else:
        tl.store(places, ((numbers * factor + ROUND) - ROUND).to(tl.int8), inside)
    # A row with an infinity or NaN has no finite result.
    tl.store(rounded.scales + row, tl.where(finite, largest / limit, float("nan")))


@triton.jit
def added(part, lines, total, FLOATS: tl.constexpr):
    """`total` plus the product of a step. Hopper's matrix units sum float8 products with about 14 bits, so a float8 sum
    leaves them after each step and is added in float32: over 4,096 columns the error of a whole row was 2e-3."""
    if FLOATS:
        return total + tl.dot(part, lines, out_dtype=tl.float32)
    else:
        return tl.dot(part, lines, total, out_dtype=tl.int32)


@triton.jit
def scaled(total, row_scales, output_scales, out, own):
    found = total.to(tl.float32) * output_scales[:, None] * row_scales[None, :]
    if out.bias is not None:
        found += tl.load(out.bias + own).to(tl.float32)[:, None]
    return found


@triton.jit
def with_outliers(found, rows, own, row, used):
    """`found` (OUT, ROWS) plus the products of outlier columns. The loop keeps both operands in shared memory, as those
    of the product before."""
    inner = tl.arange(0, STEP)
    weights = rows.kept + own[:, None].to(tl.int64) * rows.width + inner[None, :]
    inputs = rows.beside + tl.where(used, row, 0)[:, None].to(tl.int64) * rows.width + inner[None, :]
    for at in tl.range(0, rows.width, STEP, num_stages=2):
        found = tl.dot(tl.load(weights + at), tl.trans(tl.load(inputs + at)), found)
    return found


@triton.jit(do_not_specialize=["count"])
def w8a8_tiles_kernel(
    rows, words, out, sums, count, share, FLOATS: tl.constexpr, TILE: tl.constexpr, OVERLAP: tl.constexpr
):
    """The kernel for few rows; split-K as in `linear_tiles.split_tiles_kernel`. Tiles divide outputs and columns
    evenly."""
    start_next(OVERLAP)
    ROWS: tl.constexpr = TILE.rows
    OUT: tl.constexpr = TILE.out
    SPLITS: tl.constexpr = TILE.splits
    outputs, columns = words.outputs, words.columns
    tile, split = tl.program_id(0), tl.program_id(1)
    within = tl.arange(0, OUT)
    own = tile * OUT + within
    row = tl.arange(0, ROWS)
    column = split * share + tl.arange(0, TILE.depth)
    used = row < count
    starts = words.codes + own[:, None].to(tl.int64) * columns
    weights = starts + column[None, :]
    inputs = rows.codes + tl.where(used, row, 0)[:, None].to(tl.int64) * columns + column[None, :]
    output_scales = tl.load(words.scales + own)
    if rows.kept is not None:
        prefetch_l2((rows.kept + own.to(tl.int64) * rows.width)[:, None], 1)
    kind: tl.constexpr = tl.float32 if FLOATS else tl.int32
    total = tl.zeros((OUT, ROWS), kind)
    wait_for_inputs(OVERLAP)
    for at in tl.range(0, share, TILE.depth, num_stages=TILE.stages):
        lines = tl.trans(tl.load(inputs + at))
        total = added(tl.load(weights + at, eviction_policy="evict_first"), lines, total, FLOATS)
    row_scales = tl.load(rows.scales + row, used, 0.0)
    places = out.y + row[None, :].to(tl.int64) * outputs + own[:, None]
    if SPLITS == 1:
        found = scaled(total, row_scales, output_scales, out, own)
        if rows.kept is not None:
            found = with_outliers(found, rows, own, row, used)
        tl.store(places, found.to(out.y.dtype.element_ty), mask=used[None, :])
    else:
        parts = sums.partial + tile * (SPLITS * OUT * ROWS) + within[:, None] * ROWS + row[None, :]
        if is_last_split(total.to(tl.float32), parts, sums.arrivals + tile, split, OUT * ROWS, SPLITS):
            whole = sum_of_splits(parts, sums.arrivals + tile, OUT * ROWS, SPLITS)
            found = scaled(whole, row_scales, output_scales, out, own)
            if rows.kept is not None:
                found = with_outliers(found, rows, own, row, used)
            tl.store(places, found.to(out.y.dtype.element_ty), mask=used[None, :])


@triton.jit(do_not_specialize=["count"])
def w8a8_gated_kernel(
    rows, words, out, count, KIND: tl.constexpr, FLOATS: tl.constexpr, TILE: tl.constexpr, OVERLAP: tl.constexpr
):
    """f(gate) * up for few rows and a weight of 2 * `outputs` rows; tiles divide both halves evenly."""
    start_next(OVERLAP)
    ROWS: tl.constexpr = TILE.rows
    OUT: tl.constexpr = TILE.out
    outputs, columns = words.outputs, words.columns
    own = tl.program_id(0) * OUT + tl.arange(0, OUT)
    row = tl.arange(0, ROWS)
    column = tl.arange(0, TILE.depth)
    used = row < count
    gates = words.codes + own[:, None].to(tl.int64) * columns
    ups = words.codes + (outputs + own)[:, None].to(tl.int64) * columns
    gate_weights, up_weights = gates + column[None, :], ups + column[None, :]
    inputs = rows.codes + tl.where(used, row, 0)[:, None].to(tl.int64) * columns + column[None, :]
    gate_scales, up_scales = tl.load(words.scales + own), tl.load(words.scales + outputs + own)
    if rows.kept is not None:
        prefetch_l2((rows.kept + own.to(tl.int64) * rows.width)[:, None], 1)
        prefetch_l2((rows.kept + (outputs + own).to(tl.int64) * rows.width)[:, None], 1)
    kind: tl.constexpr = tl.float32 if FLOATS else tl.int32
    gate = tl.zeros((OUT, ROWS), kind)
    up = tl.zeros((OUT, ROWS), kind)
    wait_for_inputs(OVERLAP)
    for at in tl.range(0, columns, TILE.depth, num_stages=TILE.stages):
        lines = tl.trans(tl.load(inputs + at))
        gate = added(tl.load(gate_weights + at, eviction_policy="evict_first"), lines, gate, FLOATS)
        up = added(tl.load(up_weights + at, eviction_policy="evict_first"), lines, up, FLOATS)
    row_scales = tl.load(rows.scales + row, used, 0.0)
    dtype: tl.constexpr = out.y.dtype.element_ty
    opened = gate.to(tl.float32) * gate_scales[:, None] * row_scales[None, :]
    passed = up.to(tl.float32) * up_scales[:, None] * row_scales[None, :]
    if rows.kept is not None:
        opened = with_outliers(opened, rows, own, row, used)
        passed = with_outliers(passed, rows, outputs + own, row, used)
    result = gated(opened, passed, KIND, dtype)
    tl.store(out.y + row[None, :].to(tl.int64) * outputs + own[:, None], result.to(dtype), mask=used[None, :])


@triton.jit
def w8a8_gemm_kernel(
    x,
    weight,
    rows,
    words,
    out,
    count,
    TOGETHER: tl.constexpr,
    FLOATS: tl.constexpr,
    KEPT: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The kernel for many rows: persistent programs; x and weight are descriptors of both codes, which read zeros past
    the end. TOGETHER row blocks share the weights that they read at the same time."""
    start_next(OVERLAP)
    ROWS: tl.constexpr = TILE.rows
    OUT: tl.constexpr = TILE.out
    outputs = words.outputs
    kind: tl.constexpr = tl.float32 if FLOATS else tl.int32
    row_blocks, out_blocks = tl.cdiv(count, ROWS), tl.cdiv(outputs, OUT)
    wait_for_inputs(OVERLAP)
    for tile in tl.range(tl.program_id(0), row_blocks * out_blocks, tl.num_programs(0), flatten=True):
        first = tile // (TOGETHER * out_blocks) * TOGETHER
        size = tl.minimum(row_blocks - first, TOGETHER)
        rest = tile % (TOGETHER * out_blocks)
        from_row, from_out = (first + rest % size) * ROWS, rest // size * OUT
        total = tl.zeros((ROWS, OUT), kind)
        for at in tl.range(0, words.columns, TILE.depth, num_stages=TILE.stages):
            lines, part = x.load([from_row, at]), weight.load([from_out, at])
            total = tl.dot(lines, tl.trans(part), total, out_dtype=kind)
        row, own = from_row + tl.arange(0, ROWS), from_out + tl.arange(0, OUT)
        used, exist = row < count, own < outputs
        # Loaded together with the scales, so that nothing waits twice.
        left = ()
        right = ()
        if KEPT > 0:
            inner = tl.arange(0, STEP)
            inputs = rows.beside + row[:, None].to(tl.int64) * KEPT + inner[None, :]
            weights = rows.kept + own[:, None].to(tl.int64) * KEPT + inner[None, :]
        for part in tl.static_range(KEPT // STEP):
            left = append(left, tl.load(inputs + part * STEP, used[:, None], 0.0))
            right = append(right, tl.load(weights + part * STEP, exist[:, None], 0.0))
        found = total.to(tl.float32) * tl.load(rows.scales + row, used, 0.0)[:, None]
        found = found * tl.load(words.scales + own, exist, 0.0)[None, :]
        for part in tl.static_range(KEPT // STEP):
            found = tl.dot(left[part], tl.trans(right[part]), found)
        if out.bias is not None:
            found += tl.load(out.bias + own, exist, 0.0).to(tl.float32)[None, :]
        places = out.y + row[:, None].to(tl.int64) * outputs + own[None, :]
        tl.store(places, found.to(out.y.dtype.element_ty), used[:, None] & exist[None, :])
