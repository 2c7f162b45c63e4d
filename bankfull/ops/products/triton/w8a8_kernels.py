"""Kernels of 8-bit weights times 8-bit activations: rounding the activations, and tiles on tensor cores.

The weight is read as its bytes, in the column order of `quantized_layout`; rounding stores the activations in the same
order, so no code moves. Sums are int32 or float32; both scales are applied once, at the end.

Outlier columns (LLM.int8()) are not rounded: rounding leaves them out of a row's maximum and codes, and stores them
`beside` (rows, KEPT), in x's dtype. Products add `beside` times the weight's columns `kept` (outputs, KEPT) after the
scales. KEPT is a power of two of at least STEP, 0 without outliers; what is not a column is zero.
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
    x,
    delta,
    joined,
    norm,
    codes,
    scales,
    marks,
    kept_columns,
    beside,
    columns,
    x_stride,
    delta_stride,
    eps,
    offset,
    GROUP: tl.constexpr,
    NORM: tl.constexpr,
    SHIFTED: tl.constexpr,
    FLOATS: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One row per program. NORM: of x + delta, which is stored to `joined`; rounded like the separate operations.
    `marks`, in the order of the codes, are 1 at outlier columns; `kept_columns` are their numbers, -1 for none."""
    start_next(OVERLAP)
    kind: tl.constexpr = x.dtype.element_ty
    position = tl.arange(0, BLOCK)
    inside = position < columns
    column = stored_column(position, GROUP)
    row = tl.program_id(0).to(tl.int64)
    if NORM:
        gain = tl.load(norm + column, inside, 0.0)
    if KEPT > 0:
        marked = tl.load(marks + position, inside, 0) != 0
        kept = tl.load(kept_columns + tl.arange(0, KEPT))
    wait_for_inputs(OVERLAP)
    numbers = tl.load(x + row * x_stride + column, inside, 0.0).to(tl.float32)
    if KEPT > 0:
        outliers = tl.load(x + row * x_stride + kept, kept >= 0, 0.0).to(tl.float32)
        if NORM:
            more = tl.load(delta + row * delta_stride + kept, kept >= 0, 0.0).to(tl.float32)
            outliers = (outliers + more).to(kind).to(tl.float32)
    if NORM:
        branch = tl.load(delta + row * delta_stride + column, inside, 0.0).to(tl.float32)
        stream = (numbers + branch).to(kind)
        tl.store(joined + row * columns + column, stream, inside)
        numbers = stream.to(tl.float32)
        inverse = tl.rsqrt(tl.sum(numbers * numbers, 0) / columns + eps)
        numbers = weighted(numbers, inverse, gain, offset, SHIFTED, kind).to(kind).to(tl.float32)
    if KEPT > 0:
        if NORM:
            outliers = weighted(outliers, inverse, tl.load(norm + kept, kept >= 0, 0.0), offset, SHIFTED, kind)
        tl.store(beside + row * KEPT + tl.arange(0, KEPT), outliers.to(kind))
        numbers = tl.where(marked, 0.0, numbers)
    largest = tl.max(tl.abs(numbers), 0)
    finite = tl.sum(numbers * 0.0, 0) == 0.0
    limit: tl.constexpr = 448.0 if FLOATS else 127.0
    factor = tl.where(largest > 0, limit / largest, 0.0)
    places = codes + row * columns + position
    if FLOATS:
        tl.store(places, to_float8(numbers * factor), inside)
    else:
        tl.store(places, ((numbers * factor + ROUND) - ROUND).to(tl.int8), inside)
    # A row with an infinity or NaN has no finite result.
    tl.store(scales + row, tl.where(finite, largest / limit, float("nan")))


@triton.jit
def added(part, lines, total, FLOATS: tl.constexpr):
    """`total` plus the product of a step. Hopper's matrix units sum float8 products with about 14 bits, so a float8 sum
    leaves them after each step and is added in float32: over 4,096 columns the error of a whole row was 2e-3."""
    if FLOATS:
        return total + tl.dot(part, lines, out_dtype=tl.float32)
    else:
        return tl.dot(part, lines, total, out_dtype=tl.int32)


@triton.jit
def scaled(total, row_scales, output_scales, bias, own, BIAS: tl.constexpr):
    found = total.to(tl.float32) * output_scales[:, None] * row_scales[None, :]
    if BIAS:
        found += tl.load(bias + own).to(tl.float32)[:, None]
    return found


