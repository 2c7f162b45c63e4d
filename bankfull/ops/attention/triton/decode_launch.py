"""Launches of the decode kernel: tiles and splits for the shapes of a batch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bankfull.ops.attention.body import TREE_TOKENS
from bankfull.ops.attention.triton.decode import attention_decode
from bankfull.ops.attention.triton.head_tile import HeadTile
from bankfull.ops.attention.triton.listed import most_listed, numbers_of
from bankfull.ops.attention.triton.map import Sequences
from bankfull.ops.attention.triton.rope import Turn
from bankfull.ops.attention.triton.sparse import sparse_decode
from bankfull.ops.attention.triton.splits import LATE, MERGED, most_queries, scratch, split_count, split_plan, tile_keys
from bankfull.ops.attention.triton.tile import Scoring
from bankfull.ops.pages.rounded import INT4
from bankfull.ops.pages.side import Cache
from bankfull.ops.triton.launch import INTERPRETED, cdiv, multiprocessors, overlapped, power_of_two
from bankfull.ops.triton.rows import HeadRows

MOST_TOKENS = 16
"""Sequences with more new tokens use the prefill kernel, unless they may have a tree."""
WIDTHS = (1, 4, MOST_TOKENS, 32, TREE_TOKENS)
"""New tokens per sequence that kernels are compiled for: padding rows of queries cost less than another kernel."""


def launch_decode(
    q: Tensor,
    new: tuple[Tensor, Tensor] | None,
    cache: Cache,
    sequences: Sequences,
    width: int,
    out: Tensor,
    turn: Turn,
    scoring: Scoring,
) -> None:
    """Decode sequences with at most `width` new tokens. `new`: keys and values to be written to their pages; without
    them, queries are already final, unless there is a `turn`."""
    keys, values = cache
    mask = scoring.mask
    width = next(most for most in WIDTHS if width <= most)
    words = keys.scales is not None and new is None and mask is None and _in_words(keys.at) and _in_words(values.at)
    tile = turn.compiled(HeadTile.of(q, cache, 64 if words and keys.at.dtype is INT4 else 32 if words else 16))
    largest = max(tile.padded, tile.padded_values)
    needed = tile.groups * width
    live = min(power_of_two(needed), most_queries(largest, q.element_size()))
    rows = max(16, live)
    row_tiles = cdiv(needed, rows)
    table, chosen = sequences.table, sequences.chosen
    count = len(table) if chosen is None else len(chosen)
    pairs = count * values.heads * row_tiles
    processors = multiprocessors(q.device)
    plan = LATE if mask is not None else split_plan(pairs, live, processors, new is not None)
    block = tile_keys(largest, q.element_size(), keys.at.element_size(), plan.tile_bytes)
    most = table.shape[1] * values.tokens
    if mask is not None:
        live, most = rows, most_listed(mask, width, most)
    most = split_count(pairs, most, block, plan.programs * processors)
    tile = tile._replace(
        capped=scoring.cap is not None,
        partial=out.shape[2] > tile.values,
        mask=None if mask is None else numbers_of(mask),
        rows=rows,
        live=live,
        row_tiles=row_tiles,
        block=block,
        stages=plan.stages,
        least=plan.least,
        at_once=min(plan.at_once, max(1, MERGED // (live * tile.padded_values))),
        new=1 if width == 1 else 16,
        early=new is not None and pairs <= processors,
        words=words,
        scale_bytes=min(_alignment(side.scales) for side in cache),
        assembled=words and not INTERPRETED and q.dtype is torch.bfloat16 and torch.version.hip is None,
    )
    grid, splits = (values.heads * row_tiles, most, count), min(most, plan.most_splits)
    rest = scratch(q.device, rows, tile.padded_values), scoring.scores, table.stride(0)
    options = {"num_warps": plan.warps, **overlapped(q)}
    queries, result = HeadRows.of(q), HeadRows.of(out)
    if mask is not None:
        sparse_decode[grid](queries, result, cache, sequences, *rest, splits, tile, **options)
        return
    k, v = (None, None) if new is None else map(HeadRows.of, new)
    attention_decode[grid](
        queries, k, v, result, cache, sequences, turn, *rest, scoring.window, splits, tile, **options
    )


def _alignment(scales: Tensor | None) -> int:
    """The largest power of two of bytes, up to 16, at which the scales of every token and head begin."""
    if scales is None:
        return 1
    return math.gcd(16, scales.data_ptr(), *(n * scales.element_size() for n in scales.stride()[:3]))


def _in_words(pages: Tensor) -> bool:
    """Whether the heads of rounded pages begin and end at whole words of two bytes."""
    return not any(n % 2 for n in (pages.data_ptr(), pages.shape[-1], *pages.stride()[:-1]))
