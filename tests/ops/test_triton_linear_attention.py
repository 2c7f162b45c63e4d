"""The GPU kernels of linear attention and the delta rule: chunks, borders of chunks, and tokens one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from bankfull.ops import OPERATIONS
from bankfull.ops.recurrence.triton.linear_attention import CHUNK, FEW_TOKENS, SMALL_CHUNK, chunk_for
from bankfull.ops.triton import providers  # noqa: F401  (registers the kernels that tests look up)
from tests.ops.cases import moved
from tests.ops.compare import assert_close
from tests.ops.test_triton_pointwise import DEVICE, recurrent_meta

Draw = Callable[..., Tensor]
COUNTS: tuple[tuple[list[int], list[int]], ...] = (
    ([CHUNK + 5, 1, 2 * CHUNK + 1], [1, 1, 3]),
    ([CHUNK], [0]),
    ([40, 1], [1, 0]),
    ([7, 2], [4, 2]),
)
"""Tokens of each sequence and states that it keeps: chunks that are full, begun, or cut by the kept tokens."""


@pytest.fixture
def draw() -> Draw:
    numbers = torch.Generator().manual_seed(3)

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=numbers).to(dtype).to(DEVICE)

    return normal


def compare(name: str, written: tuple[int, ...], *args: Any) -> None:
    """Outputs and all slots are the body's, which computes in float32 on the host."""
    results = []
    for device, run in ((DEVICE, OPERATIONS[name].providers["triton"].run), ("cpu", OPERATIONS[name].body)):
        own = [moved(arg, device) for arg in args]
        results.append((run(*own), *(own[i] for i in written)))
    got, expected = results
    assert got[0].dtype == expected[0].dtype
    for one, other in zip(got, expected, strict=True):
        assert_close(one, other, args[0].dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("counts", "kept"), COUNTS)
def test_decaying_attention(counts: list[int], kept: list[int], dtype: torch.dtype, draw: Draw) -> None:
    heads, key, value, tokens = 3, 20, 24, sum(counts)
    meta, slots = recurrent_meta(counts, kept)
    q, k, v = draw(tokens, heads, 2 * key + value, dtype=dtype).split((key, key, value), -1)  # strided heads
    slopes = torch.tensor([0.0, 0.05, 3.0], device=DEVICE)  # 3: underflows within a chunk
    compare("linear_attention", (4,), q, k, v, slopes, draw(slots, heads, key, value), None, meta)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("counts", "kept"), COUNTS[:3])
def test_normalized_attention(counts: list[int], kept: list[int], dtype: torch.dtype, draw: Draw) -> None:
    heads, key, value, tokens = 2, 273, 20, sum(counts)
    meta, slots = recurrent_meta(counts, kept)
    q, k = draw(tokens, heads, key, dtype=dtype).abs(), draw(tokens, heads, key, dtype=dtype).abs()
    v, slopes = draw(tokens, heads, value, dtype=dtype), torch.zeros(heads, device=DEVICE)
    state, sums = draw(slots, heads, key, value), draw(slots, heads, key).abs()
    compare("linear_attention", (4, 5), q, k, v, slopes, state, sums, meta)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("counts", "kept"), COUNTS)
def test_delta_rule(counts: list[int], kept: list[int], dtype: torch.dtype, draw: Draw) -> None:
    key_heads, heads, key, value, tokens = 2, 4, 20, 24, sum(counts)
    meta, slots = recurrent_meta(counts, kept)
    q, k = draw(tokens, 2 * key_heads * key, dtype=dtype).unflatten(1, (-1, key)).split(key_heads, 1)
    b, a = draw(tokens, 2 * heads, dtype=dtype).split(heads, -1)
    rate, shift = -draw(heads).exp(), draw(heads)
    v, state = draw(tokens, heads, value, dtype=dtype), draw(slots, heads, key, value)
    compare("delta_rule", (7,), q, k, v, a, b, rate, shift, state, meta)


def test_equal_keys_do_not_amplify_rounding(draw: Draw) -> None:
    """The hardest system of a chunk: all keys are the same, written with full strength and without decay."""
    tokens, heads, key, value = 2 * CHUNK + 1, 1, 16, 16
    meta, slots = recurrent_meta([tokens], [1])
    k = draw(1, heads, key).repeat(tokens, 1, 1)
    strong, none = torch.full((tokens, heads), 20.0, device=DEVICE), torch.full((heads,), -1e-6, device=DEVICE)
    q, v, state = draw(tokens, heads, key), draw(tokens, heads, value), draw(slots, heads, key, value)
    compare("delta_rule", (7,), q, k, v, strong, strong, none, torch.zeros(heads, device=DEVICE), state, meta)


def test_a_step_in_which_every_state_is_kept_takes_tokens_one_by_one() -> None:
    wide, half = torch.float32, torch.bfloat16
    assert chunk_for(tokens=32 * 9, sequences=32, kept=9, dtype=half, key=128) == 0
    assert chunk_for(tokens=64, sequences=64, kept=1, dtype=half, key=128) == 0
    assert chunk_for(tokens=FEW_TOKENS, sequences=1, kept=1, dtype=half, key=128) == 0
    assert chunk_for(tokens=2048, sequences=64, kept=1, dtype=half, key=128) == CHUNK
    assert chunk_for(tokens=2048, sequences=64, kept=1, dtype=half, key=512) == SMALL_CHUNK
    assert chunk_for(tokens=2048, sequences=64, kept=1, dtype=wide, key=128) == SMALL_CHUNK


def test_token_counts_may_change_between_replays(draw: Draw) -> None:
    """The counts on the device are used; those on the host only give the number of sequences."""
    meta, slots = recurrent_meta([30, 2], [1, 2])
    there = moved(meta, DEVICE)
    there.q_start[1], there.kept[0] = 3, 2  # the host's
    q, k, v, slopes = draw(32, 2, 16), draw(32, 2, 16), draw(32, 2, 16), draw(2).abs()
    state = draw(slots, 2, 16, 16)
    own = state.clone()
    got = OPERATIONS["linear_attention"].providers["triton"].run(q, k, v, slopes, own, None, there)
    right, _ = recurrent_meta([30, 2], [1, 2])
    here = [moved(x, "cpu") for x in (q, k, v, slopes, state)]
    expected = OPERATIONS["linear_attention"].body(*here, None, moved(right, "cpu"))
    assert_close(got, expected, torch.float32)
    assert_close(own, here[-1], torch.float32)