@triton.jit
def with_outliers(found, beside, kept, own, row, used, width):
    """`found` (OUT, ROWS) plus the products of `width` outlier columns. The loop keeps both operands in shared memory,
    as those of the product before."""
    inner = tl.arange(0, STEP)
    weights = kept + own[:, None].to(tl.int64) * width + inner[None, :]
    inputs = beside + tl.where(used, row, 0)[:, None].to(tl.int64) * width + inner[None, :]
    for at in tl.range(0, width, STEP, num_stages=2):
        found = tl.dot(tl.load(weights + at), tl.trans(tl.load(inputs + at)), found)
    return found


@triton.jit(do_not_specialize=["rows"])
def w8a8_tiles_kernel(
    x,
    x_scales,
    weight,
    weight_scales,
    bias,
    y,
    partial,
    arrivals,
    beside,
    kept,
    rows,
    outputs,
    columns,
    share,
    width,
    ROWS: tl.constexpr,
    OUT: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    SPLITS: tl.constexpr,
    BIAS: tl.constexpr,
    FLOATS: tl.constexpr,
    OUTLIERS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The kernel for few rows; split-K as in `linear_tiles.split_tiles_kernel`. Tiles divide outputs and columns
    evenly. OUTLIERS: whether there are `width` outlier columns."""
    start_next(OVERLAP)
    tile, split = tl.program_id(0), tl.program_id(1)
    within = tl.arange(0, OUT)
    own = tile * OUT + within
    row = tl.arange(0, ROWS)
    column = split * share + tl.arange(0, DEPTH)
    used = row < rows
    starts = weight + own[:, None].to(tl.int64) * columns
    weights = starts + column[None, :]
    inputs = x + tl.where(used, row, 0)[:, None].to(tl.int64) * columns + column[None, :]
    output_scales = tl.load(weight_scales + own)
    prefetch_l2((kept + own.to(tl.int64) * width)[:, None], 1 if OUTLIERS else 0)
    kind: tl.constexpr = tl.float32 if FLOATS else tl.int32
    total = tl.zeros((OUT, ROWS), kind)
    wait_for_inputs(OVERLAP)
    for at in tl.range(0, share, DEPTH, num_stages=STAGES):
        lines = tl.trans(tl.load(inputs + at))
        total = added(tl.load(weights + at, eviction_policy="evict_first"), lines, total, FLOATS)
    row_scales = tl.load(x_scales + row, used, 0.0)
    places = y + row[None, :].to(tl.int64) * outputs + own[:, None]
    if SPLITS == 1:
        found = scaled(total, row_scales, output_scales, bias, own, BIAS)
        if OUTLIERS:
            found = with_outliers(found, beside, kept, own, row, used, width)
        tl.store(places, found.to(y.dtype.element_ty), mask=used[None, :])
    else:
        sums = partial + tile * (SPLITS * OUT * ROWS) + within[:, None] * ROWS + row[None, :]
        if is_last_split(total.to(tl.float32), sums, arrivals + tile, split, OUT * ROWS, SPLITS):
            whole = sum_of_splits(sums, arrivals + tile, OUT * ROWS, SPLITS)
            found = scaled(whole, row_scales, output_scales, bias, own, BIAS)
            if OUTLIERS:
                found = with_outliers(found, beside, kept, own, row, used, width)
            tl.store(places, found.to(y.dtype.element_ty), mask=used[None, :])


@triton.jit(do_not_specialize=["rows"])
def w8a8_gated_kernel(
    x,
    x_scales,
    weight,
    weight_scales,
    y,
    beside,
    kept,
    rows,
    outputs,
    columns,
    width,
    ROWS: tl.constexpr,
    OUT: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    KIND: tl.constexpr,
    FLOATS: tl.constexpr,
    OUTLIERS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """f(gate) * up for few rows and a weight of 2 * `outputs` rows; tiles divide both halves evenly."""
    start_next(OVERLAP)
    own = tl.program_id(0) * OUT + tl.arange(0, OUT)
    row = tl.arange(0, ROWS)
    column = tl.arange(0, DEPTH)
    used = row < rows
    gates = weight + own[:, None].to(tl.int64) * columns
    ups = weight + (outputs + own)[:, None].to(tl.int64) * columns
    gate_weights, up_weights = gates + column[None, :], ups + column[None, :]
    inputs = x + tl.where(used, row, 0)[:, None].to(tl.int64) * columns + column[None, :]
    gate_scales, up_scales = tl.load(weight_scales + own), tl.load(weight_scales + outputs + own)
    prefetch_l2((kept + own.to(tl.int64) * width)[:, None], 1 if OUTLIERS else 0)
    prefetch_l2((kept + (outputs + own).to(tl.int64) * width)[:, None], 1 if OUTLIERS else 0)
    sums: tl.constexpr = tl.float32 if FLOATS else tl.int32
    gate = tl.zeros((OUT, ROWS), sums)
    up = tl.zeros((OUT, ROWS), sums)
    wait_for_inputs(OVERLAP)
    for at in tl.range(0, columns, DEPTH, num_stages=STAGES):
        lines = tl.trans(tl.load(inputs + at))
        gate = added(tl.load(gate_weights + at, eviction_policy="evict_first"), lines, gate, FLOATS)
        up = added(tl.load(up_weights + at, eviction_policy="evict_first"), lines, up, FLOATS)
    row_scales = tl.load(x_scales + row, used, 0.0)
    dtype: tl.constexpr = y.dtype.element_ty
    opened = gate.to(tl.float32) * gate_scales[:, None] * row_scales[None, :]
    passed = up.to(tl.float32) * up_scales[:, None] * row_scales[None, :]
    if OUTLIERS:
        opened = with_outliers(opened, beside, kept, own, row, used, width)
        passed = with_outliers(passed, beside, kept, outputs + own, row, used, width)
    result = gated(opened, passed, KIND, dtype)
    tl.store(y + row[None, :].to(tl.int64) * outputs + own[:, None], result.to(dtype), mask=used[None, :])


@triton.jit
def w8a8_gemm_kernel(
    x,
    x_scales,
    weight,
    weight_scales,
    bias,
    y,
    beside,
    kept,
    rows,
    outputs,
    columns,
    ROWS: tl.constexpr,
    OUT: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    TOGETHER: tl.constexpr,
    BIAS: tl.constexpr,
    FLOATS: tl.constexpr,
    KEPT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The kernel for many rows: persistent programs; x and weight are descriptors, which read zeros past the end.
    TOGETHER row blocks share the weights that they read at the same time."""
    start_next(OVERLAP)
    kind: tl.constexpr = tl.float32 if FLOATS else tl.int32
    row_blocks, out_blocks = tl.cdiv(rows, ROWS), tl.cdiv(outputs, OUT)
    wait_for_inputs(OVERLAP)
    for tile in tl.range(tl.program_id(0), row_blocks * out_blocks, tl.num_programs(0), flatten=True):
        first = tile // (TOGETHER * out_blocks) * TOGETHER
        size = tl.minimum(row_blocks - first, TOGETHER)
        rest = tile % (TOGETHER * out_blocks)
        from_row, from_out = (first + rest % size) * ROWS, rest // size * OUT
        total = tl.zeros((ROWS, OUT), kind)
        for at in tl.range(0, columns, DEPTH, num_stages=STAGES):
            lines, part = x.load([from_row, at]), weight.load([from_out, at])
            total = tl.dot(lines, tl.trans(part), total, out_dtype=kind)
        row, own = from_row + tl.arange(0, ROWS), from_out + tl.arange(0, OUT)
        used, exist = row < rows, own < outputs
        # Loaded together with the scales, so that nothing waits twice.
        inner = tl.arange(0, STEP)
        inputs = beside + row[:, None].to(tl.int64) * KEPT + inner[None, :]
        weights = kept + own[:, None].to(tl.int64) * KEPT + inner[None, :]
        left = ()
        right = ()
        for part in tl.static_range(KEPT // STEP):
            left = append(left, tl.load(inputs + part * STEP, used[:, None], 0.0))
            right = append(right, tl.load(weights + part * STEP, exist[:, None], 0.0))
        found = total.to(tl.float32) * tl.load(x_scales + row, used, 0.0)[:, None]
        found = found * tl.load(weight_scales + own, exist, 0.0)[None, :]
        for part in tl.static_range(KEPT // STEP):
            found = tl.dot(left[part], tl.trans(right[part]), found)
        if BIAS:
            found += tl.load(bias + own, exist, 0.0).to(tl.float32)[None, :]
        places = y + row[:, None].to(tl.int64) * outputs + own[None, :]
        tl.store(places, found.to(y.dtype.element_ty), used[:, None] & exist[None, :])
