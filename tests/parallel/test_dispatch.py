"""Tokens on their way to experts: nothing is lost whatever the routing, and the bytes are those of the formula."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bankfull.layers.build import Build
from bankfull.layers.experts import Experts, ExpertsShape, RoutingRule
from bankfull.ops import combine, dispatch, kit_for
from bankfull.ranks.expert_ranks import ExpertRanks, ExpertSpread, hottest, owner_of
from bankfull.ranks.mesh import MeshSpec
from bankfull.spread.experts import mixture
from bankfull.weights.qtensor import QTensor, Scheme
from tests.models.oracle import CPU
from tests.parallel.threads import ThreadRank, on_ranks
from tests.quick import examples

HIDDEN, INNER = 12, 6
ROW, INDEX = 4 * HIDDEN, 8


class Drawn:
    """A source of random tensors. The first columns of a token are its router's logits."""

    def __init__(self, experts: int) -> None:
        make = torch.Generator().manual_seed(experts)
        self.tensors = {"gate.weight": torch.eye(HIDDEN)[:experts]}
        for expert in range(experts):
            for name, shape in (("gate", (INNER, HIDDEN)), ("up", (INNER, HIDDEN)), ("down", (HIDDEN, INNER))):
                self.tensors[f"experts.{expert}.{name}_proj.weight"] = torch.randn(shape, generator=make)
        self.read: list[str] = []

    def names(self) -> list[str]:
        return list(self.tensors)

    def has(self, name: str) -> bool:
        return name in self.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def scheme(self, name: str) -> Scheme:
        return self.get(name).scheme

    def get(self, name: str) -> QTensor:
        self.read.append(name)
        return QTensor.dense(self.tensors[name])

    def unread(self) -> list[str]:
        return []

    def release(self) -> None:
        """Nothing is mapped."""


def layer_of(rule: RoutingRule, ranks: ExpertRanks | None = None) -> Experts:
    build = Build(Drawn(rule.experts), kit_for("cpu", "torch"), torch.float32, CPU, experts=ranks)
    return mixture(build, ExpertsShape(HIDDEN, INNER, rule))


def close(found: Tensor, expected: Tensor) -> bool:
    """Equal but for the order of sums."""
    return found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-5, atol=2e-6 * HIDDEN * 9)


def tokens_of(choices: list[list[int]], seed: int = 0) -> Tensor:
    """Tokens that choose these experts, in this order."""
    x = torch.randn(len(choices), HIDDEN, generator=torch.Generator().manual_seed(seed)) / 4
    for token, chosen in enumerate(choices):
        for place, expert in enumerate(chosen):
            x[token, expert] = 9.0 - place
    return x


@st.composite
def routings(draw: st.DrawFn) -> tuple[RoutingRule, list[list[list[int]]], tuple[int, ...]]:
    """The experts of each token of each rank, and the hot ones: ranks without tokens and experts without tokens."""
    experts = draw(st.integers(1, 8))
    ranks, per_token = draw(st.integers(1, min(4, experts))), draw(st.integers(1, min(3, experts)))
    favourites = draw(st.lists(st.integers(0, experts - 1), min_size=per_token, max_size=experts, unique=True))
    one = st.permutations(favourites).map(lambda order: list(order)[:per_token])
    tokens = draw(st.lists(st.lists(one, max_size=5), min_size=ranks, max_size=ranks))
    hot = draw(st.sets(st.integers(0, experts - 1)))
    return RoutingRule(experts, per_token, renormalize=True), tokens, tuple(sorted(hot))


