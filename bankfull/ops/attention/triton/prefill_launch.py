"""Launches of the prefill kernel: tile shapes, and tensor maps of a step's own keys and values."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from bankfull.ops.attention.triton.held import Held
from bankfull.ops.attention.triton.prefill import attention_prefill
from bankfull.ops.attention.triton.tile import dot_dtype, score_factors
from bankfull.ops.pages.rounded import INT4, head_numbers, int4_group
from bankfull.ops.triton.launch import INTERPRETED, overlapped, power_of_two


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
    keys: Tensor,
    values: Tensor,
    scales: tuple[Tensor, Tensor] | None,
    table: Tensor,
    lengths: Tensor,
    tiles_of: Callable[[int], Tensor],
    out: Tensor,
    scale: float,
    window: int | None,
    cap: float | None,
    sinks: Tensor | None,
    sight: int = 0,
    held: Held | None = None,
) -> None:
    """Attention of final queries over pages that hold all keys and values, with the tiles that `tiles_of(tokens per
    tile)` returns. With three dimensions, `keys` and `values` are the step's own, and the sequences of the tiles must
    have no past. `sight`: `PagedMeta.block`. `held`: partial attention over these keys, whose table is passed."""
    fresh = keys.dim() == 3
    heads, size = q.shape[1:]
    key_heads, numbers, paired = values.shape[-2], head_numbers(values), values.dtype is INT4
    page = 1 if fresh else values.shape[1]
    groups = heads // key_heads
    padded, padded_values = (max(32 if paired else 16, power_of_two(n)) for n in (size, numbers))
    rows, block, warps, stages = tile_shape(max(padded, padded_values), q.element_size())
    if scales is not None and values.dtype is not torch.int8:  # these conversions need registers
        block = max(16, block // 2)  # at least what a product needs
    packed = groups if groups <= rows else 1
    tiles = tiles_of(rows // packed)
    k_scales, v_scales = scales or (None, None)
    inner, outer = score_factors(scale, cap)
    k_strides, v_strides = ((0, *part.stride()[:2]) if fresh else part.stride()[:3] for part in (keys, values))
    options = overlapped(q)
    k_map = v_map = None
    # GPUs with programmatic dependent launch also have TMA. Other tile sizes were not measured with it.
    if fresh and block == 64 and (INTERPRETED or options["OVERLAP"]):
        k_map, v_map = tensor_map(keys, block), tensor_map(values, block)
    mapped = k_map is not None and v_map is not None
    attention_prefill[(len(tiles) * (heads // packed),)](
        q,
        out,
        k_map if mapped else keys,
        v_map if mapped else values,
        k_scales,
        v_scales,
        table,
        lengths,
        tiles,
        held and held.begins,
        held and held.ends,
        sinks,
        *q.stride()[:2],
        out.stride(0),
        *k_strides,
        *v_strides,
        *((0, 0, 0) if k_scales is None else k_scales.stride()[:3]),
        *((0, 0, 0) if v_scales is None else v_scales.stride()[:3]),
        table.stride(0),
        inner,
        outer,
        window,
        sight or None,
        heads // packed,
        groups,
        packed,
        size,
        numbers,
        padded,
        padded_values,
        page,
        cap is not None,
        k_strides[:2] == v_strides[:2],
        rows,
        block,
        stages,
        dot_dtype(q),
        fresh,
        mapped,
        int4_group(size) if paired else 0,
        num_warps=warps,
        **options,
    )
