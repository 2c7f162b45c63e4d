"""The GPU's kernels for experts, for every number of tokens at which another one runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import bankfull.ops.triton.providers  # noqa: F401  (registers the kernels)
from bankfull.ops import Kit, RoutingRule, expert_mlp, route
from bankfull.ops.experts.triton import experts
from bankfull.ops.experts.triton import words as experts_words
from bankfull.ops.experts.triton.experts import FEW_TOKENS, SOME_TOKENS
from bankfull.ops.experts.triton.weights import CODES, ExpertWords, form_of, prepare
from bankfull.ops.products.triton.quantized.layout import LAYOUTS
from bankfull.weights.qtensor import QTensor
from tests.ops import cases
from tests.ops.compare import assert_close

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Without a GPU, kernels are interpreted on the host."""
FULL = () if torch.cuda.is_available() else (pytest.mark.full,)
"""Of long rows the interpreter takes long, too."""


def check(
    tokens: int,
    scheme: str,
    dtype: torch.dtype,
    chosen: torch.Tensor | None = None,
    kind: str = "silu",
    *,
    down: str = "",
    sizes: tuple[int, int] = (64, 96),
    experts: int = 5,
    per_token: int = 2,
    biased: bool = False,
) -> None:
    """`sizes`: hidden and inner. `down`: another scheme of the last matrix."""
    make, (hidden, inner) = cases.Maker(7, dtype), sizes
    gate, up, last = (
        make.weight(cases.WEIGHTS[name], experts * outer, columns).reshape_leading(experts, outer)
        for name, outer, columns in (
            (scheme, inner, hidden),
            (scheme, inner, hidden),
            (down or scheme, hidden, inner),
        )
    )
    if chosen is None:
        chosen = torch.rand(tokens, experts, generator=make.numbers).argsort(-1)[:, :per_token]
    x = torch.randn(tokens, hidden, generator=make.numbers).to(dtype) / hidden**0.5
    weights = torch.rand(chosen.shape, generator=make.numbers)
    biases = [make.normal(experts, outer) if biased else None for outer in (inner, inner, hidden)]
    args = (x, chosen.to(torch.int32), weights, gate, up, last, *biases, kind)
    expected = expert_mlp(*args)
    given = cases.Case(args, dtype).to(DEVICE).args
    facts = {"dtype": dtype, "weight": given[3], "weights": given[3:6]}
    kit = Kit("cuda", ("triton",))
    run = kit.bind(expert_mlp, **facts)
    assert set(kit.chosen["expert_mlp"]) == {"triton"}
    prepared = [kit.prepare(expert_mlp, a, **facts) if isinstance(a, QTensor) else a for a in given]
    assert_close(run(*prepared), expected, torch.bfloat16 if dtype is torch.float16 else dtype)


@pytest.mark.parametrize("tokens", [1, FEW_TOKENS, FEW_TOKENS + 1, SOME_TOKENS, SOME_TOKENS + 1])
def test_every_number_of_tokens_gives_the_same_sums(tokens: int) -> None:
    check(tokens, "f32", torch.float32)


COUNTS = (1, 2, 9, SOME_TOKENS + 6)
"""One for each way through the kernels, and two of very few tokens, which the interpreter is slow for."""
QUANTIZED = [*CODES, *(name for name in LAYOUTS if name not in CODES)]
VARIED = ("bf16", "int8_g32", "fp8_g128", "int4_g32", "uint3_g32", "int2_g64", "mxfp4")


@pytest.mark.few(1)
@pytest.mark.covering(1)
@pytest.mark.parametrize("tokens", COUNTS)
@pytest.mark.parametrize("scheme", VARIED)
def test_every_number_of_tokens_reads_every_kind_of_format(scheme: str, tokens: int) -> None:
    block = max(32, cases.WEIGHTS[scheme].block)
    check(tokens, scheme, torch.bfloat16, kind="clamped_swiglu", sizes=(2 * block, 3 * block), biased=True)


@pytest.mark.few(4)
@pytest.mark.parametrize("scheme", QUANTIZED)
def test_every_format_is_read(scheme: str) -> None:
    block = max(32, cases.WEIGHTS[scheme].block)
    tokens = COUNTS[QUANTIZED.index(scheme) % len(COUNTS)]
    check(tokens, scheme, torch.bfloat16, sizes=(block, 2 * block if block < 256 else block), experts=3)


