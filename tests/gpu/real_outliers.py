"""Inputs of real size for products with outlier columns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from bankfull.ops import Epilogue
from bankfull.weights.formats import SCHEMES
from bankfull.weights.qtensor import QTensor
from tests.gpu.place import DEVICE
from tests.gpu.real import GATED, SIZES, Draw, Made, unnormed, weight_of
from tests.ops.cases import Case

COUNTS = (4, 14, 40, 100)
"""Outlier columns: in one step of tensor cores, in several, and too many for the GEMM's epilogue."""


def _weights(draw: Draw, outer: int, inner: int) -> Iterator[tuple[str, QTensor]]:
    for count in COUNTS:
        columns = torch.randperm(inner, device=DEVICE)[:count].sort().values
        kept = (draw.normal(outer, len(columns), dtype=torch.float32) * inner**-0.5).to(torch.bfloat16)
        yield (
            f"{count} outlier columns",
            replace(weight_of(SCHEMES["int8_row"], outer, inner), outliers=(columns, kept)),
        )


def _case(draw: Draw, args: tuple[object, ...], weight: QTensor, tokens: int, normed: bool = False) -> Case:
    """The body rounds activations, which is off by 1%; kernels do not round those of one row, and none in float32.
    `normed`: the kernel's norm is rounded less before that, which moves ties."""
    rounds = tokens > 1 and draw.dtype != torch.float32 and not normed
    return Case(args, draw.dtype, {"weight": weight}, provided=torch.bfloat16 if rounds else torch.float8_e4m3fn)


def linear_outliers(draw: Draw, tokens: int) -> Made:
    for outer, inner in ((SIZES.hidden, SIZES.ffn), (SIZES.hidden, SIZES.hidden)):
        for label, weight in _weights(draw, outer, inner):
            x = draw.normal(tokens, inner)
            x[:, weight.outliers[0]] *= 20  # type: ignore[index]
            yield f"{inner} columns, {label}", _case(draw, (x, weight, Epilogue(draw.normal(outer))), weight, tokens)


def gated_linear_outliers(draw: Draw, tokens: int) -> Made:
    for label, weight in _weights(draw, 2 * SIZES.ffn, SIZES.hidden):
        yield label, _case(draw, (draw.normal(tokens, SIZES.hidden), weight, GATED), weight, tokens)


def normed_linear_outliers(draw: Draw, tokens: int) -> Made:
    for label, weight in _weights(draw, SIZES.hidden, SIZES.hidden):
        yield label, _case(draw, (unnormed(draw, tokens), weight, Epilogue()), weight, tokens, True)


def normed_gated_linear_outliers(draw: Draw, tokens: int) -> Made:
    for label, weight in _weights(draw, 2 * SIZES.ffn, SIZES.hidden):
        yield label, _case(draw, (unnormed(draw, tokens), weight, GATED), weight, tokens, True)


GENERATORS = {
    function.__name__: function
    for function in (
        linear_outliers,
        gated_linear_outliers,
        normed_linear_outliers,
        normed_gated_linear_outliers,
    )
}
