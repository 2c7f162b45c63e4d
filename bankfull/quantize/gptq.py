"""GPTQ (2210.17323): columns are rounded one after another, and those that follow make up for each one's error.

The error of a matrix on the calibration text is tr(D H D^T), with D the change of the matrix and H the Hessian. After a
column has been rounded, the best change of the columns that remain follows from the Cholesky factor U of the inverse
of H. Columns come in the order of falling diagonal of H (act-order): those that matter most can still be made up for.
Scales are set before, from the original numbers in the original order of columns (static groups): a permutation
need not be stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bankfull.quantize.grid import Grid, stacked
from bankfull.quantize.method import LayerData, Matrix
from bankfull.weights.qtensor import QTensor

BLOCK, INNER = 256, 32
"""Columns whose updates of later columns are one product; and, within them, columns that update one another singly."""
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
            made = self.rounded(grid, [_matrix(layer, one) for one in group], hessian)
            for (name, number), tensor in zip(group, made, strict=True):
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
        factor = inverse_factor(hessian, self.damping, self.act_order)
        if factor is None:  # nothing enters these matrices, or numbers that are not finite
            codes = grid.codes(_grouped(whole, grid), scales.unsqueeze(-1), zeros.unsqueeze(-1)).flatten(-2)
        else:
            codes = _codes(grid, whole, scales, zeros, *factor)
        sizes = [len(one) for one in matrices]
        parts = (tensor.split(sizes) for tensor in (codes, scales, zeros))
        return [grid.packed(*each) for each in zip(*parts, strict=True)]


def output_error(change: Tensor, hessian: Tensor) -> float:
    """tr(D H D^T): the squared change of a matrix's outputs on the calibration text."""
    return float((change @ hessian).mul_(change).sum(dtype=torch.float64))


def inverse_factor(hessian: Tensor, damping: float, act_order: bool) -> tuple[Tensor, Tensor] | None:
    """The upper triangular U with U^T U = H^-1, for the columns in an order that is returned, too. None if H is zero or
    not finite. Where H is singular in float32 the damping grows."""
    diagonal = hessian.diagonal()
    mean = float(diagonal.mean())
    if not 0 < mean < float("inf"):
        return None
    order = diagonal.argsort(descending=True, stable=True) if act_order else torch.arange(len(diagonal))
    # H = U' U'^T with U' upper triangular is the Cholesky factorization of H with rows and columns reversed. Then U is
    # the inverse of U': one factorization and one triangular inversion.
    back = order.flip(0)
    reverse = hessian[back][:, back]
    for _ in range(8):
        damped = reverse.clone()
        damped.diagonal().add_(damping * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not int(failed):
            del damped
            identity = torch.eye(len(order))
            inverse = torch.linalg.solve_triangular(lower, identity, upper=False)
            factor = inverse.flip(0, 1).contiguous()
            if bool(factor.isfinite().all()):
                return factor, order
        damping = max(damping, 1e-4) * 4
    return None


def _codes(grid: Grid, whole: Tensor, scales: Tensor, zeros: Tensor, factor: Tensor, order: Tensor) -> Tensor:
    # Columns as rows, so that each is contiguous.
    left = whole.T[order].contiguous()
    scale_rows, zero_rows = scales.T.contiguous(), zeros.T.contiguous()
    group_of = torch.div(order, grid.group, rounding_mode="floor").tolist()
    steps, columns = factor.diagonal().tolist(), len(order)
    codes = torch.empty(columns, len(whole), dtype=torch.float32)
    errors = torch.empty(BLOCK, len(whole))
    for begin in range(0, columns, BLOCK):
        end = min(begin + BLOCK, columns)
        for at in range(begin, end, INNER):
            upto = min(at + INNER, end)
            for column in range(at, upto):
                row, group = left[column], group_of[column]
                code = grid.codes(row, scale_rows[group], zero_rows[group])
                codes[column] = code
                error = code.sub(zero_rows[group]).mul_(scale_rows[group]).sub_(row).div_(steps[column])
                errors[column - begin] = error
                if column + 1 < upto:
                    left[column + 1 : upto].addr_(factor[column, column + 1 : upto], error)
            if upto < end:
                left[upto:end].addmm_(factor[at:upto, upto:end].T, errors[at - begin : upto - begin])
        if end < columns:
            left[end:].addmm_(factor[begin:end, end:].T, errors[: end - begin])
    made = torch.empty_like(codes)
    made[order] = codes
    return made.T.contiguous()


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
