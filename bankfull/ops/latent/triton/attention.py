"""Attention of absorbed queries over latents: flash decoding in which a tile of keys is also the tile of values.

Program (tile of rows, split, sequence or tile of queries) reads a part of a sequence's latents once for a tile of rows,
which are the heads of adjacent query tokens. Sequences with few new tokens are split over the multiprocessors, and the
last program to finish merges the partial results in the order of the splits. Others run in tiles of queries.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from bankfull.ops.attention.body import TREE_TOKENS, PagedMeta
from bankfull.ops.attention.triton.decode import sequence_of
from bankfull.ops.attention.triton.decode_launch import MOST_TOKENS, WIDTHS
from bankfull.ops.attention.triton.head_tile import HeadTile
from bankfull.ops.attention.triton.map import Sequences, device_sequences, device_tiles
from bankfull.ops.attention.triton.splits import scratch, store_or_merge
from bankfull.ops.attention.triton.tile import (
    FLOATS,
    QueryRows,
    Scoring,
    Softmax,
    bit_count,
    load_frames,
    no_keys,
    offsets,
    online_softmax,
    visible_keys,
)
from bankfull.ops.latent.body import latent_attention
from bankfull.ops.pages.side import Cache, Pages
from bankfull.ops.triton.launch import cdiv, multiprocessors, overlapped, power_of_two, start_next, wait_for_inputs
from bankfull.ops.triton.rows import HeadRows, contiguous_rows

BLOCK = 32
"""Keys of a tile. Two stages of 576 numbers in bfloat16 leave room for two programs on a multiprocessor."""
STAGES = 2
PROGRAMS = 2
"""Programs per multiprocessor that splits of sequences aim at."""
LEAST = 4
"""Fewest tiles of a split, except the last one: merging costs as much as reading several tiles."""
TILE_ROWS = 64
"""Rows (heads of query tokens) of a tile of a long sequence."""


@triton.jit(do_not_specialize=["table_row", "splits", "window"])
def latent_attention_kernel(
    q,
    out,
    pages,
    sequences,
    scratch,
    scores,
    table_row,
    window,
    splits,
    ROPE: tl.constexpr,
    PADDED_ROPE: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """ROPE: numbers of a key after its value. `tiles` of the sequences are those of the programs of the last axis;
    without them, it is a sequence, or a place in `chosen`."""
    start_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    row_tile, split = tl.program_id(0), tl.program_id(1)
    pair = tl.program_id(2) * tl.num_programs(0) + row_tile
    if sequences.tiles is not None:
        record = sequences.tiles + tl.program_id(2) * 4
        sequence = tl.load(record)
        first = tl.load(record + 1)
        width = tl.load(record + 2)
        left = tl.load(record + 3)
        length = tl.load(sequences.lengths + sequence)
        known = tl.minimum(left, length)
    else:
        sequence, length, first, width, known = sequence_of(sequences)
    # The tile's last query sees the most keys, its first one begins the window.
    tree = length - known
    end = tl.minimum(tree + width, length)
    begin = length * 0
    if window is not None:
        begin = tl.maximum(tree + 1 - window, 0)
    if sequences.ends is not None:
        tree = tl.load(sequences.past_lengths + sequence)
        end = length
        if sequences.tiles is not None:
            end = tl.load(sequences.ends + first + width - 1)
        if sequences.begins is not None:
            begin = tl.load(sequences.begins + first)
    base = begin // TILE.block * TILE.block
    count = tl.cdiv(tl.maximum(end - base, 0), TILE.block)
    share = tl.maximum(tl.cdiv(count, splits), TILE.least)
    active = tl.maximum(tl.cdiv(count, share), 1)
    live = row_tile * TILE.rows + tl.arange(0, TILE.rows)
    if (split < active) & (row_tile * TILE.rows < width * TILE.groups):
        real = live < width * TILE.groups
        query = live // TILE.groups
        token = first + query
        head = live % TILE.groups
        position = tree + query
        path = None
        if sequences.ancestors is not None:
            path = tl.load(sequences.ancestors + token, mask=real, other=0)
            position = tl.where(path != 0, tree + bit_count(path).to(tl.int32) - 1, position)
        reach = window
        if sequences.ends is not None:
            position = tl.load(sequences.ends + token, mask=real, other=0) - 1
            if sequences.begins is not None:
                reach = position + 1 - tl.load(sequences.begins + token, mask=real, other=0)
        numbers = tl.arange(0, TILE.padded_values)
        turned = tl.arange(0, PADDED_ROPE)
        own = q.at + token.to(tl.int64) * q.token + head * q.head
        met = real[:, None] & (numbers < TILE.values)[None, :]
        plain_query = tl.load(own[:, None] + numbers[None, :], mask=met, other=0.0).to(TILE.product)
        met = real[:, None] & (turned < ROPE)[None, :]
        rope_query = tl.load(own[:, None] + TILE.values + turned[None, :], mask=met, other=0.0).to(TILE.product)
        table_base = sequences.table + sequence.to(tl.int64) * table_row
        low = base + split * share * TILE.block
        high = tl.minimum(low + share * TILE.block, end)
        peak, total, acc = no_keys(TILE)
        # Page frames are loaded one iteration ahead, so that no load in the loop depends on another.
        frames = load_frames(table_base, low, begin, high, TILE)
        for at in tl.range(low, high, TILE.block, num_stages=TILE.stages):
            key = at + tl.arange(0, TILE.block)
            inside = (key >= begin) & (key < high)
            places = offsets(frames, at, pages.frame, pages.place, TILE)
            row = pages.at + places[:, None]
            plain = inside[:, None] & (numbers < TILE.values)[None, :]
            latents = tl.load(row + numbers[None, :], mask=plain, other=0.0).to(TILE.product)
            rotated = inside[:, None] & (turned < ROPE)[None, :]
            keys = tl.load(row + TILE.values + turned[None, :], mask=rotated, other=0.0).to(TILE.product)
            score = tl.dot(plain_query, tl.trans(latents), input_precision="ieee")
            score = tl.dot(rope_query, tl.trans(keys), score, input_precision="ieee")
            seen = visible_keys(key, position, begin, high, reach, path, tree, False)
            score = tl.where(seen, score, float("-inf"))
            frames = load_frames(table_base, at + TILE.block, begin, high, TILE)
            peak, total, acc = online_softmax(score, scores.inner, latents, None, peak, total, acc, True)
        rows = QueryRows(token, head, real)
        softmax = Softmax(peak, total, acc)
        store_or_merge(out, softmax, scores, scratch, rows, rows, pair, split, splits, active, TILE)


def _launch(
    q: Tensor,
    cache: Cache,
    sequences: Sequences,
    out: Tensor,
    scoring: Scoring,
    width: int,
    tiles: Tensor | None = None,
) -> None:
    """Sequences with at most `width` new tokens; or `tiles` of `width` tokens."""
    tile, (pages, _) = HeadTile.of(q, cache), cache
    rows = min(max(16, power_of_two(width * tile.groups)), 16 if q.element_size() == 4 else TILE_ROWS)
    row_tiles = cdiv(width * tile.groups, rows)
    table, chosen = sequences.table, sequences.chosen
    block, splits = 16 if q.element_size() == 4 else BLOCK, 1
    if tiles is not None:
        count, sequences = len(tiles), sequences.in_tiles(tiles)
    else:
        count = len(table) if chosen is None else len(chosen)
        room = PROGRAMS * multiprocessors(q.device) // max(1, count * row_tiles)
        splits = max(1, min(room, cdiv(table.shape[1] * tile.page, block)))
    partial = out.shape[2] > tile.values
    tile = tile._replace(rows=rows, live=rows, block=block, stages=STAGES, least=LEAST, partial=partial)
    rope, parts = tile.size - tile.values, scratch(q.device, rows, tile.padded_values)
    rest = scoring.scores, table.stride(0), scoring.window, splits, rope, max(16, power_of_two(rope)), tile
    options = {"num_warps": 4 if rows <= 16 else 8, **overlapped(q)}
    latent_attention_kernel[(row_tiles, splits, count)](
        HeadRows.of(q), HeadRows.of(out), pages, sequences, parts, *rest, **options
    )


def accepts(*, dtype: torch.dtype | None = None, pages: torch.dtype | None = None, **facts: object) -> bool:
    """Latents in the queries' dtype, or in one that converts to it without loss."""
    return dtype in FLOATS and (pages in (None, dtype) or (dtype is torch.float32 and pages in FLOATS))


