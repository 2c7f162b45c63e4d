"""Attention of sequences with few new tokens each: the work is to stream their keys and values once.

Program (key head, split, sequence) reads a share of a sequence's tokens for all query heads that share the key head.
`fused`, it norms and turns its own queries, takes new keys and values as the projections left them, and one program of
the sequence and key head writes these to their pages. Where a sequence was split, the program that comes last merges
the partial results, in the order of the splits: the result does not depend on who came last.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from bankfull.ops.reference.attention import HeadNorms
from bankfull.ops.triton.attention_tile import (
    absorbed,
    capped,
    look_up,
    multiplied_as,
    places,
    score_factors,
    store_heads,
)
from bankfull.ops.triton.attention_turn import turned
from bankfull.ops.triton.launch import overlapped, power_of_two, processors, start_next, wait_for_inputs

WIDTHS = (1, 4, 16)
"""New tokens of a sequence that kernels are compiled for: a few more rows of queries cost less than another kernel."""
MOST_TOKENS = WIDTHS[-1]
"""More are the business of tiles of queries."""
FEW_PAIRS = 32
"""Of sequences and key heads."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How the work is cut into programs."""

    tile_bytes: int
    """Of keys, and again of values, in one step of a program's loop."""
    stages: int
    warps: int
    programs: int
    """For each multiprocessor, at least, while there is enough to split."""
    most_splits: int = 1 << 30
    """Of a sequence: what they found must be merged, which takes the longer the more there are."""
    least: int = 1
    """Tiles of a split that is not the last one: a sequence that has no more is not split."""
    at_once: int = 8
    """Of the splits that are merged: loaded together."""


FEW = Cut(32768, 1, 8, 4, 16)
"""Of pairs: what counts is how soon each program has its first tile, which is all that it has unless the sequence is
long, and that the kernels around it keep their place on the multiprocessor: no stages in shared memory. Programs that
have no part of the sequence hold back the kernel behind for a moment, which would take the memory from the others."""
FEW_QUERIES = Cut(16384, 1, 8, 2, 32, at_once=16)
"""The same where no more than two queries share keys, as in 0.6B: up to 2,048 tokens each program has one tile."""
MANY = Cut(8192, 3, 4, 4)
"""Small enough that four programs with three stages fit a multiprocessor beside each other; what they have in flight is
more than the memory's latency times its speed."""
SOME = Cut(16384, 3, 8, 2, least=16)
"""Up to two pairs for each multiprocessor, which cannot begin early any more: each has a program, until its sequence is
so long that what is gained by two is more than it takes to merge what they find."""
LATE = Cut(8192, 3, 4, 2)
"""The same, where programs cannot begin before their input is there."""
MERGED = 4096
"""Numbers of partial results that are loaded at once."""


@triton.jit
def visible_keys(key, position, begin, end, window, ALL: tl.constexpr):
    """Which of the keys do the queries see? ALL: every query sees all of begin .. end, but for a window."""
    seen = ((key >= begin) & (key < end))[None, :]
    if not ALL:
        seen = seen & (key[None, :] <= position[:, None])
    if window is not None:
        seen = seen & (key[None, :] > position[:, None] - window)
    return seen


