"""Pointwise kernels: activations, gates, soft caps and sums. All are memory-bound.

Results are rounded after the same operations as in the bodies.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from bankfull.ops.norm.body import add
from bankfull.ops.pointwise.body import activate, activate_mul, soft_cap
from bankfull.ops.triton.launch import INTERPRETED, cdiv, multiprocessors, overlapped, start_next, wait_for_inputs
from bankfull.ops.triton.rows import accepts, supported, two_dimensional

LARGE_BLOCK, SMALL_BLOCK = 4096, 1024
"""Columns per program. Large: two 16-byte loads of 16-bit elements per thread and operand, to saturate memory. Small:
to spread little work over all multiprocessors."""
LARGE_WARPS, SMALL_WARPS = 8, 4


if INTERPRETED:

    @triton.jit
    def quotient(x, y):
        return x / y

else:

    @triton.jit
    def quotient(x, y):
        """Accurate to two ulps; 0 for divisors near infinity. A third of the instructions of `/`, so that activations
        keep up with memory."""
        return libdevice.fast_dividef(x, y)


@triton.jit
def activation(x, KIND: tl.constexpr):
    """One of the activations of the reference, in float32."""
    if KIND == "silu":
        y = quotient(x, 1.0 + tl.exp(-x))
    elif KIND == "gelu":
        y = gelu(x)
    elif KIND == "gelu_tanh":
        # x (1 + tanh u) / 2 is x sigmoid(2 u): no cancellation, one exponential.
        y = quotient(x, 1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif KIND == "relu":
        y = tl.where(x < 0.0, 0.0, x)  # NaN stays NaN
    elif KIND == "sigmoid":
        y = quotient(1.0, 1.0 + tl.exp(-x))
    else:
        tl.static_assert(KIND == "softplus")
        y = softplus(x)
    return y


@triton.jit
def gelu(x):
    """x * Phi(x), Phi the normal CDF. The tail beyond |x| is a polynomial times exp(-x^2 / 2) (Abramowitz and Stegun
    7.1.26): error at most 1.5e-7, about float32 epsilon, at half the cost of the exact function."""
    size = tl.abs(x)
    t = quotient(1.0, 1.0 + 0.23164189 * size)
    series = t * (0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145))))
    past = series * tl.exp(-0.5 * x * x)
    return x * tl.where(x < 0.0, past, 1.0 - past)


@triton.jit
def softplus(x):
    """max(x, 0) + log(1 + exp(-|x|)). The logarithm is a series exact to rounding, because the hardware's is too coarse
    near one. Beyond torch's threshold of 20 the sum rounds to x by itself."""
    e = tl.exp(-tl.abs(x))
    s = quotient(e, 2.0 + e)  # log(1 + e) = 2 artanh(s), s <= 1/3
    q = s * s
    series = 1.0 + q * (1 / 3 + q * (1 / 5 + q * (1 / 7 + q * (1 / 9 + q * (1 / 11 + q * (1 / 13))))))
    return tl.where(x < 0.0, 0.0, x) + 2.0 * s * series


@triton.jit
def tanh(x):
    """tanh(x) from an exponential; near zero, where that cancels, from the series."""
    e = tl.exp(-2.0 * tl.abs(x))
    far = quotient(1.0 - e, 1.0 + e)
    q = x * x
    near = x * (1.0 + q * (-1 / 3 + q * (2 / 15 + q * (-17 / 315))))
    return tl.where(q < 0.04, near, tl.where(x < 0.0, -far, far))


