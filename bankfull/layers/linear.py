"""Linear layers and the embedding over weights in any scheme."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from bankfull.axes import HIDDEN, VOCAB, as_axis, joined
from bankfull.layers.build import Build
from bankfull.ops import (
    Epilogue,
    Operation,
    Unnormed,
    activate_mul,
    embedding,
    gather_columns,
    linear,
    linear_bf16,
    linear_hadamard,
    linear_int8,
    linear_outliers,
    linear_w8a8,
    spread_embedding,
)
from bankfull.ops.products.activations import BF16, FLOAT, FLOATS, HADAMARD, INT8, OUTLIERS, TOKEN, ActivationFormat
from bankfull.ops.products.body import highest, normed_rows
from bankfull.ops.registry import Function
from bankfull.weights.qtensor import QTensor, same_columns

PRODUCTS: dict[ActivationFormat, Operation] = {
    FLOAT: linear,
    BF16: linear_bf16,
    INT8: linear_int8,
    HADAMARD: linear_hadamard,
    TOKEN: linear_w8a8,
    OUTLIERS: linear_outliers,
}
GATED = (*FLOATS, OUTLIERS)
"""Formats whose kernels compute gates."""


class StoredRows(Protocol):
    def __call__(self, rows: Tensor | None = None) -> QTensor:
        """These rows of a matrix, as the file stores them; all of them without `rows`. Nothing else is read."""
        ...


class Projection(Protocol):
    """What a head scores tokens with: a `Linear`, or one whose rows ranks share (`spread.gathered`)."""

    def __call__(self, x: Tensor, /) -> Tensor: ...
    def best(self, x: Tensor | Unnormed) -> Tensor: ...
    def norms_for_best(self, rows: int) -> bool: ...


class Weight:
    """A matrix that a provider lays out. Where layers are stacked, that happens at its first use: until then it may
    become part of a larger matrix."""

    def __init__(self, build: Build, operation: Operation, stored: QTensor, **fused: bool) -> None:
        self._build, self._operation, self._fused, self.scheme = build, operation, fused, stored.scheme
        self._stored: QTensor | None = stored
        if not build.kit.stacks:
            _ = self.ready

    @cached_property
    def ready(self) -> Any:
        return self._build.prepare(self._operation, self.take().in_stored_order, **self._fused)

    def take(self) -> QTensor:
        """The matrix as stored in the file. It can be taken once."""
        stored, self._stored = self.peek(), None
        return stored

    def peek(self) -> QTensor:
        assert self._stored is not None, "the weight was already taken"
        return self._stored


class Normed:
    """The products with a fused norm that kernels offer for a weight: for few rows, whose programs repeat the norm, and
    for more rows, whose norm rounds the activations in the same pass."""

    def __init__(self, build: Build, stored: QTensor, wants: ActivationFormat, **fused: bool) -> None:
        facts = {"weight": stored, "normed": True, **fused}
        self._few = build.bind_if_offered(linear if wants in FLOATS else PRODUCTS[wants], **facts)
        self._most = 0 if self._few is None else normed_rows(stored)
        self._more = None if wants is FLOAT else build.bind_if_offered(PRODUCTS[wants], **facts)

    def takes(self, rows: int) -> bool:
        return rows <= self._most or (rows > 1 and self._more is not None)

    def of(self, rows: int) -> Function:
        function = self._few if rows <= self._most else self._more
        assert function is not None
        return function


class Linear:
    def __init__(
        self,
        build: Build,
        inner: int,
        outer: int,
        bias: bool = False,
        weight: QTensor | None = None,
        int8_when_batched: bool = False,
    ) -> None:
        """`inner` and `outer`: the axes of the weight's columns and rows; a bare number counts channels of the stream.
        `int8_when_batched`: whether this weight may be multiplied in int8 when many rows are batched."""
        columns, rows = as_axis(inner, HIDDEN), as_axis(outer, HIDDEN)
        given = build.weight("weight", (rows, columns), for_linear=True) if weight is None else weight
        stored = given.in_stored_order
        self.wants = _wanted(build, given, int8_when_batched)
        """The format of its input's activations, from which its operations follow."""
        self.columns = given.columns
        """The order of the weight's columns, by which inputs are gathered."""
        product = PRODUCTS[self.wants]
        self.outer = int(outer)
        self.stored = Weight(build, product, given)
        self.bias = build.tensor("bias", (rows,)) if bias else None
        self._linear = build.bind(product, weight=stored)
        self._best = None if self.wants is OUTLIERS else build.bind(product, weight=stored, best=True)
        self._gather = build.bind(gather_columns) if self.columns is not None else None
        self.sum_of_ranks = build.sum_of_ranks("weight")
        """Set where this rank multiplies only some of the inputs."""
        self._normed: Normed | None = None
        self._normed_best: Normed | None = None
        if self.columns is None:  # a fused norm would not gather
            self._normed = Normed(build, stored, self.wants)
            self._normed_best = Normed(build, stored, self.wants, best=True)

    @property
    def weight(self) -> Any:
        """The weight in the provider's layout."""
        return self.stored.ready

    def __call__(self, x: Tensor | Unnormed) -> Tensor:
        if isinstance(x, Unnormed):
            assert self._normed is not None
            return self._normed.of(len(x.x))(x, self.weight, Epilogue(self.bias))
        y: Tensor = self._linear(self.ordered(x), self.weight, Epilogue(self.bias))
        return y if self.sum_of_ranks is None else self.sum_of_ranks(y)

    def ordered(self, x: Tensor) -> Tensor:
        """The columns of x as the weight has them."""
        gathered: Tensor = x if self._gather is None else self._gather(x, self.columns)
        return gathered

    def norms(self, rows: int) -> bool:
        """Whether a call takes this many rows `Unnormed`."""
        return self._normed is not None and self._normed.takes(rows)

    def norms_for_best(self, rows: int) -> bool:
        """Whether `best` takes this many rows `Unnormed`."""
        return self._normed_best is not None and self._normed_best.takes(rows)

    def best(self, x: Tensor | Unnormed) -> Tensor:
        """The index of the highest output of each row; -1 where it is not finite."""
        epilogue = Epilogue(self.bias, best=True)
        if isinstance(x, Unnormed):
            assert self._normed_best is not None
            return self._normed_best.of(len(x.x))(x, self.weight, epilogue)
        if self._best is None:
            return highest(self(x))
        return self._best(self.ordered(x), self.weight, epilogue)


