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
from bankfull.ops.attention.triton.splits import merged
from bankfull.ops.attention.triton.tile import (
    bit_count,
    capped,
    halved,
    load_frames,
    of_words,
    offsets,
    online_softmax,
    online_softmax_one,
    online_softmax_paired,
    quartered,
    repeated,
    softmax_weights,
    split_bytes,
    split_nibbles,
    store_heads,
    unpacked,
    visible_keys,
)
from bankfull.ops.triton.launch import (
    start_next,
    wait_for_inputs,
)


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
    ancestors,
    begins,
    ends,
    past_lengths,
    sinks,
    cos,
    sin,
    q_weight,
    k_weight,
    partial_acc,
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
    GROUP: tl.constexpr,
    WORDS: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    ASSEMBLED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """GROUP: numbers of a head that share an int4 scale; 0: pages hold no int4 codes. WORDS: codes are read in words of
    16 bits, two of 8 bits or four of int4. The numbers at each place of a word, or of a byte with two int4, are
    multiplied apart. SCALE_BYTES: a power of two that divides the address of the first int4 scale of each token and
    head, so that its scales are copied at once.

    EARLY: load the first KV tile before the previous kernel has ended, which is safe because pages were written by
    earlier steps. (Lengths and page tables were written before the step's first kernel, which no later kernel
    overtakes.) With too many programs for that, only its page frames are loaded early.

    `ends`: the attention is partial, over keys that `attention_held` has counted."""
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
    # A padding row (length 0) sees no keys, stores no keys, and its result is zero.
    known = tl.minimum(width, length)
    end = length - known if FUSED else length
    begin = length * 0
    if window is not None:
        begin = tl.maximum(length - known + 1 - window, 0)
    if begins is not None:
        begin = tl.load(begins + first)
    base = begin // BLOCK * BLOCK
    tiles = tl.cdiv(tl.maximum(end - base, 0), BLOCK)
    share = tl.maximum(tl.cdiv(tiles, splits), LEAST)
    active = tl.maximum(tl.cdiv(tiles, share), 1)
    if split < active:
        # The query heads of a KV head are adjacent in the tile: row = token * GROUPS + head within the group. LIVE of
        # the tile's ROWS are used; the others, which the dot product's minimum size requires, repeat them.
        live = row_tile * ROWS + tl.arange(0, LIVE)
        real = live < width * GROUPS
        token = first + live // GROUPS
        head = key_head * GROUPS + live % GROUPS
        row = tl.arange(0, ROWS)
        tree = length - known
        position = tree + (row_tile * ROWS + row % LIVE) // GROUPS
        path = None
        query = (row_tile * ROWS + row % LIVE) // GROUPS
        if ancestors is not None:
            path = tl.load(ancestors + first + query, mask=query < width, other=0)
            position = tl.where(path != 0, tree + bit_count(path).to(tl.int32) - 1, position)
        reach = window
        if ends is not None:
            tree = tl.load(past_lengths + sequence)
            position = tl.load(ends + first + query, mask=query < width, other=0) - 1
            if begins is not None:
                reach = position + 1 - tl.load(begins + first + query, mask=query < width, other=0)
        dims = tl.arange(0, PADDED)
        numbers = tl.arange(0, PADDED_VALUES)
        last = split == active - 1
        factor = inner
        if CAPPED:
            factor = 1.0
        k_base = k_pages + key_head * k_page_head
        v_base = v_pages + key_head * v_page_head
        if WORDS:
            k_words = k_base.to(tl.pointer_type(tl.int16))
            v_words = v_base.to(tl.pointer_type(tl.int16))
        table_base = table + sequence.to(tl.int64) * table_row
        low = base + split * share * BLOCK
        high = tl.minimum(low + share * BLOCK, end)
        # Page frames are loaded one iteration ahead, so that no load in the loop depends on another.
        frames = load_frames(table_base, low, begin, high, PAGE, BLOCK)
        if EARLY:
            early = low + tl.arange(0, BLOCK)
            there = ((early >= begin) & (early < high))[:, None]
            k_places = offsets(frames, low, k_frame, k_place, PAGE, BLOCK)
            v_places = k_places if ALIKE else offsets(frames, low, v_frame, v_place, PAGE, BLOCK)
            k_met = there & (dims < SIZE)[None, :]
            early_keys = tl.load(k_base + k_places[:, None] + dims[None, :], mask=k_met, other=0.0)
            v_met = there & (numbers < VALUES)[None, :]
            early_values = tl.load(v_base + v_places[:, None] + numbers[None, :], mask=v_met, other=0.0)
            frames = load_frames(table_base, low + BLOCK, begin, high, PAGE, BLOCK)
            wait_for_inputs(OVERLAP)
        elif FUSED:
            wait_for_inputs(OVERLAP)
        own = normed_and_rotated(
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
            # The last split has the fewest old tokens, so it handles the new ones.
            new = tl.arange(0, NEW)
            fresh = (new < known) & last
            new_token = (first + new).to(tl.int64)
            new_keys = normed_and_rotated(
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
        acc = tl.zeros([ROWS, PADDED_VALUES // 2 if GROUP or WORDS else PADDED_VALUES], tl.float32)
        if GROUP and WORDS:
            queries_0, queries_1, queries_2, queries_3 = quartered(queries, ROWS, PADDED)
            acc = tl.zeros([ROWS, PADDED_VALUES // 4], tl.float32)
            acc_1, acc_2, acc_3 = acc, acc, acc
        elif GROUP or WORDS:
            even_queries, odd_queries = halved(queries, ROWS, PADDED)
            odd_acc = tl.zeros([ROWS, PADDED_VALUES // 2], tl.float32)
        if EARLY:
            score = tl.dot(queries, tl.trans(early_keys.to(PRODUCT)), input_precision="ieee")
            if CAPPED:
                score = capped(score, inner, outer)
            early_seen = visible_keys(low + tl.arange(0, BLOCK), position, begin, high, reach, path, tree, FUSED)
            score = tl.where(early_seen, score, float("-inf"))
            peak, total, acc = online_softmax(score, factor, early_values.to(PRODUCT), None, peak, total, acc, True)
            low += BLOCK
        for at in tl.range(low, high, BLOCK, num_stages=STAGES):
            key = at + tl.arange(0, BLOCK)
            inside = (key >= begin) & (key < high)
            k_places = offsets(frames, at, k_frame, k_place, PAGE, BLOCK)
            v_places = k_places if ALIKE else offsets(frames, at, v_frame, v_place, PAGE, BLOCK)
            if k_scales is not None:
                k_scale_places = k_scales + key_head * k_scale_head
                k_scale_places += offsets(frames, at, k_scale_frame, k_scale_place, PAGE, BLOCK)
                v_scale_places = v_scales + key_head * v_scale_head
                v_scale_places += offsets(frames, at, v_scale_frame, v_scale_place, PAGE, BLOCK)
            if GROUP and WORDS:
                fours = tl.arange(0, PADDED // 4)
                groups = tl.arange(0, PADDED // GROUP)
                met = inside[:, None] & (fours < SIZE // 4)[None, :]
                scaled = inside[:, None] & (groups < SIZE // GROUP)[None, :]
                k_scale_places = tl.multiple_of(k_scale_places, SCALE_BYTES)
                v_scale_places = tl.multiple_of(v_scale_places, SCALE_BYTES)
                keys = tl.load(k_words + (k_places // 2)[:, None] + fours[None, :], mask=met, other=0)
                key_scale = tl.load(k_scale_places[:, None] + groups[None, :], mask=scaled, other=0.0)
                values = tl.load(v_words + (v_places // 2)[:, None] + fours[None, :], mask=met, other=0)
                value_scale = tl.load(v_scale_places[:, None] + groups[None, :], mask=scaled, other=0.0)
                each = of_words(key_scale, BLOCK, PADDED // 4, PADDED // GROUP)
                part_0, part_1, part_2, part_3 = split_nibbles(tl.trans(keys), tl.trans(each), ASSEMBLED, PRODUCT)
                score = tl.dot(queries_0, part_0, input_precision="ieee")
                score = tl.dot(queries_1, part_1, score, input_precision="ieee")
                score = tl.dot(queries_2, part_2, score, input_precision="ieee")
                score = tl.dot(queries_3, part_3, score, input_precision="ieee")
            elif GROUP:
                pairs = tl.arange(0, PADDED // 2)
                groups = tl.arange(0, PADDED // GROUP)
                met = inside[:, None] & (pairs < SIZE // 2)[None, :]
                keys = tl.load(k_base + k_places[:, None] + pairs[None, :], mask=met, other=0)
                scaled = inside[:, None] & (groups < SIZE // GROUP)[None, :]
                key_scale = tl.load(k_scale_places[:, None] + groups[None, :], mask=scaled, other=0.0)
                values = tl.load(v_base + v_places[:, None] + pairs[None, :], mask=met, other=0)
                value_scale = tl.load(v_scale_places[:, None] + groups[None, :], mask=scaled, other=0.0)
                even, odd = unpacked(keys, key_scale, BLOCK, PADDED // 2, PADDED // GROUP, PRODUCT)
                score = tl.dot(even_queries, tl.trans(even), input_precision="ieee")
                score = tl.dot(odd_queries, tl.trans(odd), score, input_precision="ieee")
            elif WORDS:
                floats: tl.constexpr = k_pages.dtype.element_ty != tl.int8
                pairs = tl.arange(0, PADDED // 2)
                met = inside[:, None] & (pairs < SIZE // 2)[None, :]
                keys = tl.load(k_words + (k_places // 2)[:, None] + pairs[None, :], mask=met, other=0)
                pairs = tl.arange(0, PADDED_VALUES // 2)
                met = inside[:, None] & (pairs < VALUES // 2)[None, :]
                values = tl.load(v_words + (v_places // 2)[:, None] + pairs[None, :], mask=met, other=0)
                even, odd = split_bytes(tl.trans(keys), floats, ASSEMBLED, PRODUCT)
                score = tl.dot(even_queries, even, input_precision="ieee")
                score = tl.dot(odd_queries, odd, score, input_precision="ieee")
                score = score * tl.load(k_scale_places, mask=inside, other=0.0)[None, :]
                value_scale = tl.load(v_scale_places, mask=inside, other=0.0)
            else:
                met = inside[:, None] & (dims < SIZE)[None, :]
                keys = tl.load(k_base + k_places[:, None] + dims[None, :], mask=met, other=0.0)
                met = inside[:, None] & (numbers < VALUES)[None, :]
                values = tl.load(v_base + v_places[:, None] + numbers[None, :], mask=met, other=0.0)
                score = tl.dot(queries, tl.trans(keys.to(PRODUCT)), input_precision="ieee")
                value_scale = None
                if k_scales is not None:
                    score = score * tl.load(k_scale_places, mask=inside, other=0.0)[None, :]
                    value_scale = tl.load(v_scale_places, mask=inside, other=0.0)
            if CAPPED:
                score = capped(score, inner, outer)
            score = tl.where(visible_keys(key, position, begin, high, reach, path, tree, FUSED), score, float("-inf"))
            frames = load_frames(table_base, at + BLOCK, begin, high, PAGE, BLOCK)
            if GROUP and WORDS:
                each = of_words(value_scale, BLOCK, PADDED // 4, PADDED // GROUP)
                part_0, part_1, part_2, part_3 = split_nibbles(values, each, ASSEMBLED, PRODUCT)
                peak, total, weight, rescale = softmax_weights(score, factor, peak, total, True)
                weight = weight.to(PRODUCT)
                acc = tl.dot(weight, part_0, acc * rescale[:, None], input_precision="ieee")
                acc_1 = tl.dot(weight, part_1, acc_1 * rescale[:, None], input_precision="ieee")
                acc_2 = tl.dot(weight, part_2, acc_2 * rescale[:, None], input_precision="ieee")
                acc_3 = tl.dot(weight, part_3, acc_3 * rescale[:, None], input_precision="ieee")
            elif GROUP:
                even, odd = unpacked(values, value_scale, BLOCK, PADDED // 2, PADDED // GROUP, PRODUCT)
                peak, total, acc, odd_acc = online_softmax_paired(
                    score, factor, even, odd, None, peak, total, acc, odd_acc, True
                )
            elif WORDS:
                even, odd = split_bytes(values, floats, ASSEMBLED, PRODUCT)
                peak, total, acc, odd_acc = online_softmax_paired(
                    score, factor, even, odd, value_scale, peak, total, acc, odd_acc, True
                )
            else:
                peak, total, acc = online_softmax(
                    score, factor, values.to(PRODUCT), value_scale, peak, total, acc, True
                )
        if GROUP and WORDS:
            acc = tl.interleave(tl.interleave(acc, acc_2), tl.interleave(acc_1, acc_3))
        elif GROUP or WORDS:
            acc = tl.interleave(acc, odd_acc)
        if FUSED and NEW == 1:
            # One new token, visible to all queries: no tile product needed.
            new_score = tl.sum(own.to(tl.float32) * new_keys.to(tl.float32), 1)
            if CAPPED:
                new_score = capped(new_score, inner, outer)
            new_score = tl.where(last & (known > 0), repeated(new_score[:, None], ROWS, LIVE, 1), float("-inf"))
            peak, total, acc = online_softmax_one(new_score, factor, new_values.to(tl.float32), peak, total, acc)
        elif FUSED:
            new_key = length - known + new
            if last:
                new_scores = tl.dot(queries, tl.trans(new_keys.to(PRODUCT)), input_precision="ieee")
                if CAPPED:
                    new_scores = capped(new_scores, inner, outer)
                seen = visible_keys(new_key, position, begin, length, reach, path, tree, False)
                new_scores = tl.where(seen, new_scores, float("-inf"))
                peak, total, acc = online_softmax(
                    new_scores, factor, new_values.to(PRODUCT), None, peak, total, acc, True
                )

        stored = (row < LIVE) & (row_tile * ROWS + row < width * GROUPS)
        if active == 1:
            store_heads(
                out,
                acc,
                peak,
                total,
                sinks,
                first + (row_tile * ROWS + row) // GROUPS,
                key_head * GROUPS + (row_tile * ROWS + row) % GROUPS,
                stored,
                out_token,
                VALUES,
                PADDED_VALUES,
                ends is not None,
            )
        else:
            line = (pair * splits + split) * ROWS + row
            tl.store(partial_peak + line, peak, mask=stored)
            tl.store(partial_total + line, total, mask=stored)
            tl.store(partial_acc + line[:, None] * PADDED_VALUES + numbers[None, :], acc, mask=stored[:, None])
            # All warps must have finished their stores before one thread increments the counter.
            tl.debug_barrier()
            arrived = tl.atomic_add(arrivals + pair, 1, sem="acq_rel")
            if arrived == active - 1:
                merged_acc, merged_peak, merged_total = merged(
                    partial_acc,
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
                store_heads(
                    out,
                    merged_acc,
                    merged_peak,
                    merged_total,
                    sinks,
                    token,
                    head,
                    real,
                    out_token,
                    VALUES,
                    PADDED_VALUES,
                    ends is not None,
                )
                # Reset for the next launch, which may be a replay of this one.
                tl.store(arrivals + pair, 0)
