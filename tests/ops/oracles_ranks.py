"""Oracles of operations between ranks, for the groups of `cases_ranks`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from bankfull.ops import Sides
from bankfull.ranks.expert_ranks import ExpertSpread
from tests.ops.cases_ranks import Receiver
from tests.ops.oracles import Array, f64


def dispatch(x: Tensor, chosen: Tensor, weights: Tensor, spread: ExpertSpread, group: object) -> tuple[Array, ...]:
    """One rank: every pair of a token and an expert is computed here, in the order of the tokens."""
    tokens, per_token = chosen.shape
    row = np.repeat(np.arange(tokens), per_token)
    counts = np.array([[tokens], [tokens]])
    return f64(x)[row], chosen.numpy().reshape(-1, 1), f64(weights).reshape(-1, 1), row, np.arange(tokens), counts


def combine(y: Tensor, row: Tensor, sent: Tensor, counts: Tensor, tokens: int, *others: object) -> Array:
    out = np.zeros((tokens, y.shape[1]))
    for pair, at in enumerate(row.tolist()):
        out[int(sent[at])] += f64(y)[pair]
    return out


def cross(x: Tensor, tokens: int, sides: Sides, to_feeds: bool) -> Array:
    assert isinstance(sides.group, Receiver) and sides.group.given is not None
    return f64(sides.group.given)


ORACLES: dict[str, Callable[..., Any]] = {function.__name__: function for function in (dispatch, combine, cross)}
