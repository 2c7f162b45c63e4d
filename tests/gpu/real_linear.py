"""Inputs of linear attention and the delta rule with the sizes of MiniMax-Text-01, BASED and Qwen3-Next."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.gpu.place import CUDA
from tests.gpu.real import Draw, Made, recurrent, state_slots
from tests.ops.cases import Case

HEADS, SIZE = (16, 128) if CUDA else (3, 8)
FEATURES = 16 if CUDA else 4
"""Elements of a BASED query, before its Taylor features."""


def taylor_features(draw: Draw, tokens: int) -> Made:
    yield "", Case((draw.normal(tokens, HEADS, FEATURES),), draw.dtype)


def linear_attention(draw: Draw, tokens: int) -> Made:
    """Lightning attention, with a decay per head; and BASED, with a normalizer and without decay."""
    for label, meta, slots in recurrent(draw, tokens):
        total = int(meta.q_start[-1])
        slopes = draw.normal(HEADS, dtype=torch.float32).abs() * 0.3
        q, k, v = (draw.normal(total, HEADS, SIZE) * SIZE**-0.5 for _ in range(3))
        args = (q, k, v, slopes, state_slots(draw, slots, HEADS, SIZE, SIZE), None, meta)
        yield f"{label} lightning", Case(args, draw.dtype, written=(4,))
        # Positive features, as those of a Taylor expansion: the sum that divides stays away from zero.
        wide = 1 + FEATURES + FEATURES * FEATURES
        q, k = (draw.normal(total, HEADS, wide).abs() + 0.5 for _ in range(2))
        normalizer = state_slots(draw, slots, HEADS, wide).abs() + 0.5
        args = (q, k, v, torch.zeros_like(slopes), state_slots(draw, slots, HEADS, wide, SIZE), normalizer, meta)
        yield f"{label} BASED", Case(args, draw.dtype, written=(4, 5))


def delta_rule(draw: Draw, tokens: int) -> Made:
    for label, meta, slots in recurrent(draw, tokens):
        total, key_heads = int(meta.q_start[-1]), max(1, HEADS // 2)
        heads = 2 * key_heads
        q, k = (draw.normal(total, key_heads, SIZE) for _ in range(2))
        v, a, b = draw.normal(total, heads, SIZE), draw.normal(total, heads), draw.normal(total, heads)
        rate, shift = -draw.normal(heads, dtype=torch.float32).exp(), draw.normal(heads, dtype=torch.float32)
        args = (q, k, v, a, b, rate, shift, state_slots(draw, slots, heads, SIZE, SIZE), meta)
        yield label, Case(args, draw.dtype, written=(7,))


GENERATORS: dict[str, Callable[[Draw, int], Made]] = {
    function.__name__: function for function in (taylor_features, linear_attention, delta_rule)
}
