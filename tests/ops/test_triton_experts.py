"""The GPU's kernels for experts, for every number of tokens at which another one runs."""

from __future__ import annotations

import pytest
import torch

from bankfull.ops import Kit, RoutingRule, expert_mlp, route, triton  # noqa: F401  (triton registers its providers)
from bankfull.ops.triton.experts import FEW_TOKENS, SOME_TOKENS
from bankfull.weights.formats import SCHEMES
from bankfull.weights.qtensor import QTensor
from tests.ops import cases
from tests.ops.compare import assert_close

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Without a GPU, kernels are interpreted on the host."""


def check(tokens: int, scheme: str, dtype: torch.dtype, chosen: torch.Tensor | None = None, kind: str = "silu") -> None:
    make, experts, per_token, hidden, inner = cases.Maker(7, dtype), 5, 2, 64, 96
    gate, up, down = (
        make.weight(SCHEMES[scheme], experts * outer, columns).reshape_leading(experts, outer)
        for outer, columns in ((inner, hidden), (inner, hidden), (hidden, inner))
    )
    if chosen is None:
        chosen = torch.rand(tokens, experts, generator=make.numbers).argsort(-1)[:, :per_token]
    x = torch.randn(tokens, hidden, generator=make.numbers).to(dtype) / hidden**0.5
    weights = torch.rand(chosen.shape, generator=make.numbers)
    args = (x, chosen.to(torch.int32), weights, gate, up, down, None, None, None, kind)
    expected = expert_mlp(*args)
    given = cases.Case(args, dtype).to(DEVICE).args
    facts = {"dtype": dtype, "weight": given[3], "weights": given[3:6]}
    kit = Kit("cuda", ("triton",))
    run = kit.bind(expert_mlp, **facts)
    assert set(kit.chosen["expert_mlp"]) == {"triton"}
    prepared = [kit.prepare(expert_mlp, a, **facts) if isinstance(a, QTensor) else a for a in given]
    assert_close(run(*prepared), expected, dtype)


@pytest.mark.parametrize("tokens", [1, FEW_TOKENS, FEW_TOKENS + 1, SOME_TOKENS, SOME_TOKENS + 1])
def test_every_number_of_tokens_gives_the_same_sums(tokens: int) -> None:
    check(tokens, "f32", torch.float32)


@pytest.mark.parametrize("scheme", ["bf16", "int8_row", "int8_g32", "int4_g32", "fp8"])
def test_many_tokens_read_every_format(scheme: str) -> None:
    check(SOME_TOKENS + 6, scheme, torch.bfloat16, kind="clamped_swiglu")


@pytest.mark.parametrize("tokens", [3, 20, 66])
def test_experts_without_tokens_change_nothing(tokens: int) -> None:
    """All tokens choose the same experts, the first and the last."""
    check(tokens, "f32", torch.float32, torch.tensor([[4, 0]]).repeat(tokens, 1))


@pytest.mark.parametrize("groups", [1, 4])
def test_routing_of_many_experts_has_the_ties_of_the_body(groups: int) -> None:
    rule = RoutingRule(160, 6, "softmax", True, 2.5, groups, max(1, groups // 2))
    logits = torch.randint(0, 9, (12, 160), generator=torch.Generator().manual_seed(1)).to(torch.float32) / 4
    logits[3] = torch.nan
    found = Kit("cuda", ("triton",)).bind(route, dtype=torch.float32, experts=160)(logits.to(DEVICE), None, rule)
    expected = route(logits, None, rule)
    assert torch.equal(found[1].cpu(), expected[1])
    kept = [i for i in range(12) if i != 3]
    assert torch.allclose(found[0].cpu()[kept], expected[0][kept])
