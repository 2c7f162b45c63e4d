"""Sampling on the device: the same tokens as `bankfull.sample`, with cutoffs of top-p and min-p up to the last place of
an exponential.

Sampling parameters are read by row from the table on the device. No host decision depends on device values, so a call
can be captured; a replay then uses the table, rows, lengths and scores of that time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bankfull.ops.sampling.triton import kernels, truncation
from bankfull.ops.sampling.triton.state import BINS, SHAPE, STATUS
from bankfull.ops.triton.launch import overlapped, power_of_two
from bankfull.sample.random import Purpose
from bankfull.sample.table import SamplingTable

_FEW_LINES, _SMALL_BLOCK, _LARGE_BLOCK = 8, 1024, 4096
_WAYS, _TILE = 8, 512


def best(scores: Tensor) -> Tensor:
    """Argmax of each row, the first among equals; -1 if the maximum is not finite or any score is NaN."""
    lines = scores.reshape(-1, scores.shape[-1])
    return _Step(lines, draws=False).best().reshape(scores.shape[:-1])


def best_of_parts(tops: Tensor, places: Tensor, vocab: int) -> Tensor:
    """`best`, from the maximum of each part of a row (lines, parts) and its first index; a NaN must count as
    infinity."""
    lines, parts = tops.shape
    tokens = torch.empty(lines, dtype=torch.int64, device=tops.device)
    if lines:
        kernels.line_tops_kernel[(lines,)](
            tops,
            places,
            tops,
            tokens,
            tokens,
            0,
            tokens,
            0,
            tokens,
            tokens,
            tokens,
            VOCAB=vocab,
            BLOCKS=parts,
            WIDTH=power_of_two(max(parts, 32)),
            DRAWS=False,
            num_warps=1,
            **overlapped(tops),
        )
    return tokens


def choose(scores: Tensor, rows: Tensor, table: SamplingTable, length: Tensor) -> Tensor:
    """One token per row of `scores`, for rows without typical sampling. 16-bit scores are widened as they are read;
    float64 is not supported."""
    return choose_captured(scores, rows, table, length, greedy_only=False)


def choose_captured(scores: Tensor, rows: Tensor, table: SamplingTable, length: Tensor, *, greedy_only: bool) -> Tensor:
    """`choose`; if the host knows that all rows are greedy, only the argmax."""
    assert scores.dtype != torch.float64 and rows.dtype == torch.int64
    step = _Step(scores, draws=not greedy_only)
    return step.best() if greedy_only else step.choose(rows.contiguous(), table, length.contiguous())


class _Step:
    """The launches for one batch, and the memory between them."""

    def __init__(self, scores: Tensor, draws: bool) -> None:
        self.scores = scores if scores.stride(-1) == 1 else scores.contiguous()
        self.lines, self.vocab = scores.shape
        # Few rows are spread over many programs; many rows fill the device with larger blocks.
        self.block = _SMALL_BLOCK if self.lines <= _FEW_LINES else _LARGE_BLOCK
        self.blocks = -(-self.vocab // self.block)
        self.width = power_of_two(max(self.blocks, 32))
        self.warps = self.block // 512
        self.overlap = overlapped(scores)
        self.tokens = self._empty(dtype=torch.int64)
        self.tops = self._empty(self.blocks, dtype=torch.float32)
        self.places = self._empty(self.blocks, dtype=torch.int32)
        self.bottoms = self._empty(self.blocks, dtype=torch.float32) if draws else self.tops

    def _empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty((self.lines, *shape), dtype=dtype, device=self.scores.device)

    def best(self) -> Tensor:
        if self.lines:
            self._block_tops(draws=False)
        return best_of_parts(self.tops, self.places, self.vocab)

    def choose(self, rows: Tensor, table: SamplingTable, length: Tensor) -> Tensor:
        if not self.lines:
            return self.tokens
        assert table.reals.stride(1) == 1 and table.wholes.stride(1) == 1
        reals = (table.reals, table.reals.stride(0))
        wholes = (table.wholes, table.wholes.stride(0))
        scores = (self.scores, self.scores.stride(0))
        shape = self._empty(SHAPE.value, dtype=torch.float32)
        status = self._empty(STATUS.value, dtype=torch.int64)
        weights = self._empty(self.blocks, dtype=torch.int64)
        counts = self._empty(self.blocks, dtype=torch.int32)
        bins = self._empty(self.blocks, BINS.value, dtype=torch.int32)
        # Bins are fine enough that few candidates remain. If there are more, they are read from the scores.
        room = min(self.vocab, max(4096, self.vocab // 8))
        found_keys = self._empty(room, dtype=torch.int32)

        per_line, per_block = (self.lines,), (self.lines * self.blocks,)
        line = {"VOCAB": self.vocab, "BLOCKS": self.blocks, "WIDTH": self.width, **self.overlap}
        block = {
            "VOCAB": self.vocab,
            "BLOCKS": self.blocks,
            "BLOCK": self.block,
            "num_warps": self.warps,
            **self.overlap,
        }
        self._block_tops(draws=True)
        kernels.line_tops_kernel[per_line](
            self.tops,
            self.places,
            self.bottoms,
            rows,
            *reals,
            *wholes,
            self.tokens,
            shape,
            status,
            DRAWS=True,
            num_warps=1,
            **line,
        )
        kernels.weigh_kernel[per_block](*scores, shape, status, weights, bins, **block)
        truncation.bracket_kernel[per_line](rows, *reals, *wholes, shape, status, weights, bins, num_warps=4, **line)
        truncation.collect_kernel[per_block](*scores, shape, status, weights, counts, found_keys, ROOM=room, **block)
        truncation.cut_kernel[per_line](
            *scores,
            rows,
            *reals,
            shape,
            status,
            weights,
            counts,
            found_keys,
            ROOM=room,
            WAYS=_WAYS,
            TILE=_TILE,
            num_warps=8,
            **line,
        )
        bounds, cut_bounds = (self._empty(self.blocks, dtype=torch.float32) for _ in range(2))
        kernels.race_kernel[per_block](
            *scores,
            rows,
            *wholes,
            length,
            shape,
            status,
            self.tops,
            bounds,
            cut_bounds,
            counts,
            PURPOSE=int(Purpose.TOKEN),
            **block,
        )
        kernels.pick_kernel[per_line](
            *scores,
            rows,
            *wholes,
            length,
            shape,
            status,
            bounds,
            cut_bounds,
            counts,
            self.tokens,
            BLOCK=self.block,
            PURPOSE=int(Purpose.TOKEN),
            num_warps=8,
            enable_fp_fusion=False,  # exact keys must have the bits of the tensor operations
            **line,
        )
        return self.tokens

    def _block_tops(self, draws: bool) -> None:
        kernels.block_tops_kernel[(self.lines * self.blocks,)](
            self.scores,
            self.scores.stride(0),
            self.tops,
            self.places,
            self.bottoms,
            VOCAB=self.vocab,
            BLOCK=self.block,
            BLOCKS=self.blocks,
            DRAWS=draws,
            num_warps=self.warps,
            **self.overlap,
        )
