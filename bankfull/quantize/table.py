"""The methods of `bankfull quantize`, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch

from bankfull.quantize.ablation import Choice, KeptChannels
from bankfull.quantize.awq import Awq
from bankfull.quantize.fp8 import Fp8
from bankfull.quantize.gptq import Gptq
from bankfull.quantize.grid import Grid
from bankfull.quantize.method import Method
from bankfull.quantize.recipe import QuantizeRecipe
from bankfull.quantize.rtn import RoundToNearest
from bankfull.quantize.smoothquant import SmoothQuant
from bankfull.quantize.sparse import Pruner, parse_pattern

Make = Callable[[QuantizeRecipe, torch.dtype], Method]
"""Makes the method of a recipe. The dtype is the one that scales must be representable in, besides their own."""


@dataclass(frozen=True, slots=True)
class Offered:
    about: str
    make: Make


def _grid(recipe: QuantizeRecipe, scales: torch.dtype) -> Grid:
    assert recipe.group is not None, "the recipe was checked"
    return Grid(recipe.bits, recipe.group, recipe.symmetric, scales)


def _rtn(recipe: QuantizeRecipe, scales: torch.dtype) -> Method:
    return RoundToNearest(recipe.scheme_for, recipe.clip == "mse", scales)


def _awq(recipe: QuantizeRecipe, scales: torch.dtype) -> Method:
    if recipe.ablate:
        share, _, by = recipe.ablate.partition(":")
        return KeptChannels(_grid(recipe, scales), float(share), cast(Choice, by or "activations"))
    return Awq(_grid(recipe, scales), recipe.clip == "mse")


def _gptq(recipe: QuantizeRecipe, scales: torch.dtype) -> Method:
    return Gptq(_grid(recipe, scales))


def _fp8(recipe: QuantizeRecipe, scales: torch.dtype) -> Method:
    return Fp8(recipe.activations == "fp8-static", recipe.clip == "mse", scales)


def _smoothquant(recipe: QuantizeRecipe, scales: torch.dtype) -> Method:
    return SmoothQuant(recipe.alpha, recipe.clip == "mse", scales)


def _pruned(recipe: QuantizeRecipe, scales: torch.dtype) -> Method:
    return Pruner(recipe.method, parse_pattern(recipe.sparsity))


METHODS: dict[str, Offered] = {
    "rtn": Offered("round to nearest, each matrix by itself; needs no text", _rtn),
    "awq": Offered("scale up the channels with large activations before rounding", _awq),
    "gptq": Offered("round column by column, and correct each error in the columns that follow", _gptq),
    "fp8": Offered("8-bit floats, one scale per row", _fp8),
    "int8": Offered("int8 rows, with the columns that meet large activations in bfloat16 beside them", _rtn),
    "smoothquant": Offered("int8 weights and activations, outliers moved into the weights", _smoothquant),
    "mixed": Offered("round to nearest, with bits by layer that fit a budget", _rtn),
    "wanda": Offered("zeros where weight and activation are small", _pruned),
    "sparsegpt": Offered("zeros where they cost least, corrected in the weights that stay", _pruned),
    "neurons": Offered("whole blocks of feed-forward neurons removed, before the rest is written as it is", _rtn),
    "qat": Offered("tuned so that rounding hurts less, before it is written", _rtn),
}


def make_method(recipe: QuantizeRecipe, scales: torch.dtype = torch.float32) -> Method:
    return METHODS[recipe.method].make(recipe, scales)
