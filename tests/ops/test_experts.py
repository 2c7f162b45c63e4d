"""Routing and mixtures of experts: every token gets its experts, and the cost is that of the experts touched."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from bankfull.errors import ModelError
from bankfull.ops import OPERATIONS, RoutingRule, expert_mlp, route
from bankfull.ops.cost import nbytes
from bankfull.ops.experts.body import SIGMOID, SOFTMAX, distinct_experts
from bankfull.weights.formats import SCHEMES
from tests.ops import cases
from tests.quick import examples


@st.composite
def routed(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor | None, RoutingRule]:
    """Logits with many ties, infinities and NaN among them."""
    groups, size = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    kept = draw(st.integers(1, groups))
    rule = RoutingRule(
        groups * size,
        draw(st.integers(1, kept * size)),
        draw(st.sampled_from((SOFTMAX, SIGMOID))),
        draw(st.booleans()),
        1.0,
        groups,
        kept,
        draw(st.integers(1, min(size, 2))),
    )
    numbers = st.sampled_from((0.0, 0.0, 1.0, -2.0, 3.5, 1e30, -torch.inf, torch.inf, torch.nan))
    tokens = draw(st.integers(1, 5))
    rows = draw(st.lists(numbers, min_size=tokens * rule.experts, max_size=tokens * rule.experts))
    bias = draw(st.none() | st.lists(st.sampled_from((0.0, 0.5)), min_size=rule.experts, max_size=rule.experts))
    return torch.tensor(rows).view(tokens, -1), None if bias is None else torch.tensor(bias), rule


@examples(150)
@given(routed())
def test_every_token_gets_its_number_of_different_experts(
    made: tuple[torch.Tensor, torch.Tensor | None, RoutingRule],
) -> None:
    logits, bias, rule = made
    _, chosen = route(logits, bias, rule)
    assert chosen.shape == (len(logits), rule.per_token)
    for row in chosen.tolist():
        assert len(set(row)) == rule.per_token and all(0 <= expert < rule.experts for expert in row)
        assert len({expert // (rule.experts // rule.groups) for expert in row}) <= rule.groups_kept


@examples(60)
@given(st.integers(1, 9), st.integers(1, 9), st.sampled_from((SOFTMAX, SIGMOID)))
def test_the_lowest_id_wins_a_tie(experts: int, per_token: int, scores: str) -> None:
    rule = RoutingRule(experts, min(per_token, experts), scores, renormalize=True)
    weights, chosen = route(torch.full((3, experts), 0.25), None, rule)
    assert chosen.tolist() == [list(range(rule.per_token))] * 3
    assert torch.allclose(weights, torch.full_like(weights, 1 / rule.per_token))


def test_a_bias_chooses_but_does_not_weigh() -> None:
    logits, bias = torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0.0, 0.0, 9.0])
    weights, chosen = route(logits, bias, RoutingRule(3, 2, SIGMOID))
    assert chosen.tolist() == [[2, 0]]
    assert torch.allclose(weights, torch.tensor([[0.0, 2.0]]).sigmoid())


def test_renormalized_softmax_is_the_softmax_of_the_chosen_logits() -> None:
    logits = torch.randn(7, 20, dtype=torch.float64)
    weights, chosen = route(logits, None, RoutingRule(20, 4, renormalize=True))
    assert torch.allclose(weights, logits.gather(1, chosen.long()).softmax(-1))


IMPOSSIBLE = [
    ({"experts": 4, "per_token": 5}, "5 experts per token, but only 4 experts"),
    ({"experts": 0, "per_token": 1}, "has 0 and 1"),
    ({"experts": -8, "per_token": -1}, "has -8 and -1"),
    ({"experts": 8, "per_token": 1, "groups": 3}, "into 3 groups"),
    ({"experts": 8, "per_token": 1, "groups": 4, "groups_kept": 5}, "keeps 5 of them"),
    ({"experts": 8, "per_token": 3, "groups": 4, "groups_kept": 1}, "chooses 3 experts from 1 groups of 2"),
    ({"experts": 8, "per_token": 1, "groups": 8, "group_best": 2}, "ranked by their best 2"),
    ({"experts": 8, "per_token": 1, "scores": "cosine"}, "'cosine'"),
]


@pytest.mark.parametrize(("how", "sentence"), IMPOSSIBLE)
def test_an_impossible_rule_is_refused_in_one_sentence(how: dict[str, object], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence) as caught:
        RoutingRule(**how)  # type: ignore[arg-type]
    assert str(caught.value).count(". ") == 0


def test_a_token_of_one_expert_alone_is_that_expert() -> None:
    """Empty experts change nothing, and weights are factors."""
    made = cases.case("expert_mlp", 4, torch.float64)
    x, chosen, weights, *rest = made.args
    whole = expert_mlp(x, chosen, weights, *rest)
    parts = [
        expert_mlp(x, chosen[:, slot : slot + 1], weights[:, slot : slot + 1] * 2, *rest) / 2
        for slot in range(chosen.shape[1])
    ]
    assert torch.allclose(sum(parts), whole)


def test_the_expected_experts_are_those_that_uniform_routing_touches() -> None:
    drawn = torch.Generator().manual_seed(3)
    for tokens, experts, per_token in ((1, 64, 8), (8, 64, 8), (3, 4, 2), (50, 16, 3)):
        found = [
            len(torch.rand(tokens, experts, generator=drawn).argsort(-1)[:, :per_token].unique()) for _ in range(400)
        ]
        assert abs(sum(found) / len(found) - distinct_experts(tokens, experts, per_token)) < 0.02 * experts


@pytest.mark.parametrize("scheme", ["bf16", "q4_0", "q4_k", "int8_row"])
def test_experts_cost_the_bytes_of_those_touched_in_their_scheme(scheme: str) -> None:
    make = cases.Maker(3, torch.float32)
    gate, up, down = (make.weight(SCHEMES[scheme], 16 * 256, 256).reshape_leading(16, 256) for _ in range(3))
    each = nbytes(gate, up, down) / 16
    for tokens, touched in ((1, 4.0), (2, 7.0)):
        x, chosen, weights = torch.zeros(tokens, 256), torch.zeros(tokens, 4, dtype=torch.int32), torch.zeros(tokens, 4)
        for name in ("expert_mlp", "expert_mlp_int8", "expert_mlp_bf16"):
            cost = OPERATIONS[name].cost(x, chosen, weights, gate, up, down, None, None, None, "silu")
            assert cost.read == nbytes(x, chosen, weights) + touched * each
            assert cost.flops == tokens * 4 * 6 * 256 * 256