@examples(150)
@given(routings())
def test_every_token_gets_the_sum_of_its_experts_whatever_the_routing(
    drawn: tuple[RoutingRule, list[list[list[int]]], tuple[int, ...]],
) -> None:
    rule, tokens, hot = drawn
    whole = layer_of(rule)

    def own_tokens(rank: ThreadRank) -> bool:
        x = tokens_of(tokens[rank.index], rank.index)
        return close(layer_of(rule, ExpertRanks(rank, hot={"": hot}))(x), whole(x))

    assert all(on_ranks(len(tokens), own_tokens))
    together = tokens_of([chosen for own in tokens for chosen in own])

    def same_tokens(rank: ThreadRank) -> Tensor:
        return layer_of(rule, ExpertRanks(rank, rank, hot={"": hot}))(together)

    found = on_ranks(len(tokens), same_tokens)
    assert all(torch.equal(found[0], other) for other in found), "all ranks go on with the same bits"
    assert close(found[0], whole(together))


def test_contexts_with_other_tokens_share_experts() -> None:
    """tp=2,cp=2,ep=4: tensor ranks share the tokens of their context, and all four ranks hold different experts."""
    rule, mesh = RoutingRule(5, 2), MeshSpec(tp=2, cp=2, ep=4)
    choices = [[[0, 4], [1, 2], [3, 0]], [[4, 3], [4, 2], [4, 1], [4, 0], [1, 3]]]

    def work(rank: ThreadRank) -> None:
        places = mesh.expert_places(rank.index)
        assert (len(places.group), len(places.tokens), len(places.width)) == (4, 2, 1)
        x = tokens_of(choices[rank.index // 2], rank.index // 2)
        layer = layer_of(rule, ExpertRanks(rank.among(*places.group), rank.among(*places.tokens)))
        assert close(layer(x), layer_of(rule)(x))

    on_ranks(mesh.ranks, work)


@examples(100)
@given(routings())
def test_the_bytes_are_those_of_the_routing_that_happened(
    drawn: tuple[RoutingRule, list[list[list[int]]], tuple[int, ...]],
) -> None:
    rule, tokens, hot = drawn
    ranks = len(tokens)

    def sent(rank: ThreadRank) -> list[int]:
        layer_of(rule, ExpertRanks(rank, hot={"": hot}))(tokens_of(tokens[rank.index]))
        return rank.sent

    def rows(source: int, target: int) -> int:
        """Tokens of one rank with an expert on the other: each travels once."""
        mine = [set(chosen) - set(hot) for chosen in tokens[source]]
        return sum(any(owner_of(e, rule.experts, ranks) == target for e in chosen) for chosen in mine)

    for index, found in enumerate(on_ranks(ranks, sent)):
        others = [other for other in range(ranks) if other != index]
        leaving = sum(rows(index, other) for other in others)
        coming = sum(rows(other, index) for other in others)
        routes = 2 * 4 * rule.per_token  # numbers and weights of a token's experts
        assert found == [INDEX * (ranks - 1), leaving * ROW, leaving * routes, coming * ROW]


@pytest.mark.parametrize("hot", [(), (0,), (1, 4)])
@pytest.mark.parametrize(("experts", "ranks", "per_token"), [(6, 3, 2), (5, 2, 3), (7, 4, 1)])
def test_declared_bytes_are_exact_where_every_choice_is_made_once(
    experts: int, ranks: int, per_token: int, hot: tuple[int, ...]
) -> None:
    choices = [list(chosen) for chosen in combinations(range(experts), per_token)]
    x, chosen = tokens_of(choices), torch.tensor(choices, dtype=torch.int32)
    weights = torch.ones(len(x), per_token)

    def work(rank: ThreadRank) -> None:
        spread = ExpertSpread(experts, ranks, rank.index, hot)
        rows, places, scales, row, own, counts = dispatch(x, chosen, weights, spread, rank)
        declared = dispatch.cost(x, chosen, weights, spread, rank)
        assert declared.wire == pytest.approx(sum(rank.sent))
        assert declared.write == pytest.approx(
            sum(t.numel() * t.element_size() for t in (rows, places, scales, row, own, counts))
        )
        assert [tuple(t.shape) for t in dispatch.on_meta(x, chosen, weights, spread, rank)] == [
            tuple(t.shape) for t in (rows, places, scales, row, own, counts)
        ]
        rank.sent.clear()
        args = (rows, row, own, counts, len(x), per_token, spread, rank)
        assert close(combine(*args), per_token * x)
        assert combine.cost(*args).wire == pytest.approx(sum(rank.sent))

    on_ranks(ranks, work)


def test_hot_experts_on_every_rank_level_the_load() -> None:
    """Nine of ten tokens choose the experts 0 and 1, which one rank holds."""
    rule, ranks = RoutingRule(8, 2, renormalize=True), 4
    choices = [[0, 1] if token % 10 else [2 + token % 6, 7 - token % 5] for token in range(80)]
    x, expected = tokens_of(choices), layer_of(rule)(tokens_of(choices))

    def work(rank: ThreadRank) -> tuple[list[int], list[int], list[bool], int]:
        layer = layer_of(rule, ExpertRanks(rank, rank))
        pairs: list[int] = []
        run = layer._run

        def counted(rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
            pairs.append(len(rows))
            return run(rows, chosen, weights)

        layer._run = counted  # type: ignore[method-assign]
        layer.count_routing()
        before = layer(x)
        sent = [sum(rank.sent[1:4])]  # rows there and back, without counts and the gathering of results
        counts = layer.counted_routing()
        assert counts.sum() == 2 * len(x)
        layer.replicate(counts, 2)
        assert layer.spread is not None and layer.spread.hot == (0, 1)
        rank.sent.clear()
        after = layer(x)
        sent.append(sum(rank.sent[1:4]))
        right = [close(y, expected) for y in (before, after)]
        return pairs, sent, right, layer.gate.shape[0]

    found = on_ranks(ranks, work)
    assert all(all(right) for _, _, right, _ in found)
    busiest = [max(pairs[turn] for pairs, _, _, _ in found) for turn in (0, 1)]
    assert busiest[0] > 0.85 * 2 * len(x) and busiest[1] < 1.25 * 2 * len(x) / ranks
    sent = [sum(sent[turn] for _, sent, _, _ in found) for turn in (0, 1)]
    assert sent[1] < 0.3 * sent[0], "tokens of hot experts stay where they are"
    assert [held for _, _, _, held in found] == [2, 4, 4, 4]


def test_the_hottest_experts_are_those_with_the_highest_counts() -> None:
    assert hottest([3, 9, 9, 0, 9], 2) == (1, 2)
    assert hottest(torch.tensor([1.0, 5.0]), 4) == (0, 1)
    assert hottest([], 3) == ()


def test_a_rank_reads_only_experts_that_it_holds() -> None:
    def work(rank: ThreadRank) -> set[int]:
        source = Drawn(6)
        build = Build(source, kit_for("cpu", "torch"), torch.float32, CPU, experts=ExpertRanks(rank, hot={"": [5]}))
        mixture(build, ExpertsShape(HIDDEN, INNER, RoutingRule(6, 2)))
        return {int(name.split(".")[1]) for name in source.read if name.startswith("experts.")}

    assert on_ranks(3, work) == [{0, 1, 5}, {2, 3, 5}, {4, 5}]


def test_a_shared_expert_runs_on_each_ranks_own_tokens() -> None:
    rule, seen = RoutingRule(4, 2), {}
    x = tokens_of([[0, 1], [2, 3], [1, 2], [0, 3], [1, 0]])

    def work(rank: ThreadRank) -> Tensor:
        layer = layer_of(rule, ExpertRanks(rank, rank))

        def shared(rows: Tensor) -> Tensor:
            seen[rank.index] = len(rows)
            return 2 * rows

        layer.shared = shared
        return layer(x)

    found = on_ranks(2, work)
    assert seen == {0: 3, 1: 2}
    assert all(close(y, layer_of(rule)(x) + 2 * x) for y in found)