@latent_attention.provider("triton", on="cuda", accepts=accepts)
def run_latent_attention(
    q: Tensor, pages: Tensor, rank: int, meta: PagedMeta, scale: float, window: int | None = None
) -> Tensor:
    if pages.shape[1:] != (meta.page_tokens, 1, q.shape[2]) or not 0 < rank < q.shape[2] or pages.stride(3) != 1:
        raise ValueError("latent_attention: shapes of queries, latents and page size do not match")
    q = contiguous_rows(q)
    out = torch.empty((*q.shape[:2], rank), dtype=q.dtype, device=q.device)
    cache = Cache(Pages.of(pages), Pages.of(pages[..., :rank]))
    return attend_latents(q, cache, meta, Sequences.of(meta, q.device), out, Scoring(scale, window))


def attend_latents(
    q: Tensor, cache: Cache, meta: PagedMeta, sequences: Sequences, out: Tensor, scoring: Scoring
) -> Tensor:
    """A value is the first columns of its key."""
    each = max(1, (16 if q.element_size() == 4 else TILE_ROWS) // q.shape[1])
    if meta.partition is not None:  # a captured step, whose sequences only the device knows
        _launch(q, cache, sequences, out, scoring, each, meta.partition.tiles(each))
        if meta.partition.decodes is not None:
            _launch(q, cache, sequences._replace(chosen=meta.partition.decodes), out, scoring, 1)
        return out
    counts = np.diff(meta.q_start)
    few = counts <= (MOST_TOKENS if meta.ancestors is None else TREE_TOKENS)
    long, short = np.flatnonzero(~few), np.flatnonzero(few)
    if len(long):
        tiles = device_tiles(meta.q_start, meta.kv_len, long, each, q.device)
        _launch(q, cache, sequences, out, scoring, each, tiles)
    if len(short):
        width = next(most for most in WIDTHS if int(counts[short].max()) <= most)
        chosen = None if few.all() else device_sequences(short, q.device)
        _launch(q, cache, sequences._replace(chosen=chosen), out, scoring, width)
    return out