@triton.jit
def place(columns, BLOCK: tl.constexpr):
    """The program's row and columns. Adjacent programs read adjacent memory."""
    blocks = tl.cdiv(columns, BLOCK)
    program = tl.program_id(0)
    block = program % blocks
    return (program // blocks).to(tl.int64), block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def activate_kernel(x, y, columns, x_stride, KIND: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    row, at = place(columns, BLOCK)
    inside = at < columns
    numbers = tl.load(x + row * x_stride + at, inside, 0.0).to(tl.float32)
    tl.store(y + row * columns + at, activation(numbers, KIND).to(y.dtype.element_ty), inside)


@triton.jit
def activate_mul_kernel(
    gate, up, y, columns, gate_stride, up_stride, KIND: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    row, at = place(columns, BLOCK)
    inside = at < columns
    opening = tl.load(gate + row * gate_stride + at, inside, 0.0)
    passing = tl.load(up + row * up_stride + at, inside, 0.0).to(tl.float32)
    opened = activation(opening.to(tl.float32), KIND).to(opening.dtype).to(tl.float32)
    tl.store(y + row * columns + at, (opened * passing).to(y.dtype.element_ty), inside)


@triton.jit
def soft_cap_kernel(x, y, columns, x_stride, cap, inverse, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    row, at = place(columns, BLOCK)
    inside = at < columns
    numbers = tl.load(x + row * x_stride + at, inside, 0.0)
    share = (numbers.to(tl.float32) * inverse).to(numbers.dtype).to(tl.float32)
    bounded = tanh(share).to(numbers.dtype).to(tl.float32)
    tl.store(y + row * columns + at, (bounded * cap).to(numbers.dtype), inside)


@triton.jit
def add_kernel(x, delta, y, columns, x_stride, delta_stride, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    row, at = place(columns, BLOCK)
    inside = at < columns
    stream = tl.load(x + row * x_stride + at, inside, 0.0).to(tl.float32)
    branch = tl.load(delta + row * delta_stride + at, inside, 0.0).to(tl.float32)
    tl.store(y + row * columns + at, (stream + branch).to(y.dtype.element_ty), inside)


def as_lines(*operands: Tensor) -> list[Tensor]:
    """The operands as (rows, columns): one row if all are contiguous, so that no block is partial."""
    if all(x.is_contiguous() for x in operands):
        return [x.view(1, -1) for x in operands]
    return [two_dimensional(x) for x in operands]


def launch_size(line: Tensor) -> tuple[int, dict[str, int]]:
    """Number of programs and the launch parameters."""
    rows, columns = line.shape
    large = line.numel() >= 2 * LARGE_BLOCK * multiprocessors(line.device)
    block, warps = (LARGE_BLOCK, LARGE_WARPS) if large else (SMALL_BLOCK, SMALL_WARPS)
    return rows * cdiv(columns, block), {"BLOCK": block, "num_warps": warps}


@activate.provider("triton", on="cuda", accepts=accepts)
def run_activate(x: Tensor, kind: str) -> Tensor:
    if not supported(x):
        return activate.body(x, kind)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    (line,) = as_lines(x)
    programs, size = launch_size(line)
    if x.numel():
        activate_kernel[(programs,)](line, y, line.shape[1], line.stride(0), kind, **size, **overlapped(x))
    return y


@activate_mul.provider("triton", on="cuda", accepts=accepts)
def run_activate_mul(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    if gate.shape != up.shape or not supported(gate, up):
        return activate_mul.body(gate, up, kind)
    y = torch.empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype), device=gate.device)
    opening, passing = as_lines(gate, up)
    programs, size = launch_size(opening)
    if y.numel():
        strides = opening.stride(0), passing.stride(0)
        activate_mul_kernel[(programs,)](
            opening, passing, y, opening.shape[1], *strides, kind, **size, **overlapped(gate)
        )
    return y


@soft_cap.provider("triton", on="cuda", accepts=accepts)
def run_soft_cap(x: Tensor, cap: float) -> Tensor:
    if not supported(x):
        return soft_cap.body(x, cap)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    (line,) = as_lines(x)
    programs, size = launch_size(line)
    if x.numel():
        soft_cap_kernel[(programs,)](
            line, y, line.shape[1], line.stride(0), float(cap), 1.0 / cap, **size, **overlapped(x)
        )
    return y


@add.provider("triton", on="cuda", accepts=accepts)
def run_add(x: Tensor, delta: Tensor) -> Tensor:
    if x.shape != delta.shape or not supported(x, delta):
        return add.body(x, delta)
    y = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, delta.dtype), device=x.device)
    stream, branch = as_lines(x, delta)
    programs, size = launch_size(stream)
    if y.numel():
        add_kernel[(programs,)](
            stream, branch, y, stream.shape[1], stream.stride(0), branch.stride(0), **size, **overlapped(x)
        )
    return y
