"""A recurrence gives the same numbers however a sequence is cut into chunks: the same bits on CPU kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bankfull.ops import OPERATIONS, RecurrentMeta, native
from tests.quick import examples

STATES = {
    "causal_conv_silu": (12, 3),
    "selective_scan": (12, 5),
    "ssd_scan": (4, 6, 5),
    "diagonal_scan": (2, 5, 12),
}
PER_TOKEN = {"causal_conv_silu": (0,), "selective_scan": (0, 1, 3, 4), "ssd_scan": (0, 1, 3, 4), "diagonal_scan": (0,)}
"""Operands with one row per token."""


def operands(name: str, tokens: int, seed: int, dtype: torch.dtype) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype)

    if name == "causal_conv_silu":
        return [normal(tokens, 12), normal(12, 4), normal(12)]
    if name == "selective_scan":
        delta = torch.nn.functional.softplus(normal(tokens, 12))
        return [normal(tokens, 12), delta, -normal(12, 5).exp(), normal(tokens, 5), normal(tokens, 5), normal(12)]
    if name == "ssd_scan":
        x, b, c, dt = normal(tokens, 24 + 10 + 10 + 4).split((24, 10, 10, 4), dim=1)
        vectors = -normal(4).exp(), normal(4), normal(4)
        b, c = (part.unflatten(1, (2, 5)) for part in (b, c))
        return [x.unflatten(1, (4, 6)), dt, vectors[0], b, c, vectors[1], vectors[2], (0.0, float("inf"))]
    return [normal(tokens, 12), 0.6 * normal(2, 5, 12).tanh(), normal(2, 5, 12), normal(12)]


def ran(run: Any, name: str, args: list[Any], chunks: list[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The outputs, and the state after the last token. The state moves between two slots."""
    state = torch.zeros(3, *STATES[name], dtype=dtype)
    parts, first, read = [], 0, 0
    for turn, count in enumerate(chunks):
        write = 1 + turn % 2
        meta = RecurrentMeta(np.array([0, count]), np.array([1]), torch.tensor([read]), torch.tensor([[write]]))
        own = [arg[first : first + count] if i in PER_TOKEN[name] else arg for i, arg in enumerate(args)]
        parts.append(run(*own, state, meta))
        first, read = first + count, write
    return torch.cat(parts), state[read]


@pytest.mark.parametrize("name", sorted(STATES))
@examples(15)
@given(chunks=st.lists(st.integers(1, 23), min_size=2, max_size=6), seed=st.integers(0, 2**32))
def test_chunks_change_nothing(name: str, chunks: list[int], seed: int) -> None:
    total = sum(chunks)
    args = operands(name, total, seed, torch.float64)
    body = OPERATIONS[name].body
    whole, cut = (ran(body, name, args, how, torch.float64) for how in ([total], chunks))
    for one, other in zip(whole, cut, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    if native.status() is not None:
        return
    args = operands(name, total, seed, torch.float32)
    kernel = OPERATIONS[name].providers["native"].run
    whole, cut, single = (ran(kernel, name, args, how, torch.float32) for how in ([total], chunks, [1] * total))
    for one, *others in zip(whole, cut, single, strict=True):
        assert all(torch.equal(one, other) for other in others)
