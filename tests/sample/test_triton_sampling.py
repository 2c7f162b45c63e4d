"""Sampling on a GPU against the tensor operations that are its meaning; without a GPU its kernels are interpreted."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from bankfull.ops.products.body import highest  # noqa: E402
from bankfull.ops.sampling.triton.numbers import (  # noqa: E402
    SLACK,
    gumbel_of,
    highest_gumbel_of,
    least_reaching,
    race_words,
    strength_of,
    word_of,
)
from bankfull.ops.sampling.triton.sampling import best, choose, choose_captured  # noqa: E402
from bankfull.sample.draw import WEIGHT_BITS  # noqa: E402
from bankfull.sample.logits import NO_TOKEN, SamplingTable, sample  # noqa: E402
from bankfull.sample.params import SamplingParams  # noqa: E402
from bankfull.sample.race import gumbel, highest_gumbel  # noqa: E402
from bankfull.sample.random import NumberKey, Purpose, high_words, words_of  # noqa: E402
from tests.sample.batch import entering  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED_IN_FULL = [] if torch.cuda.is_available() else [pytest.mark.full]

PARAMS = [
    SamplingParams(temperature=0),
    SamplingParams(),
    SamplingParams(temperature=0.3, top_k=1),
    SamplingParams(temperature=1.7, top_k=40),
    SamplingParams(top_p=0.9),
    SamplingParams(top_p=1e-6),
    SamplingParams(temperature=2.0, top_k=700, top_p=0.5),
    SamplingParams(min_p=0.03),
    SamplingParams(top_p=0.999),
    SamplingParams(temperature=0.9, top_k=50, top_p=0.95, min_p=0.01),
    SamplingParams(top_k=10**6, min_p=1.0),
    SamplingParams(temperature=90.0, top_p=0.97),
    SamplingParams(temperature=1e-4, top_k=100, top_p=0.9),
]


def table_of(all_params: list[SamplingParams], vocab: int) -> SamplingTable:
    table = SamplingTable(len(all_params), vocab, DEVICE)
    for row, params in enumerate(all_params):
        table.set([entering(row, params, prompt_len=0, child=row % 3, seed=row + 2**40 - 7, stop_ids=[])])
    return table


def by_tensors(scores: torch.Tensor, rows: torch.Tensor, table: SamplingTable, length: torch.Tensor) -> torch.Tensor:
    assert table.chooser is None
    return sample(scores, rows, table, rows[:, None], length, host_rows=rows.tolist()).tokens


def scores_of(kind: str, lines: int, vocab: int) -> torch.Tensor:
    numbers = torch.Generator().manual_seed(vocab)
    scores = torch.randn(lines, vocab, generator=numbers) * 3
    if kind == "equal":
        scores = (scores * 2).round() / 2
    elif kind == "same":
        scores = torch.full_like(scores, -0.0)
        scores[:, ::3] = 0.0
    elif kind == "peaked":
        scores[:, 77:90] += 12
    elif kind == "far":  # different scores round to the same one below a far highest
        scores = scores * 1e-4 + 1
        scores[:, vocab // 2] = 300.0
    elif kind == "banned":
        scores[:, torch.rand(vocab, generator=numbers) < 0.99] = -torch.inf
    return scores.to(DEVICE)


@pytest.mark.parametrize(
    ("kind", "vocab"),
    [
        ("random", 1000),
        pytest.param("random", 4097, marks=INTERPRETED_IN_FULL),
        ("equal", 4097),
        ("same", 1000),
        ("peaked", 1000),
        ("far", 1000),
        ("banned", 4097),
        ("random", 1),
        ("equal", 17),
    ],
)
def test_tokens_are_those_of_the_tensor_operations(kind: str, vocab: int) -> None:
    """Greedy and drawn lines in one batch, rows in any order, one of them twice at different lengths."""
    table = table_of(PARAMS, vocab)
    order = torch.randperm(len(PARAMS), generator=torch.Generator().manual_seed(3))
    rows = torch.cat((order, order[3:5])).to(DEVICE)
    length = torch.arange(len(rows), device=DEVICE) * 2**30
    scores = scores_of(kind, len(rows), vocab)
    assert choose(scores, rows, table, length).tolist() == by_tensors(scores, rows, table, length).tolist()


def test_a_line_gets_the_same_token_alone_as_among_others() -> None:
    """Alone it is also cut into other blocks."""
    all_params = PARAMS[3:7]
    table = table_of(all_params, 4500)
    rows = torch.arange(12, device=DEVICE) % len(all_params)
    length = torch.arange(12, device=DEVICE, dtype=torch.int32)
    scores = scores_of("equal", 12, 4500)
    together = choose(scores, rows, table, length)
    for line in range(0, 12, 3):
        at = slice(line, line + 1)
        assert torch.equal(choose(scores[at], rows[at], table, length[at]), together[at])


def test_equals_that_have_found_no_room_come_in_no_later_block() -> None:
    scores = torch.zeros(8, 3000, device=DEVICE)
    scores[:, 50::100] = 2.0
    table = table_of([SamplingParams(top_k=90)], 3000)
    rows = torch.zeros(8, dtype=torch.int64, device=DEVICE)
    length = torch.arange(8, device=DEVICE)
    tokens = choose(scores, rows, table, length)
    assert (tokens >= 1024).any()
    assert torch.equal(tokens, by_tensors(scores, rows, table, length))


def test_candidates_that_no_list_has_room_for_are_cut_all_the_same() -> None:
    """One outlier stretches the bins until nearly all tokens fall into one of them."""
    vocab, all_params = (
        5003,
        [SamplingParams(top_k=3000), SamplingParams(top_p=0.6), SamplingParams(top_k=4500, top_p=0.3)],
    )
    scores = scores_of("random", len(all_params), vocab) * 1e-3
    scores[:, 5] = -26.0
    table = table_of(all_params, vocab)
    rows = torch.arange(len(all_params), device=DEVICE)
    assert choose(scores, rows, table, rows).tolist() == by_tensors(scores, rows, table, rows).tolist()


def test_scores_of_16_bits_are_widened() -> None:
    all_params = [SamplingParams(top_k=20, top_p=0.9), SamplingParams(temperature=0)]
    scores = scores_of("random", 2, 1000).bfloat16()
    table = table_of(all_params, 1000)
    rows = torch.arange(2, device=DEVICE)
    assert choose(scores, rows, table, rows).tolist() == by_tensors(scores, rows, table, rows).tolist()


def test_lines_without_a_usable_score_say_so_and_spare_the_others() -> None:
    all_params = [SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_k=3, top_p=0.5)]
    table = table_of(all_params, 1100)
    rows = torch.arange(15, device=DEVICE) % 3
    scores = scores_of("random", 15, 1100)
    whole = by_tensors(scores, rows, table, rows)
    scores[0:3] = -torch.inf
    scores[3:6, 1050] = torch.nan
    scores[6:9, 40] = torch.inf
    scores[9:12] = torch.nan
    assert choose(scores, rows, table, rows).tolist() == [NO_TOKEN] * 12 + whole[12:].tolist()
    assert best(scores).tolist() == highest(scores).tolist()


@pytest.mark.covering(1)
@pytest.mark.parametrize("lines", [1, 3, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_best_token_is_the_first_of_the_highest(lines: int, dtype: torch.dtype) -> None:
    scores = scores_of("equal", lines, 4097).to(dtype)
    assert torch.equal(best(scores), highest(scores))
    assert torch.equal(best(scores.T.contiguous().T), highest(scores))
    assert torch.equal(best(scores[:, 1:4000]), highest(scores[:, 1:4000]))


def test_where_all_lines_are_greedy_the_table_is_not_asked() -> None:
    table = table_of([SamplingParams(temperature=0)] * 2, 1500)
    rows = torch.tensor([1, 0, 1], device=DEVICE)
    scores = scores_of("equal", 3, 1500)
    expected = choose(scores, rows, table, rows)
    assert torch.equal(choose_captured(scores, rows, table, rows, greedy_only=True), expected)
    assert torch.equal(expected, highest(scores))


def test_no_lines_give_no_tokens() -> None:
    table = table_of([SamplingParams()], 100)
    nothing = torch.empty(0, dtype=torch.int64, device=DEVICE)
    assert choose(torch.empty(0, 100, device=DEVICE), nothing, table, nothing).shape == (0,)
    assert best(torch.empty(0, 100, device=DEVICE)).shape == (0,)


@triton.jit
def words_kernel(
    seeds, children, positions, calls_out, out, PURPOSE: tl.constexpr, LOW: tl.constexpr, SIZE: tl.constexpr
):
    at = tl.program_id(0)
    key = (tl.load(seeds + at), tl.load(children + at), tl.load(positions + at), PURPOSE)
    ids = tl.arange(0, SIZE)
    tl.store(out + at * SIZE + ids, word_of(ids, key, LOW).to(tl.int64))
    calls = tl.arange(0, SIZE // 4)
    first, second, third, fourth = race_words(key, calls, LOW)
    place = calls_out + at * SIZE + (calls // 4) * 16 + calls % 4
    tl.store(place, first.to(tl.int64))
    tl.store(place + 4, second.to(tl.int64))
    tl.store(place + 8, third.to(tl.int64))
    tl.store(place + 12, fourth.to(tl.int64))


@pytest.mark.parametrize("low", [False, True])
def test_random_words_are_those_of_the_tensor_operations(low: bool) -> None:
    size = 64
    key = NumberKey(
        torch.tensor([0, 1, 2**63 - 1, -5, 2**32, 12345678901234567], device=DEVICE),
        torch.tensor([0, 127, 2**32 - 1, 3, 1, 0], device=DEVICE),
        torch.tensor([0, 2**32 + 9, 2**31, 5, 2**40, 77], device=DEVICE),
    )
    ids = torch.arange(size, device=DEVICE).expand(len(key.seed), -1)
    for purpose in Purpose:
        out = torch.empty(len(key.seed), size, dtype=torch.int64, device=DEVICE)
        by_calls = torch.empty_like(out)
        words_kernel[(len(key.seed),)](*key, by_calls, out, PURPOSE=int(purpose), LOW=low, SIZE=size)
        expected = words_of(key, purpose, ids, low=low)
        assert torch.equal(out, expected) and torch.equal(by_calls, expected)
        assert low or torch.equal(high_words(key, purpose, size), expected)


@triton.jit
def gumbel_kernel(high, low, out, bounds, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    upper, lower = tl.load(high + at).to(tl.uint32), tl.load(low + at).to(tl.uint32)
    tl.store(out + at, gumbel_of(upper, lower))
    tl.store(bounds + at, highest_gumbel_of(upper))


def test_the_noise_of_a_race_has_the_bits_of_the_tensor_operations() -> None:
    size = 2048
    generator = torch.Generator().manual_seed(8)
    high, low = torch.randint(0, 2**32, (2, size), generator=generator).to(DEVICE)
    edges = [0, 1, 2, 3, 2**29, 2**29 - 1, 2**31, 2**32 - 1, 2**32 - 2, 1 << 20]
    high[: len(edges)] = torch.tensor(edges, device=DEVICE)
    low[:2] = torch.tensor([0, 2**32 - 1], device=DEVICE)
    out = torch.empty(size, dtype=torch.float64, device=DEVICE)
    bounds = torch.empty(size, device=DEVICE)
    gumbel_kernel[(1,)](high, low, out, bounds, SIZE=size, enable_fp_fusion=False)
    assert torch.equal(out, gumbel(high, low))
    assert ((bounds.double() - highest_gumbel(high)).abs() < SLACK.value / 4).all()
    assert (out <= highest_gumbel(high) + 1e-8).all()


@triton.jit
def strength_kernel(distances, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, strength_of(tl.load(distances + at)))


def test_a_weight_is_the_exponential_up_to_its_last_places() -> None:
    distances = torch.linspace(0, 28, 2048, device=DEVICE)
    distances[-1] = torch.inf
    out = torch.empty_like(distances)
    strength_kernel[(1,)](distances, out, SIZE=2048)
    exact = (-distances.double()).exp() * 2.0**WEIGHT_BITS
    assert out[0] == 2.0**WEIGHT_BITS and out[-1] < 1
    torch.testing.assert_close(out[:-1].double(), exact[:-1], rtol=2.5e-7, atol=0)


@triton.jit
def reaching_kernel(shares, out):
    at = tl.program_id(0)
    tl.store(out + at, least_reaching(tl.load(shares + at)))


def test_the_least_sum_that_reaches_a_share_is_found_beyond_exact_floats() -> None:
    shares = [1e-9, 1.0, 2.5, 2.0**53 - 1, 2.0**53, 2.0**57 + 2.0**20, 0.9 * 2.0**60, 2.0**61]
    out = torch.empty(len(shares), dtype=torch.int64, device=DEVICE)
    reaching_kernel[(len(shares),)](torch.tensor(shares, dtype=torch.float64, device=DEVICE), out)
    for share, least in zip(shares, out.tolist(), strict=True):
        assert float(least - 1) < share <= float(least)
