"""Parts of the integer kernels for experts: activations in fixed point, rows of codes, and their sums."""

from __future__ import annotations

import triton
import triton.language as tl

from bankfull.ops.products.triton.quantized.codes import scales_of, stored_scales
from bankfull.ops.products.triton.quantized.fixed_point import (
    FLOAT_ZERO,
    ROUND,
    append,
    halves_as_floats,
    planes,
    powers_for,
    split_runs,
)
from bankfull.ops.products.triton.quantized.integer_tile import integer_sums
from bankfull.ops.products.triton.quantized.rows import neighbours


@triton.jit
def widened(both, KIND: tl.constexpr):
    """The two 16-bit floats of each word as float32."""
    if tl.bfloat16 == KIND:  # the upper half of a float32
        return (both << 16).to(tl.float32, bitcast=True), (both & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        return halves_as_floats(both.to(tl.int32, bitcast=True))


@triton.jit
def load_activations(x, row, used, groups, FIRST: tl.constexpr, FORM: tl.constexpr, B: tl.constexpr, W: tl.constexpr):
    """The activations of each run of words from FIRST on, for the rows at offsets `row` [B]: float32 [B, W / RUN],
    first the pairs of codes 0 of the run's words, then those of codes 1, ..."""
    L: tl.constexpr = FORM.length
    run: tl.constexpr = neighbours(L)
    word = FIRST + tl.arange(0, W)
    pair = word // L * (FORM.group // 2) + word % L
    inside = used[:, None] & (word < groups * L)[None, :]
    at = (x + row).to(tl.pointer_type(tl.uint32))[:, None] + pair[None, :]
    found = ()
    for i in tl.static_range(FORM.group // L // 2):
        each = split_runs(tl.load(at + i * L, inside, 0), B, W, run)
        for k in tl.static_range(run):
            even, odd = widened(each[k], x.dtype.element_ty)
            found = append(append(found, even), odd)
    return found


@triton.jit
def of_word(numbers, K: tl.constexpr, RUN: tl.constexpr):
    """The activations of word K of each run."""
    found = ()
    for i in tl.static_range(len(numbers) // RUN // 2):
        found = append(append(found, numbers[2 * (i * RUN + K)]), numbers[2 * (i * RUN + K) + 1])
    return found


@triton.jit
def prepared(line, FORM: tl.constexpr, RUN: tl.constexpr):
    """Activations for `run_sums`: planes of their upper and lower bytes, the power of two of each run in units of the
    integer sums, and the runs' sums."""
    most = tl.abs(line[0])
    whole = line[0]
    for i in tl.static_range(1, len(line)):
        most = tl.maximum(most, tl.abs(line[i]), propagate_nan=tl.PropagateNan.ALL)
        whole += line[i]
    up, factors = powers_for(most)
    numbers = ()
    for i in tl.static_range(len(line)):
        numbers = append(numbers, (line[i] * up + ROUND).to(tl.int32, bitcast=True))
    upper = ()
    lower = ()
    for k in tl.static_range(RUN):
        high = planes(of_word(numbers, k, RUN), 1, FORM.floats)
        low = planes(of_word(numbers, k, RUN), 0, FORM.floats)
        for j in tl.static_range(len(high)):
            upper = append(upper, high[j])
            lower = append(lower, low[j])
    if FORM.bits <= 3:
        factors = factors * 0.0625
    if FORM.floats:  # codes are doubled
        factors = factors * 0.5
        whole = whole * 0.5
    return upper, lower, factors, whole


@triton.jit
def load_rows(words, row, exist, FIRST: tl.constexpr, FORM: tl.constexpr, R: tl.constexpr, W: tl.constexpr):
    """Words [R, W] of the rows `row` from FIRST on, the words of their third bits, and the stored scales of each run
    [W / RUN, R]. Runs come first, and contiguity is hidden, so that a thread loads the scales of its own runs."""
    L: tl.constexpr = FORM.length
    groups = words.groups
    run: tl.constexpr = neighbours(L)
    word = FIRST + tl.arange(0, W)
    inside = exist[:, None] & (word < groups * L)[None, :]
    at = row[:, None] * (groups * L) + word[None, :]
    # Read once per token, so not kept in the cache.
    codes = tl.load(words.codes + at, inside, 0, eviction_policy="evict_first").to(tl.uint32, bitcast=True)
    thirds = codes
    if FORM.bits == 3:
        four: tl.constexpr = min(4, W)
        two = FIRST // 2 + tl.arange(0, W // four)[:, None, None] * (four // 2) + tl.arange(0, four // 2)[None, None, :]
        inside = exist[None, :, None] & (two < groups * L // 2)
        at = row[None, :, None] * (groups * L // 2) + two
        thirds = tl.load(words.high + at, inside, 0, eviction_policy="evict_first").to(tl.uint32, bitcast=True)
    group = tl.max_contiguous((FIRST + tl.arange(0, W // run) * run) // L, 1)[:, None]
    scale, minimum, outer = stored_scales(words, row[None, :], group, exist[None, :] & (group < groups), FORM)
    return codes, thirds, scale, minimum, outer


@triton.jit
def run_sums(
    upper, lower, factors, whole, held, FORM: tl.constexpr, R: tl.constexpr, W: tl.constexpr, RUN: tl.constexpr
):
    """The sum of each run of words, [R, W / RUN]."""
    codes, thirds, scale, minimum, outer = held
    factor, least = scales_of(tl.trans(scale), tl.trans(minimum), tl.trans(outer), FORM)
    exact = integer_sums(upper, lower, codes, thirds, FORM, R, W, RUN)
    found = exact.to(tl.float32) * factors
    if FORM.zero != 0 or FORM.floats:
        zero: tl.constexpr = FLOAT_ZERO if FORM.floats else FORM.zero
        found -= zero * whole
    found = found * factor
    if FORM.minima != 0:
        found += least * whole
    return found


@triton.jit
def some_of(items, FIRST: tl.constexpr, COUNT: tl.constexpr):
    found = ()
    for i in tl.static_range(COUNT):
        found = append(found, items[FIRST + i])
    return found


@triton.jit
def load_whole_rows(words, row, exist, FORM: tl.constexpr, CHUNKS: tl.constexpr, R: tl.constexpr, W: tl.constexpr):
    """`load_rows` of every chunk."""
    found = ()
    for c in tl.static_range(CHUNKS):
        found = append(found, load_rows(words, row, exist, c * W, FORM, R, W))
    return found


@triton.jit
def row_sums(
    upper,
    lower,
    factors,
    whole,
    held,
    FORM: tl.constexpr,
    CHUNKS: tl.constexpr,
    R: tl.constexpr,
    W: tl.constexpr,
    RUN: tl.constexpr,
):
    """The sum of each row, [R], over the chunks that `load_whole_rows` has loaded."""
    planes_per_chunk: tl.constexpr = len(upper) // CHUNKS
    total = tl.zeros([R, W // RUN], tl.float32)
    for c in tl.static_range(CHUNKS):
        high = some_of(upper, c * planes_per_chunk, planes_per_chunk)
        low = some_of(lower, c * planes_per_chunk, planes_per_chunk)
        total += run_sums(high, low, factors[c], whole[c], held[c], FORM, R, W, RUN)
    return tl.sum(total, 1)


@triton.jit
def for_rows(of_slots, A: tl.constexpr, B: tl.constexpr, U: tl.constexpr):
    """[B, U] for A B rows, of which B adjacent ones belong to the slots."""
    found = of_slots
    if A > 1 and B > 1:
        found = tl.reshape(tl.broadcast_to(of_slots[None, :, :], [A, B, U]), [A * B, U])
    return found


@triton.jit
def all_activations(
    x,
    row,
    used,
    groups,
    FORM: tl.constexpr,
    CHUNKS: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    W: tl.constexpr,
):
    """`prepared` activations of every chunk, concatenated; for A rows of weights each."""
    run: tl.constexpr = neighbours(FORM.length)
    upper = ()
    lower = ()
    factors = ()
    whole = ()
    for c in tl.static_range(CHUNKS):
        line = load_activations(x, row, used, groups, c * W, FORM, B, W)
        high, low, powers, sums = prepared(line, FORM, run)
        for i in tl.static_range(len(high)):
            upper = append(upper, for_rows(high[i], A, B, W // run))
            lower = append(lower, for_rows(low[i], A, B, W // run))
        factors = append(factors, for_rows(powers, A, B, W // run))
        whole = append(whole, for_rows(sums, A, B, W // run))
    return upper, lower, factors, whole
