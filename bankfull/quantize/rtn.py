"""Round to nearest: each matrix by itself, without activations; optionally with the range that loses least.

Codes are counted with the scale as it is stored. `clip`: besides the full range, each group tries ranges shrunk by up
to half, and takes the one with the least mean squared error. A shrunk range clips the largest weights and rounds the
others more finely.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bankfull.errors import ModelError
from bankfull.quantize.grid import Grid
from bankfull.quantize.method import LayerData
from bankfull.weights.formats import SCHEMES
from bankfull.weights.formats.groups import WITH_ZEROS, bits_of
from bankfull.weights.formats.rows import FP8, INT8_ROW, LARGEST_FP8
from bankfull.weights.qtensor import QTensor
from bankfull.weights.quantize import quantize
from bankfull.weights.rounding import inverse, signed

SHRINKS = tuple(1.0 - step / 20 for step in range(11))
"""Shares of the full range that clipping tries."""
ELEMENTS_AT_ONCE = 1 << 21
"""Bounds the working memory, several times the size of the values."""

Coded = tuple[Tensor, Tensor]
"""Codes of rows, as float32, and their scales (n, 1)."""


@dataclass(frozen=True, slots=True)
class RoundToNearest:
    scheme_for: Callable[[str, int], str | None]
    """Scheme of a matrix by its name and its number of columns; None: it is kept."""
    clip: bool = False
    scale_dtype: torch.dtype = torch.float32
    """Scales are representable in it, and in the scheme's own dtype."""
    name: str = "rtn"
    calibrated: bool = False

    def quantize(self, layer: LayerData) -> None:
        for name, weight in layer.matrices.items():
            scheme = self.scheme_for(name, weight.shape[-1])
            if scheme is None:
                continue
            try:
                layer.quantized[name] = rounded(weight, scheme, self.clip, self.scale_dtype)
            except ModelError as error:
                raise ModelError(f"{name}: {error}") from None


def rounded(weight: Tensor, scheme: str, clip: bool = False, scale_dtype: torch.dtype = torch.float32) -> QTensor:
    """A matrix (..., columns) in any scheme that weights are quantized to. Block formats have their own encodings,
    which know no clipping."""
    if not bool(weight.isfinite().all()):
        raise ModelError("a matrix with values that are not finite cannot be quantized; use another checkpoint.")
    target, whole = SCHEMES[scheme], weight.detach().to(torch.float32)
    if target.name in (INT8_ROW, FP8):
        return _by_row(whole, scheme, clip, scale_dtype)
    if "codes" not in (part.name for part in target.parts):
        return quantize(whole, scheme)
    grid = Grid(bits_of(scheme), target.block, not scheme.startswith(WITH_ZEROS), scale_dtype)
    shape = tuple(weight.shape)
    flat = whole.reshape(-1, shape[-1])
    scales, zeros = grid.searched(flat, None, SHRINKS if clip else SHRINKS[:1])
    step = max(1, ELEMENTS_AT_ONCE // shape[-1])
    parts = zip(flat.split(step), scales.split(step), zeros.split(step), strict=True)
    return QTensor.stacked([grid.rounded(*part) for part in parts]).reshape_leading(*shape[:-1])


def _by_row(whole: Tensor, scheme: str, clip: bool, scale_dtype: torch.dtype) -> QTensor:
    target = SCHEMES[scheme]
    parts = target.empty(tuple(whole.shape), whole.device)
    flat, codes = whole.reshape(-1, whole.shape[-1]), parts["codes"].view(-1, whole.shape[-1])
    scales = parts["scales"].view(-1, 1)
    step = max(1, ELEMENTS_AT_ONCE // whole.shape[-1])
    for at in range(0, len(flat), step):
        values, scale = _best(flat[at : at + step], scheme == FP8, SHRINKS if clip else SHRINKS[:1], scale_dtype)
        codes[at : at + step], scales[at : at + step] = values.to(codes.dtype), scale
    return QTensor(target, parts, tuple(whole.shape))


def _best(rows: Tensor, floats: bool, shrinks: tuple[float, ...], scale_dtype: torch.dtype) -> Coded:
    full = rows.abs().amax(-1, keepdim=True) / LARGEST_FP8 if floats else signed(rows)[0]
    best: tuple[Tensor, Tensor, Tensor] | None = None
    for shrink in shrinks:
        scale = (full * shrink).to(scale_dtype).to(torch.float32)
        codes = _codes(rows, scale, floats)
        error = (codes * scale - rows).square_().sum(-1, keepdim=True)
        if best is None:
            best = codes, scale, error
        else:
            wins = error < best[2]
            best = torch.where(wins, codes, best[0]), torch.where(wins, scale, best[1]), torch.minimum(error, best[2])
    assert best is not None
    return best[0], best[1]


def _codes(rows: Tensor, scale: Tensor, floats: bool) -> Tensor:
    if floats:
        # Values rounded past the largest code would become NaN.
        kept = (rows * inverse(scale)).clamp_(-LARGEST_FP8, LARGEST_FP8)
        return kept.to(torch.float8_e4m3fn).to(torch.float32)
    return (rows * inverse(scale)).round_().clamp_(-127, 127)
