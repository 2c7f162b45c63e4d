"""Norms, and how a branch joins the residual stream on its way into the next one."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import cached_property, partial
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from bankfull.layers.build import Build
from bankfull.ops import Unnormed, add, add_rms_norm, layer_norm, rms_norm


class Norm(Protocol):
    def __call__(self, x: Tensor) -> Tensor: ...

    def join(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor | Unnormed]:
        """The stream with the branch `delta`, if there is one, joined, and its norm: one pass over memory where a
        kernel offers it."""
        ...


@runtime_checkable
class Reader(Protocol):
    """What reads a norm, and can do the norm's work."""

    def norms(self, rows: int) -> bool:
        """Does it want so many rows `Unnormed`?"""
        ...


class RMSNorm:
    def __init__(self, build: Build, size: int, eps: float, offset: float = 0.0) -> None:
        self.weight = build.tensor("weight", (size,))
        self.eps, self.offset = eps, offset
        self._norm = build.bind(rms_norm)
        self._join = build.bind(add_rms_norm)
        self.reader: Reader | None = None
        self._zeros = partial(torch.zeros, size, dtype=build.dtype, device=build.device)

    def read_by(self, reader: Reader) -> RMSNorm:
        """The same norm in a place where this reads it, and nobody else."""
        there = copy(self)
        there.reader = reader
        return there

    @cached_property
    def _nothing(self) -> Tensor:
        """A branch that changes nothing: a reader that norms also joins, and what a stream begins with has none."""
        return self._zeros()

    def __call__(self, x: Tensor) -> Tensor:
        return self._norm(x, self.weight, self.eps, self.offset)

    def join(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor | Unnormed]:
        if self.reader is not None and self.reader.norms(len(x)):
            branch = self._nothing.expand_as(x) if delta is None else delta
            if x.dtype == branch.dtype:
                joined = torch.empty_like(x)
                return joined, Unnormed(x, branch, self.weight, self.eps, self.offset, joined)
        if delta is None:
            return x, self(x)
        return self._join(x, delta, self.weight, self.eps, self.offset)


class AddThen:
    """Any module in the place of a norm: the branch joins first, in a pass of its own."""

    def __init__(self, build: Build, module: Callable[[Tensor], Tensor]) -> None:
        self._module = module
        self._add = build.bind(add)

    def __call__(self, x: Tensor) -> Tensor:
        return self._module(x)

    def join(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        x = x if delta is None else self._add(x, delta)
        return x, self._module(x)


class LayerNorm:
    def __init__(self, build: Build, size: int, eps: float, affine: bool = True) -> None:
        """`affine`: the file has a weight and a bias; without them the norm is all there is."""
        none = torch.zeros(size, dtype=build.dtype, device=build.device)
        self.weight = build.tensor("weight", (size,)) if affine else none + 1
        self.bias = build.tensor("bias", (size,)) if affine else none
        self.eps = eps
        self._norm = build.bind(layer_norm)

    def __call__(self, x: Tensor) -> Tensor:
        return self._norm(x, self.weight, self.bias, self.eps)