@triton.jit
def repeated(x, ROWS: tl.constexpr, LIVE: tl.constexpr, COLUMNS: tl.constexpr):
    """(LIVE, COLUMNS) again and again, until there are ROWS of them."""
    return tl.reshape(tl.broadcast_to(x[None, :, :], [ROWS // LIVE, LIVE, COLUMNS]), [ROWS, COLUMNS])


@triton.jit
def absorbed_one(score, factor, value, peak, total, mixed):
    """The running softmax with one key more: its scores (rows, 1), its value (1, numbers)."""
    score = tl.max(score, 1) * factor
    highest = tl.maximum(peak, score)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    weight, fade = tl.exp2(score - base), tl.exp2(peak - base)
    return highest, total * fade + weight, mixed * fade[:, None] + weight[:, None] * value


@triton.jit
def merged(
    partial_mixed,
    partial_peak,
    partial_total,
    first,
    count,
    real,
    PADDED_VALUES: tl.constexpr,
    ROWS: tl.constexpr,
    LIVE: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """The partial results first .. first + count as one, in this order; rows that pad a tile were never stored. Several
    are loaded at once, because each round takes as long as the memory needs to answer. Loads go past the first-level
    cache: others have written these."""
    row = tl.arange(0, LIVE)
    numbers = tl.arange(0, PADDED_VALUES)
    peak = tl.full([LIVE], float("-inf"), tl.float32)
    total = tl.zeros([LIVE], tl.float32)
    mixed = tl.zeros([LIVE, PADDED_VALUES], tl.float32)
    for at in range(0, count, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            there = real & (at + i < count)
            line = (first + at + i) * ROWS + row
            other_peak = tl.load(partial_peak + line, mask=there, other=float("-inf"), cache_modifier=".cg")
            other_total = tl.load(partial_total + line, mask=there, other=0.0, cache_modifier=".cg")
            other_mixed = tl.load(
                partial_mixed + line[:, None] * PADDED_VALUES + numbers[None, :],
                mask=there[:, None],
                other=0.0,
                cache_modifier=".cg",
            )
            highest = tl.maximum(peak, other_peak)
            safe = tl.where(highest == float("-inf"), 0.0, highest)
            fade, weight = tl.exp2(peak - safe), tl.exp2(other_peak - safe)
            total = total * fade + other_total * weight
            mixed = mixed * fade[:, None] + other_mixed * weight[:, None]
            peak = highest
    return mixed, total


@triton.jit(do_not_specialize=["table_row", "splits", "window"])
def attention_decode(
    q,
    k,
    v,
    out,
    k_pages,
    v_pages,
    k_scales,
    v_scales,
    table,
    slots,
    starts,
    lengths,
    chosen,
    cos,
    sin,
    q_weight,
    k_weight,
    partial_mixed,
    partial_peak,
    partial_total,
    arrivals,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    out_token,
    k_frame,
    k_place,
    k_page_head,
    v_frame,
    v_place,
    v_page_head,
    k_scale_frame,
    k_scale_place,
    k_scale_head,
    v_scale_frame,
    v_scale_place,
    v_scale_head,
    table_row,
    cos_token,
    sin_token,
    inner,
    outer,
    eps,
    offset,
    window,
    splits,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    VALUES: tl.constexpr,
    PADDED: tl.constexpr,
    PADDED_VALUES: tl.constexpr,
    HALF: tl.constexpr,
    SHIFTED: tl.constexpr,
    PAGE: tl.constexpr,
    CAPPED: tl.constexpr,
    FUSED: tl.constexpr,
    ALIKE: tl.constexpr,
    ROWS: tl.constexpr,
    LIVE: tl.constexpr,
    ROW_TILES: tl.constexpr,
    NEW: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    LEAST: tl.constexpr,
    EARLY: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PRODUCT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """EARLY: all that is in the pages was written by earlier steps, so that the first tile is asked for before the
    kernel before has ended. (Lengths and page tables were written before the step's first kernel, which lets nobody
    begin before they are there.) Where programs are too many for that, they look up at least where it lies."""
    start_next(OVERLAP)
    if not FUSED:
        wait_for_inputs(OVERLAP)
    key_head = tl.program_id(0) // ROW_TILES
    row_tile = tl.program_id(0) % ROW_TILES
    split = tl.program_id(1)
    sequence = tl.program_id(2)
    pair = sequence * tl.num_programs(0) + tl.program_id(0)
    if chosen is not None:
        sequence = tl.load(chosen + sequence)
    length = tl.load(lengths + sequence)
    first = tl.load(starts + sequence)
    width = tl.load(starts + sequence + 1) - first
    # Of a padded row (length 0) nothing is seen and nothing is kept; its result is zero.
    known = tl.minimum(width, length)
    end = length - known if FUSED else length
    begin = length * 0
    if window is not None:
        begin = tl.maximum(length - known + 1 - window, 0)
    base = begin // BLOCK * BLOCK
    tiles = tl.cdiv(tl.maximum(end - base, 0), BLOCK)
    share = tl.maximum(tl.cdiv(tiles, splits), LEAST)
    active = tl.maximum(tl.cdiv(tiles, share), 1)
    if split < active:
        # The heads that share keys lie side by side in the tile: row = token * GROUPS + head within the group. LIVE of
        # the tile's ROWS are used; the others, which products ask for, repeat them.
        live = row_tile * ROWS + tl.arange(0, LIVE)
        real = live < width * GROUPS
        token = first + live // GROUPS
        head = key_head * GROUPS + live % GROUPS
        row = tl.arange(0, ROWS)
        position = length - known + (row_tile * ROWS + row % LIVE) // GROUPS
        dims = tl.arange(0, PADDED)
        numbers = tl.arange(0, PADDED_VALUES)
        last = split == active - 1
        factor = inner
        if CAPPED:
            factor = 1.0
        k_base = k_pages + key_head * k_page_head
        v_base = v_pages + key_head * v_page_head
        table_base = table + sequence.to(tl.int64) * table_row
        low = base + split * share * BLOCK
        high = tl.minimum(low + share * BLOCK, end)
        # The pages of a tile are looked up one step before they are needed: no load of the loop waits for another.
        frames = look_up(table_base, low, begin, high, PAGE, BLOCK)
        if EARLY:
            early = low + tl.arange(0, BLOCK)
            there = ((early >= begin) & (early < high))[:, None]
            k_places = places(frames, low, k_frame, k_place, PAGE, BLOCK)
            v_places = k_places if ALIKE else places(frames, low, v_frame, v_place, PAGE, BLOCK)
            k_met = there & (dims < SIZE)[None, :]
            early_keys = tl.load(k_base + k_places[:, None] + dims[None, :], mask=k_met, other=0.0)
            v_met = there & (numbers < VALUES)[None, :]
            early_values = tl.load(v_base + v_places[:, None] + numbers[None, :], mask=v_met, other=0.0)
            frames = look_up(table_base, low + BLOCK, begin, high, PAGE, BLOCK)
            wait_for_inputs(OVERLAP)
        elif FUSED:
            wait_for_inputs(OVERLAP)
        own = turned(
            q + token.to(tl.int64) * q_token + head * q_head,
            real,
            token.to(tl.int64),
            q_weight,
            cos,
            sin,
            cos_token,
            sin_token,
            eps,
            offset,
            SIZE,
            PADDED,
            HALF,
            SHIFTED,
        )
        queries = repeated(own, ROWS, LIVE, PADDED).to(PRODUCT)
        if FUSED:
            # The last split has the least of the old tokens, so the new ones are its work.
            new = tl.arange(0, NEW)
            fresh = (new < known) & last
            new_token = (first + new).to(tl.int64)
            new_keys = turned(
                k + new_token * k_token + key_head * k_head,
                fresh,
                new_token,
                k_weight,
                cos,
                sin,
                cos_token,
                sin_token,
                eps,
                offset,
                SIZE,
                PADDED,
                HALF,
                SHIFTED,
            ).to(k_pages.dtype.element_ty)
            meant = fresh[:, None] & (numbers < VALUES)[None, :]
            new_values = tl.load(
                v + (new_token * v_token + key_head * v_head)[:, None] + numbers[None, :], mask=meant, other=0.0
            ).to(v_pages.dtype.element_ty)
            written = fresh & (row_tile == 0)
            slot = tl.load(slots + new_token, mask=written, other=0).to(tl.int64)
            new_k = slot // PAGE * k_frame + slot % PAGE * k_place + key_head * k_page_head
            new_v = slot // PAGE * v_frame + slot % PAGE * v_place + key_head * v_page_head
            tl.store(k_pages + new_k[:, None] + dims[None, :], new_keys, mask=written[:, None] & (dims < SIZE)[None, :])
            tl.store(v_pages + new_v[:, None] + numbers[None, :], new_values, mask=written[:, None] & meant)

        peak = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        mixed = tl.zeros([ROWS, PADDED_VALUES], tl.float32)
        if EARLY:
            score = tl.dot(queries, tl.trans(early_keys.to(PRODUCT)), input_precision="ieee")
            if CAPPED:
                score = capped(score, inner, outer)
            early_seen = visible_keys(low + tl.arange(0, BLOCK), position, begin, high, window, FUSED)
            score = tl.where(early_seen, score, float("-inf"))
            peak, total, mixed = absorbed(score, factor, early_values.to(PRODUCT), None, peak, total, mixed, True)
            low += BLOCK
        for at in tl.range(low, high, BLOCK, num_stages=STAGES):
            key = at + tl.arange(0, BLOCK)
            inside = (key >= begin) & (key < high)
            k_places = places(frames, at, k_frame, k_place, PAGE, BLOCK)
            v_places = k_places if ALIKE else places(frames, at, v_frame, v_place, PAGE, BLOCK)
            met = inside[:, None] & (dims < SIZE)[None, :]
            keys = tl.load(k_base + k_places[:, None] + dims[None, :], mask=met, other=0.0)
            met = inside[:, None] & (numbers < VALUES)[None, :]
            values = tl.load(v_base + v_places[:, None] + numbers[None, :], mask=met, other=0.0)
            score = tl.dot(queries, tl.trans(keys.to(PRODUCT)), input_precision="ieee")
            value_scale = None
            if k_scales is not None:
                scales = k_scales + key_head * k_scale_head
                scales += places(frames, at, k_scale_frame, k_scale_place, PAGE, BLOCK)
                score = score * tl.load(scales, mask=inside, other=0.0)[None, :]
                scales = v_scales + key_head * v_scale_head
                scales += places(frames, at, v_scale_frame, v_scale_place, PAGE, BLOCK)
                value_scale = tl.load(scales, mask=inside, other=0.0)
            if CAPPED:
                score = capped(score, inner, outer)
            score = tl.where(visible_keys(key, position, begin, high, window, FUSED), score, float("-inf"))
            frames = look_up(table_base, at + BLOCK, begin, high, PAGE, BLOCK)
            peak, total, mixed = absorbed(score, factor, values.to(PRODUCT), value_scale, peak, total, mixed, True)
        if FUSED and NEW == 1:
            # One token, which everyone sees: no product of tiles.
            new_score = tl.sum(own.to(tl.float32) * new_keys.to(tl.float32), 1)
            if CAPPED:
                new_score = capped(new_score, inner, outer)
            new_score = tl.where(last & (known > 0), repeated(new_score[:, None], ROWS, LIVE, 1), float("-inf"))
            peak, total, mixed = absorbed_one(new_score, factor, new_values.to(tl.float32), peak, total, mixed)
        elif FUSED:
            new_key = length - known + new
            if last:
                new_scores = tl.dot(queries, tl.trans(new_keys.to(PRODUCT)), input_precision="ieee")
                if CAPPED:
                    new_scores = capped(new_scores, inner, outer)
                seen = visible_keys(new_key, position, begin, length, window, False)
                new_scores = tl.where(seen, new_scores, float("-inf"))
                peak, total, mixed = absorbed(
                    new_scores, factor, new_values.to(PRODUCT), None, peak, total, mixed, True
                )

        stored = (row < LIVE) & (row_tile * ROWS + row < width * GROUPS)
        if active == 1:
            store_heads(
                out,
                mixed,
                total,
                first + (row_tile * ROWS + row) // GROUPS,
                key_head * GROUPS + (row_tile * ROWS + row) % GROUPS,
                stored,
                out_token,
                VALUES,
                PADDED_VALUES,
            )
        else:
            line = (pair * splits + split) * ROWS + row
            tl.store(partial_peak + line, peak, mask=stored)
            tl.store(partial_total + line, total, mask=stored)
            tl.store(partial_mixed + line[:, None] * PADDED_VALUES + numbers[None, :], mixed, mask=stored[:, None])
            # Every warp's stores must be done before the one thread that counts says so.
            tl.debug_barrier()
            arrived = tl.atomic_add(arrivals + pair, 1, sem="acq_rel")
            if arrived == active - 1:
                merged_mixed, merged_total = merged(
                    partial_mixed,
                    partial_peak,
                    partial_total,
                    pair * splits,
                    active,
                    real,
                    PADDED_VALUES,
                    ROWS,
                    LIVE,
                    AT_ONCE,
                )
                store_heads(out, merged_mixed, merged_total, token, head, real, out_token, VALUES, PADDED_VALUES)
                # The next launch, which may be a replay of this one, counts from zero.
                tl.store(arrivals + pair, 0)


class Scratch:
    """Partial results, and how many programs of a pair (sequence, tile of rows) have left theirs.

    There are never more programs than this while sequences are split, so one size serves every batch, and a captured
    step finds it where it was. One stream at a time may use it.
    """

    def __init__(self, device: torch.device, lines: int, values: int) -> None:
        programs = 2 * max(cut.programs for cut in (FEW, FEW_QUERIES, MANY, SOME, LATE)) * processors(device)
        self.mixed = torch.empty(programs * lines * values, dtype=torch.float32, device=device)
        self.peak = torch.empty(programs * lines, dtype=torch.float32, device=device)
        self.total = torch.empty_like(self.peak)
        self.arrivals = torch.zeros(programs, dtype=torch.int32, device=device)


_scratches: dict[tuple[torch.device, int, int], Scratch] = {}


def scratch(device: torch.device, lines: int, values: int) -> Scratch:
    key = device, lines, values
    if key in _scratches:
        return _scratches[key]
    made = Scratch(device, lines, values)
    # While a step is captured nothing runs: zeros appear when it is replayed, so only that step may rely on them.
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        _scratches[key] = made
    return made


def split_count(pairs: int, most_tokens: int, block: int, programs: int) -> int:
    """Only from what a captured step keeps: sequences, heads, and the width of its page tables."""
    return min(triton.cdiv(programs, pairs), max(1, triton.cdiv(most_tokens, block)))


def most_queries(padded: int, product_bytes: int) -> int:
    """Rows of a tile. Products of float32 go without the matrix units: small tiles, so that they fit the registers."""
    return 16 if product_bytes == 4 else min(64, max(16, 8192 // padded))


def tile_keys(padded: int, product_bytes: int, page_bytes: int, tile_bytes: int) -> int:
    return 16 if product_bytes == 4 else min(128, max(16, tile_bytes // (padded * page_bytes)))


def cut_for(pairs: int, live: int, multiprocessors: int, fused: bool) -> Cut:
    """`live`: queries that share keys."""
    if not fused or pairs > 2 * multiprocessors:
        return LATE
    if pairs > multiprocessors:
        return SOME
    return MANY if pairs > FEW_PAIRS else FEW_QUERIES if live <= 2 else FEW


def launch_decode(
    q: Tensor,
    new: tuple[Tensor, Tensor] | None,
    k_pages: Tensor,
    v_pages: Tensor,
    scales: tuple[Tensor, Tensor] | None,
    table: Tensor,
    slots: Tensor,
    starts: Tensor,
    lengths: Tensor,
    chosen: Tensor | None,
    width: int,
    out: Tensor,
    angles: tuple[Tensor, Tensor] | None,
    norms: HeadNorms | None,
    scale: float,
    window: int | None,
    cap: float | None,
) -> None:
    """Sequences with at most `width` new tokens; all of the batch, or those `chosen`. `new`: keys and values that are
    not in their pages yet; without them queries are taken as they are."""
    heads, size = q.shape[1:]
    page, key_heads, values = v_pages.shape[1:]
    groups = heads // key_heads
    width = next(most for most in WIDTHS if width <= most)
    padded, padded_values = (max(16, power_of_two(n)) for n in (size, values))
    largest = max(padded, padded_values)
    most_rows = most_queries(largest, q.element_size())
    live = min(power_of_two(groups * width), most_rows)
    rows = max(16, live)
    row_tiles = triton.cdiv(groups * width, rows)
    sequences = len(table) if chosen is None else len(chosen)
    pairs = sequences * key_heads * row_tiles
    early = new is not None and pairs <= processors(q.device)
    cut = cut_for(pairs, live, processors(q.device), new is not None)
    block = tile_keys(largest, q.element_size(), k_pages.element_size(), cut.tile_bytes)
    most = split_count(pairs, table.shape[1] * page, block, cut.programs * processors(q.device))
    splits = min(most, cut.most_splits)
    own = scratch(q.device, rows, padded_values)
    k, v = new or (q, q)
    cos, sin = angles or (None, None)
    k_scales, v_scales = scales or (None, None)
    inner, outer = score_factors(scale, cap)
    attention_decode[(key_heads * row_tiles, most, sequences)](
        q,
        k,
        v,
        out,
        k_pages,
        v_pages,
        k_scales,
        v_scales,
        table,
        slots,
        starts,
        lengths,
        chosen,
        cos,
        sin,
        norms and norms.q,
        norms and norms.k,
        own.mixed,
        own.peak,
        own.total,
        own.arrivals,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        out.stride(0),
        *k_pages.stride()[:3],
        *v_pages.stride()[:3],
        *((0, 0, 0) if k_scales is None else k_scales.stride()),
        *((0, 0, 0) if v_scales is None else v_scales.stride()),
        table.stride(0),
        0 if cos is None else cos.stride(0),
        0 if sin is None else sin.stride(0),
        inner,
        outer,
        norms.eps if norms else 0.0,
        norms.offset if norms else 0.0,
        window,
        splits,
        groups,
        size,
        values,
        padded,
        padded_values,
        1 if cos is None else cos.shape[1],
        bool(norms and norms.offset),
        page,
        cap is not None,
        new is not None,
        k_pages.stride()[:2] == v_pages.stride()[:2],
        rows,
        live,
        row_tiles,
        1 if width == 1 else 16,
        block,
        cut.stages,
        cut.least,
        early,
        min(cut.at_once, max(1, MERGED // (live * padded_values))),
        multiplied_as(q),
        num_warps=cut.warps,
        **overlapped(q),
    )