@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("scheme", ["mxfp4", "uint4_g32", "int3_g64", "q6_k"])
def test_float32_is_exact_up_to_its_roundings(scheme: str, tokens: int) -> None:
    block = cases.WEIGHTS[scheme].block
    check(tokens, scheme, torch.float32, sizes=(block, 2 * block if block < 256 else block), experts=3)


@pytest.mark.parametrize("scheme", [pytest.param(name, marks=FULL) for name in ("mxfp4", "int3_g32", "q8_0")])
def test_rows_of_several_chunks_the_last_one_not_full(scheme: str) -> None:
    check(2, scheme, torch.float16, sizes=(2880, 32), experts=3)
    check(1, scheme, torch.bfloat16, sizes=(32, 2880), experts=3, biased=True)


@pytest.mark.parametrize("columns", [pytest.param(columns, marks=FULL) for columns in (4096, 7168)])
def test_several_warps_share_a_long_row(columns: int) -> None:
    check(1, "int4_g128", torch.bfloat16, sizes=(columns, 128), experts=2)
    check(1, "mxfp4", torch.bfloat16, sizes=(32, columns), experts=2, per_token=1)


@pytest.mark.few(1)
@pytest.mark.parametrize("per_token", [1, 3, 8, 9])
def test_any_number_of_experts_per_token(per_token: int) -> None:
    """More than eight are added by a kernel of their own."""
    check(3, "mxfp4", torch.bfloat16, sizes=(32, 64), experts=9, per_token=per_token, biased=True)


@pytest.mark.few(0)
def test_gate_and_down_may_have_different_formats() -> None:
    for tokens in COUNTS:
        check(tokens, "int4_g32", torch.bfloat16, down="int8_row")
        check(tokens, "bf16", torch.bfloat16, down="mxfp4")


@pytest.mark.few(0)
def test_programs_take_several_tiles_of_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts_words, "multiprocessors", lambda device: 1)
    monkeypatch.setattr(experts_words, "AT_ONCE", 8)
    for scheme in ("mxfp4", "int3_g32"):
        check(2, scheme, torch.bfloat16, sizes=(64, 96), biased=True)


def test_very_few_tokens_of_codes_that_are_whole_numbers_take_integer_products(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    for name in ("few_gate", "few_down", "tile_gate", "tile_down"):
        kernel = getattr(experts_words, name)

        def watched(*args: object, name: str = name, kernel: Callable[..., torch.Tensor] = kernel) -> torch.Tensor:
            called.append(name)
            return kernel(*args)

        monkeypatch.setattr(experts_words, name, watched)
    few, tiles = ["few_gate", "few_down"], ["tile_gate", "tile_down"]
    for scheme, tokens, dtype, expected in (
        ("mxfp4", 1, torch.bfloat16, few),
        ("int3_g32", FEW_TOKENS, torch.float16, few),
        ("mxfp4", FEW_TOKENS + 1, torch.bfloat16, tiles),
        ("mxfp4", 1, torch.float32, tiles),
        ("q5_0", 1, torch.bfloat16, tiles),
        ("int8_row", 1, torch.bfloat16, []),
    ):
        called.clear()
        check(tokens, scheme, dtype)
        assert called == expected, scheme


def test_stacked_words_take_the_bytes_of_their_scheme() -> None:
    for scheme, bits in (("mxfp4", 4.25), ("int3_g128", 3.125), ("uint3_g64", 3.375), ("int2_g32", 2.5)):
        weight = cases.Maker(1).weight(cases.WEIGHTS[scheme], 3 * 16, 256).reshape_leading(3, 16)
        found = prepare(weight)
        assert isinstance(found, ExpertWords) and found.shape == (3, 16, 256)
        assert found.nbytes == weight.nbytes == 3 * 16 * 256 * bits / 8


@pytest.mark.parametrize("exponent", [0, 66, 188, 255])
def test_scales_that_kernels_cannot_hold_are_left_to_the_body(exponent: int) -> None:
    weight = cases.Maker(1).weight(cases.WEIGHTS["mxfp4"], 4, 64)
    assert form_of(weight) is not None
    weight.parts["blocks"][1, 17] = exponent
    assert form_of(weight) is None and not experts._accepts(dtype=torch.bfloat16, weights=(weight,) * 3)


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
