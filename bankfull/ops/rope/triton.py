"""RoPE: the angles of a step, and the rotation of heads.

The rotation is computed in float32 and rounded once. The body rounds both products first, but a device that fuses a
multiply-add would not either, so matching it exactly is not attempted.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from bankfull.ops.rope.body import rope_angles, rotate
from bankfull.ops.triton.launch import (
    INTERPRETED,
    cdiv,
    multiprocessors,
    overlapped,
    power_of_two,
    start_next,
    wait_for_inputs,
)
from bankfull.ops.triton.rows import DTYPES, HeadRows, accepts, contiguous_rows, preloadable

if INTERPRETED:

    @triton.jit
    def cos_sin(angle):
        return tl.cos(angle), tl.sin(angle)

else:

    @triton.jit
    def cos_sin(angle):
        """cos and sin, exact to rounding: angles reach many thousands, and the fast instructions need small ones."""
        return libdevice.cos(angle), libdevice.sin(angle)


@triton.jit(do_not_specialize=["tokens"])
def rope_angles_kernel(
    positions,
    frequencies,
    cos,
    sin,
    tokens,
    half,
    scale,
    TOKENS: tl.constexpr,
    HALF: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    at = tl.arange(0, HALF)[None, :]
    frequency = tl.load(frequencies + at, at < half, 0.0)
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None]
    inside = (token < tokens) & (at < half)
    position = tl.load(positions + token, token < tokens, 0).to(tl.float32)
    x, y = cos_sin(position * frequency)
    out = token.to(tl.int64) * half + at
    tl.store(cos + out, (x * scale).to(cos.dtype.element_ty), inside)
    tl.store(sin + out, (y * scale).to(sin.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["rows"])
def rotate_kernel(
    x,
    cos,
    sin,
    y,
    rows,
    heads,
    size,
    half,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """ROWS heads of one token or of adjacent tokens. REST covers the columns without RoPE; 0 if there are none."""
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    token, head = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    source, out = x.at + token * x.token + head * x.head, y + row.to(tl.int64) * size
    at = tl.arange(0, HALF)[None, :]
    inside = (row < rows) & (at < half)
    cosine = tl.load(cos + token * half + at, inside, 0.0).to(tl.float32)
    sine = tl.load(sin + token * half + at, inside, 0.0).to(tl.float32)
    left = tl.load(source + at, inside, 0.0).to(tl.float32)
    right = tl.load(source + half + at, inside, 0.0).to(tl.float32)
    tl.store(out + at, (left * cosine - right * sine).to(y.dtype.element_ty), inside)
    tl.store(out + half + at, (right * cosine + left * sine).to(y.dtype.element_ty), inside)
    if REST > 0:
        beyond = 2 * half + tl.arange(0, REST)[None, :]
        passing = (row < rows) & (beyond < size)
        tl.store(out + beyond, tl.load(source + beyond, passing, 0.0), passing)


@rope_angles.provider("triton", on="cuda", accepts=accepts)
def run_rope_angles(positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    if dtype not in DTYPES or frequencies.dtype is not torch.float32 or not preloadable(frequencies):
        return rope_angles.body(positions, frequencies, scale, dtype)
    tokens, half = len(positions), len(frequencies)
    cos, sin = (torch.empty(tokens, half, dtype=dtype, device=positions.device) for _ in range(2))
    block = power_of_two(half)
    # About 512 angles per 128 threads: instructions, not memory, are the bottleneck.
    several = max(1, 512 // block)
    if cos.numel():
        rope_angles_kernel[(cdiv(tokens, several),)](
            positions.contiguous(),
            frequencies,
            cos,
            sin,
            tokens,
            half,
            float(scale),
            TOKENS=several,
            HALF=block,
            num_warps=4,
            **overlapped(cos),
        )
    return cos, sin


@rotate.provider("triton", on="cuda", accepts=accepts)
def run_rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    tokens, heads, size = x.shape
    half = cos.shape[1]
    fits = cos.shape == sin.shape == (tokens, half) and 0 < 2 * half <= size
    if not fits or not x.dtype == cos.dtype == sin.dtype or x.dtype not in DTYPES:
        return rotate.body(x, cos, sin)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block, rows = power_of_two(half), tokens * heads
    # 16 elements for each of 128 threads if there are enough rows; otherwise one warp per few heads.
    several = max(1, 2048 // block)
    few = rows < 4 * several * multiprocessors(x.device)
    several = max(1, 256 // block) if few else several
    if y.numel():
        rotate_kernel[(cdiv(rows, several),)](
            HeadRows.of(contiguous_rows(x)),
            cos.contiguous(),
            sin.contiguous(),
            y,
            rows,
            heads,
            size,
            half,
            ROWS=several,
            HALF=block,
            REST=power_of_two(size - 2 * half) if size > 2 * half else 0,
            num_warps=1 if few else 4,
            **overlapped(x),
        )
    return y
