"""What queries see of their sequence, counted: the query-key pairs, tokens and pages that a window or a mask leaves."""

from __future__ import annotations

import numpy as np

from bankfull.state.mask import MOST, Mask, Sight


def seen_by(mask: Mask, keys: np.ndarray, first: int, end: int) -> np.ndarray:
    """Which of the keys any query at first .. end sees."""
    from_here = np.maximum(keys, first)
    if mask.aligned:
        seen = from_here < np.minimum((keys // mask.window + 1) * mask.window, end)
    else:
        nearest = keys + -(-(from_here - keys) // mask.dilation) * mask.dilation
        seen = nearest < np.minimum(keys + mask.extent, end)
    if mask.columns:
        seen = seen | (keys % mask.stride >= mask.stride - mask.columns)
    elif mask.stride:
        seen = seen | (keys + -(-(from_here - keys) // mask.stride) * mask.stride < end)
    return np.asarray((keys < end) & (seen | (keys < mask.global_tokens)))


def live_pages(mask: Mask, first: int, end: int, page_tokens: int) -> np.ndarray:
    """Pages, in order, that hold a key which a query at first .. end sees."""
    pages = -(-end // page_tokens)
    keys = np.arange(pages * page_tokens)
    return np.flatnonzero(seen_by(mask, keys, first, end).reshape(pages, page_tokens).any(1))


def seen_counts(mask: Mask, queries: np.ndarray) -> np.ndarray:
    """Keys that each query sees. In order of their positions, they are the global tokens, those on the stride
    before the window, and the rest of the window."""
    start = np.maximum(queries // mask.window * mask.window if mask.aligned else queries - mask.extent + 1, 0)
    fixed = np.minimum(mask.global_tokens, queries + 1)
    first = np.maximum(start, mask.global_tokens)
    local = np.maximum((queries - first) // mask.dilation + 1, 0)
    if not mask.stride:
        return np.asarray(fixed + local)
    begin = np.minimum(mask.global_tokens, start)
    if mask.columns:
        return np.asarray(fixed + local + _columns_before(mask, start) - _columns_before(mask, begin))
    return np.asarray(fixed + local + (queries - begin) // mask.stride - (queries - start) // mask.stride)


def _columns_before(mask: Mask, position: np.ndarray) -> np.ndarray:
    rest = position % mask.stride - (mask.stride - mask.columns)
    return np.asarray(position // mask.stride * mask.columns + np.maximum(rest, 0))


def end_of_sight(position: np.ndarray, length: int, block: int) -> np.ndarray:
    """The position after the last one that a token at each position sees in a sequence of `length` tokens."""
    return np.minimum((position // block + 1) * block, length) if block else position + 1


def visible_pairs(queries: int, length: int, sight: Sight, block: int = 0) -> int:
    """Query-key pairs left by a causal mask (with an optional window), by a sparse mask, or by blocks, for the last
    `queries` of `length` tokens."""
    past = length - queries
    if block:
        return int(end_of_sight(np.arange(past, length), length, block).sum())
    if isinstance(sight, Mask):
        return int(seen_counts(sight, np.arange(past, length)).sum())
    whole = queries if sight is None else min(max(sight - past, 0), queries)  # whose window covers the past
    return whole * past + whole * (whole + 1) // 2 + (queries - whole) * (sight or 0)


def live_from(queries: int, length: int, window: int | None) -> int:
    """First position visible to any of the last `queries` tokens."""
    return 0 if window is None else max(0, length - queries + 1 - window)


def held_tokens(length: int, sight: Sight) -> int:
    """Tokens of a sequence of `length` that its next token or a later one may see."""
    if isinstance(sight, Mask):
        return int(seen_by(sight, np.arange(length), length - 1, MOST).sum())
    return length if sight is None else min(length, sight)


def live_tokens(queries: int, length: int, sight: Sight) -> int:
    """Keys visible to any of the last `queries` of `length` tokens."""
    if isinstance(sight, Mask):
        return int(seen_by(sight, np.arange(length), length - queries, length).sum())
    return length - live_from(queries, length, sight)


def seen_by_one(positions: np.ndarray, sight: Sight) -> np.ndarray:
    """Keys that a single query at each of these positions sees."""
    if isinstance(sight, Mask):
        return seen_counts(sight, positions)
    return np.asarray(positions + 1 if sight is None else np.minimum(positions + 1, sight))
