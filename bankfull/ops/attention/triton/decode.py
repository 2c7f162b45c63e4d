"""Attention of sequences with few new tokens each: flash decoding, bound by streaming their KV cache once.

Program (KV head, split, sequence) reads a part of a sequence's tokens for all query heads of the KV head. If fused, it
also applies norm and RoPE to its queries and to the new keys, and one program per sequence and KV head writes the new
keys and values to their pages. If a sequence is split, the last program to finish merges the partial results in the
order of the splits, so the result does not depend on timing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from bankfull.ops.attention.triton.rope import normed_and_rotated
from bankfull.ops.attention.triton.splits import store_or_merge
from bankfull.ops.attention.triton.tile import (
    QueryRows,
    Softmax,
    bit_count,
    capped,
    halved,
    load_frames,
    of_parts,
    offsets,
    online_softmax,
    online_softmax_one,
    online_softmax_paired,
    quartered,
    repeated,
    scale_places,
    softmax_weights,
    split_bytes,
    split_nibbles,
    unpacked,
    visible_keys,
)
from bankfull.ops.pages.triton import page_offsets
from bankfull.ops.triton.launch import start_next, wait_for_inputs


@triton.jit
def sequence_of(sequences):
    """The program's sequence: its number, length, first new token, and new tokens; and those that are known: a padding
    row has length 0, so it sees no keys, stores no keys, and its result is zero."""
    sequence = tl.program_id(2)
    if sequences.chosen is not None:
        sequence = tl.load(sequences.chosen + sequence)
    length = tl.load(sequences.lengths + sequence)
    first = tl.load(sequences.starts + sequence)
    width = tl.load(sequences.starts + sequence + 1) - first
    return sequence, length, first, width, tl.minimum(width, length)


@triton.jit(do_not_specialize=["table_row", "splits", "window"])
def attention_decode(
    q,
    k,
    v,
    out,
    cache,
    sequences,
    turn,
    scratch,
    scores,
    table_row,
    window,
    splits,
    TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """With `k` and `v`, the kernel is fused; else queries are final, and keys and values are in their pages. Numbers at
    each place of a word (`HeadTile.words`), or of a byte with two int4, are multiplied apart.

    Early: the first KV tile is loaded before the previous kernel has ended, which is safe because pages were written by
    earlier steps. (Lengths and page tables were written before the step's first kernel, which no later kernel
    overtakes.) With too many programs for that, only its page frames are loaded early."""
    FUSED: tl.constexpr = k is not None
    GROUP: tl.constexpr = TILE.group
    WORDS: tl.constexpr = TILE.words
    PADDED: tl.constexpr = TILE.padded
    PADDED_VALUES: tl.constexpr = TILE.padded_values
    ROWS: tl.constexpr = TILE.rows
    LIVE: tl.constexpr = TILE.live
    BLOCK: tl.constexpr = TILE.block
    k_pages, v_pages = cache
    start_next(OVERLAP)
    if not FUSED:
        wait_for_inputs(OVERLAP)
    key_head = tl.program_id(0) // TILE.row_tiles
    row_tile = tl.program_id(0) % TILE.row_tiles
    split = tl.program_id(1)
    pair = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    sequence, length, first, width, known = sequence_of(sequences)
    end = length - known if FUSED else length
    begin = length * 0
    if window is not None:
        begin = tl.maximum(length - known + 1 - window, 0)
    if sequences.begins is not None:
        begin = tl.load(sequences.begins + first)
    base = begin // BLOCK * BLOCK
    tiles = tl.cdiv(tl.maximum(end - base, 0), BLOCK)
    share = tl.maximum(tl.cdiv(tiles, splits), TILE.least)
    active = tl.maximum(tl.cdiv(tiles, share), 1)
    if split < active:
        # The query heads of a KV head are adjacent in the tile: row = token * groups + head within the group.
        live = row_tile * ROWS + tl.arange(0, LIVE)
        real = live < width * TILE.groups
        token = first + live // TILE.groups
        head = key_head * TILE.groups + live % TILE.groups
        row = tl.arange(0, ROWS)
        tree = length - known
        position = tree + (row_tile * ROWS + row % LIVE) // TILE.groups
        path = None
        query = (row_tile * ROWS + row % LIVE) // TILE.groups
        if sequences.ancestors is not None:
            path = tl.load(sequences.ancestors + first + query, mask=query < width, other=0)
            position = tl.where(path != 0, tree + bit_count(path).to(tl.int32) - 1, position)
        reach = window
        if sequences.ends is not None:
            tree = tl.load(sequences.past_lengths + sequence)
            position = tl.load(sequences.ends + first + query, mask=query < width, other=0) - 1
            if sequences.begins is not None:
                reach = position + 1 - tl.load(sequences.begins + first + query, mask=query < width, other=0)
        dims = tl.arange(0, PADDED)
        numbers = tl.arange(0, PADDED_VALUES)
        last = split == active - 1
        factor = scores.inner
        if TILE.capped:
            factor = 1.0
        k_base = k_pages.at + key_head * k_pages.head
        v_base = v_pages.at + key_head * v_pages.head
        if WORDS:
            k_words = k_base.to(tl.pointer_type(tl.int16))
            v_words = v_base.to(tl.pointer_type(tl.int16))
        table_base = sequences.table + sequence.to(tl.int64) * table_row
        low = base + split * share * BLOCK
        high = tl.minimum(low + share * BLOCK, end)
        # Page frames are loaded one iteration ahead, so that no load in the loop depends on another.
        frames = load_frames(table_base, low, begin, high, TILE)
        if TILE.early:
            early = low + tl.arange(0, BLOCK)
            there = ((early >= begin) & (early < high))[:, None]
            k_places = offsets(frames, low, k_pages.frame, k_pages.place, TILE)
            v_places = k_places if TILE.alike else offsets(frames, low, v_pages.frame, v_pages.place, TILE)
            k_met = there & (dims < TILE.size)[None, :]
            early_keys = tl.load(k_base + k_places[:, None] + dims[None, :], mask=k_met, other=0.0)
            v_met = there & (numbers < TILE.values)[None, :]
            early_values = tl.load(v_base + v_places[:, None] + numbers[None, :], mask=v_met, other=0.0)
            frames = load_frames(table_base, low + BLOCK, begin, high, TILE)
            wait_for_inputs(OVERLAP)
        elif FUSED:
            wait_for_inputs(OVERLAP)
        places = q.at + token.to(tl.int64) * q.token + head * q.head
        own = normed_and_rotated(places, real, token.to(tl.int64), turn.q_weight, turn, TILE)
        queries = repeated(own, ROWS, LIVE, PADDED).to(TILE.product)
        if FUSED:
            # The last split has the fewest old tokens, so it handles the new ones.
            new = tl.arange(0, TILE.new)
            fresh = (new < known) & last
            new_token = (first + new).to(tl.int64)
            places = k.at + new_token * k.token + key_head * k.head
            new_keys = normed_and_rotated(places, fresh, new_token, turn.k_weight, turn, TILE)
            new_keys = new_keys.to(k_pages.at.dtype.element_ty)
            meant = fresh[:, None] & (numbers < TILE.values)[None, :]
            places = (v.at + (new_token * v.token + key_head * v.head)[:, None]) + numbers[None, :]
            new_values = tl.load(places, mask=meant, other=0.0).to(v_pages.at.dtype.element_ty)
            written = fresh & (row_tile == 0)
            slot = tl.load(sequences.slots + new_token, mask=written, other=0).to(tl.int64)
            new_k = k_pages.at + page_offsets(k_pages, slot, key_head, TILE)[:, None] + dims[None, :]
            new_v = v_pages.at + page_offsets(v_pages, slot, key_head, TILE)[:, None] + numbers[None, :]
            tl.store(new_k, new_keys, mask=written[:, None] & (dims < TILE.size)[None, :])
            tl.store(new_v, new_values, mask=written[:, None] & meant)

        peak = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, PADDED_VALUES // 2 if GROUP or WORDS else PADDED_VALUES], tl.float32)
        if GROUP and WORDS:
            queries_0, queries_1, queries_2, queries_3 = quartered(queries, ROWS, PADDED)
            acc = tl.zeros([ROWS, PADDED_VALUES // 4], tl.float32)
            acc_1, acc_2, acc_3 = acc, acc, acc
        elif GROUP or WORDS:
            even_queries, odd_queries = halved(queries, ROWS, PADDED)
            odd_acc = tl.zeros([ROWS, PADDED_VALUES // 2], tl.float32)
        if TILE.early:
            score = tl.dot(queries, tl.trans(early_keys.to(TILE.product)), input_precision="ieee")
            if TILE.capped:
                score = capped(score, scores)
            early_seen = visible_keys(low + tl.arange(0, BLOCK), position, begin, high, reach, path, tree, FUSED)
            score = tl.where(early_seen, score, float("-inf"))
            early_values = early_values.to(TILE.product)
            peak, total, acc = online_softmax(score, factor, early_values, None, peak, total, acc, True)
            low += BLOCK
        for at in tl.range(low, high, BLOCK, num_stages=TILE.stages):
            key = at + tl.arange(0, BLOCK)
            inside = (key >= begin) & (key < high)
            k_places = offsets(frames, at, k_pages.frame, k_pages.place, TILE)
            v_places = k_places if TILE.alike else offsets(frames, at, v_pages.frame, v_pages.place, TILE)
            if k_pages.scales is not None:
                k_scale_places = scale_places(frames, at, key_head, k_pages, TILE)
                v_scale_places = scale_places(frames, at, key_head, v_pages, TILE)
            if GROUP and WORDS:
                fours = tl.arange(0, PADDED // 4)
                groups = tl.arange(0, PADDED // GROUP)
                met = inside[:, None] & (fours < TILE.size // 4)[None, :]
                scaled = inside[:, None] & (groups < TILE.size // GROUP)[None, :]
                keys = tl.load(k_words + (k_places // 2)[:, None] + fours[None, :], mask=met, other=0)
                key_scale = tl.load(k_scale_places[:, None] + groups[None, :], mask=scaled, other=0.0)
                values = tl.load(v_words + (v_places // 2)[:, None] + fours[None, :], mask=met, other=0)
                value_scale = tl.load(v_scale_places[:, None] + groups[None, :], mask=scaled, other=0.0)
                each = of_parts(key_scale, PADDED // 4, PADDED // GROUP, BLOCK)
                part_0, part_1, part_2, part_3 = split_nibbles(tl.trans(keys), tl.trans(each), TILE)
                score = tl.dot(queries_0, part_0, input_precision="ieee")
                score = tl.dot(queries_1, part_1, score, input_precision="ieee")
                score = tl.dot(queries_2, part_2, score, input_precision="ieee")
                score = tl.dot(queries_3, part_3, score, input_precision="ieee")
            elif GROUP:
                pairs = tl.arange(0, PADDED // 2)
                groups = tl.arange(0, PADDED // GROUP)
                met = inside[:, None] & (pairs < TILE.size // 2)[None, :]
                keys = tl.load(k_base + k_places[:, None] + pairs[None, :], mask=met, other=0)
                scaled = inside[:, None] & (groups < TILE.size // GROUP)[None, :]
                key_scale = tl.load(k_scale_places[:, None] + groups[None, :], mask=scaled, other=0.0)
                values = tl.load(v_base + v_places[:, None] + pairs[None, :], mask=met, other=0)
                value_scale = tl.load(v_scale_places[:, None] + groups[None, :], mask=scaled, other=0.0)
                even, odd = unpacked(keys, key_scale, PADDED, TILE)
                score = tl.dot(even_queries, tl.trans(even), input_precision="ieee")
                score = tl.dot(odd_queries, tl.trans(odd), score, input_precision="ieee")
            elif WORDS:
                floats: tl.constexpr = k_pages.at.dtype.element_ty != tl.int8
                pairs = tl.arange(0, PADDED // 2)
                met = inside[:, None] & (pairs < TILE.size // 2)[None, :]
                keys = tl.load(k_words + (k_places // 2)[:, None] + pairs[None, :], mask=met, other=0)
                pairs = tl.arange(0, PADDED_VALUES // 2)
                met = inside[:, None] & (pairs < TILE.values // 2)[None, :]
                values = tl.load(v_words + (v_places // 2)[:, None] + pairs[None, :], mask=met, other=0)
                even, odd = split_bytes(tl.trans(keys), floats, TILE)
                score = tl.dot(even_queries, even, input_precision="ieee")
                score = tl.dot(odd_queries, odd, score, input_precision="ieee")
                score = score * tl.load(k_scale_places, mask=inside, other=0.0)[None, :]
                value_scale = tl.load(v_scale_places, mask=inside, other=0.0)
            else:
                met = inside[:, None] & (dims < TILE.size)[None, :]
                keys = tl.load(k_base + k_places[:, None] + dims[None, :], mask=met, other=0.0)
                met = inside[:, None] & (numbers < TILE.values)[None, :]
                values = tl.load(v_base + v_places[:, None] + numbers[None, :], mask=met, other=0.0)
                score = tl.dot(queries, tl.trans(keys.to(TILE.product)), input_precision="ieee")
                value_scale = None
                if k_pages.scales is not None:
                    score = score * tl.load(k_scale_places, mask=inside, other=0.0)[None, :]
                    value_scale = tl.load(v_scale_places, mask=inside, other=0.0)
            if TILE.capped:
                score = capped(score, scores)
            score = tl.where(visible_keys(key, position, begin, high, reach, path, tree, FUSED), score, float("-inf"))
            frames = load_frames(table_base, at + BLOCK, begin, high, TILE)
            if GROUP and WORDS:
                each = of_parts(value_scale, PADDED // 4, PADDED // GROUP, BLOCK)
                part_0, part_1, part_2, part_3 = split_nibbles(values, each, TILE)
                peak, total, weight, rescale = softmax_weights(score, factor, peak, total, True)
                weight = weight.to(TILE.product)
                acc = tl.dot(weight, part_0, acc * rescale[:, None], input_precision="ieee")
                acc_1 = tl.dot(weight, part_1, acc_1 * rescale[:, None], input_precision="ieee")
                acc_2 = tl.dot(weight, part_2, acc_2 * rescale[:, None], input_precision="ieee")
                acc_3 = tl.dot(weight, part_3, acc_3 * rescale[:, None], input_precision="ieee")
            elif GROUP:
                even, odd = unpacked(values, value_scale, PADDED, TILE)
                peak, total, acc, odd_acc = online_softmax_paired(
                    score, factor, even, odd, None, peak, total, acc, odd_acc, True
                )
            elif WORDS:
                even, odd = split_bytes(values, floats, TILE)
                peak, total, acc, odd_acc = online_softmax_paired(
                    score, factor, even, odd, value_scale, peak, total, acc, odd_acc, True
                )
            else:
                peak, total, acc = online_softmax(
                    score, factor, values.to(TILE.product), value_scale, peak, total, acc, True
                )
        if GROUP and WORDS:
            acc = tl.interleave(tl.interleave(acc, acc_2), tl.interleave(acc_1, acc_3))
        elif GROUP or WORDS:
            acc = tl.interleave(acc, odd_acc)
        if FUSED and TILE.new == 1:
            # One new token, visible to all queries: no tile product needed.
            new_score = tl.sum(own.to(tl.float32) * new_keys.to(tl.float32), 1)
            if TILE.capped:
                new_score = capped(new_score, scores)
            new_score = tl.where(last & (known > 0), repeated(new_score[:, None], ROWS, LIVE, 1), float("-inf"))
            peak, total, acc = online_softmax_one(new_score, factor, new_values.to(tl.float32), peak, total, acc)
        elif FUSED:
            new_key = length - known + new
            if last:
                new_scores = tl.dot(queries, tl.trans(new_keys.to(TILE.product)), input_precision="ieee")
                if TILE.capped:
                    new_scores = capped(new_scores, scores)
                seen = visible_keys(new_key, position, begin, length, reach, path, tree, False)
                new_scores = tl.where(seen, new_scores, float("-inf"))
                peak, total, acc = online_softmax(
                    new_scores, factor, new_values.to(TILE.product), None, peak, total, acc, True
                )

        row = row_tile * ROWS + row
        stored = (tl.arange(0, ROWS) < LIVE) & (row < width * TILE.groups)
        rows = QueryRows(first + row // TILE.groups, key_head * TILE.groups + row % TILE.groups, stored)
        live_rows = QueryRows(token, head, real)
        softmax = Softmax(peak, total, acc)
        store_or_merge(out, softmax, scores, scratch, rows, live_rows, pair, split, splits, active, TILE)
