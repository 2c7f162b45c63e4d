"""Decoding under a sparse mask: only the keys that some query of a tile sees are read, wherever they lie.

The kernel walks the list of `listed.py`, split over programs as `attention_decode` splits a sequence, and supports
trees of drafts. Of sequences with many new tokens, `attention_prefill` walks such a list per tile of queries.
"""

from __future__ import annotations

import triton
import triton.language as tl

from bankfull.ops.attention.triton.decode import sequence_of
from bankfull.ops.attention.triton.listed import attend_listed, key_list
from bankfull.ops.attention.triton.splits import store_or_merge
from bankfull.ops.attention.triton.tile import QueryRows, bit_count
from bankfull.ops.triton.launch import start_next, wait_for_inputs


@triton.jit(do_not_specialize=["table_row", "splits"])
def sparse_decode(
    q, out, cache, sequences, scratch, scores, table_row, splits, TILE: tl.constexpr, OVERLAP: tl.constexpr
):
    """Program (KV head and tile of its rows, split, sequence). Row = token * groups + head within the group."""
    start_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    ROWS: tl.constexpr = TILE.rows
    key_head = tl.program_id(0) // TILE.row_tiles
    row_tile = tl.program_id(0) % TILE.row_tiles
    split = tl.program_id(1)
    pair = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    sequence, length, first, width, known = sequence_of(sequences)
    past = length - known
    row = row_tile * ROWS + tl.arange(0, ROWS)
    query = row // TILE.groups
    real = query < width
    # The queries of this tile; with trees all of the sequence, because depths do not follow the order of slots.
    begin = row_tile * ROWS // TILE.groups
    count = tl.minimum((row_tile * ROWS + ROWS - 1) // TILE.groups + 1, known) - begin
    end = past + begin + count
    tree_tokens = length * 0
    path, ancestors = None, None
    position = past + query
    if sequences.ancestors is not None:
        begin = begin * 0
        count = known
        end = past
        tree_tokens = known
        ancestors = sequences.ancestors + first
        path = tl.load(ancestors + query, mask=real, other=0)
        position = tl.where(path != 0, past + bit_count(path).to(tl.int32) - 1, position)
    listed = key_list(past + begin, count, end, tree_tokens, TILE)
    tiles = tl.cdiv(listed.keys, TILE.block)
    share = tl.maximum(tl.cdiv(tiles, splits), 1)
    active = tl.maximum(tl.cdiv(tiles, share), 1)
    if split < active:
        token = (first + query).to(tl.int64)
        head = key_head * TILE.groups + row % TILE.groups
        dims = tl.arange(0, TILE.padded)
        places = q.at + (token * q.token + head * q.head)[:, None] + dims[None, :]
        queries = tl.load(places, mask=real[:, None] & (dims < TILE.size)[None, :], other=0.0).to(TILE.product)
        low = split * share * TILE.block
        high = tl.minimum(low + share * TILE.block, listed.keys)
        table_base = sequences.table + sequence.to(tl.int64) * table_row
        softmax = attend_listed(
            low, high, queries, position, path, ancestors, listed, cache, key_head, table_base, scores, TILE
        )
        rows = QueryRows(token, head, real)
        store_or_merge(out, softmax, scores, scratch, rows, rows, pair, split, splits, active, TILE)
