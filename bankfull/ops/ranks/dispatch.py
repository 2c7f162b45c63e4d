"""Experts on several ranks: tokens travel to the ranks that hold their experts, and the results travel back.

A token goes to a rank once, however many of its experts the rank holds. The choice of experts is data, so costs are
expectations: each set of a token's experts is equally likely, and the other ranks have as many tokens as this one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bankfull.ops.cost import Cost, nbytes
from bankfull.ops.norm.body import wide
from bankfull.ops.registry import op
from bankfull.ranks.expert_ranks import ExpertSpread
from bankfull.ranks.group import RankGroup

INDEX_BYTES = 8


Dispatched = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _dispatch_cost(x: Tensor, chosen: Tensor, weights: Tensor, spread: ExpertSpread, group: RankGroup) -> Cost:
    (tokens, hidden), per_token = x.shape, chosen.shape[1]
    row, weight = hidden * x.element_size(), weights.element_size()
    pairs = spread.pairs(tokens, per_token)
    write = pairs * (row + 4 + weight + INDEX_BYTES) + spread.sent(tokens, per_token) * INDEX_BYTES
    wire = spread.leaving(tokens, per_token) * (row + 2 * per_token * weight) + (spread.ranks - 1) * INDEX_BYTES
    return Cost(read=nbytes(x, chosen, weights), write=write + 2 * spread.ranks * INDEX_BYTES, wire=wire)


def _dispatch_shape(x: Tensor, chosen: Tensor, weights: Tensor, spread: ExpertSpread, group: RankGroup) -> Dispatched:
    tokens, per_token = chosen.shape
    pairs, sent = round(spread.pairs(tokens, per_token)), round(spread.sent(tokens, per_token))
    numbers = chosen.new_empty(0, dtype=torch.int64)
    return (
        x.new_empty(pairs, x.shape[1]),
        chosen.new_empty(pairs, 1),
        weights.new_empty(pairs, 1),
        numbers.new_empty(pairs),
        numbers.new_empty(sent),
        numbers.new_empty(2, spread.ranks),
    )


@op(cost=_dispatch_cost, shape=_dispatch_shape)
def dispatch(x: Tensor, chosen: Tensor, weights: Tensor, spread: ExpertSpread, group: RankGroup) -> Dispatched:
    """Send each token (a row of x) to the ranks of its experts. `chosen` and `weights` come from `route`.

    Returns the pairs of a token and an expert that this rank computes, as operands of `expert_mlp`: rows (pairs,
    hidden), places among the experts that are held here and weights (pairs, 1); the number of each pair's row among
    those that came; the own token of each row that was sent; and the rows that were sent to, and came from, each
    rank (2, ranks). No token is dropped: a rank takes as many rows as come."""
    goes = spread.goes(chosen)
    rank, sent = goes.T.nonzero(as_tuple=True)  # by rank, then by token
    counts = torch.stack((leaving := goes.sum(0), group.all_to_all(leaving)))
    split, come = counts.tolist()
    # Numbers of experts are exact in any dtype of weights, so that they travel with these.
    elsewhere = spread.owner[chosen[sent].long()] != rank[:, None]
    routes = torch.cat((chosen[sent].masked_fill(elsewhere, -1).to(weights.dtype), weights[sent]), 1)
    rows = torch.cat(group.exchange(x[sent].split(split), come))
    experts, scales = torch.cat(group.exchange(routes.split(split), come)).chunk(2, 1)
    row, slot = (experts >= 0).nonzero(as_tuple=True)
    places = spread.place[experts[row, slot].long()].to(chosen.dtype)
    return rows[row], places[:, None], scales[row, slot][:, None], row, sent, counts


def _combine_cost(
    y: Tensor,
    row: Tensor,
    sent: Tensor,
    counts: Tensor,
    tokens: int,
    per_token: int,
    spread: ExpertSpread,
    group: RankGroup,
) -> Cost:
    back = spread.coming(tokens, per_token)
    size = y.shape[1] * y.element_size()
    return Cost(float(y.numel()), nbytes(y, row, sent, counts), tokens * size, wire=back * size)


def _combine_shape(y: Tensor, row: Tensor, sent: Tensor, counts: Tensor, tokens: int, *others: object) -> Tensor:
    return y.new_empty(tokens, y.shape[1])


@op(cost=_combine_cost, shape=_combine_shape)
def combine(
    y: Tensor,
    row: Tensor,
    sent: Tensor,
    counts: Tensor,
    tokens: int,
    per_token: int,
    spread: ExpertSpread,
    group: RankGroup,
) -> Tensor:
    """The sum of each token's experts (tokens, hidden), from the weighted results y (pairs, hidden) of `dispatch`'s
    pairs. `per_token`, the experts of a token, tells the cost."""
    split, come = counts.tolist()
    total = torch.zeros(sum(come), y.shape[1], dtype=wide(y).dtype, device=y.device)
    back = total.index_add_(0, row, wide(y)).to(y.dtype)
    returned = torch.cat(group.exchange(back.split(come), split))
    sums = torch.zeros(tokens, y.shape[1], dtype=total.dtype, device=y.device)
    return sums.index_add_(0, sent, wide(returned)).to(y.dtype)
