"""Which packed layout (csrc/packing.hpp) holds a weight exactly, and how its parts get there.

GGUF blocks and dense bfloat16 have layouts of their own. Groups of 64 and 128 columns keep one scale, and one zero
point, per group; rows of int8 keep one scale per row; MXFP4 keeps its exponents.
"""

from __future__ import annotations

from functools import partial

from bankfull.ops.native.checks import address
from bankfull.ops.native.extension import required
from bankfull.ops.products.native.linear import FORMATS, SCALED, storage_of
from bankfull.weights.formats.groups import SCHEMES as GROUPED
from bankfull.weights.formats.groups import WITH_ZEROS
from bankfull.weights.formats.mxfp4 import BLOCK_BYTES, MXFP4
from bankfull.weights.formats.rows import INT8_ROW
from bankfull.weights.qtensor import QTensor
from bankfull.weights.store import known

_native = required()
_PACKS: dict[str, tuple[int, int, int]] = _native.packs()
_KINDS = {
    "int8": "pack8",
    "int4": "pack4",
    "int3": "pack3",
    "int2": "pack2",
    "uint4": "pack4z",
    "uint3": "pack3",
    "uint2": "pack2",
}


def _of_group(name: str, group: int) -> int:
    kind = name.split("_")[0]
    return int(_native.group_pack(_PACKS[_KINDS[kind]][0], group, kind in WITH_ZEROS))


_BY_SCHEME = {
    **{name: int(_native.pack_of(code)) for name, (code, *_) in FORMATS.items()},
    **{scheme.name: _of_group(scheme.name, scheme.block) for scheme in GROUPED},
    INT8_ROW: int(_native.group_pack(_PACKS["pack8r"][0], 0, False)),
    MXFP4: int(_native.group_pack(_PACKS["pack4f"][0], 0, False)),
    **{name: int(_native.pack_of(FORMATS[codes][0])) for name, codes in SCALED.items()},
}
COLUMNS = 32
"""Columns of a block in every layout but those of GGUF's blocks of 256 and of dense weights."""
_LEAST, _MOST = 2, 254
"""Exponents of MXFP4 whose values float32 holds in products: the layout halves them."""


def pack_of(weight: QTensor) -> int:
    """The layout; -1 if there is none, if rows do not divide into its blocks, or if the parts are not contiguous in the
    memory of the host."""
    layout = _BY_SCHEME.get(weight.scheme.name, -1)
    columns = weight.shape[-1]
    if weight.scheme.name in SCALED and len(weight.shape) != 2:
        return -1
    if layout < 0 or columns <= 0 or not weight.is_in_host_memory:
        return -1
    if columns % (COLUMNS if weight.scheme.name == INT8_ROW else weight.scheme.block):
        return -1
    return layout if weight.scheme.name != MXFP4 or known(weight, "in range", partial(_fits, weight)) else -1


def _fits(weight: QTensor) -> bool:
    blocks = weight.parts["blocks"]
    exponents = blocks.reshape(-1, BLOCK_BYTES)[:, 0]
    return not blocks.numel() or bool((exponents >= _LEAST).all() and (exponents <= _MOST).all())


def pack_into(weight: QTensor, pack: int, out: int) -> None:
    """Write one matrix to the address `out`, which has room for it: `packed_bytes`. Scales that multiply outputs are
    not part of the layout."""
    outputs, inner = weight.shape
    name = SCALED.get(weight.scheme.name, weight.scheme.name)
    if name in FORMATS:
        _native.pack(FORMATS[name][0], address(storage_of(weight)), out, outputs, inner)
        return
    codes = weight.parts["blocks" if name == MXFP4 else "codes"]
    scales, zeros = weight.parts.get("scales"), weight.parts.get("zeros")
    _native.pack_groups(pack, address(codes), address(scales), address(zeros), out, outputs, inner)


def packed_bytes(pack: int, outputs: int, inner: int) -> int:
    return int(_native.packed_bytes(pack, outputs, inner))
