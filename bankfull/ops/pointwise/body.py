"""Pointwise non-linearities of the feed-forward layers and of the logits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bankfull.ops.cost import Cost, nbytes
from bankfull.ops.registry import op
from bankfull.ops.shapes import like_first

_KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "relu": torch.nn.functional.relu,
    "softplus": torch.nn.functional.softplus,
    "sigmoid": torch.sigmoid,
}
#: Activation names in checkpoints -> our names.
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "relu": "relu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


@op(cost=lambda x, kind: Cost(8.0 * x.numel(), nbytes(x), nbytes(x)), shape=like_first)
def activate(x: Tensor, kind: str) -> Tensor:
    return _KINDS[kind](x)


@op(cost=lambda gate, up, kind: Cost(9.0 * gate.numel(), nbytes(gate, up), nbytes(gate)), shape=like_first)
def activate_mul(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """f(gate) * up: the pointwise part of a gated feed-forward layer."""
    return _KINDS[kind](gate) * up


@op(cost=lambda x, cap: Cost(10.0 * x.numel(), nbytes(x), nbytes(x)), shape=like_first)
def soft_cap(x: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(x / cap)


@op(cost=lambda x, factors: Cost(1.0 * x.numel(), nbytes(x, factors), nbytes(x)), shape=like_first)
def scale_columns(x: Tensor, factors: Tensor) -> Tensor:
    """x (rows, columns) times a factor for each column."""
    return x * factors


@op(
    cost=lambda x, columns: Cost(0.0, nbytes(x, columns), nbytes(x)),
    shape=lambda x, columns: x.new_empty(*x.shape[:-1], len(columns)),
)
def gather_columns(x: Tensor, columns: Tensor) -> Tensor:
    """The columns of x in the order of `columns` (int32, each once): as a weight has them that is stored in that
    order."""
    return x.index_select(-1, columns)
