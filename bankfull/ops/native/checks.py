"""Checks before a tensor's address goes to C++: host memory, contiguous, expected dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from bankfull.ops.native.extension import select_isa

WIDENED = (torch.float32, torch.bfloat16, torch.float16)


def isa_is_chosen() -> bool:
    """Always True; raises ConfigError when a model is built with a BANKFULL_ISA that this machine lacks."""
    return select_isa() is not None


def float_rows(x: Tensor) -> Tensor:
    """x as contiguous float32; x itself if it already is."""
    if x.dtype is torch.float32 and x.is_cpu and x.is_contiguous():
        return x
    if not x.is_cpu:
        raise ValueError(f"a CPU kernel was given a tensor on {x.device}")
    if x.dtype not in WIDENED:
        raise ValueError(f"a float32 kernel was given {x.dtype}, which it would have to narrow")
    return x.to(torch.float32).contiguous()


def token_rows(x: Tensor) -> Tensor:
    """x itself if each token is contiguous: operands are slices of one projection."""
    if x.dtype is torch.float32 and x.is_cpu and x[:1].is_contiguous():
        return x
    return float_rows(x)


def dense_floats(x: Tensor) -> Tensor:
    """x, checked: a kernel writes into it, so a copy is not allowed."""
    if x.dtype is not torch.float32 or not x.is_cpu or not x.is_contiguous():
        raise ValueError(f"a kernel that writes float32 in place was given {x.dtype} on {x.device}, or strided")
    return x


def integers(x: Tensor) -> Tensor:
    """x as contiguous int64 in host memory; x itself if it already is."""
    if x.dtype is torch.int64 and x.is_cpu and x.is_contiguous():
        return x
    if not x.is_cpu or x.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"a CPU kernel was given indices in {x.dtype} on {x.device}")
    return x.to(torch.int64).contiguous()


def address(x: Tensor | None) -> int:
    """The data pointer, or 0 for None. The caller keeps the tensor alive until the kernel returns."""
    return 0 if x is None else x.data_ptr()
