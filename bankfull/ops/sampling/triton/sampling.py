"""Sampling on the device: the same tokens as `bankfull.sample`, with cutoffs of top-p and min-p up to the last place of
an exponential.

Sampling parameters are read by row from the table on the device. No host decision depends on device values, so a call
can be captured; a replay then uses the table, rows, lengths and scores of that time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bankfull.ops.sampling.triton import kernels, truncation
from bankfull.ops.sampling.triton.state import BINS, SHAPE, STATUS, LineBlocks, Lines, Passes
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
        size = LineBlocks(vocab, parts, power_of_two(max(parts, 32)))
        kernels.line_tops_kernel[(lines,)](tops, places, tokens, None, None, size, num_warps=1, **overlapped(tops))
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
        self.lines, vocab = scores.shape
        # Few rows are spread over many programs; many rows fill the device with larger blocks.
        block = _SMALL_BLOCK if self.lines <= _FEW_LINES else _LARGE_BLOCK
        blocks = -(-vocab // block)
        # Bins are fine enough that few candidates remain. If there are more, they are read from the scores.
        self.size = LineBlocks(vocab, blocks, power_of_two(max(blocks, 32)), block, min(vocab, max(4096, vocab // 8)))
        self.tops = self._of_blocks(torch.float32)
        self.places = self._of_blocks(torch.int32)
        self.bottoms = self._of_blocks(torch.float32) if draws else None

    def _of_blocks(self, dtype: torch.dtype) -> Tensor:
        return self._empty(self.size.blocks, dtype=dtype)

    def _empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty((self.lines, *shape), dtype=dtype, device=self.scores.device)

    def best(self) -> Tensor:
        if self.lines:
            self._block_tops()
        return best_of_parts(self.tops, self.places, self.size.vocab)

    def choose(self, rows: Tensor, table: SamplingTable, length: Tensor) -> Tensor:
        tokens = self._empty(dtype=torch.int64)
        if not self.lines:
            return tokens
        reals, wholes, scores, size = table.reals, table.wholes, self.scores, self.size
        assert reals.stride(1) == 1 and wholes.stride(1) == 1 and self.bottoms is not None
        own = Lines(scores, scores.stride(0), rows, length, reals, reals.stride(0), wholes, wholes.stride(0))
        passes = Passes(
            shape=self._empty(SHAPE.value, dtype=torch.float32),
            status=self._empty(STATUS.value, dtype=torch.int64),
            tops=self.tops,
            bottoms=self.bottoms,
            weights=self._of_blocks(torch.int64),
            counts=self._of_blocks(torch.int32),
            bins=self._empty(size.blocks, BINS.value, dtype=torch.int32),
            found_keys=self._empty(size.room, dtype=torch.int32),
            bounds=self._of_blocks(torch.float32),
            cut_bounds=self._of_blocks(torch.float32),
        )
        per_line, per_block = (self.lines,), (self.lines * size.blocks,)
        line = overlapped(scores)
        block = {"num_warps": size.block // 512, **line}
        self._block_tops()
        kernels.line_tops_kernel[per_line](self.tops, self.places, tokens, own, passes, size, num_warps=1, **line)
        kernels.weigh_kernel[per_block](own, passes, size, **block)
        truncation.bracket_kernel[per_line](own, passes, size, num_warps=4, **line)
        truncation.collect_kernel[per_block](own, passes, size, **block)
        truncation.cut_kernel[per_line](own, passes, size, _WAYS, _TILE, num_warps=8, **line)
        kernels.race_kernel[per_block](own, passes, size, int(Purpose.TOKEN), **block)
        # Exact keys must have the bits of the tensor operations.
        exact = {"num_warps": 8, "enable_fp_fusion": False, **line}
        kernels.pick_kernel[per_line](own, passes, tokens, size, int(Purpose.TOKEN), **exact)
        return tokens

    def _block_tops(self) -> None:
        scores, size = self.scores, self.size
        kernels.block_tops_kernel[(self.lines * size.blocks,)](
            scores,
            scores.stride(0),
            self.tops,
            self.places,
            self.bottoms,
            size,
            num_warps=size.block // 512,
            **overlapped(scores),
        )
