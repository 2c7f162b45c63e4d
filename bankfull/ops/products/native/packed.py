"""Linear layers with bfloat16 or int8 activations: weights are repacked once, activations are encoded per call.

`linear_bf16`: any number of rows is multiplied in bfloat16, with matrix tiles if the CPU has them. With dense weights a
row's result is bitwise identical on every CPU.

`linear_int8`: few rows are multiplied as int8 with one scale per group of 32, as in the operation's body. From
`tile_rows` rows on, CPUs with matrix tiles multiply in bfloat16, which loses less precision.

`linear_hadamard`: the same for few rows; many rows are Hadamard-transformed and multiplied as int8 with a second copy
of the weight (csrc/hadamard.hpp).

`linear_w8a8`: rows of int8 are stored as that kernel wants them, so many rows need neither a transform nor a copy. Few
rows have one scale per group of 32, which is more precise; so have many rows on CPUs without such a kernel.

On either side of that row threshold, a row's result is bitwise identical in any batch and for any number of threads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bankfull.ops.native.checks import address, float_rows, isa_is_chosen
from bankfull.ops.native.extension import required
from bankfull.ops.native.memory import Slabs
from bankfull.ops.products.body import (
    PLAIN,
    Epilogue,
    highest,
    linear_bf16,
    linear_hadamard,
    linear_int8,
)
from bankfull.ops.products.native.linear import SCALED, scales_of, unscaled
from bankfull.ops.products.native.packing import pack_into, pack_of, packed_bytes
from bankfull.ops.products.w8a8 import linear_w8a8
from bankfull.ops.shapes import check_linear
from bankfull.weights.formats.rows import INT8_ROW
from bankfull.weights.qtensor import QTensor
from bankfull.weights.store import prepared

_native = required()
_slabs, _copies = Slabs(), Slabs()


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """Panels of sixteen outputs in the layout `pack` of csrc/packs.hpp. The values are those of the file."""

    data: Tensor
    pack: int
    shape: tuple[int, int]
    hadamard: Tensor | None = None
    """int8 copy of the Hadamard-transformed weight, one byte per weight, for many rows; `data` itself if it is int8
    with one scale per row, which is multiplied without a transform."""
    scales: Tensor | None = None
    """(outputs,): what multiplies each output, where the layout holds codes without them."""

    @property
    def nbytes(self) -> int:
        return self.data.numel() + (0 if self.scales is None else self.scales.nbytes)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        out = torch.empty(self.shape, dtype=torch.float32)
        _native.unpack(self.pack, address(self.data), address(out), *self.shape)
        return (out if self.scales is None else out * self.scales.unsqueeze(-1)).to(dtype)


def pack(weight: QTensor) -> PackedWeight:
    outputs, inner = weight.shape
    layout = pack_of(weight)
    size = packed_bytes(layout, outputs, inner)
    data = prepared(weight, str(layout), size, _slabs.take, lambda data: pack_into(weight, layout, address(data)))
    return PackedWeight(data, layout, (outputs, inner), scales=scales_of(weight))


def pack_with_hadamard(weight: QTensor) -> PackedWeight:
    packed = pack(weight)
    size = int(_native.hadamard_bytes(packed.pack, *packed.shape))

    def transform(copy: Tensor) -> None:
        _native.hadamard(packed.pack, address(packed.data), address(copy), *packed.shape)

    return replace(packed, hadamard=prepared(weight, f"{packed.pack} transformed", size, _copies.take, transform))


def pack_by_rows(weight: QTensor) -> PackedWeight:
    packed = pack(weight)
    whole = int(_native.hadamard_bytes(packed.pack, *packed.shape)) == packed.nbytes
    return replace(packed, hadamard=packed.data) if whole else packed


def _accepts_bf16(*, dtype: torch.dtype | None = None, weight: QTensor | None = None, **facts: Any) -> bool:
    if dtype != torch.float32 or not isinstance(weight, QTensor) or len(weight.shape) != 2:
        return False
    return pack_of(weight) >= 0 and isa_is_chosen()


def accepts_int8(*, weight: QTensor | None = None, **facts: Any) -> bool:
    if weight is None or weight.is_dense or weight.scheme.name in SCALED:
        return False
    return _accepts_bf16(weight=weight, **facts)


def _accepts_hadamard(*, weight: QTensor | None = None, **facts: Any) -> bool:
    if weight is None or not accepts_int8(weight=weight, **facts):
        return False
    return int(_native.hadamard_bytes(pack_of(weight), *weight.shape)) > 0


def _accepts_w8a8(*, weight: QTensor | None = None, **facts: Any) -> bool:
    return weight is not None and weight.scheme.name == INT8_ROW and accepts_int8(weight=weight, **facts)


def _product(x: Tensor, weight: PackedWeight, bias: Tensor | None, int8: bool) -> Tensor:
    outputs, inner = weight.shape
    check_linear(x, weight.shape, bias)
    rows = float_rows(x)
    count, stride = rows.numel() // inner, int(_native.encoded_stride(inner))
    tiles = not int8 or 0 < _native.tile_rows() <= count
    encoded = torch.empty(count * stride, dtype=torch.uint8)
    _native.encode(address(rows), inner, count, inner, address(encoded), stride, tiles)
    y = torch.empty(*x.shape[:-1], outputs, dtype=torch.float32)
    wide_bias = unscaled(bias, weight.scales)
    part = (
        address(weight.data),
        address(weight.hadamard),
        address(wide_bias),
        address(y),
        outputs,
        outputs,
        weight.pack,
    )
    _native.packed_linear(tiles, address(encoded), stride, count, inner, [part], -1, 0, 0, False)
    return y if weight.scales is None else y.mul_(weight.scales)


def _best(x: Tensor, weight: PackedWeight, bias: Tensor | None, int8: bool) -> Tensor:
    outputs, inner = weight.shape
    check_linear(x, weight.shape, bias)
    rows = float_rows(x)
    best = torch.empty(x.shape[:-1], dtype=torch.int64)
    wide_bias = None if bias is None else float_rows(bias)
    _native.packed_best(
        address(rows),
        best.numel(),
        inner,
        address(weight.data),
        address(weight.hadamard),
        address(wide_bias),
        outputs,
        weight.pack,
        int8,
        address(best),
    )
    return best


def _run(x: Tensor, weight: PackedWeight, epilogue: Epilogue, int8: bool) -> Tensor:
    if epilogue.best and weight.scales is None:
        return _best(x, weight, epilogue.bias, int8)
    y = _product(x, weight, epilogue.bias, int8)
    return highest(y) if epilogue.best else y


@linear_bf16.provider("native", on="cpu", accepts=_accepts_bf16, prepare=pack, fuses=("best",))
def run_linear_bf16(x: Tensor, weight: PackedWeight, epilogue: Epilogue = PLAIN) -> Tensor:
    return _run(x, weight, epilogue, int8=False)


@linear_int8.provider("native", on="cpu", accepts=accepts_int8, prepare=pack, fuses=("best",))
@linear_hadamard.provider("native", on="cpu", accepts=_accepts_hadamard, prepare=pack_with_hadamard, fuses=("best",))
@linear_w8a8.provider("native", on="cpu", accepts=_accepts_w8a8, prepare=pack_by_rows, fuses=("best",))
def run_linear_int8(x: Tensor, weight: PackedWeight, epilogue: Epilogue = PLAIN) -> Tensor:
    """The weight tells in which way many rows are multiplied."""
    return _run(x, weight, epilogue, int8=True)
