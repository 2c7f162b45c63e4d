"""GPTQ (2210.17323): columns are rounded one after another, and those that follow make up for each one's error.

The error of a matrix on the calibration text is tr(E H E^T), with E the change of the matrix and H the Hessian. With
H = F D F^T, F unit upper triangular, it is the sum over all columns k of D_k |E_k + sum over j < k of F_jk E_j|^2. So
column k is rounded after the errors of the columns before it were added to it, each times F_jk. This is what updates
with the inverse of H come to (2307.13304), without the inverse: one Cholesky factorization is all that is needed.

Columns come in the order of falling diagonal of H (act-order): those that matter most can still be made up for. Scales
are set before, from the original numbers in the original order of columns (static groups): a permutation need not be
stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bankfull.quantize.grid import Grid, stacked
from bankfull.quantize.method import LayerData, Matrix
from bankfull.weights.qtensor import QTensor
from bankfull.weights.rounding import inverse

BLOCK, INNER = 128, 8
"""Columns that get the errors of all columns before them in one product; and, within them, columns that get one
another's errors singly."""
DAMPING = 0.01
"""Part of the mean diagonal that is added to the diagonal."""
SHRINKS = tuple(1.0 - step / 40 for step in range(-1, 17))
"""Candidates for a group's scale: from a little more than its largest number needs, to 60% of that."""


@dataclass(frozen=True, slots=True)
class Gptq:
    grid: Grid
    damping: float = DAMPING
    act_order: bool = True

    name: str = "gptq"
    calibrated: bool = True

    def quantize(self, layer: LayerData) -> None:
        experts: dict[str, dict[int, QTensor]] = {}
        for group in layer.groups():
            first, expert = group[0]
            grid = self.grid.fitting(layer.matrices[first].shape[-1])
            if grid is None:
                continue  # no group divides the columns: the matrices stay as they are
            hessian = layer.hessian(first, expert)
            tensors = self.rounded(grid, [_matrix(layer, one) for one in group], hessian)
            for (name, number), tensor in zip(group, tensors, strict=True):
                if number is None:
                    layer.quantized[name] = tensor
                else:
                    experts.setdefault(name, {})[number] = tensor
        for name, parts in experts.items():
            layer.quantized[name] = stacked([parts[number] for number in sorted(parts)])

    def rounded(self, grid: Grid, matrices: Sequence[Tensor], hessian: Tensor) -> list[QTensor]:
        """Matrices (out, in) with the same input; they are rounded together, as rows of one matrix."""
        whole = torch.cat(list(matrices)).to(torch.float32)
        scales, zeros = grid.searched(whole, _importance(hessian), SHRINKS)
        feedback = feedback_of(hessian, self.damping, self.act_order)
        if feedback is None:  # nothing enters these matrices, or numbers that are not finite
            codes = grid.codes(_grouped(whole, grid), scales.unsqueeze(-1), zeros.unsqueeze(-1)).flatten(-2)
        else:
            codes = _codes(grid, whole, scales, zeros, feedback)
        sizes = [len(one) for one in matrices]
        parts = (tensor.split(sizes) for tensor in (codes, scales, zeros))
        return [grid.packed(*each) for each in zip(*parts, strict=True)]


def output_error(change: Tensor, hessian: Tensor) -> float:
    """tr(E H E^T): the squared change of a matrix's outputs on the calibration text."""
    return float((change @ hessian).mul_(change).sum(dtype=torch.float64))


@dataclass(frozen=True, slots=True)
class Feedback:
    """H = F D F^T, with the columns of H in `order`."""

    matrix: Tensor
    """F: unit upper triangular."""
    pivots: Tensor
    """The diagonal of D."""
    order: Tensor


