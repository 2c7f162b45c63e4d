"""Activations as 16-bit fixed point in registers, and conversions and dot products by single PTX instructions."""

from __future__ import annotations

import triton
import triton.language as tl

from bankfull.ops.products.triton.quantized.fp8_rows import append, has_wide_exponent
from bankfull.ops.products.triton.quantized.rows import pair_of
from bankfull.ops.triton.launch import INTERPRETED

PLAIN = tl.constexpr(INTERPRETED)
"""In the interpreter, PTX instructions are replaced by plain Triton."""
ROUND = tl.constexpr(1.5 * 2.0**23)


@triton.jit
def bytes_as_floats(words):
    """Each byte of a word (int32), the lowest first, as a float32. Conversion instructions are slow: the byte becomes
    the lowest mantissa bits of 2 ** 23, which is then subtracted."""
    if PLAIN:
        a, b, c, d = words & 255, (words >> 8) & 255, (words >> 16) & 255, (words >> 24) & 255
        a, b, c, d = a.to(tl.float32), b.to(tl.float32), c.to(tl.float32), d.to(tl.float32)
    else:
        a, b, c, d = tl.inline_asm_elementwise(
            "prmt.b32 $0, $4, 0x4B000000, 0x7540; prmt.b32 $1, $4, 0x4B000000, 0x7541;"
            " prmt.b32 $2, $4, 0x4B000000, 0x7542; prmt.b32 $3, $4, 0x4B000000, 0x7543;",
            "=&r,=&r,=&r,=&r,r",
            [words],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
        a, b, c, d = a - 8388608.0, b - 8388608.0, c - 8388608.0, d - 8388608.0
    return a, b, c, d


@triton.jit
def halves_as_floats(words):
    """The two float16 of a word (int32) as float32."""
    if PLAIN:
        low = (words & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        return low, ((words >> 16) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }",
            "=&r,=&r,r",
            [words],
            dtype=(tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )


@triton.jit
def load_norm_weights(gain, words, FORM: tl.constexpr, TILE: tl.constexpr):
    """The norm's weight, in the order of `load_activations`."""
    L: tl.constexpr = FORM.length
    word = tl.arange(0, TILE.words)
    pair = word // L * (FORM.group // 2) + word % L
    found = ()
    for i in tl.static_range(FORM.group // L // 2):
        even, odd = pair_of(gain, pair + i * L, word < TILE.groups * L, words.columns, FORM.padded)
        found = append(append(found, even), odd)
    return found


@triton.jit
def rounded(even, odd, KIND: tl.constexpr):
    """Two float32 rounded to KIND, and the word that packs both. Conversion in pairs is fast, single conversion is
    not."""
    if PLAIN:
        low = even.to(KIND)
        high = odd.to(KIND)
        bits = low.to(tl.uint16, bitcast=True).to(tl.uint32) | (high.to(tl.uint16, bitcast=True).to(tl.uint32) << 16)
        return low.to(tl.float32), high.to(tl.float32), bits
    elif has_wide_exponent(KIND):
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $2, $4, $3; shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;",
            "=&r,=&r,=&r,r,r",
            [even, odd],
            dtype=(tl.float32, tl.float32, tl.uint32),
            is_pure=True,
            pack=1,
        )
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 low, high; cvt.rn.f16x2.f32 $2, $4, $3; mov.b32 {low, high}, $2; cvt.f32.f16 $0, low;"
            " cvt.f32.f16 $1, high; }",
            "=&r,=&r,=&r,r,r",
            [even, odd],
            dtype=(tl.float32, tl.float32, tl.uint32),
            is_pure=True,
            pack=1,
        )


@triton.jit
def load_activations(rows, gains, words, FORM: tl.constexpr, TILE: tl.constexpr):
    """The activations of each thread's words, two (float32 [W]) for each pair of codes, and the inverse RMS that they
    were multiplied by. Of a row to be normed, the first program stores x + delta to `joined`. Rounded like the separate
    operations."""
    kind: tl.constexpr = rows.x.dtype.element_ty
    L: tl.constexpr = FORM.length
    W: tl.constexpr = TILE.words
    columns = words.columns
    word = tl.arange(0, W)
    pair = word // L * (FORM.group // 2) + word % L
    inside = word < TILE.groups * L
    found = ()
    pairs = ()
    squares = tl.zeros([W], tl.float32)
    scale = 1.0
    for i in tl.static_range(FORM.group // L // 2):
        even, odd = pair_of(rows.x, pair + i * L, inside, columns, FORM.padded)
        if rows.gain is not None:
            more_even, more_odd = pair_of(rows.delta, pair + i * L, inside, columns, FORM.padded)
            even, odd, both = rounded(even + more_even, odd + more_odd, kind)
            pairs = append(pairs, both)
            squares += even * even + odd * odd
        found = append(append(found, even), odd)
    if rows.gain is not None:
        if tl.program_id(0) == 0:
            store_stream(rows.joined, pairs, pair, inside, columns, L, FORM.padded)
        scale = tl.rsqrt(tl.sum(squares, 0) / columns + rows.eps)
        normed = ()
        for i in tl.static_range(FORM.group // L // 2):
            even = found[2 * i] * scale
            odd = found[2 * i + 1] * scale
            if rows.offset is not None:
                even, odd, both = rounded(
                    even * (rows.offset + gains[2 * i]), odd * (rows.offset + gains[2 * i + 1]), kind
                )
            else:
                even, odd, both = rounded(even, odd, kind)
                even, odd, both = rounded(even * gains[2 * i], odd * gains[2 * i + 1], kind)
            normed = append(append(normed, even), odd)
        found = normed
    return found, scale


@triton.jit
def store_stream(joined, pairs, pair, inside, columns, L: tl.constexpr, PADDED: tl.constexpr):
    """Store the words of `rounded`, two elements each."""
    for i in tl.static_range(len(pairs)):
        if PADDED:
            column = 2 * (pair + i * L)
            halves = joined.to(tl.pointer_type(tl.uint16))
            tl.store(halves + column, pairs[i].to(tl.uint16), inside & (column < columns))
            tl.store(halves + column + 1, (pairs[i] >> 16).to(tl.uint16), inside & (column + 1 < columns))
        else:
            tl.store(joined.to(tl.pointer_type(tl.uint32)) + pair + i * L, pairs[i], inside)


@triton.jit
def group_sums(line, W: tl.constexpr, L: tl.constexpr):
    """Sum of each group's activations, [W / L, 1], which multiplies zero points and minima."""
    whole = tl.zeros([W], tl.float32)
    for i in tl.static_range(len(line)):
        whole += line[i]
    return tl.sum(tl.reshape(whole, [W // L, L]), 1, keep_dims=True)


@triton.jit
def powers_for(most):
    """The powers of two that turn numbers of up to `most` into integers of 15 bits, and back."""
    # 2 ** e <= most < 2 ** (e + 1), from the exponent field, clamped so that both factors are normal numbers.
    exponents = tl.minimum(tl.maximum(most.to(tl.int32, bitcast=True) >> 23, 15), 254)
    up = ((127 + 14 + 127 - exponents) << 23).to(tl.float32, bitcast=True)
    factors = tl.where(most < float("inf"), ((exponents - 14) << 23).to(tl.float32, bitcast=True), float("nan"))
    return up, factors


@triton.jit
def fixed_point(line, W: tl.constexpr, L: tl.constexpr):
    """Activations as integers in the lower 16 bits of words, and the power of two, [W / L, 1], of each group. 16-bit
    floats of at least 1/128 (float16: 1/16) of their group's maximum keep all their digits; others lose less than the
    maximum's last digit. Conversion instructions are slow: adding ROUND drops the fraction and leaves the integer in
    the lowest bits."""
    most = tl.zeros([W], tl.float32)
    for i in tl.static_range(len(line)):
        most = tl.maximum(most, tl.abs(line[i]), propagate_nan=tl.PropagateNan.ALL)
    up, factors = powers_for(tl.max(tl.reshape(most, [W // L, L]), 1, keep_dims=True))
    of_words = tl.reshape(tl.broadcast_to(up, [W // L, L]), [W])
    found = ()
    for i in tl.static_range(len(line)):
        found = append(found, (line[i] * of_words + ROUND).to(tl.int32, bitcast=True))
    return found, factors


@triton.jit
def four_bytes(a, b, c, d, BYTE: tl.constexpr):
    """The lowest (0) or second lowest (1) byte of each operand, packed into a word."""
    if PLAIN:
        low = ((a >> (8 * BYTE)) & 255) | (((b >> (8 * BYTE)) & 255) << 8)
        return low | (((c >> (8 * BYTE)) & 255) << 16) | (((d >> (8 * BYTE)) & 255) << 24)
    elif BYTE == 0:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 low, high; prmt.b32 low, $1, $2, 0x0040; prmt.b32 high, $3, $4, 0x0040;"
            " prmt.b32 $0, low, high, 0x5410; }",
            "=r,r,r,r,r",
            [a, b, c, d],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 low, high; prmt.b32 low, $1, $2, 0x0051; prmt.b32 high, $3, $4, 0x0051;"
            " prmt.b32 $0, low, high, 0x5410; }",
            "=r,r,r,r,r",
            [a, b, c, d],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def of_lanes(numbers, S: tl.constexpr, BYTE: tl.constexpr):
    """The activations of the codes at bit 2 S of each byte of a word of 16."""
    return four_bytes(numbers[2 * S], numbers[2 * S + 8], numbers[2 * S + 1], numbers[2 * S + 9], BYTE)


@triton.jit
def planes(numbers, BYTE: tl.constexpr, FLOATS: tl.constexpr):
    """The upper (1) or lower (0) bytes of a word's activations, packed by four, in the order of `bytes_of`."""
    if len(numbers) == 16:
        return (
            of_lanes(numbers, 0, BYTE),
            of_lanes(numbers, 2, BYTE),
            of_lanes(numbers, 1, BYTE),
            of_lanes(numbers, 3, BYTE),
        )
    elif FLOATS:
        first = four_bytes(numbers[0], numbers[2], numbers[4], numbers[6], BYTE)
        return first, four_bytes(numbers[1], numbers[3], numbers[5], numbers[7], BYTE)
    elif len(numbers) == 8:
        first = four_bytes(numbers[0], numbers[4], numbers[1], numbers[5], BYTE)
        return first, four_bytes(numbers[2], numbers[6], numbers[3], numbers[7], BYTE)
    else:
        return (four_bytes(numbers[0], numbers[2], numbers[1], numbers[3], BYTE),)


@triton.jit
def bytes_of(codes, thirds, SECOND: tl.constexpr, BITS: tl.constexpr, FLOATS: tl.constexpr):
    """The codes of a word, unsigned, each in its own byte. Of 2 and 3 bits, every other result is 16 times too large,
    which saves its shift. `thirds`: the third bits of two words, of which this is the second one if SECOND."""
    if FLOATS:
        return bytes_of_floats(codes)
    elif BITS == 4:
        return codes & 0x0F0F0F0F, (codes >> 4) & 0x0F0F0F0F
    elif BITS == 2:
        others = codes >> 2
        return codes & 0x03030303, codes & 0x30303030, others & 0x03030303, others & 0x30303030
    elif BITS == 3:
        # `THIRD_BITS`: those that are not in place for their codes are one or two bits away.
        some = (codes & 0x33333333) | ((thirds >> 1 if SECOND else thirds) & 0x44444444)
        others = ((codes >> 2) & 0x33333333) | ((thirds << 1 if SECOND else thirds << 2) & 0x44444444)
        return some & 0x0F0F0F0F, some & 0xF0F0F0F0, others & 0x0F0F0F0F, others & 0xF0F0F0F0
    else:
        return (codes ^ 0x80808080,)


FLOAT_ZERO = tl.constexpr(12)
"""What `bytes_of_floats` adds."""


@triton.jit
def bytes_of_floats(codes):
    """4-bit floats (e2m1), doubled and plus 12, which are whole numbers from 0 to 24: those of the lower half of a
    word, and of the upper half. One instruction looks up four codes in a table of eight bytes; codes whose upper bit is
    set, the negative ones, get the sign of the byte there, zero, and are looked up in a table of their own."""
    if PLAIN:
        found = ()
        for half in tl.static_range(2):
            four = (codes >> (16 * half)) & 0xFFFF
            four = (four | (four << 8)) & 0x00FF00FF
            four = (four | (four << 4)) & 0x0F0F0F0F
            # Four codes at once: with the bits s a b m, a magnitude is m + 2 b + a (m + 4) + 2 a b (m + 1).
            m, b, a = four & 0x01010101, (four >> 1) & 0x01010101, (four >> 2) & 0x01010101
            doubled = m + 2 * b + (m & a) + 4 * a + 2 * ((m & a & b) + (a & b))
            negative = doubled & (((four >> 3) & 0x01010101) * 255)
            found = append(found, 0x0C0C0C0C + doubled - 2 * negative)
        return found
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 flipped, next, positive, negative; xor.b32 flipped, $2, 0x88888888; shr.b32 next, $2, 16;"
            " prmt.b32 positive, 0x0F0E0D0C, 0x18141210, $2; prmt.b32 negative, 0x090A0B0C, 0x00040608, flipped;"
            " or.b32 $0, positive, negative; shr.b32 flipped, flipped, 16;"
            " prmt.b32 positive, 0x0F0E0D0C, 0x18141210, next; prmt.b32 negative, 0x090A0B0C, 0x00040608, flipped;"
            " or.b32 $1, positive, negative; }",
            "=&r,=&r,r",
            [codes],
            dtype=(tl.uint32, tl.uint32),
            is_pure=True,
            pack=1,
        )


@triton.jit
def dot4(codes, numbers, sums, SIGNED: tl.constexpr):
    """`sums` plus the dot product of four codes with four bytes (dp4a)."""
    if PLAIN:
        for i in tl.static_range(4):
            number = (numbers >> (8 * i)) & 255
            if SIGNED:
                number = (number ^ 128) - 128
            sums += ((codes >> (8 * i)) & 255).to(tl.int32) * number
        return sums
    elif SIGNED:
        return tl.inline_asm_elementwise(
            "dp4a.u32.s32 $0, $1, $2, $3;", "=r,r,r,r", [codes, numbers, sums], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return tl.inline_asm_elementwise(
            "dp4a.u32.u32 $0, $1, $2, $3;", "=r,r,r,r", [codes, numbers, sums], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def split_runs(x, R: tl.constexpr, W: tl.constexpr, RUN: tl.constexpr):
    """[R, W] as RUN tensors [R, W / RUN]: the first element of each run, the second, ..."""
    if RUN == 1:
        return (tl.reshape(x, [R, W]),)
    elif RUN == 4:
        even, odd = tl.split(tl.reshape(x, [R, W // 4, 2, 2]))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        return first, second, third, fourth
    else:
        tl.static_assert(RUN == 2)
        return tl.split(tl.reshape(x, [R, W // 2, 2]))


@triton.jit
def split_planes(planes, W: tl.constexpr, RUN: tl.constexpr):
    """The planes of each element of a run, concatenated, [1, W / RUN] each."""
    apart = ()
    for k in tl.static_range(len(planes)):
        of_plane = split_runs(planes[k][None, :], 1, W, RUN)
        for i in tl.static_range(RUN):
            apart = append(apart, of_plane[i])
    found = ()
    for i in tl.static_range(RUN):
        for k in tl.static_range(len(planes)):
            found = append(found, apart[k * RUN + i])
    return found
