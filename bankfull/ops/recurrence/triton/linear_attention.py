"""Linear attention over ragged batches: a program handles one sequence, one head and a block of the values' columns.

The state stays in registers. Few tokens are taken one by one, many in chunks (`chunk_for`) by matrix products: within a
chunk as attention with decaying weights, across chunks through the state; only the tokens whose states are kept are
taken one by one then. Token counts and kept states are read on the device, so they may change between replays of a
captured step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bankfull.ops.recurrence.linear_attention import linear_attention, taylor_features, taylor_size
from bankfull.ops.recurrence.ssm import RecurrentMeta
from bankfull.ops.recurrence.triton.operands import (
    HeadInputs,
    SequenceStates,
    keys_of,
    queries_of,
    read_slot,
    span,
    values_of,
    written_slot,
)
from bankfull.ops.triton.launch import cdiv, multiprocessors, overlapped, power_of_two, start_next, wait_for_inputs
from bankfull.ops.triton.rows import HeadRows, accepts, contiguous_rows, preloadable, supported

MOST_STATE = 8192
"""Elements of the state in a program: more would spill registers."""
FEW_TOKENS = 16
"""Longest sequence whose tokens are taken one by one."""
LAUNCH = {"num_warps": 4, "num_stages": 1}
CHUNK, SMALL_CHUNK = 32, 16
"""Tokens of a chunk. On an H200 with Triton 3.6, products with 64 rows and fewer than 64 columns were wrong (an error
of 0.97, or an illegal access; right in the interpreter), so no chunk has 64 tokens. Small chunks: in float32, whose
products use no matrix units, and for keys of more than WIDE_KEY elements, whose state takes the registers."""
WIDE_KEY = 128


class AttentionTile(NamedTuple):
    """What is constant in a kernel: tokens of a chunk (0: all one by one), elements of a key, padded, and the values'
    columns of a program."""

    chunk: int
    key: int
    columns: int
    precision: str = "ieee"
    """That of float32 products."""


class Normalizers(NamedTuple):
    """The sums of the keys of all slots, which normalize; strides in elements."""

    at: Tensor
    slot: int
    head: int
    row: int


@triton.jit(do_not_specialize=["write_stride"])
def linear_attention_kernel(
    inputs,
    slopes,
    states,
    normalizer,
    y,
    write_stride,
    heads,
    key,
    value,
    TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Axis 0: blocks of columns, 1: heads, 2: sequences."""
    head, sequence = tl.program_id(1), tl.program_id(2)
    row, column = tl.arange(0, TILE.key), tl.program_id(0) * TILE.columns + tl.arange(0, TILE.columns)
    has_row, has_column = row < key, column < value
    inside = has_row[:, None] & has_column[None, :]
    slope = tl.load(slopes + head).to(tl.float32)
    keep = tl.exp(-slope)
    q, k, v = queries_of(inputs), keys_of(inputs), values_of(inputs)
    # Counts and states were written before this step, so they may be read before the inputs are ready.
    first, last, kept = span(states.starts, states.kepts, sequence)
    past = read_slot(states, sequence)
    own = head * states.head + row[:, None] * states.row + column[None, :] * states.column
    h = tl.load(states.at + past * states.slot + own, inside, 0.0).to(tl.float32)
    if normalizer is not None:
        own_sums = head * normalizer.head + row * normalizer.row
        z = tl.load(normalizer.at + past * normalizer.slot + own_sums, has_row, 0.0).to(tl.float32)
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    begin = first
    if TILE.chunk > 0:
        place = tl.arange(0, TILE.chunk)
        apart = place[:, None] - place[None, :]
        # Exponents of the upper triangle would overflow before they are masked.
        within = tl.where(apart >= 0, tl.exp(-slope * tl.maximum(apart, 0).to(tl.float32)), 0.0)
        since = tl.exp(-slope * (place + 1).to(tl.float32))
        end = last - kept
        for start in range(first, end, TILE.chunk):
            token = start + place
            used = token < end
            count = tl.minimum(end - start, TILE.chunk)
            rows = used[:, None] & has_row[None, :]
            queries = tl.load(q.at + token[:, None] * q.token + head * q.head + row[None, :], rows, 0.0)
            keys = tl.load(k.at + token[:, None] * k.token + head * k.head + row[None, :], rows, 0.0)
            cells = used[:, None] & has_column[None, :]
            values = tl.load(v.at + token[:, None] * v.token + head * v.head + column[None, :], cells, 0.0)
            # Operands are rounded to the inputs' dtype; sums and the state stay in float32.
            scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * within
            out = tl.dot(scores.to(values.dtype), values, input_precision="ieee")
            out += since[:, None] * tl.dot(queries, h.to(queries.dtype), input_precision="ieee")
            left = tl.maximum(count - 1 - place, 0).to(tl.float32)
            decayed = keys.to(tl.float32) * tl.exp(-slope * left)[:, None]
            if normalizer is not None:
                sums = tl.sum(scores, 1) + since * tl.sum(queries.to(tl.float32) * z[None, :], 1)
                out = out / tl.where(used, sums, 1.0)[:, None]
                z = tl.exp(-slope * count.to(tl.float32)) * z + tl.sum(decayed, 0)
            h = tl.exp(-slope * count.to(tl.float32)) * h
            h += tl.dot(tl.trans(decayed.to(values.dtype)), values, input_precision="ieee")
            places = y + (token[:, None] * heads + head) * value + column[None, :]
            tl.store(places, out.to(y.dtype.element_ty), cells)
        begin = tl.maximum(first, end)
    for token in range(begin, last):
        query = tl.load(q.at + token * q.token + head * q.head + row, has_row, 0.0).to(tl.float32)
        into = tl.load(k.at + token * k.token + head * k.head + row, has_row, 0.0).to(tl.float32)
        new = tl.load(v.at + token * v.token + head * v.head + column, has_column, 0.0).to(tl.float32)
        h = keep * h + into[:, None] * new[None, :]
        result = tl.sum(query[:, None] * h, 0)
        if normalizer is not None:
            z = keep * z + into
            result = result / tl.sum(query * z, 0)
        tl.store(y + (token * heads + head) * value + column, result.to(y.dtype.element_ty), has_column)
        number = kept - (last - token)
        if number >= 0:
            slot = written_slot(states, sequence, number, write_stride)
            tl.store(states.at + slot * states.slot + own, h.to(states.at.dtype.element_ty), inside)
            if normalizer is not None:  # the first program stores it for all
                stores = has_row & (tl.program_id(0) == 0)
                sums = normalizer.at + slot * normalizer.slot + own_sums
                tl.store(sums, z.to(normalizer.at.dtype.element_ty), stores)


