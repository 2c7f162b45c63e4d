"""Generated inputs for products with activations that are rounded per token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from bankfull.ops.products.w8a8 import SCHEMES as NAMES
from bankfull.weights.formats import SCHEMES
from tests.ops.cases import Case, Maker, clear_winner, gated_linear, linear, unnormed


def _rows(make: Maker, count: int, inner: int, scheme: str) -> Tensor:
    """In float64 any numbers. In others, numbers that the 8-bit type holds: a kernel may scale in another order, which
    moves ties."""
    if make.dtype == torch.float64:
        return make.normal(count, inner)
    if scheme == "fp8":
        drawn = torch.randn(count, inner, generator=make.numbers).mul(90).clamp(-448, 448)
        rows = drawn.to(torch.float8_e4m3fn).float()
        rows[:, 0] = 448
    else:
        rows = torch.randint(-127, 128, (count, inner), generator=make.numbers).float()
        rows[:, 0] = -127
    return (rows * 2.0 ** torch.randint(-9, 3, (count, 1), generator=make.numbers)).to(make.dtype)


def _weighted(make: Maker, of: Callable[[Maker], Case]) -> Case:
    """A case of a linear layer with weights that have one scale per row."""
    name = NAMES[make.seed // 3 % len(NAMES)]
    outer, inner = 32 * make.size(1, 3), 32 * make.size(1, 4)
    weight = make.weight(SCHEMES[name], outer, inner)
    x = _rows(make, make.pick.choice((2, 5, 17, 66)), inner, name)
    bias = make.normal(outer) if make.size(0, 1) else None
    epilogue = of(make).args[2]._replace(bias=bias)
    return Case((x, weight, epilogue), make.dtype, {"weight": weight}, provided=torch.bfloat16)


def linear_w8a8(make: Maker) -> Case:
    return _weighted(make, linear)


def best_linear_w8a8(make: Maker) -> Case:
    made = linear_w8a8(make)
    x, weight, epilogue = clear_winner(made, make).args
    # Sums of exact codes are larger than those of normal numbers.
    return replace(made, args=(x, weight, epilogue._replace(bias=epilogue.bias * 2.0**14)))


def gated_linear_w8a8(make: Maker) -> Case:
    return _weighted(make, gated_linear)


def _normed(made: Case, make: Maker) -> Case:
    """Normed numbers are not exact codes: below float64, rounding may differ by one code, so results are compared with
    less precision."""
    x, *others = made.args
    made = replace(made, args=(unnormed(make, *x.shape), *others), provided=torch.float8_e4m3fn)
    if make.dtype == torch.float64:
        return made
    return replace(made, dtype=torch.float8_e4m3fn, facts={**made.facts, "dtype": make.dtype})


def normed_linear_w8a8(make: Maker) -> Case:
    return _normed(linear_w8a8(make), make)


def normed_gated_linear_w8a8(make: Maker) -> Case:
    return _normed(gated_linear_w8a8(make), make)


GENERATORS: dict[str, Callable[[Maker], Case]] = {
    function.__name__: function
    for function in (
        linear_w8a8,
        best_linear_w8a8,
        gated_linear_w8a8,
        normed_linear_w8a8,
        normed_gated_linear_w8a8,
    )
}
