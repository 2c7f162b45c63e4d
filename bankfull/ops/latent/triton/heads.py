"""Latent attention around its attention kernel: products with one matrix per head, the writing of latents, and
expansion for long chunks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bankfull.ops.attention.body import PagedMeta
from bankfull.ops.attention.triton.rope import Turn
from bankfull.ops.attention.triton.tile import dot_dtype
from bankfull.ops.latent.body import (
    HeadWeights,
    absorb_queries,
    expanded_attention,
    expanded_rows,
    head_products,
    write_latents,
)
from bankfull.ops.pages.side import Pages
from bankfull.ops.rope.body import rotate
from bankfull.ops.triton.launch import cdiv, overlapped, power_of_two, start_next, wait_for_inputs
from bankfull.ops.triton.rows import DTYPES, HeadRows, accepts, contiguous_rows, preloadable
from bankfull.weights.qtensor import QTensor

FEW_TOKENS = 64
"""Tokens up to which narrow tiles of outputs keep every multiprocessor busy."""


class Matrices(NamedTuple):
    """One matrix per head, with its strides."""

    at: Tensor
    head: int
    column: int
    output: int


@triton.jit(do_not_specialize=["tokens"])
def head_products_kernel(
    tokens,
    columns,
    outputs,
    x,
    matrices,
    y,
    turn,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRODUCT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Tile (tokens, head, outputs). HALF: pairs of numbers after the columns that RoPE rotates, 0 if there are none;
    the first tile of outputs rotates them."""
    start_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1).to(tl.int64)
    output = tl.program_id(2) * OUTPUTS + tl.arange(0, OUTPUTS)
    here, there = token < tokens, output < outputs
    row = x.at + token.to(tl.int64) * x.token + head * x.head
    matrix = matrices.at + head * matrices.head + output.to(tl.int64) * matrices.output
    acc = tl.zeros([TOKENS, OUTPUTS], tl.float32)
    for first in range(0, columns, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        inside = column < columns
        left = tl.load(row[:, None] + column[None, :], mask=here[:, None] & inside[None, :], other=0.0)
        at = matrix[None, :] + column.to(tl.int64)[:, None] * matrices.column
        right = tl.load(at, mask=inside[:, None] & there[None, :], other=0.0)
        acc = tl.dot(left.to(PRODUCT), right.to(PRODUCT), acc, input_precision="ieee")
    target = y.at + token.to(tl.int64) * y.token + head * y.head
    tl.store(target[:, None] + output[None, :], acc.to(y.at.dtype.element_ty), mask=here[:, None] & there[None, :])
    if HALF > 0 and tl.program_id(2) == 0:
        pair = tl.arange(0, PADDED_HALF)[None, :]
        rotated = here[:, None] & (pair < HALF)
        cosine = tl.load(turn.cos + (token.to(tl.int64) * turn.cos_token)[:, None] + pair, rotated, 0.0).to(tl.float32)
        sine = tl.load(turn.sin + (token.to(tl.int64) * turn.sin_token)[:, None] + pair, rotated, 0.0).to(tl.float32)
        one = tl.load(row[:, None] + columns + pair, rotated, 0.0).to(tl.float32)
        other = tl.load(row[:, None] + columns + HALF + pair, rotated, 0.0).to(tl.float32)
        place = target[:, None] + outputs + pair
        tl.store(place, (one * cosine - other * sine).to(y.at.dtype.element_ty), rotated)
        tl.store(place + HALF, (other * cosine + one * sine).to(y.at.dtype.element_ty), rotated)


def _launch_products(x: Tensor, weight: HeadWeights, y: Tensor, angles: tuple[Tensor, Tensor] | None) -> None:
    tokens, heads, _ = x.shape
    stored = weight.matrices(weight.stored.parts["data"].dtype)
    few = tokens <= FEW_TOKENS
    rows = min(64, max(16, power_of_two(tokens)))
    outputs = 32 if few else 64
    half = 0 if angles is None else angles[0].shape[1]
    if not x.numel():
        return
    sizes = tokens, weight.columns, weight.outputs
    operands = HeadRows.of(x), Matrices(stored, *stored.stride()), HeadRows.of(y), Turn.of(angles, None)
    tile = half, power_of_two(max(1, half)), rows, outputs, 64, dot_dtype(x)
    head_products_kernel[(cdiv(tokens, rows), heads, cdiv(weight.outputs, outputs))](
        *sizes, *operands, *tile, num_warps=4, **overlapped(x)
    )


def _accepts_dense(*, dtype: torch.dtype | None = None, weight: QTensor | None = None, **facts: Any) -> bool:
    """Dense matrices in the queries' dtype; layers dequantize others once."""
    dense = weight is None or (weight.is_dense and weight.parts["data"].dtype is dtype)
    return dtype in DTYPES and dense


@head_products.provider("triton", on="cuda", accepts=_accepts_dense)
def run_head_products(x: Tensor, weight: HeadWeights) -> Tensor:
    if x.shape[1:] != (weight.heads, weight.columns):
        raise ValueError("head_products: shapes of vectors and matrices do not match")
    y = torch.empty(*x.shape[:2], weight.outputs, dtype=x.dtype, device=x.device)
    _launch_products(contiguous_rows(x), weight, y, None)
    return y


@absorb_queries.provider("triton", on="cuda", accepts=_accepts_dense)
def run_absorb_queries(q: Tensor, cos: Tensor, sin: Tensor, weight: HeadWeights) -> Tensor:
    rope = q.shape[2] - weight.columns
    if q.shape[1] != weight.heads or rope != 2 * cos.shape[1]:
        raise ValueError("absorb_queries: shapes of queries, angles and matrices do not match")
    y = torch.empty(*q.shape[:2], weight.outputs + rope, dtype=q.dtype, device=q.device)
    _launch_products(contiguous_rows(q), weight, y, (cos, sin))
    return y


@triton.jit
def write_latents_kernel(
    kv,
    kv_token,
    weight,
    angles,
    pages,
    slots,
    eps,
    RANK: tl.constexpr,
    PADDED: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    PAGE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per token."""
    start_next(OVERLAP)
    at = tl.arange(0, PADDED)
    gain = tl.load(weight + at, at < RANK, 0.0).to(tl.float32)
    wait_for_inputs(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    target = pages.at + slot // PAGE * pages.frame + slot % PAGE * pages.place
    row = kv + token * kv_token
    latent = tl.load(row + at, at < RANK, 0.0).to(tl.float32)
    latent = latent * tl.rsqrt(tl.sum(latent * latent, 0) / RANK + eps)
    latent = latent.to(kv.dtype.element_ty).to(tl.float32) * gain
    tl.store(target + at, latent.to(kv.dtype.element_ty).to(pages.at.dtype.element_ty), at < RANK)
    pair = tl.arange(0, PADDED_HALF)
    inside = pair < HALF
    cosine = tl.load(angles.cos + token * angles.cos_token + pair, inside, 0.0).to(tl.float32)
    sine = tl.load(angles.sin + token * angles.sin_token + pair, inside, 0.0).to(tl.float32)
    left = tl.load(row + RANK + pair, inside, 0.0).to(tl.float32)
    right = tl.load(row + RANK + HALF + pair, inside, 0.0).to(tl.float32)
    out = target + RANK + pair
    tl.store(out, (left * cosine - right * sine).to(pages.at.dtype.element_ty), inside)
    tl.store(out + HALF, (right * cosine + left * sine).to(pages.at.dtype.element_ty), inside)


@write_latents.provider("triton", on="cuda", accepts=accepts)
def run_write_latents(
    kv: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor, pages: Tensor, slots: Tensor
) -> None:
    rank, half = len(weight), cos.shape[1]
    if pages.shape[2:] != (1, kv.shape[1]) or kv.shape[1] != rank + 2 * half or pages.stride(3) != 1:
        raise ValueError("write_latents: shapes of latents, angles and pages do not match")
    if pages.dtype not in DTYPES or not preloadable(weight):
        write_latents.body(kv, weight, eps, cos, sin, pages, slots)
        return
    kv = contiguous_rows(kv)
    if len(kv):
        tile = rank, power_of_two(rank), half, power_of_two(half), pages.shape[1]
        rest = weight, Turn.of((cos, sin), None), Pages.of(pages), slots, eps, *tile
        write_latents_kernel[(len(kv),)](kv, kv.stride(0), *rest, num_warps=4, **overlapped(kv))


@expanded_attention.provider("triton", on="cuda", accepts=_accepts_dense)
def run_expanded_attention(
    q: Tensor,
    cos: Tensor,
    sin: Tensor,
    pages: Tensor,
    meta: PagedMeta,
    keys: HeadWeights,
    values: HeadWeights,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Sequence by sequence with the library's products and attention; never in a captured step."""
    # Here, because this import loads torch's compiler: seconds of every start.
    from torch.nn.attention.bias import causal_lower_right

    if window is not None or meta.ancestors is not None:
        return expanded_attention.body(q, cos, sin, pages, meta, keys, values, scale, window)
    nope = keys.outputs
    q = torch.cat((q[..., :nope], rotate.body(q[..., nope:], cos, sin)), -1)
    out = q.new_empty(*q.shape[:2], values.outputs)
    for i in range(len(meta.kv_len)):
        queries = slice(int(meta.q_start[i]), int(meta.q_start[i + 1]))
        k, v = expanded_rows(pages, meta, i, keys, values, None, q.dtype)
        query, key, value = (part.transpose(0, 1)[None] for part in (q[queries], k, v))
        mask = causal_lower_right(query.shape[2], key.shape[2])
        mixed = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
        out[queries] = mixed[0].transpose(0, 1)
    return out
