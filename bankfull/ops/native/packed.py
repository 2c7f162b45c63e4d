"""Linear layers in 8-bit arithmetic: weights repacked once, activations encoded on the way in.

Few rows are multiplied as int8 codes with a scale for each group of 32, which is the operation's body. Many rows, where
the processor has tiles, are multiplied as bfloat16, which loses less: `tile_rows` tells from how many on. A row's
result is the same bits for any number of threads and, on either side of that border, in any batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bankfull.ops.native.checks import address, float_rows
from bankfull.ops.native.extension import required
from bankfull.ops.native.linear import FORMATS, accepts, storage_of
from bankfull.ops.native.memory import Slabs
from bankfull.ops.reference.linear import best_output_int8, linear_int8
from bankfull.weights.qtensor import QTensor

_native = required()
_slabs = Slabs()


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """Sixteen outputs side by side, in the layout `pack` of csrc/packs.hpp. The numbers are those of the file."""

    data: Tensor
    pack: int
    shape: tuple[int, int]

    @property
    def nbytes(self) -> int:
        return self.data.numel()

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        out = torch.empty(self.shape, dtype=torch.float32)
        _native.unpack(self.pack, address(self.data), address(out), *self.shape)
        return out.to(dtype)


def pack(weight: QTensor) -> PackedWeight:
    outputs, inner = weight.shape
    code = FORMATS[weight.scheme.name][0]
    layout = int(_native.pack_of(code))
    data = _slabs.take(int(_native.packed_bytes(layout, outputs, inner)))
    _native.pack(code, address(storage_of(weight)), address(data), outputs, inner)
    return PackedWeight(data, layout, (outputs, inner))


def _accepts(*, dtype: torch.dtype | None = None, weight: QTensor | None = None, **facts: Any) -> bool:
    if dtype != torch.float32 or not accepts(dtype=dtype, weight=weight) or weight is None:
        return False
    return int(_native.pack_of(FORMATS[weight.scheme.name][0])) >= 0


def _check(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> None:
    outputs, inner = weight.shape
    if x.shape[-1] != inner:
        raise ValueError(f"linear_int8: the input has {x.shape[-1]} columns, the weight {inner}")
    if bias is not None and bias.shape != (outputs,):
        raise ValueError(f"linear_int8: the bias has shape {tuple(bias.shape)}, the weight {outputs} outputs")


def _encode(x: Tensor, inner: int) -> tuple[Tensor, int, int, bool]:
    """The rows as the kernels want them, their stride, how many there are, and whether they are tiles."""
    rows = float_rows(x)
    count, stride = rows.numel() // inner, int(_native.encoded_stride(inner))
    tiles = 0 < _native.tile_rows() <= count
    encoded = torch.empty(count * stride, dtype=torch.uint8)
    _native.encode(address(rows), inner, count, inner, address(encoded), stride, tiles)
    return encoded, stride, count, tiles


@linear_int8.provider("native", on="cpu", accepts=_accepts, prepare=pack)
def run_linear_int8(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    outputs, inner = weight.shape
    _check(x, weight, bias)
    encoded, stride, count, tiles = _encode(x, inner)
    y = torch.empty(*x.shape[:-1], outputs, dtype=torch.float32)
    wide_bias = None if bias is None else float_rows(bias)
    part = (address(weight.data), address(wide_bias), address(y), outputs, outputs, weight.pack)
    _native.packed_linear(tiles, address(encoded), stride, count, inner, [part], -1, 0, 0, False)
    return y


@best_output_int8.provider("native", on="cpu", accepts=_accepts, prepare=pack)
def run_best_output_int8(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    outputs, inner = weight.shape
    _check(x, weight, bias)
    rows = float_rows(x)
    best = torch.empty(x.shape[:-1], dtype=torch.int64)
    wide_bias = None if bias is None else float_rows(bias)
    _native.packed_best(
        address(rows), best.numel(), inner, address(weight.data), address(wide_bias), outputs, weight.pack,
        address(best),
    )  # fmt: skip
    return best