class GatedLinear:
    """f(gate) * up, from one matrix that holds both."""

    def __init__(self, build: Build, whole: Linear, kind: str) -> None:
        self.kind, self._epilogue = kind, Epilogue(whole.bias, kind)
        self._whole: Linear | None = None
        self._normed: Normed | None = None
        if whole.wants not in GATED:
            self._whole, self._multiply = whole, build.bind(activate_mul)
            return
        self._ordered = whole.ordered
        given = whole.stored.take()
        stored = given.in_stored_order
        product = PRODUCTS[whole.wants]
        self.stored = Weight(build, product, given, gated=True)
        self._gated = build.bind(product, weight=stored, gated=True)
        if whole.columns is None:
            self._normed = Normed(build, stored, whole.wants, gated=True)

    def __call__(self, x: Tensor | Unnormed) -> Tensor:
        if self._whole is not None:
            product: Tensor = self._multiply(*self._whole(x).chunk(2, -1), self.kind)
            return product
        if isinstance(x, Unnormed):
            assert self._normed is not None
            return self._normed.of(len(x.x))(x, self.stored.ready, self._epilogue)
        return self._gated(self._ordered(x), self.stored.ready, self._epilogue)

    def norms(self, rows: int) -> bool:
        return self._normed is not None and self._normed.takes(rows)


def stack(build: Build, parts: Sequence[Linear]) -> Linear | None:
    """One layer instead of several with the same input, their outputs concatenated. None where that is not faster, or
    where the weights differ in scheme, activations, order of columns or outliers. It takes the parts' weights."""
    if not build.kit.stacks or len({(part.stored.scheme, part.wants) for part in parts}) > 1:
        return None
    if not same_columns([part.stored.peek() for part in parts]):
        return None
    bias = None
    if any(part.bias is not None for part in parts):
        blank = next(part.bias for part in parts if part.bias is not None)
        bias = torch.cat([blank.new_zeros(part.outer) if part.bias is None else part.bias for part in parts])
    weight = QTensor.stacked([part.stored.take() for part in parts])
    whole = Linear(build, weight.shape[1], weight.shape[0], weight=weight)
    whole.bias = bias
    return whole


def _wanted(build: Build, weight: QTensor, int8_when_batched: bool) -> ActivationFormat:
    """What the rule says for a weight, with a second copy of it where that is allowed and a kernel has a use for it."""
    wanted = build.activations.of_weight(weight)
    copied = wanted is INT8 and int8_when_batched and build.activations.copies
    if copied and build.kit.offers(linear_hadamard, dtype=build.dtype, weight=weight.in_stored_order):
        return HADAMARD
    return wanted


def split_linear(
    build: Build,
    inner: int,
    outers: Sequence[int],
    bias: bool = False,
    int8_when_batched: Sequence[bool] = (),
    order: Tensor | None = None,
    stored: int | None = None,
) -> list[Linear]:
    """Several layers stored as one stacked tensor (Phi's qkv and gate_up), as views without a copy. `order`: the rows
    of the file in the order in which the layers have them, for files that interleave rows; the rows are copied.
    `stored`: the axis of the file's rows, where it is not that of the layers one after another."""
    rows_axis = joined(*outers) if stored is None else stored
    whole = build.weight("weight", (rows_axis, as_axis(inner, HIDDEN)), for_linear=True)
    biases = build.tensor("bias", (rows_axis,)) if bias else None
    if order is not None:
        order = order.to(build.device)
        whole, biases = whole.rows(order), None if biases is None else biases[order]
    parts, first = [], 0
    for outer, batched in zip(outers, int8_when_batched or [False] * len(outers), strict=True):
        rows = slice(first, first + outer)
        part = Linear(build, inner, outer, weight=whole.rows(rows), int8_when_batched=batched)
        part.bias = None if biases is None else biases[rows]
        parts.append(part)
        first += outer
    return parts


class Embedding:
    def __init__(self, build: Build, count: int, size: int, scale: float = 1.0, spread: bool = False) -> None:
        """`count`: of the vocabulary, unless it is another axis. `spread`: whether ranks share the rows."""
        self.share = build.row_share(count) if spread else None
        self._build, self._axes = build, (as_axis(count, VOCAB), HIDDEN(size))
        self.rows = int(count)
        """Rows of the whole table."""
        self.table = build.table("weight", self._axes, None if self.share is None else self.share.rows)
        self.scale = scale
        self._dtype = build.dtype
        self._embedding = build.bind(embedding if self.share is None else spread_embedding, weight=self.table)

    def __call__(self, ids: Tensor) -> Tensor:
        where = () if self.share is None else (self.share.first, self.share.group)
        embedded: Tensor = self._embedding(ids, self.table, self._dtype, self.scale, *where)
        return embedded

    def stored(self, rows: Tensor | None = None) -> QTensor:
        """These rows of the whole table (all without `rows`), also those that other ranks hold."""
        if self.share is not None:
            return self._build.table("weight", self._axes, rows)
        return self.table if rows is None else self.table.rows(rows.to(self.table.device))
