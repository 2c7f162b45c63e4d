"""Collectives: operations whose operands are spread over ranks.

`wire` of their cost is the least number of bytes that one of p ranks sends: (p - 1) / p of the tensor for each pass
over a ring. An all-reduce is two passes, a reduce-scatter and an all-gather.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bankfull.ops.cost import Cost, nbytes
from bankfull.ops.norm.body import rms_norm, wide
from bankfull.ops.products.body import embedding
from bankfull.ops.registry import op
from bankfull.ranks.group import Neighbour, RankGroup
from bankfull.weights.qtensor import QTensor


def _moved(x: Tensor, group: RankGroup, passes: float, read: float = 1.0, written: float = 1.0) -> Cost:
    size = nbytes(x)
    return Cost(read=read * size, write=written * size, wire=passes * size * (group.size - 1) / group.size)


def _reduce_cost(x: Tensor, group: RankGroup) -> Cost:
    return _moved(x, group, 2) + Cost(flops=float(x.numel() * (group.size - 1)) / group.size)


@op(cost=_reduce_cost, shape=lambda x, group: torch.empty_like(x))
def all_reduce(x: Tensor, group: RankGroup) -> Tensor:
    """The sum of the ranks' tensors, on every rank."""
    return group.all_reduce(x)


def _columns_cost(x: Tensor, group: RankGroup, width: int) -> Cost:
    return _moved(x, group, group.size, written=group.size)


def _columns_shape(x: Tensor, group: RankGroup, width: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], width)


@op(cost=_columns_cost, shape=_columns_shape)
def gather_outputs(x: Tensor, group: RankGroup, width: int) -> Tensor:
    """Rows (tokens, width) whose columns are spread evenly over the ranks; what is beyond `width` pads the last one."""
    return group.all_gather(x).movedim(0, -2).flatten(-2)[..., :width]


def _rows_cost(x: Tensor, group: RankGroup, rows: int) -> Cost:
    return _moved(x, group, group.size, written=group.size)


def _rows_shape(x: Tensor, group: RankGroup, rows: int) -> Tensor:
    return x.new_empty(rows, *x.shape[1:])


@op(cost=_rows_cost, shape=_rows_shape)
def gather_rows(x: Tensor, group: RankGroup, rows: int) -> Tensor:
    """The rows of all ranks in their order; what is beyond `rows` pads the last one."""
    return group.all_gather(x).flatten(0, 1)[:rows]


def _scatter_cost(x: Tensor, group: RankGroup) -> Cost:
    return _moved(x, group, 1, written=1 / group.size) + Cost(flops=float(x.numel() * (group.size - 1)) / group.size)


def _scatter_shape(x: Tensor, group: RankGroup) -> Tensor:
    return x.new_empty(-(-x.shape[0] // group.size), *x.shape[1:])


@op(cost=_scatter_cost, shape=_scatter_shape)
def reduce_scatter(x: Tensor, group: RankGroup) -> Tensor:
    """This rank's rows of the sum of the ranks' tensors; rows are divided evenly, zeros pad the last rank's."""
    missing = -x.shape[0] % group.size
    return group.reduce_scatter(torch.cat((x, x.new_zeros(missing, *x.shape[1:]))) if missing else x)


def _exchange_cost(x: Tensor, group: RankGroup) -> Cost:
    return _moved(x, group, 1)


@op(cost=_exchange_cost, shape=lambda x, group: torch.empty_like(x))
def exchange_parts(x: Tensor, group: RankGroup) -> Tensor:
    """Part i of x (ranks, ...) goes to rank i. The result has the parts that came here, in the order of the ranks."""
    return group.all_to_all(x)


def _embedding_cost(
    ids: Tensor, weight: QTensor, dtype: torch.dtype, scale: float, first: int, group: RankGroup
) -> Cost:
    rows = ids.new_empty(ids.numel(), weight.shape[1], dtype=dtype, device="meta")
    return embedding.cost(ids, weight, dtype, scale) + _reduce_cost(rows, group)


def _embedding_shape(
    ids: Tensor, weight: QTensor, dtype: torch.dtype, scale: float, first: int, group: RankGroup
) -> Tensor:
    return torch.empty(len(ids), weight.shape[1], dtype=dtype, device=ids.device)


@op(cost=_embedding_cost, shape=_embedding_shape)
def spread_embedding(
    ids: Tensor, weight: QTensor, dtype: torch.dtype, scale: float, first: int, group: RankGroup
) -> Tensor:
    """Rows of a table that is spread over the ranks; this one holds the rows from `first` on."""
    local = ids - first
    inside = (local >= 0) & (local < weight.shape[0])
    rows = embedding.body(local * inside, weight, dtype, scale)
    return group.all_reduce(rows * inside[:, None])


def _norm_cost(x: Tensor, weight: Tensor, eps: float, offset: float, group: RankGroup) -> Cost:
    means = x.new_empty(x.numel() // x.shape[-1], 1, dtype=torch.float32, device="meta")
    return rms_norm.cost(x, weight, eps, offset) + _reduce_cost(means, group)


def _norm_shape(x: Tensor, weight: Tensor, *rest: object) -> Tensor:
    return x.new_empty(x.shape, dtype=weight.dtype)


@op(cost=_norm_cost, shape=_norm_shape)
def spread_rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float, group: RankGroup) -> Tensor:
    """`rms_norm` of rows whose columns are spread evenly over the ranks. Columns that several ranks hold count once,
    because all have equally many copies."""
    y = wide(x)
    mean = group.all_reduce(y.square().mean(-1, keepdim=True)) / group.size
    y = y * torch.rsqrt(mean + eps)
    if offset:
        return (y * (offset + wide(weight))).to(weight.dtype)
    return (weight * y.to(x.dtype)).to(weight.dtype)


def _send_cost(x: Tensor, after: Neighbour) -> Cost:
    return Cost(read=nbytes(x), wire=nbytes(x))


@op(cost=_send_cost, shape=lambda x, after: torch.empty_like(x))
def send_rows(x: Tensor, after: Neighbour) -> Tensor:
    """Send rows to the next stage of a pipeline; returns them."""
    after.send(x)
    return x


def _receive_cost(tokens: Tensor, before: Neighbour, hidden: int, dtype: torch.dtype) -> Cost:
    return Cost(write=float(len(tokens) * hidden * dtype.itemsize))


def _received(tokens: Tensor, before: Neighbour, hidden: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(len(tokens), hidden, dtype=dtype, device=tokens.device)


@op(cost=_receive_cost, shape=_received)
def receive_rows(tokens: Tensor, before: Neighbour, hidden: int, dtype: torch.dtype) -> Tensor:
    """A row for each token, from the stage before."""
    return before.receive((len(tokens), hidden), dtype)


COLLECTIVES = (
    all_reduce,
    gather_outputs,
    gather_rows,
    reduce_scatter,
    exchange_parts,
    spread_embedding,
    spread_rms_norm,
    send_rows,
    receive_rows,
)
"""Operations in which a rank waits for others. A rank that runs one step more than they do waits for ever."""
