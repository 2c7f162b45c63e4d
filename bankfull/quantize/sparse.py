"""One-shot pruning: weights become zero without retraining, by Wanda (2306.11695) or SparseGPT (2301.00774).

Wanda drops the weights with the smallest |weight| times norm of their input, row by row. SparseGPT drops the weights
whose loss costs least by the Hessian, and lets the weights that remain make up for it, column by column as in GPTQ.

Two zeros of each four weights (2:4) need not be stored (`weights.formats.two_of_four`). Other zeros save no bytes and
no time: every format stores them, and no kernel skips them. `neurons` removes whole rows and columns instead.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bankfull.errors import ConfigError
from bankfull.quantize.gptq import DAMPING, feedback_of
from bankfull.quantize.method import LayerData
from bankfull.weights.qtensor import QTensor

BLOCK = 128
"""Columns of which SparseGPT chooses the weights to drop at once; their updates of later columns are one product."""
RULES = ("wanda", "sparsegpt", "magnitude")
LARGEST_GROUP = 32


@dataclass(frozen=True, slots=True)
class SparsityPattern:
    """A share of zeros, or so many weights of each group of adjacent columns."""

    share: float
    """Share of the weights that become zero."""
    group: int | None = None
    """Columns of a group; None: the zeros may stand anywhere."""

    @property
    def dropped(self) -> int:
        """Zeros in a group."""
        assert self.group is not None
        return round(self.share * self.group)

    @property
    def is_two_of_four(self) -> bool:
        return self.group == 4 and self.dropped == 2

    def statement(self, drops_zeros: bool) -> str:
        """What the pattern saves. `drops_zeros`: the files do not hold them."""
        zeros = f"{self.share:.0%} of the weights are zero"
        if drops_zeros:
            return (
                f"{zeros} and are not stored. A GPU multiplies the matrices as they are; on a CPU they get their zeros "
                "back. Others read these files with compressed-tensors before 0.15 only (vLLM before 0.19.1; newer "
                "transformers puts random weights in their place): --format safetensors stores zeros, for every engine."
            )
        if self.is_two_of_four:
            return (
                f"{zeros}, and the files are as large as before, for every engine. --quantize 2:4 drops the zeros at "
                "load, for a GPU."
            )
        return (
            f"{zeros}. The file is as large as before and runs as fast: zeros are stored, and no kernel skips them. "
            "Pruned blocks of neurons save bytes and time, and so does 2:4."
        )


def parse_pattern(text: str) -> SparsityPattern:
    """ "50%", "0.5" or "2:4" (of four adjacent weights two may differ from zero)."""
    if match := re.fullmatch(r"(\d{1,2}):(\d{1,2})", text.strip()):
        kept, group = int(match[1]), int(match[2])
        if 0 < kept < group <= LARGEST_GROUP:
            return SparsityPattern(1 - kept / group, group)
    elif match := re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)(%?)", text.strip()):
        share = float(match[1]) / (100 if match[2] else 1)
        if 0 < share < 1:
            return SparsityPattern(share)
    raise ConfigError(f"--sparsity {text[:20]!r} is no pattern; use a share of zeros (50%), or 2:4.")


@dataclass(frozen=True, slots=True)
class Pruner:
    """A quantization method that stores matrices as they were, with zeros."""

    rule: str
    pattern: SparsityPattern
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise ConfigError(f"Pruning by {self.rule[:20]!r} is not offered; use {', '.join(RULES)}.")

    @property
    def name(self) -> str:
        return self.rule

    @property
    def calibrated(self) -> bool:
        return self.rule != "magnitude"

    def quantize(self, layer: LayerData) -> None:
        if not self.calibrated:
            for name, matrix in layer.matrices.items():
                flat = matrix.flatten(0, -2)
                if self._fits(flat):
                    layer.quantized[name] = self._stored(self.pruned(flat, torch.empty(0)).view_as(matrix))
            return
        experts: dict[str, dict[int, Tensor]] = {}
        for group in layer.groups():
            first, of_first = group[0]
            hessian = layer.hessian(first, of_first)
            for name, expert in group:
                matrix = layer.matrices[name] if expert is None else layer.matrices[name][expert]
                if not self._fits(matrix):
                    continue  # stays as it is
                pruned = self.pruned(matrix, hessian)
                if expert is None:
                    layer.quantized[name] = self._stored(pruned)
                else:
                    experts.setdefault(name, {})[expert] = pruned
        for name, parts in experts.items():
            layer.quantized[name] = self._stored(torch.stack([parts[number] for number in sorted(parts)]))

    def pruned(self, matrix: Tensor, hessian: Tensor) -> Tensor:
        """`matrix`: float32 (out, in)."""
        if self.rule == "magnitude":
            return pruned_by(matrix.abs(), matrix, self.pattern, by_row=False)
        if self.rule == "wanda":
            return pruned_by(matrix.abs() * hessian.diagonal().clamp(min=0).sqrt(), matrix, self.pattern, by_row=True)
        return sparse_gpt(matrix, hessian, self.pattern)

    def _fits(self, matrix: Tensor) -> bool:
        return self.pattern.group is None or matrix.shape[-1] % self.pattern.group == 0

    def _stored(self, matrix: Tensor) -> QTensor:
        return QTensor.dense(matrix.to(self.dtype).contiguous())


def pruned_by(scores: Tensor, matrix: Tensor, pattern: SparsityPattern, by_row: bool) -> Tensor:
    """The matrix without the weights of the lowest scores. `by_row`: each row loses the same number of weights."""
    if pattern.group is not None:
        parts = scores.unflatten(-1, (-1, pattern.group))
        lowest = parts.argsort(-1)[..., : pattern.dropped]
        return matrix.masked_fill(torch.zeros_like(parts, dtype=torch.bool).scatter(-1, lowest, True).flatten(-2), 0)
    scored = scores if by_row else scores.reshape(1, -1)
    lowest = scored.argsort(-1)[:, : round(pattern.share * scored.shape[-1])]
    return matrix.masked_fill(torch.zeros_like(scored, dtype=torch.bool).scatter(-1, lowest, True).view_as(matrix), 0)


def sparse_gpt(matrix: Tensor, hessian: Tensor, pattern: SparsityPattern) -> Tensor:
    feedback = feedback_of(hessian, DAMPING, act_order=False)
    if feedback is None:  # nothing enters this matrix: what it loses makes no difference
        return pruned_by(matrix.abs(), matrix, pattern, by_row=True)
    numbers = matrix.T.to(torch.float32).contiguous()  # columns as rows
    left, errors = numbers.clone(), torch.empty_like(numbers)
    pivots = feedback.pivots[:, None]
    columns, owed = len(left), 0.0
    width = BLOCK if pattern.group is None else BLOCK // pattern.group * pattern.group
    for begin in range(0, columns, width):
        end = min(begin + width, columns)
        left[begin:end].addmm_(feedback.matrix[:begin, begin:end].T, errors[:begin])
        dropped = torch.zeros_like(left[begin:end], dtype=torch.bool)
        if pattern.group is None:
            scores = (left[begin:end].square() * pivots[begin:end]).flatten()
            # Rounding is carried over, so that the whole matrix has the wanted share.
            owed += pattern.share * len(scores)
            count = round(owed)
            owed -= count
            dropped.view(-1)[scores.argsort()[:count]] = True
        for column in range(begin, end):
            if pattern.group is not None and (column - begin) % pattern.group == 0:
                part = slice(column, column + pattern.group)
                lowest = (left[part].square() * pivots[part]).argsort(0)[: pattern.dropped]
                dropped[column - begin : column - begin + pattern.group].scatter_(0, lowest, True)
            left[column].masked_fill_(dropped[column - begin], 0)
            errors[column] = numbers[column] - left[column]
            left[column + 1 : end].addr_(feedback.matrix[column, column + 1 : end], errors[column])
    return left.T.contiguous()


def zeros_of(tensors: Mapping[str, QTensor]) -> float:
    """Share of zeros in these matrices."""
    values = [tensor.dequantize() for tensor in tensors.values()]
    return sum(int((value == 0).sum()) for value in values) / max(1, sum(value.numel() for value in values))
