"""Sampling in C++, row by row: the same tokens as `bankfull.sample`, with the cutoffs of top-p and min-p up to the last
place of an exponential."""

from __future__ import annotations

import torch
from torch import Tensor

from bankfull.ops.native.checks import float_rows
from bankfull.ops.native.extension import required
from bankfull.sample.random import Purpose
from bankfull.sample.table import CHILD, GREEDY, MIN_P, SEED, TEMPERATURE, TOP_K, TOP_P, SamplingTable

_native = required()
_REALS, _WHOLES = [TEMPERATURE, TOP_P, MIN_P], [TOP_K, SEED, CHILD]
_At = tuple[int, int, tuple[int, ...]]
ParamsAt = tuple[_At, _At, int]
"""Location of the sampling parameters of all rows: address, column count and used columns of reals and of integers, and
the RNG purpose."""


def params_at(table: SamplingTable) -> ParamsAt:
    """The parameters' location, for kernels that read the table in place; its tensors must stay alive."""
    assert table.reals.is_contiguous() and table.wholes.is_contiguous()
    return (
        (table.reals.data_ptr(), table.reals.shape[1], tuple(_REALS)),
        (table.wholes.data_ptr(), table.wholes.shape[1], (*_WHOLES, GREEDY)),
        int(Purpose.TOKEN),
    )


def choose(scores: Tensor, rows: Tensor, table: SamplingTable, length: Tensor) -> Tensor:
    """One token per row of float32 `scores`, for rows without typical sampling."""
    dense = float_rows(scores)
    reals = table.reals[rows][:, _REALS].contiguous()
    wholes = table.wholes[rows]
    wanted = torch.cat((wholes[:, _WHOLES], length[:, None], wholes[:, GREEDY, None]), 1).contiguous()
    tokens = torch.empty(len(dense), dtype=torch.int64)
    _native.sample(
        dense.data_ptr(), reals.data_ptr(), wanted.data_ptr(), tokens.data_ptr(), *dense.shape, int(Purpose.TOKEN)
    )
    return tokens