def feedback_of(hessian: Tensor, damping: float, act_order: bool) -> Feedback | None:
    """None if H is zero or not finite. Where H is singular in float32 the damping grows."""
    diagonal = hessian.diagonal()
    mean = float(diagonal.mean())
    if not 0 < mean < float("inf"):
        return None
    places = torch.arange(len(diagonal), device=hessian.device)
    order = diagonal.argsort(descending=True, stable=True) if act_order else places
    # H = U U^T with U upper triangular is the Cholesky factorization of H with rows and columns reversed.
    back = order.flip(0)
    reverse = hessian.index_select(0, back).index_select(1, back)
    added = 0.0
    for _ in range(8):
        reverse.diagonal().add_((damping - added) * mean)
        added = damping
        lower, failed = torch.linalg.cholesky_ex(reverse)
        if not int(failed):
            upper = lower.flip(0, 1)
            del lower
            roots = upper.diagonal().clone()
            upper.div_(roots)
            if bool(upper.isfinite().all()):
                return Feedback(upper, roots.square_(), order)
        damping = max(damping, 1e-4) * 4
    return None


def _codes(grid: Grid, whole: Tensor, scales: Tensor, zeros: Tensor, feedback: Feedback) -> Tensor:
    """The codes of a matrix (out, in), as int8."""
    order = feedback.order
    left = whole.T.contiguous().index_select(0, order)
    """Columns as rows, so that each is contiguous: first a column's numbers, then its error."""
    codes = torch.empty(left.shape, dtype=torch.int8, device=left.device)
    scale_rows, zero_rows = scales.T.contiguous(), zeros.T.contiguous()
    group_of = torch.div(order, grid.group, rounding_mode="floor")
    for begin in range(0, len(left), BLOCK):
        block = slice(begin, begin + BLOCK)
        numbers, groups = left[block], group_of[block]
        wanted = torch.addmm(numbers, feedback.matrix[:begin, block].T, left[:begin])
        each = scale_rows.index_select(0, groups), zero_rows.index_select(0, groups)
        codes[block], left[block] = rounded_columns(
            numbers, wanted, feedback.matrix[block, block], *each, grid.lowest, grid.highest
        )
    in_order = torch.empty_like(codes)
    in_order[order] = codes
    return in_order.T.contiguous()


def rounded_columns(
    numbers: Tensor, wanted: Tensor, feedback: Tensor, scales: Tensor, zeros: Tensor, lowest: int, highest: int
) -> tuple[Tensor, Tensor]:
    """Codes (int8) and errors of some columns (columns, rows). `wanted`: the numbers with the errors of all columns
    before these; it is overwritten. Scales and zeros: (columns, rows)."""
    if numbers.is_cuda:
        from bankfull.ops.triton import rounded_columns as kernel

        return kernel.rounded_columns(numbers, wanted, feedback, scales, zeros, lowest, highest)
    inverses = inverse(scales)
    codes, errors = torch.empty_like(numbers, dtype=torch.int8), torch.empty_like(numbers)
    count = len(numbers)
    for at in range(0, count, INNER):
        upto = min(at + INNER, count)
        for column in range(at, upto):
            code = (wanted[column] * inverses[column]).round_().add_(zeros[column]).clamp_(lowest, highest)
            codes[column] = code
            torch.sub(numbers[column], code.sub_(zeros[column]).mul_(scales[column]), out=errors[column])
            if column + 1 < upto:
                wanted[column + 1 : upto].addr_(feedback[column, column + 1 : upto], errors[column])
        if upto < count:
            wanted[upto:].addmm_(feedback[at:upto, upto:].T, errors[at:upto])
    return codes, errors


def _importance(hessian: Tensor) -> Tensor | None:
    diagonal = hessian.diagonal()
    mean = float(diagonal.mean())
    # A column that the text never uses still counts a little.
    return diagonal + 1e-3 * mean if 0 < mean < float("inf") else None


def _matrix(layer: LayerData, matrix: Matrix) -> Tensor:
    name, expert = matrix
    return layer.matrices[name] if expert is None else layer.matrices[name][expert]


def _grouped(whole: Tensor, grid: Grid) -> Tensor:
    return whole.unflatten(-1, (-1, grid.group))
