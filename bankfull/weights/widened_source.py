"""fp8 matrices as a CPU multiplies them: no kernel there reads 8-bit floats.

A matrix with one scale per row keeps its exact values: bfloat16 holds its codes, and the scales are multiplied with the
product. One with a scale per 128 columns, and matrices of experts, are expanded to the computation's dtype.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace

import torch

from bankfull.weights.formats.dense import BY_DTYPE
from bankfull.weights.formats.fp8_groups import FP8_G128
from bankfull.weights.formats.rows import BF16_ROW, FP8, WIDE
from bankfull.weights.outliers import outlier_count
from bankfull.weights.qtensor import QTensor, Scheme
from bankfull.weights.requantized import EXPERT, is_inner_matrix
from bankfull.weights.source import ModelFiles, TensorSource
from bankfull.weights.source_view import SourceView

log = logging.getLogger("bankfull")

WIDENED = (FP8, FP8_G128)
KERNEL_DTYPES = (torch.float32, torch.bfloat16)
"""Dtypes of activations that kernels multiply `bf16_row` by."""
LEAST_EXPONENT = -100
"""Powers of two down to this one move from a scale into bfloat16 codes, which stay normal numbers."""


def in_bfloat16(weight: QTensor) -> QTensor:
    """An fp8 matrix as `bf16_row`: the same values. The power of two of each scale moves into the codes, so that scales
    lie between 1/2 and 1, and a bias can be divided by them."""
    codes, scales = weight.parts["codes"], weight.parts["scales"]
    part, exponent = torch.frexp(scales)
    moved = exponent.clamp(min=LEAST_EXPONENT, max=-LEAST_EXPONENT)
    part = torch.ldexp(part, exponent - moved)
    empty = part == 0
    wide = torch.ldexp(codes.to(torch.float32), moved).masked_fill(empty, 0).to(torch.bfloat16)
    return QTensor(WIDE, {"codes": wide, "scales": part.masked_fill(empty, 1)}, weight.shape, weight.columns)


@dataclass(frozen=True, slots=True)
class WidenedSource(SourceView):
    """`source` with its fp8 matrices in 16 bits, or expanded to `dtype`."""

    dtype: torch.dtype

    def scheme(self, name: str) -> Scheme:
        stored = self.source.scheme(name)
        if stored.name not in WIDENED:
            return stored
        return WIDE if self._keeps_codes(name, stored) else BY_DTYPE[self._expanded]

    def get(self, name: str) -> QTensor:
        tensor, wanted = self.source.get(name), self.scheme(name)
        if tensor.scheme == wanted:
            return tensor
        return in_bfloat16(tensor) if wanted == WIDE else QTensor.dense(tensor.dequantize(self._expanded))

    def outlier_count(self, name: str) -> int | None:
        return outlier_count(self.source, name)

    @property
    def _expanded(self) -> torch.dtype:
        return torch.float32 if self.dtype is torch.float64 else self.dtype

    def _keeps_codes(self, name: str, own: Scheme) -> bool:
        if own.name != FP8 or self.dtype not in KERNEL_DTYPES or EXPERT.search(name):
            return False
        return len(self.source.shape(name)) == 2 and is_inner_matrix(self.source, name)

    def notice(self) -> str:
        """What was done, and what it costs."""
        names = [name for name in self.source.names() if self.source.scheme(name).name in WIDENED]
        exact = sum(self.scheme(name).name == BF16_ROW for name in names)
        stored, held = (sum(_bytes(source, name) for name in names) for source in (self.source, self))
        whole = str(self._expanded).removeprefix("torch.")
        how = "as bfloat16, with exactly their values" if exact == len(names) else f"expanded to {whole}"
        if 0 < exact < len(names):
            how = f"in 16 bits or more, {exact} of them with exactly their values, the others expanded to {whole}"
        return (
            f"{len(names)} fp8 matrices are multiplied {how}, because no CPU kernel reads fp8: {stored / 1e6:,.1f} MB "
            f"become {held / 1e6:,.1f} MB. Activations are not rounded to 8 bits. int8 weights take half of that."
        )


def _bytes(source: TensorSource, name: str) -> int:
    *leading, columns = source.shape(name)
    return math.prod(leading) * source.scheme(name).row_bytes(columns)


def widened(files: ModelFiles, dtype: torch.dtype) -> ModelFiles:
    """The model with its fp8 matrices as a CPU multiplies them in a computation in `dtype`."""
    if not any(files.source.scheme(name).name in WIDENED for name in files.source.names()):
        return files
    return replace(files, source=WidenedSource(files.source, dtype))
