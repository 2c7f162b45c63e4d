"""Columns of a matrix rounded one after another, each with the errors of those before it: the inner loop of GPTQ.

Rows are independent. A program holds some rows of all columns of a block in registers and takes the columns in turn; as
single operations, a block of 128 columns would be a thousand launches. `quantize/gptq.py` has the meaning of the loop.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bankfull.ops.triton.launch import cdiv, power_of_two

ROWS, WARPS = 32, 1
"""Rows of a program, and its warps: in one warp a column is found without a barrier."""
MOST_COLUMNS = 128
"""Columns of a program: 32 rows of them are 128 registers of each thread, which leaves room for the rest."""
ROUND = tl.constexpr(1.5 * 2.0**23)
"""Added and subtracted, it rounds a small float32 to a whole number, ties to even."""
FAR = tl.constexpr(1024.0)
"""Farther from zero than every code."""


@triton.jit
def rounded_columns_kernel(
    numbers,
    wanted,
    feedback,
    feedback_stride,
    scales,
    zeros,
    codes,
    errors,
    columns,
    rows,
    lowest,
    highest,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    there = row < rows
    left = tl.load(
        wanted + column[:, None] * rows + row[None],
        (column[:, None] < columns) & there[None],
        0.0,
    )
    for now in range(columns):
        at = now * rows + row
        want = tl.sum(tl.where(column[:, None] == now, left, 0.0), 0)
        number = tl.load(numbers + at, there, 0.0)
        scale = tl.load(scales + at, there, 0.0)
        zero = tl.load(zeros + at, there, 0.0)
        inverse = tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), tl.where(scale == 0.0, 1.0, scale))
        step = tl.where(scale == 0.0, 0.0, tl.minimum(tl.maximum(want * inverse, -FAR), FAR))
        code = (step + ROUND) - ROUND + zero
        code = tl.minimum(tl.maximum(code, lowest), highest)
        error = number - (code - zero) * scale
        tl.store(codes + at, code.to(tl.int8), there)
        tl.store(errors + at, error, there)
        later = (column > now) & (column < columns)
        left += tl.load(feedback + now * feedback_stride + column, later, 0.0)[:, None] * error[None]


def rounded_columns(
    numbers: Tensor, wanted: Tensor, feedback: Tensor, scales: Tensor, zeros: Tensor, lowest: int, highest: int
) -> tuple[Tensor, Tensor]:
    """`quantize.gptq.rounded_columns` for at most `MOST_COLUMNS` columns."""
    columns, rows = numbers.shape
    assert columns <= MOST_COLUMNS
    feedback = feedback.contiguous()  # a device's Cholesky factor has its columns in a row
    assert all(one.is_contiguous() for one in (numbers, wanted, scales, zeros))
    codes, errors = torch.empty_like(numbers, dtype=torch.int8), torch.empty_like(numbers)
    rounded_columns_kernel[(cdiv(rows, ROWS),)](
        numbers,
        wanted,
        feedback,
        feedback.stride(0),
        scales,
        zeros,
        codes,
        errors,
        columns,
        rows,
        float(lowest),
        float(highest),
        COLUMNS=max(16, power_of_two(columns)),
        ROWS=ROWS,
        num_warps=WARPS,
    )
    return codes, errors