def columns_for(key: int, value: int, programs: int, device: torch.device) -> int:
    """Columns of the values in a program: whole lines of memory if `programs` of each block fill the device."""
    most = max(16, MOST_STATE // key)
    wide = min(64, most, max(16, power_of_two(value)))
    while wide > 16 and cdiv(value, wide) * programs < 2 * multiprocessors(device):
        wide //= 2
    return wide


def chunk_for(tokens: int, sequences: int, kept: int, dtype: torch.dtype, key: int) -> int:
    """Tokens of a chunk; 0 where tokens are taken one by one: sequences are short, or each token's state is kept."""
    if tokens - sequences < FEW_TOKENS or tokens <= sequences * kept:
        return 0
    return SMALL_CHUNK if dtype == torch.float32 or key > WIDE_KEY else CHUNK


@linear_attention.provider("triton", on="cuda", accepts=accepts)
def run_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, state: Tensor, normalizer: Tensor | None, meta: RecurrentMeta
) -> Tensor:
    states = (state,) if normalizer is None else (state, normalizer)
    if not supported(q, k, v, slopes, *states) or not preloadable(slopes) or not k.dtype == q.dtype == v.dtype:
        return linear_attention.body(q, k, v, slopes, state, normalizer, meta)
    (tokens, heads, key), value, sequences = q.shape, v.shape[2], len(meta.q_start) - 1
    y = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    inner = max(16, power_of_two(key))
    chunk = chunk_for(tokens, sequences, meta.write.shape[1], q.dtype, inner)
    block = columns_for(inner, value, sequences * heads, v.device)
    if y.numel() and sequences:
        sums = None
        if normalizer is not None:
            sums = Normalizers(normalizer, *normalizer.stride())
        linear_attention_kernel[(cdiv(value, block), heads, sequences)](
            HeadInputs.of(q, k, v),
            slopes,
            SequenceStates.of(state, meta),
            sums,
            y,
            meta.write.stride(0),
            heads,
            key,
            value,
            AttentionTile(chunk, inner, block),
            **LAUNCH,
            **overlapped(v),
        )
    return y


@triton.jit
def taylor_kernel(
    x, y, rows, heads, size, features, single, pair, ROWS: tl.constexpr, FEATURES: tl.constexpr, OVERLAP: tl.constexpr
):
    """Axis 0: blocks of rows, each a head of a token; 1: blocks of features."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    feature = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)[None, :]
    used = (row < rows) & (feature < features)
    at = x.at + (row // heads).to(tl.int64) * x.token + row % heads * x.head
    number = tl.maximum(feature - 1 - size, 0)
    is_pair = feature > size
    left = tl.where(is_pair, number // size, tl.maximum(feature - 1, 0))
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    first = tl.load(at + left, used, 0.0).to(tl.float32)
    second = tl.load(at + number % size, used & is_pair, 0.0).to(tl.float32)
    out = tl.where(is_pair, first * second * pair, tl.where(feature == 0, 1.0, first * single))
    tl.store(y + row.to(tl.int64) * features + feature, out.to(y.dtype.element_ty), used)


@taylor_features.provider("triton", on="cuda", accepts=accepts)
def run_taylor_features(x: Tensor) -> Tensor:
    if not supported(x) or x.dim() != 3:
        return taylor_features.body(x)
    tokens, heads, size = x.shape
    features = taylor_size(size)
    y = torch.empty(tokens, heads, features, dtype=x.dtype, device=x.device)
    if y.numel():
        block = min(512, power_of_two(features))
        rows = max(1, 2048 // block)
        taylor_kernel[(cdiv(tokens * heads, rows), cdiv(features, block))](
            HeadRows.of(contiguous_rows(x)),
            y,
            tokens * heads,
            heads,
            size,
            features,
            size**-0.25,
            (2 * size) ** -0.5,
            ROWS=rows,
            FEATURES=block,
            num_warps=4,
            **overlapped(x),
        )
    return y
