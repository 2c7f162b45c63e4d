"""Norms, fused with the addition of a branch to the residual stream."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import cached_property, partial
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from bankfull.axes import HIDDEN, as_axis
from bankfull.layers.build import Build
from bankfull.ops import Unnormed, add, add_rms_norm, layer_norm, rms_norm, spread_rms_norm


class Norm(Protocol):
    def __call__(self, x: Tensor) -> Tensor: ...

    def join(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor | Unnormed]:
        """The stream plus the branch `delta`, if there is one, and the norm of the sum: one pass over memory where a
        kernel fuses them."""
        ...


@runtime_checkable
class Reader(Protocol):
    """A layer that reads a norm's result and may compute the norm inside its own kernel."""

    def norms(self, rows: int) -> bool:
        """Whether it takes this many rows `Unnormed`."""
        ...


class RMSNorm:
    def __init__(self, build: Build, size: int, eps: float, offset: float = 0.0) -> None:
        """`size`: of the stream, unless it is another axis."""
        self.weight = build.tensor("weight", (as_axis(size, HIDDEN),))
        self.eps, self.offset = eps, offset
        self._norm = build.bind(rms_norm)
        self._join = build.bind(add_rms_norm)
        self.reader: Reader | None = None
        self._zeros = partial(torch.zeros, int(size), dtype=build.dtype, device=build.device)
        split = build.shard is not None and build.shard.is_cut(f"{build.prefix}.weight")
        self._spread = build.bind(spread_rms_norm) if split else None
        """The norm of rows whose columns are spread over ranks."""
        self._group = None if build.shard is None else build.shard.group

    def read_by(self, reader: Reader) -> RMSNorm:
        """A copy of the norm whose only reader is `reader`."""
        there = copy(self)
        there.reader = reader
        return there

    @cached_property
    def _nothing(self) -> Tensor:
        """A branch of zeros: a reader that norms also adds a branch, and the first norm of a stream has none."""
        return self._zeros()

    def __call__(self, x: Tensor) -> Tensor:
        if self._spread is not None:
            normed: Tensor = self._spread(x, self.weight, self.eps, self.offset, self._group)
            return normed
        return self._norm(x, self.weight, self.eps, self.offset)

    def join(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor | Unnormed]:
        assert self._spread is None, "the stream is not split by columns"
        if self.reader is not None and self.reader.norms(len(x)):
            branch = self._nothing.expand_as(x) if delta is None else delta
            if x.dtype == branch.dtype:
                joined = torch.empty_like(x)
                return joined, Unnormed(x, branch, self.weight, self.eps, self.offset, joined)
        if delta is None:
            return x, self(x)
        return self._join(x, delta, self.weight, self.eps, self.offset)


class AddThen:
    """Any module in the place of a norm: the branch is added first, in an operation of its own."""

    def __init__(self, build: Build, module: Callable[[Tensor], Tensor]) -> None:
        self.module = module
        self._add = build.bind(add)

    def __call__(self, x: Tensor) -> Tensor:
        return self.module(x)

    def join(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        x = x if delta is None else self._add(x, delta)
        return x, self.module(x)


class LayerNorm:
    def __init__(self, build: Build, size: int, eps: float, affine: bool = True) -> None:
        """`affine`: whether the file has a weight and a bias."""
        none = torch.zeros(size, dtype=build.dtype, device=build.device)
        self.weight = build.tensor("weight", (HIDDEN(size),)) if affine else none + 1
        self.bias = build.tensor("bias", (HIDDEN(size),)) if affine else none
        self.eps = eps
        self._norm = build.bind(layer_norm)

    def __call__(self, x: Tensor) -> Tensor:
        return self._norm(x, self.weight, self.bias, self.eps)
