"""Launches of the prefill kernel: tile shapes, and tensor maps of a step's own keys and values."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from bankfull.ops.attention.triton.head_tile import HeadTile
from bankfull.ops.attention.triton.listed import numbers_of
from bankfull.ops.attention.triton.map import Sequences
from bankfull.ops.attention.triton.prefill import attention_prefill
from bankfull.ops.attention.triton.tile import Scoring
from bankfull.ops.pages.side import Cache
from bankfull.ops.triton.launch import INTERPRETED, overlapped, power_of_two
from bankfull.ops.triton.rows import HeadRows


def tile_shape(padded: int, product_bytes: int) -> tuple[int, int, int, int]:
    """Query rows, keys per iteration, warps, stages.

    64 rows with four warps: two programs fit on a multiprocessor, and one runs its GEMM during the other's softmax. On
    an H200: 316 TFLOP/s for 8 x 2048 tokens, against 282 with 128 rows and eight warps.
    Float32 products do not use tensor cores: small tiles, to fit into registers.
    """
    if product_bytes == 4:
        return 32, 16, 8, 2
    return (64, 64, 4, 3) if padded <= 128 else (128, 32, 8, 2)


def tensor_map(rows: Tensor, block: int) -> TensorDescriptor | None:
    """Tensor map of a step's keys or values, one row per token, in tiles of `block` rows of one head; None if the
    layout does not allow it: it needs 16-byte strides, contiguous heads, and a head as wide as its tile."""
    count, heads, size = rows.shape
    token, head, number = rows.stride()
    adjacent = number == 1 and (head == size or heads == 1) and token >= heads * size
    aligned = rows.data_ptr() % 16 == 0 and token * rows.element_size() % 16 == 0
    if not adjacent or not aligned or size != max(16, power_of_two(size)):
        return None
    return TensorDescriptor(rows, [count, heads * size], [token, 1], [block, size])


def launch_prefill(
    q: Tensor,
    cache: Cache,
    sequences: Sequences,
    tiles_of: Callable[[int], Tensor],
    out: Tensor,
    scoring: Scoring,
    sight: int = 0,
) -> None:
    """Attention of final queries over pages that hold all keys and values, with the tiles that `tiles_of(tokens per
    tile)` returns. A cache of the step's own rows: the sequences of the tiles must have no past. `sight`:
    `PagedMeta.block`."""
    tile = HeadTile.of(q, cache)
    rows, block, warps, stages = tile_shape(max(tile.padded, tile.padded_values), q.element_size())
    keys, values = cache
    mask = scoring.mask
    if values.scales is not None and values.at.dtype is not torch.int8 and mask is None:
        block = max(16, block // 2)  # these conversions need registers; 16 is what a product needs
    packed = tile.groups if tile.groups <= rows else 1
    head_tiles = q.shape[1] // packed
    tiles = tiles_of(rows // packed)
    options = overlapped(q)
    k_map = v_map = None
    # GPUs with programmatic dependent launch also have TMA. Other tile sizes were not measured with it.
    if tile.fresh and block == 64 and (INTERPRETED or options["OVERLAP"]):
        k_map, v_map = tensor_map(keys.at, block), tensor_map(values.at, block)
    mapped = k_map is not None and v_map is not None
    maps = (k_map, v_map) if mapped else (None, None)
    tile = tile._replace(
        capped=scoring.cap is not None,
        partial=out.shape[2] > tile.values,
        mask=None if mask is None else numbers_of(mask),
        rows=rows,
        mapped=mapped,
        head_tiles=head_tiles,
        packed=packed,
        block=block,
        stages=stages,
    )
    rest = scoring.scores, sequences.table.stride(0), scoring.window, sight or None, tile
    attention_prefill[(len(tiles) * head_tiles,)](
        HeadRows.of(q), HeadRows.of(out), cache, *maps, sequences.in_tiles(tiles), *rest, num_warps=warps, **options
    )
