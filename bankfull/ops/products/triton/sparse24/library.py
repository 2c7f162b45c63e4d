"""2:4 sparse weights times many rows on sparse tensor cores: NVIDIA's cuSPARSELt, as far as torch offers it.

The library's default algorithm runs. A search among its algorithms would run each of them, and on an H200 one of those
stops with an illegal instruction, after which the process cannot use the device any more.
"""

from __future__ import annotations

from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from bankfull.weights.sparse_source import KERNEL_COLUMNS

OUTPUTS, ROWS = 32, 16
"""Outputs and rows of a product are multiples of these; rows are padded."""
AMPERE = (8, 0)
TRIAL = 256
TOLERANCE = 0.02
"""Largest accepted error of a product with 16-bit results, relative to its largest number."""


class Library(Protocol):
    def compress(self, dense: Tensor) -> Tensor:
        """A 2:4 sparse matrix in the layout of the library, as one vector."""
        ...

    def multiply(self, packed: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
        """x (rows, columns) times the transposed matrix, plus the bias."""
        ...


class CuSparseLt:
    """The sparse matrix is the library's first operand, so that x and the result are transposed."""

    def compress(self, dense: Tensor) -> Tensor:
        return torch._cslt_compress(dense)

    def multiply(self, packed: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
        return torch._cslt_sparse_mm(packed, x.t(), bias=bias, transpose_result=True)


library: Library = CuSparseLt()


@cache
def missing(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the library cannot be used on a device, as the end of a sentence; None if it can. A small product is tried,
    because versions of the library differ in the devices that they support."""
    if device.type != "cuda":
        return "this is no CUDA device"
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) < AMPERE:
        return "the device has no sparse tensor cores that cuSPARSELt supports"
    if not hasattr(torch, "_cslt_sparse_mm") or not torch.backends.cusparselt.is_available():
        return "this build of torch has no cuSPARSELt"
    return tried(device, dtype)


def tried(device: torch.device, dtype: torch.dtype) -> str | None:
    random = torch.Generator(device).manual_seed(0)
    dense = torch.randn(TRIAL, TRIAL, generator=random, device=device)
    dense[:, 1::4], dense[:, 2::4] = 0, 0
    x = torch.randn(TRIAL, TRIAL, generator=random, device=device)
    dense, x = dense.to(dtype), x.to(dtype)
    try:
        y = library.multiply(library.compress(dense), x, None).float()
    except (RuntimeError, TypeError) as error:
        return f"cuSPARSELt refuses a product: {' '.join(str(error).split())[:160]}"
    wanted = x.float() @ dense.float().t()
    wrong = float((y - wanted).abs().max() / wanted.abs().max())
    return None if wrong <= TOLERANCE else f"cuSPARSELt's product was wrong by {wrong:.1%}"


def fits(shape: tuple[int, int]) -> bool:
    return shape[0] % OUTPUTS == 0 and shape[1] % KERNEL_COLUMNS == 0


def product(packed: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    """x (rows, columns), contiguous and aligned to 16 bytes, times the weight."""
    rows = len(x)
    if short := -rows % ROWS:
        x = torch.nn.functional.pad(x, (0, 0, 0, short))
    return library.multiply(packed, x, bias)[:rows]
