"""Quantized experts for very few tokens, by integer dot products: bound by reading each chosen expert once.

A program owns a pair of token and expert (gate and up) or a token (down), and takes outputs in turns. A warp reads
whole rows, or its share of long ones: a thread has a run of adjacent words, 16 bytes, of every chunk of a row. It keeps
their activations in registers as 16-bit fixed point, with a power of two per run. The next rows load during the sums of
the current ones. No code moves between threads, and scales are loaded by the threads that use them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from bankfull.ops.triton.experts_rows import gate_values
from bankfull.ops.triton.launch import start_next, wait_for_inputs
from bankfull.ops.triton.quantized_codes import scales_of, stored_scales
from bankfull.ops.triton.quantized_fixed_point import (
    FLOAT_ZERO,
    ROUND,
    append,
    halves_as_floats,
    planes,
    powers_for,
    split_runs,
)
from bankfull.ops.triton.quantized_integer_tile import integer_sums
from bankfull.ops.triton.quantized_rows import neighbours


@triton.jit
def widened(both, KIND: tl.constexpr):
    """The two 16-bit floats of each word as float32."""
    if tl.bfloat16 == KIND:  # the upper half of a float32
        return (both << 16).to(tl.float32, bitcast=True), (both & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        return halves_as_floats(both.to(tl.int32, bitcast=True))


@triton.jit
def load_activations(
    x,
    row,
    used,
    groups,
    FIRST: tl.constexpr,
    GROUP: tl.constexpr,
    B: tl.constexpr,
    W: tl.constexpr,
    L: tl.constexpr,
):
    """The activations of each run of words from FIRST on, for the rows at offsets `row` [B]: float32 [B, W / RUN],
    first the pairs of codes 0 of the run's words, then those of codes 1, ..."""
    run: tl.constexpr = neighbours(L)
    word = FIRST + tl.arange(0, W)
    pair = word // L * (GROUP // 2) + word % L
    inside = used[:, None] & (word < groups * L)[None, :]
    at = (x + row).to(tl.pointer_type(tl.uint32))[:, None] + pair[None, :]
    found = ()
    for i in tl.static_range(GROUP // L // 2):
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
def prepared(line, BITS: tl.constexpr, FLOATS: tl.constexpr, RUN: tl.constexpr):
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
        high = planes(of_word(numbers, k, RUN), 1, FLOATS)
        low = planes(of_word(numbers, k, RUN), 0, FLOATS)
        for j in tl.static_range(len(high)):
            upper = append(upper, high[j])
            lower = append(lower, low[j])
    if BITS <= 3:
        factors = factors * 0.0625
    if FLOATS:  # codes are doubled
        factors = factors * 0.5
        whole = whole * 0.5
    return upper, lower, factors, whole


@triton.jit
def load_rows(
    words,
    high,
    scales,
    minima,
    outer_scales,
    row,
    exist,
    groups,
    FIRST: tl.constexpr,
    BITS: tl.constexpr,
    NESTED: tl.constexpr,
    MINIMA: tl.constexpr,
    GROUP: tl.constexpr,
    R: tl.constexpr,
    W: tl.constexpr,
    L: tl.constexpr,
):
    """Words [R, W] of the rows `row` from FIRST on, the words of their third bits, and the stored scales of each run
    [W / RUN, R]. Runs come first, and contiguity is hidden, so that a thread loads the scales of its own runs."""
    run: tl.constexpr = neighbours(L)
    word = FIRST + tl.arange(0, W)
    inside = exist[:, None] & (word < groups * L)[None, :]
    at = row[:, None] * (groups * L) + word[None, :]
    # Read once per token, so not kept in the cache.
    codes = tl.load(words + at, inside, 0, eviction_policy="evict_first").to(tl.uint32, bitcast=True)
    thirds = codes
    if BITS == 3:
        four: tl.constexpr = min(4, W)
        two = FIRST // 2 + tl.arange(0, W // four)[:, None, None] * (four // 2) + tl.arange(0, four // 2)[None, None, :]
        inside = exist[None, :, None] & (two < groups * L // 2)
        at = row[None, :, None] * (groups * L // 2) + two
        thirds = tl.load(high + at, inside, 0, eviction_policy="evict_first").to(tl.uint32, bitcast=True)
    group = tl.max_contiguous((FIRST + tl.arange(0, W // run) * run) // L, 1)[:, None]
    scale, minimum, outer = stored_scales(
        scales,
        minima,
        outer_scales,
        row[None, :],
        group,
        groups,
        exist[None, :] & (group < groups),
        NESTED,
        MINIMA,
        GROUP,
    )
    return codes, thirds, scale, minimum, outer


@triton.jit
def run_sums(
    upper,
    lower,
    factors,
    whole,
    codes,
    thirds,
    scale,
    minimum,
    outer,
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
    FLOATS: tl.constexpr,
    NESTED: tl.constexpr,
    MINIMA: tl.constexpr,
    R: tl.constexpr,
    W: tl.constexpr,
    RUN: tl.constexpr,
):
    """The sum of each run of words, [R, W / RUN]."""
    factor, least = scales_of(tl.trans(scale), tl.trans(minimum), tl.trans(outer), NESTED, MINIMA)
    exact = integer_sums(upper, lower, codes, thirds, BITS, FLOATS, R, W, RUN)
    found = exact.to(tl.float32) * factors
    if ZERO != 0 or FLOATS:
        zero: tl.constexpr = FLOAT_ZERO if FLOATS else ZERO
        found -= zero * whole
    found = found * factor
    if MINIMA != 0:
        found += least * whole
    return found


@triton.jit
def some_of(items, FIRST: tl.constexpr, COUNT: tl.constexpr):
    found = ()
    for i in tl.static_range(COUNT):
        found = append(found, items[FIRST + i])
    return found


@triton.jit
def load_whole_rows(
    words,
    high,
    scales,
    minima,
    outer_scales,
    row,
    exist,
    groups,
    BITS: tl.constexpr,
    NESTED: tl.constexpr,
    MINIMA: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNKS: tl.constexpr,
    R: tl.constexpr,
    W: tl.constexpr,
    L: tl.constexpr,
):
    """`load_rows` of every chunk, concatenated."""
    found = ()
    for c in tl.static_range(CHUNKS):
        codes, thirds, scale, minimum, outer = load_rows(
            words,
            high,
            scales,
            minima,
            outer_scales,
            row,
            exist,
            groups,
            c * W,
            BITS,
            NESTED,
            MINIMA,
            GROUP,
            R,
            W,
            L,
        )
        found = append(append(append(append(append(found, codes), thirds), scale), minimum), outer)
    return found


@triton.jit
def row_sums(
    upper,
    lower,
    factors,
    whole,
    held,
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
    FLOATS: tl.constexpr,
    NESTED: tl.constexpr,
    MINIMA: tl.constexpr,
    CHUNKS: tl.constexpr,
    R: tl.constexpr,
    W: tl.constexpr,
    RUN: tl.constexpr,
):
    """The sum of each row, [R], over the chunks that `load_whole_rows` has loaded."""
    planes_per_chunk: tl.constexpr = len(upper) // CHUNKS
    total = tl.zeros([R, W // RUN], tl.float32)
    for c in tl.static_range(CHUNKS):
        total += run_sums(
            some_of(upper, c * planes_per_chunk, planes_per_chunk),
            some_of(lower, c * planes_per_chunk, planes_per_chunk),
            factors[c],
            whole[c],
            held[5 * c],
            held[5 * c + 1],
            held[5 * c + 2],
            held[5 * c + 3],
            held[5 * c + 4],
            BITS,
            ZERO,
            FLOATS,
            NESTED,
            MINIMA,
            R,
            W,
            RUN,
        )
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
    BITS: tl.constexpr,
    FLOATS: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNKS: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    W: tl.constexpr,
    L: tl.constexpr,
):
    """`prepared` activations of every chunk, concatenated; for A rows of weights each."""
    run: tl.constexpr = neighbours(L)
    upper = ()
    lower = ()
    factors = ()
    whole = ()
    for c in tl.static_range(CHUNKS):
        line = load_activations(x, row, used, groups, c * W, GROUP, B, W, L)
        high, low, powers, sums = prepared(line, BITS, FLOATS, run)
        for i in tl.static_range(len(high)):
            upper = append(upper, for_rows(high[i], A, B, W // run))
            lower = append(lower, for_rows(low[i], A, B, W // run))
        factors = append(factors, for_rows(powers, A, B, W // run))
        whole = append(whole, for_rows(sums, A, B, W // run))
    return upper, lower, factors, whole


@triton.jit
def integer_gate_kernel(
    x,
    x_stride,
    chosen,
    gate_words,
    gate_high,
    gate_scales,
    gate_minima,
    gate_outer,
    up_words,
    up_high,
    up_scales,
    up_minima,
    up_outer,
    gate_bias,
    up_bias,
    hidden,
    outputs,
    groups,
    PER_TOKEN: tl.constexpr,
    CHUNKS: tl.constexpr,
    R: tl.constexpr,
    WARPS: tl.constexpr,
    W: tl.constexpr,
    L: tl.constexpr,
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
    FLOATS: tl.constexpr,
    NESTED: tl.constexpr,
    MINIMA: tl.constexpr,
    GROUP: tl.constexpr,
    BIAS: tl.constexpr,
    KIND: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """hidden[pair] = f(gate(x)) * up(x), R outputs at a time; WARPS adjacent ones belong to different warps."""
    start_next(OVERLAP)
    pair = tl.program_id(0)
    run: tl.constexpr = neighbours(L)
    lanes = tl.arange(0, R)
    wait_for_inputs(OVERLAP)
    first = tl.load(chosen + pair).to(tl.int64) * outputs
    own = tl.program_id(1) * R + lanes
    opening = load_whole_rows(
        gate_words,
        gate_high,
        gate_scales,
        gate_minima,
        gate_outer,
        first + own,
        own < outputs,
        groups,
        BITS,
        NESTED,
        MINIMA,
        GROUP,
        CHUNKS,
        R,
        W,
        L,
    )
    passing = load_whole_rows(
        up_words,
        up_high,
        up_scales,
        up_minima,
        up_outer,
        first + own,
        own < outputs,
        groups,
        BITS,
        NESTED,
        MINIMA,
        GROUP,
        CHUNKS,
        R,
        W,
        L,
    )
    # Every warp loads all activations, as a row of its own.
    row = tl.zeros([WARPS], tl.int64) + (pair // PER_TOKEN).to(tl.int64) * x_stride
    upper, lower, factors, whole = all_activations(
        x, row, row >= 0, groups, BITS, FLOATS, GROUP, CHUNKS, R // WARPS, WARPS, W, L
    )
    dtype: tl.constexpr = hidden.dtype.element_ty
    for tile in range(tl.program_id(1), tl.cdiv(outputs, R), tl.num_programs(1)):
        now = tile * R + lanes
        own = (tile + tl.num_programs(1)) * R + lanes
        next_opening = load_whole_rows(
            gate_words,
            gate_high,
            gate_scales,
            gate_minima,
            gate_outer,
            first + own,
            own < outputs,
            groups,
            BITS,
            NESTED,
            MINIMA,
            GROUP,
            CHUNKS,
            R,
            W,
            L,
        )
        next_passing = load_whole_rows(
            up_words,
            up_high,
            up_scales,
            up_minima,
            up_outer,
            first + own,
            own < outputs,
            groups,
            BITS,
            NESTED,
            MINIMA,
            GROUP,
            CHUNKS,
            R,
            W,
            L,
        )
        left = row_sums(upper, lower, factors, whole, opening, BITS, ZERO, FLOATS, NESTED, MINIMA, CHUNKS, R, W, run)
        right = row_sums(upper, lower, factors, whole, passing, BITS, ZERO, FLOATS, NESTED, MINIMA, CHUNKS, R, W, run)
        if BIAS:
            left += tl.load(gate_bias + first + now, mask=now < outputs, other=0.0).to(tl.float32)
            right += tl.load(up_bias + first + now, mask=now < outputs, other=0.0).to(tl.float32)
        values = gate_values(left, right, KIND, dtype).to(dtype)
        tl.store(hidden + pair.to(tl.int64) * outputs + now, values, mask=now < outputs)
        opening = next_opening
        passing = next_passing


@triton.jit
def integer_down_kernel(
    hidden,
    chosen,
    weights,
    words,
    high,
    scales,
    minima,
    outer_scales,
    bias,
    y,
    outputs,
    columns,
    groups,
    PER_TOKEN: tl.constexpr,
    CHUNKS: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    W: tl.constexpr,
    L: tl.constexpr,
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
    FLOATS: tl.constexpr,
    NESTED: tl.constexpr,
    MINIMA: tl.constexpr,
    GROUP: tl.constexpr,
    BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """y[token] = sum of its experts' down(hidden) * weight, in a fixed order, A outputs of B experts at a time: each
    warp has the activations of its own expert. B is at least PER_TOKEN."""
    start_next(OVERLAP)
    token = tl.program_id(0)
    run: tl.constexpr = neighbours(L)
    slots = tl.arange(0, B)
    lanes = tl.arange(0, A * B)
    some = tl.arange(0, A)
    slot = lanes % B
    used = slot < PER_TOKEN
    wait_for_inputs(OVERLAP)
    pair = (token * PER_TOKEN + slot).to(tl.int64)
    first = tl.load(chosen + pair, mask=used, other=0).to(tl.int64) * outputs
    own = tl.program_id(1) * A + lanes // B
    held = load_whole_rows(
        words,
        high,
        scales,
        minima,
        outer_scales,
        first + own,
        used & (own < outputs),
        groups,
        BITS,
        NESTED,
        MINIMA,
        GROUP,
        CHUNKS,
        A * B,
        W,
        L,
    )
    factor = tl.load(weights + pair, mask=used, other=0.0)
    rows = (token * PER_TOKEN + slots).to(tl.int64) * columns
    upper, lower, factors, whole = all_activations(
        hidden, rows, slots < PER_TOKEN, groups, BITS, FLOATS, GROUP, CHUNKS, A, B, W, L
    )
    dtype: tl.constexpr = y.dtype.element_ty
    for tile in range(tl.program_id(1), tl.cdiv(outputs, A), tl.num_programs(1)):
        now = tile * A + lanes // B
        own = (tile + tl.num_programs(1)) * A + lanes // B
        later = load_whole_rows(
            words,
            high,
            scales,
            minima,
            outer_scales,
            first + own,
            used & (own < outputs),
            groups,
            BITS,
            NESTED,
            MINIMA,
            GROUP,
            CHUNKS,
            A * B,
            W,
            L,
        )
        out = row_sums(upper, lower, factors, whole, held, BITS, ZERO, FLOATS, NESTED, MINIMA, CHUNKS, A * B, W, run)
        if BIAS:
            out += tl.load(bias + first + now, mask=used & (now < outputs), other=0.0).to(tl.float32)
        out = out.to(dtype).to(tl.float32) * factor
        mine = tile * A + some
        total = tl.sum(tl.reshape(out, [A, B]), 1)
        tl.store(y + token.to(tl.int64) * outputs + mine, total.to(dtype), mask=mine < outputs)
        held = later
