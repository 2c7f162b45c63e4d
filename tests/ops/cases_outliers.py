"""Generated inputs for products with outlier columns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from bankfull.ops import Epilogue
from bankfull.weights.formats.rows import INT8_ROW
from tests.ops import cases
from tests.ops.cases import Case, Maker, unnormed


def _with_outliers(make: Maker, made: Case) -> Case:
    """Activations of a few columns are large. A kernel may round activations in groups, or not at all."""
    x, weight, *others = made.args
    inner = weight.shape[1]
    columns = torch.tensor(sorted(make.pick.sample(range(inner), make.size(0, min(4, inner)))), dtype=torch.int64)
    x[..., columns] *= 20
    kept = make.normal(weight.shape[0], len(columns), dtype=torch.bfloat16)
    weight = replace(weight, outliers=(columns, kept))
    return replace(made, args=(x, weight, *others), facts={"weight": weight}, provided=torch.bfloat16)


def linear_outliers(make: Maker) -> Case:
    return _with_outliers(make, cases.linear_int8(make))


def gated_linear_outliers(make: Maker) -> Case:
    x, weight, (bias, *_) = cases.linear_int8(make).args
    weight = make.weight(weight.scheme, 2 * make.size(1, 40), weight.shape[1])
    bias = None if bias is None else make.normal(weight.shape[0])
    kind = make.pick.choice(("silu", "gelu"))
    return replace(_with_outliers(make, Case((x, weight, Epilogue(bias, kind)), make.dtype)), provided=torch.int8)


def _normed(make: Maker, gate: str = "") -> Case:
    weight = make.weight(cases.SCHEMES[INT8_ROW], 32 * make.size(1, 3), 32 * make.size(5, 9))
    bias = make.normal(weight.shape[0]) if make.size(0, 1) else None
    x = make.normal(make.pick.choice((1, 2, 17, 66)), weight.shape[1])
    made = _with_outliers(make, Case((x, weight, Epilogue(bias, gate)), make.dtype))
    before = unnormed(make, *x.shape)
    columns = made.args[1].outliers[0]
    before.weight[columns] *= 20
    return replace(made, args=(before, *made.args[1:]))


def normed_linear_outliers(make: Maker) -> Case:
    return _normed(make)


def normed_gated_linear_outliers(make: Maker) -> Case:
    return replace(_normed(make, "silu"), provided=torch.int8)


GENERATORS: dict[str, Callable[[Maker], Case]] = {
    function.__name__: function
    for function in (
        linear_outliers,
        gated_linear_outliers,
        normed_linear_outliers,
        normed_gated_linear_outliers,
    )
}
