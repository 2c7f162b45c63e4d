"""Speculative sampling by rejection: the output has the target's distribution, whatever the drafts are.

A draft token x that was drawn from q is accepted with probability min(1, p(x) / q(x)), p being the target's
distribution. After a rejection p becomes the normalised positive part of p - q, x leaves q, and the next child of the
same node is tried (recursive rejection sampling without replacement). When all children are rejected, or a node has
none, one token is drawn from what p has become. For deterministic drafts q is a point mass: x is accepted with
probability p(x), and leaves p after a rejection.

The result has the distribution of plain decoding, but not its tokens: `verify` keeps both. Rejection accepts a sampled
draft with probability 1 - d, the race with (1 - d) / (1 + d) or more, d being the total variation distance of p and q.
For a deterministic draft both accept with p(x), and no rule accepts more.

These are functions of tensors; the caller has applied penalties, masks, temperature and truncation to both p and q.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bankfull.sample.draw import NO_TOKEN, draw, draw_several
from bankfull.sample.random import NumberKey, Purpose, words_of

NO_NODE = -1
"""Stands in the place of a node: the root as a parent, or no node in a path."""


@dataclass(frozen=True, slots=True)
class AcceptedPath:
    """Per row: tokens[i, :counts[i]] are the accepted drafts of `nodes[i, : counts[i] - 1]` and one token of the
    target, NO_TOKEN if its line has no usable score. Beyond that both are padded with -1."""

    tokens: Tensor
    counts: Tensor
    nodes: Tensor


def draft_children(scores: Tensor, key: NumberKey, count: int) -> Tensor:
    """`count` draft tokens per line [n, count] for one node, drawn without replacement from softmax(scores), in the
    order in which they must be tried. `key.position` is the position of these tokens."""
    return draw_several(scores, key, Purpose.DRAFT, count)


def accept_chain(scores: Tensor, tokens: Tensor, drafts: Tensor | None, key: NumberKey) -> AcceptedPath:
    """`accept_tree` for chains: node i follows node i - 1."""
    parents = torch.arange(-1, tokens.shape[1] - 1, device=tokens.device).expand_as(tokens)
    return accept_tree(scores, tokens, parents, drafts, key)


def accept_tree(scores: Tensor, tokens: Tensor, parents: Tensor, drafts: Tensor | None, key: NumberKey) -> AcceptedPath:
    """`tokens` and `parents` [n, nodes]: a token below 0 is no node; a parent comes before its children, the root is
    NO_NODE, and the children of a node are in the order in which they were drawn. `scores` [n, nodes + 1, vocab]:
    softmax gives the target's distribution, first of the root and then after each node. `drafts`, of the same shape:
    the probabilities that a node's children were drawn from without replacement; last nodes that have no children may
    be left out. None for deterministic drafts. `key.position` [n] is the position of the first token to choose."""
    lines, width = tokens.shape
    row = torch.arange(lines, device=tokens.device)
    current = torch.full_like(row, NO_NODE)
    depth, tried = torch.zeros_like(row), torch.zeros_like(row)
    path = torch.full((lines, width + 1), NO_NODE, dtype=torch.int64, device=tokens.device)
    chosen = torch.full_like(path, NO_TOKEN)
    p = scores[:, 0].double().softmax(-1)
    q = None if drafts is None else drafts[:, 0].double()
    for node in range(width):
        token = tokens[:, node]
        here = (parents[:, node] == current) & (token >= 0)
        x = token.clamp_min(0).unsqueeze(-1)
        proposal = torch.zeros_like(p).scatter_(1, x, 1.0) if q is None else q
        number = _accept_number(key, depth, tried)
        passes = here & (number * proposal.gather(1, x).squeeze(-1) < p.gather(1, x).squeeze(-1))
        fails = (here & ~passes).unsqueeze(-1)
        p = torch.where(fails, _residual(p, proposal), p)
        q = q if q is None else torch.where(fails, _normalised(q.scatter(1, x, 0.0), q), q)
        entered = passes.unsqueeze(-1)
        p = torch.where(entered, scores[:, node + 1].double().softmax(-1), p)
        if q is not None and drafts is not None and node + 1 < drafts.shape[1]:
            q = torch.where(entered, drafts[:, node + 1].double(), q)
        path[row, depth] = torch.where(passes, node, path[row, depth])
        chosen[row, depth] = torch.where(passes, token, chosen[row, depth])
        tried = torch.where(passes, 0, tried + here.long())
        depth = depth + passes.long()
        current = torch.where(passes, node, current)
    at = NumberKey(key.seed, key.child, key.position + depth)
    chosen[row, depth] = draw(p.log(), at, Purpose.RESIDUAL)
    return AcceptedPath(chosen, depth + 1, path[:, :width])


def _accept_number(key: NumberKey, depth: Tensor, tried: Tensor) -> Tensor:
    """Uniform in (0, 1), keyed by position and by the number of siblings that were tried before."""
    at = NumberKey(key.seed, key.child, key.position + depth)
    high, low = (words_of(at, Purpose.ACCEPT, tried.unsqueeze(-1), low=low).squeeze(-1) for low in (False, True))
    return (((high << 20) | (low >> 12)).double() + 0.5) * 2.0**-52


def _residual(p: Tensor, q: Tensor) -> Tensor:
    return _normalised((p - q).clamp_min(0.0), p)


def _normalised(weights: Tensor, otherwise: Tensor) -> Tensor:
    """`otherwise` where rounding has left no weight; the probability of getting there is a rounding error."""
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0, weights / total, otherwise)
