"""The kernel of GPTQ's inner loop compared with the loop itself."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bankfull.ops.triton.rounded_columns import MOST_COLUMNS, rounded_columns
from bankfull.quantize import gptq
from tests.quick import examples

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Without a GPU, kernels are interpreted on the host."""
RANGES = [(0, 15), (0, 3), (-127, 127)]


def both(given: tuple[Tensor, ...], lowest: int, highest: int) -> list[tuple[Tensor, Tensor]]:
    """Codes and errors by the loop and by the kernel."""
    there = [one.to(DEVICE) for one in given]
    ours = rounded_columns(*there, lowest, highest)
    loop = gptq.rounded_columns(given[0], given[1].clone(), *given[2:], lowest, highest)
    return [loop, (ours[0].cpu(), ours[1].cpu())]


def whole(columns: int, rows: int, low: int, high: int, numbers: torch.Generator) -> Tensor:
    return torch.randint(low, high + 1, (columns, rows), generator=numbers).float()


@given(st.integers(1, 40), st.integers(1, 70), st.sampled_from(RANGES), st.integers(0, 99))
@examples(12)
def test_codes_and_errors_are_those_of_the_loop_bit_by_bit(
    columns: int, rows: int, bounds: tuple[int, int], seed: int
) -> None:
    """All sums are exact in float32, so that they do not depend on their order."""
    numbers = torch.Generator().manual_seed(seed)
    scales = torch.ldexp(torch.ones(columns, rows), whole(columns, rows, -3, 1, numbers)) * 0.25
    scales[0, 0] = 0.0  # a group of zeros
    zeros = whole(columns, rows, bounds[0], bounds[1], numbers)
    matrix = whole(columns, rows, -64, 64, numbers) / 32
    feedback = whole(columns, columns, -2, 2, numbers) / 4
    wanted = matrix + whole(columns, rows, -4, 4, numbers) / 32
    loop, kernel = both((matrix, wanted, feedback, scales, zeros), *bounds)
    assert torch.equal(loop[0], kernel[0]) and torch.equal(loop[1], kernel[1])


@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize("columns", [17, MOST_COLUMNS])
def test_a_block_of_a_larger_matrix_is_rounded_like_the_loop(columns: int, by_columns: bool) -> None:
    numbers = torch.Generator().manual_seed(columns)
    matrix = torch.randn(columns, 45, generator=numbers)
    wide = torch.randn(columns, columns + 9, generator=numbers) / columns  # a part of the whole triangle
    if by_columns:
        wide = wide.T.contiguous().T
    scales = torch.rand(columns, 45, generator=numbers) / 8 + 0.05
    given = (matrix, matrix + 0.01, wide[:, 4 : 4 + columns], scales, torch.full_like(matrix, 8.0))
    loop, kernel = both(given, 0, 15)
    same = (loop[0] == kernel[0]).float().mean()
    assert same > 0.99, "sums in another order may break a tie"
    torch.testing.assert_close(loop[1][loop[0] == kernel[0]], kernel[1][loop[0] == kernel[0]])
