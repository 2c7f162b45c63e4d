"""Mamba-2's and S4's Triton kernels in the interpreter: chunks, steps, kept states, counts on the device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import bankfull.ops.triton.providers  # noqa: F401  (registers the kernels)
from bankfull.ops import OPERATIONS, RecurrentMeta
from bankfull.ops.recurrence.triton import state_space
from tests.ops.test_triton_pointwise import DEVICE, STEP, recurrent_meta


def ssd_args(counts: list[int], kept: list[int], dtype: torch.dtype, groups: int = 2, n: int = 20) -> list[Any]:
    meta, slots = recurrent_meta(counts, kept)
    heads, size, tokens = 2 * groups, 24, sum(counts)
    generator = torch.Generator().manual_seed(len(counts) + tokens)

    def normal(*shape: int, to: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator).to(to).to(DEVICE)

    whole = normal(tokens, heads * size + 2 * groups * n + heads, to=dtype)
    x, b, c, dt = whole.split((heads * size, groups * n, groups * n, heads), dim=1)
    b, c = (part.unflatten(1, (groups, n)) for part in (b, c))
    vectors = -normal(heads).exp(), normal(heads), normal(heads)
    state = normal(slots + 1, heads, size, n)
    return [x.unflatten(1, (heads, size)), dt, vectors[0], b, c, vectors[1], vectors[2], (0.0, 2.0), state, meta]


def both(args: list[Any], given: RecurrentMeta | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Outputs and states of the kernel and of the body."""
    results = []
    for run, meta in (
        (OPERATIONS["ssd_scan"].providers["triton"].run, given or args[-1]),
        (OPERATIONS["ssd_scan"].body, args[-1]),
    ):
        state = args[8].clone()
        results += [run(*args[:8], state, meta), state]
    return results[0], results[1], results[2], results[3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("counts", "kept"),
    [
        ([1, 1, 1], [1, 1, 1]),
        ([5, 1, 17], [3, 1, 0]),
        ([17, 64, 3], [1, 1, 2]),
        ([130, 1, 20], [4, 1, 4]),
    ],
    ids=["decode", "drafts", "chunks", "chunks and drafts"],
)
def test_chunks_and_steps_are_the_recurrence(counts: list[int], kept: list[int], dtype: torch.dtype) -> None:
    args = ssd_args(counts, kept, dtype)
    got, state, expected, state_expected = both(args)
    torch.testing.assert_close(got, expected, rtol=1e-4 + 4 * STEP[dtype], atol=1e-4 + 8 * STEP[dtype])
    torch.testing.assert_close(state, state_expected, rtol=1e-3, atol=1e-3)
    written = args[-1].write[torch.from_numpy(np.arange(max(kept)) < np.array(kept)[:, None]).to(DEVICE)]
    untouched = torch.ones(len(state), dtype=torch.bool, device=DEVICE)
    untouched[written.flatten()] = False
    assert untouched.any() and torch.equal(state[untouched], args[8][untouched])


def test_the_device_counts_the_tokens() -> None:
    """A captured step replays with other counts than those on the host."""
    args = ssd_args([3, 2], [2, 1], torch.float32)
    got, state, expected, state_expected = both(args, replace(args[-1], q_start=np.array([0, 4, 5])))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state, state_expected, rtol=1e-4, atol=1e-4)


def test_a_short_sequence_has_the_same_bits_beside_a_long_one() -> None:
    """Up to SHORT tokens run one by one, whatever the other sequences of the step have."""
    args = ssd_args([9, 70], [1, 1], torch.float32)
    alone_meta, _ = recurrent_meta([9], [1])
    alone_state = args[8].clone()
    alone_meta = replace(alone_meta, read=args[-1].read[:1], write=args[-1].write[:1])
    first = [args[i][:9] if i in (0, 1, 3, 4) else args[i] for i in range(8)]
    alone = state_space.run_ssd_scan(*first, alone_state, alone_meta)
    beside, state, _, _ = both(args)
    assert torch.equal(alone, beside[:9])
    slot = int(args[-1].write[0, 0])
    assert torch.equal(alone_state[slot], state[slot])


def test_empty_batches() -> None:
    meta, _ = recurrent_meta([], [])
    args = ssd_args([1], [1], torch.float32)
    none = [args[i][:0] if i in (0, 1, 3, 4) else args[i] for i in range(9)]
    assert state_space.run_ssd_scan(*none, meta).shape == args[0][:0].shape
    x, weight = torch.zeros(0, 8, device=DEVICE), torch.ones(8, device=DEVICE)
    assert state_space.run_gated_rms_norm(x, x, weight, 1e-5, 1, False).shape == x.shape
    numbers, state = torch.zeros(2, 3, 8, device=DEVICE), torch.zeros(2, 2, 3, 8, device=DEVICE)
    assert state_space.run_diagonal_scan(x, numbers, numbers, weight, state, meta).shape == x.shape
