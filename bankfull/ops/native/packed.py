"""Linear layers in narrow arithmetic: weights repacked once, activations encoded on the way in.

`linear_bf16`: any number of rows is multiplied as bfloat16, in tiles where the processor has them. With dense weights a
row's result is the same bits on every processor.

`linear_int8`: few rows are multiplied as int8 codes with a scale for each group of 32, which is the operation's body.
Many rows, where the processor has tiles, are multiplied as bfloat16, which loses less: `tile_rows` tells from how many.

`linear_mixed`: the same for few rows; many are multiplied as int8, with a second copy of the weight: csrc/mixing.hpp.

A row's result is the same bits for any number of threads and, on either side of that border, in any batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bankfull.ops.native.checks import address, float_rows, isa_is_chosen
from bankfull.ops.native.extension import required
from bankfull.ops.native.linear import FORMATS, storage_of
from bankfull.ops.native.memory import Slabs
from bankfull.ops.reference.linear import (
    best_output_bf16,
    best_output_int8,
    best_output_mixed,
    linear_bf16,
    linear_int8,
    linear_mixed,
)
from bankfull.weights.qtensor import QTensor

_native = required()
_slabs, _copies = Slabs(), Slabs()


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """Sixteen outputs side by side, in the layout `pack` of csrc/packs.hpp. The numbers are those of the file."""

    data: Tensor
    pack: int
    shape: tuple[int, int]
    mixed: Tensor | None = None
    """A copy of a byte for each weight, for many rows."""

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


def pack_and_mix(weight: QTensor) -> PackedWeight:
    packed = pack(weight)
    copy = _copies.take(int(_native.mixed_bytes(packed.pack, *packed.shape)))
    _native.mix(packed.pack, address(packed.data), address(copy), *packed.shape)
    return replace(packed, mixed=copy)


def _accepts_bf16(*, dtype: torch.dtype | None = None, weight: QTensor | None = None, **facts: Any) -> bool:
    if dtype != torch.float32 or not isinstance(weight, QTensor) or weight.scheme.name not in FORMATS:
        return False
    fits = len(weight.shape) == 2 and weight.shape[1] > 0 and weight.shape[1] % weight.scheme.block == 0
    packed = int(_native.pack_of(FORMATS[weight.scheme.name][0])) >= 0
    storage = storage_of(weight)
    return fits and packed and storage.is_cpu and storage.is_contiguous() and isa_is_chosen()


def _accepts_int8(*, weight: QTensor | None = None, **facts: Any) -> bool:
    return weight is not None and _accepts_bf16(weight=weight, **facts) and not weight.is_dense


def _accepts_mixed(*, weight: QTensor | None = None, **facts: Any) -> bool:
    if weight is None or not _accepts_int8(weight=weight, **facts):
        return False
    layout = int(_native.pack_of(FORMATS[weight.scheme.name][0]))
    return int(_native.mixed_bytes(layout, *weight.shape)) > 0


def _check(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> None:
    outputs, inner = weight.shape
    if x.shape[-1] != inner:
        raise ValueError(f"linear: the input has {x.shape[-1]} columns, the weight {inner}")
    if bias is not None and bias.shape != (outputs,):
        raise ValueError(f"linear: the bias has shape {tuple(bias.shape)}, the weight {outputs} outputs")


def _product(x: Tensor, weight: PackedWeight, bias: Tensor | None, int8: bool) -> Tensor:
    outputs, inner = weight.shape
    _check(x, weight, bias)
    rows = float_rows(x)
    count, stride = rows.numel() // inner, int(_native.encoded_stride(inner))
    tiles = not int8 or 0 < _native.tile_rows() <= count
    encoded = torch.empty(count * stride, dtype=torch.uint8)
    _native.encode(address(rows), inner, count, inner, address(encoded), stride, tiles)
    y = torch.empty(*x.shape[:-1], outputs, dtype=torch.float32)
    wide_bias = None if bias is None else float_rows(bias)
    part = (address(weight.data), address(weight.mixed), address(wide_bias), address(y), outputs, outputs, weight.pack)
    _native.packed_linear(tiles, address(encoded), stride, count, inner, [part], -1, 0, 0, False)
    return y


def _best(x: Tensor, weight: PackedWeight, bias: Tensor | None, int8: bool) -> Tensor:
    outputs, inner = weight.shape
    _check(x, weight, bias)
    rows = float_rows(x)
    best = torch.empty(x.shape[:-1], dtype=torch.int64)
    wide_bias = None if bias is None else float_rows(bias)
    _native.packed_best(
        address(rows),
        best.numel(),
        inner,
        address(weight.data),
        address(weight.mixed),
        address(wide_bias),
        outputs,
        weight.pack,
        int8,
        address(best),
    )
    return best


@linear_bf16.provider("native", on="cpu", accepts=_accepts_bf16, prepare=pack)
def run_linear_bf16(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    return _product(x, weight, bias, int8=False)


@best_output_bf16.provider("native", on="cpu", accepts=_accepts_bf16, prepare=pack)
def run_best_output_bf16(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    return _best(x, weight, bias, int8=False)


@linear_int8.provider("native", on="cpu", accepts=_accepts_int8, prepare=pack)
def run_linear_int8(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    return _product(x, weight, bias, int8=True)


@linear_mixed.provider("native", on="cpu", accepts=_accepts_mixed, prepare=pack_and_mix)
def run_linear_mixed(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    return _product(x, weight, bias, int8=True)


@best_output_int8.provider("native", on="cpu", accepts=_accepts_int8, prepare=pack)
def run_best_output_int8(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    return _best(x, weight, bias, int8=True)


@best_output_mixed.provider("native", on="cpu", accepts=_accepts_mixed, prepare=pack_and_mix)
def run_best_output_mixed(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    return _best(x, weight, bias, int8=True)
