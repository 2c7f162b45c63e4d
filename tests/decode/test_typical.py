from __future__ import annotations

import math

import pytest
import torch

from bankfull.decode.rejection import NO_NODE
from bankfull.decode.typical import DELTA, EPSILON, LOSSY, accept_typical, thresholds
from bankfull.sample.draw import draw
from bankfull.sample.random import NumberKey, Purpose

PADDING = -1


def key_of(lines: int = 1) -> NumberKey:
    return NumberKey(torch.full((lines,), 9), torch.zeros(lines, dtype=torch.int64), torch.arange(lines) * 8 + 4)


def test_it_is_marked_lossy() -> None:
    assert LOSSY


@pytest.mark.parametrize(
    "probs", [[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.98, 0.01, 0.01], [1 / 3, 1 / 3, 1 / 3]], ids=str
)
def test_the_threshold_falls_with_the_entropy(probs: list[float]) -> None:
    entropy = -sum(p * math.log(p) for p in probs if p)
    expected = min(EPSILON, DELTA * math.exp(-entropy))
    assert thresholds(torch.tensor(probs, dtype=torch.float64)).item() == pytest.approx(expected)
    flat = torch.full((1000,), 1e-3, dtype=torch.float64)
    assert thresholds(flat).item() == pytest.approx(0.3e-3)


PEAKED = torch.tensor([0.9, 0.05, 0.03, 0.02], dtype=torch.float64).log()
FLAT = torch.tensor([0.3, 0.3, 0.2, 0.2], dtype=torch.float64).log()


def test_the_longest_accepted_path_counts_and_among_equals_the_most_likely() -> None:
    #        root
    #   0:tok0   1:tok1 (0.05: rejected)   2:tok2 (0.03: rejected)
    #   3:tok3   4:tok0   5 under 1: never, its parent is rejected
    tokens = torch.tensor([[0, 1, 2, 3, 0, 0]])
    parents = torch.tensor([[-1, -1, -1, 0, 0, 1]])
    scores = torch.stack([PEAKED, FLAT, FLAT, FLAT, PEAKED, PEAKED, PEAKED]).unsqueeze(0)
    path = accept_typical(scores, tokens, parents, key_of())
    assert path.counts.tolist() == [3]
    assert path.nodes[0, :2].tolist() == [0, 4] and set(path.nodes[0, 2:].tolist()) == {NO_NODE}
    key = key_of()
    last = draw(scores[:, 5], NumberKey(key.seed, key.child, key.position + 2), Purpose.TOKEN)
    assert path.tokens[0, :3].tolist() == [0, 0, int(last)]


def test_rows_differ_and_padding_is_no_node() -> None:
    tokens = torch.tensor([[0, PADDING], [1, 0], [0, 0]])
    parents = torch.tensor([[-1, -1], [-1, 0], [-1, 0]])
    scores = PEAKED.expand(3, 3, -1)
    path = accept_typical(scores, tokens, parents, key_of(3))
    assert path.counts.tolist() == [2, 1, 3]
    assert path.nodes.tolist() == [[0, -1], [-1, -1], [0, 1]]
    loose = accept_typical(scores, tokens, parents, key_of(3), epsilon=0.04, delta=1.0)
    assert loose.counts.tolist() == [2, 3, 3]


def test_a_greedy_row_loses_nothing() -> None:
    only = torch.full((1, 4, 4), -torch.inf, dtype=torch.float64)
    only[:, :, 2] = 0.0
    chain = torch.tensor([[-1, 0, 1]])
    assert accept_typical(only, torch.tensor([[2, 2, 1]]), chain, key_of()).tokens.tolist() == [[2, 2, 2, -1]]


def test_without_drafts_it_is_plain_decoding() -> None:
    scores = FLAT.expand(50, 1, -1)
    nothing = torch.empty(50, 0, dtype=torch.int64)
    path = accept_typical(scores, nothing, nothing, key_of(50))
    assert torch.equal(path.tokens[:, 0], draw(scores[:, 0], key_of(50), Purpose.TOKEN))
