from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import scipy
import torch

from bankfull.ops import native
from bankfull.sample.logits import NO_TOKEN, Sampled, SamplingTable, sample
from bankfull.sample.params import SamplingParams
from bankfull.sample.table import Chooser
from tests.sample import oracle
from tests.sample.batch import batch, entering

DRAWS = 20_000


CHOOSERS: dict[str, Chooser | None] = {"tensors": None}
ISAS: list[str] = []
if native.status() is None:
    from bankfull import _native
    from bankfull.ops.sampling.native import choose

    CHOOSERS["native"] = choose
    ISAS = _native.isas()


def draws_of(
    params: SamplingParams, logits: torch.Tensor, seed: int, child: int = 0, chooser: str = "tensors"
) -> torch.Tensor:
    """Many independent draws of one row: the position is what varies."""
    table = SamplingTable(1, len(logits))
    table.chooser = CHOOSERS[chooser]
    table.set([entering(0, params, prompt_len=0, child=child, seed=seed, stop_ids=[])])
    rows, length = torch.zeros(DRAWS, dtype=torch.int64), torch.arange(DRAWS)
    tokens = torch.zeros(1, 1, dtype=torch.int64)
    return sample(logits.expand(DRAWS, -1), rows, table, tokens, length, host_rows=[0] * DRAWS).tokens


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=1.8),
        SamplingParams(top_k=5),
        SamplingParams(top_p=0.7),
        SamplingParams(min_p=0.1),
        SamplingParams(typical_p=0.6),
        SamplingParams(temperature=1.4, top_k=12, top_p=0.9),
        SamplingParams(top_k=15, min_p=0.02, typical_p=0.8),
        SamplingParams(temperature=0.8, top_k=20, top_p=0.95, min_p=0.05, typical_p=0.9),
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("chooser", CHOOSERS)
def test_frequencies_of_tokens_follow_the_distribution(params: SamplingParams, seed: int, chooser: str) -> None:
    logits = torch.randn(24, generator=torch.Generator().manual_seed(seed)) * 1.5
    scores, margin = oracle.truncated(logits.double().numpy(), params)
    assert margin > 1e-6
    probs = oracle.softmax(scores)
    counts = np.bincount(draws_of(params, logits, seed, 0, chooser), minlength=24)
    assert counts[probs == 0].sum() == 0
    alive = probs > 0
    assert scipy.stats.chisquare(counts[alive], probs[alive] / probs[alive].sum() * DRAWS).pvalue > 1e-4


@pytest.mark.few(2)
@pytest.mark.skipif("native" not in CHOOSERS, reason="the kernels are not built")
@pytest.mark.parametrize("vocab", (1, 2, 17, 300, 50_000))
def test_the_kernel_chooses_the_tokens_that_tensors_choose(vocab: int) -> None:
    """The same numbers, the same cuts, ties included: only a border within rounding could fall otherwise."""
    all_params = [
        SamplingParams(temperature=0),
        SamplingParams(),
        SamplingParams(temperature=0.3, top_k=1),
        SamplingParams(temperature=1.7, top_k=40),
        SamplingParams(top_p=0.9),
        SamplingParams(top_p=1e-6),
        SamplingParams(temperature=2.0, top_k=3000, top_p=0.5),
        SamplingParams(min_p=0.03),
        SamplingParams(temperature=0.9, top_k=50, top_p=0.95, min_p=0.01),
        SamplingParams(top_p=0.999),
    ]
    numbers = torch.Generator().manual_seed(vocab)
    for round_ in range(3):
        logits = torch.randn(len(all_params), vocab, generator=numbers) * 3
        if round_ == 1:
            logits = (logits * 2).round() / 2  # many equals
        chosen = []
        for chooser in CHOOSERS.values():
            table = SamplingTable(len(all_params), vocab)
            table.chooser = chooser
            for row, params in enumerate(all_params):
                table.set([entering(row, params, prompt_len=0, child=row, seed=round_ + 2**40, stop_ids=[])])
            rows = torch.arange(len(all_params))
            tokens = torch.zeros(len(all_params), 1, dtype=torch.int64)
            found = [
                sample(logits, rows, table, tokens, rows + at, host_rows=list(range(len(all_params)))).tokens.tolist()
                for at in range(20)
            ]
            chosen.append(found)
        assert chosen[0] == chosen[1]


@pytest.fixture
def every_isa() -> Iterator[list[str]]:
    before = _native.isa()
    yield ISAS
    _native.set_isa(before)


WIDE = [
    SamplingParams(top_k=1),
    SamplingParams(temperature=0.7, top_k=60),
    SamplingParams(top_k=390),
    SamplingParams(temperature=1.9, top_p=0.99),
    SamplingParams(temperature=0.2, top_p=0.4),
    SamplingParams(min_p=1.0),
    SamplingParams(temperature=3.0, min_p=1e-9),
    SamplingParams(temperature=90.0, top_k=100, top_p=0.97),
]


@pytest.mark.skipif("native" not in CHOOSERS, reason="the kernels are not built")
@pytest.mark.parametrize("kind", ["peaked", "flat", "equal", "far", "masked"])
def test_every_instruction_set_cuts_where_tensors_cut(kind: str, every_isa: list[str]) -> None:
    """Scores of many shapes, and a vocabulary that no block divides: few or nearly all tokens are candidates, equals
    lie on the border, different scores round to the same one below a far highest."""
    vocab = 50_001
    numbers = torch.Generator().manual_seed(7)
    logits = torch.randn(len(WIDE), vocab, generator=numbers)
    if kind == "peaked":
        logits[:, 77:90] += 12
    elif kind == "flat":
        logits *= 0.01
    elif kind == "equal":
        logits = (logits * 3).round()
    elif kind == "far":
        logits = logits * 1e-4 + 1
        logits[:, 40_000] = 3_000.0
    else:
        logits[:, torch.rand(vocab, generator=numbers) < 0.99] = -torch.inf
    rows = torch.arange(len(WIDE))
    lines = rows.tolist()
    found = {}
    for name, chooser in (("tensors", None), *((isa, choose) for isa in every_isa)):
        if chooser is not None:
            _native.set_isa(name)
        table = SamplingTable(len(WIDE), vocab)
        table.chooser = chooser
        for row, params in enumerate(WIDE):
            table.set([entering(row, params, prompt_len=0, child=0, seed=row, stop_ids=[])])
        found[name] = [
            sample(logits, rows, table, rows[:, None], rows + 9 * i, host_rows=lines).tokens.tolist() for i in range(6)
        ]
    assert all(tokens == found["tensors"] for tokens in found.values()), found


def test_children_and_seeds_draw_independently() -> None:
    logits = torch.randn(6, generator=torch.Generator().manual_seed(0))
    base, child, seed = (draws_of(SamplingParams(), logits, *key) for key in ((1, 0), (1, 1), (2, 0)))
    for other in (child, seed):
        table = np.histogram2d(base.numpy(), other.numpy(), bins=[np.arange(7), np.arange(7)])[0]
        assert scipy.stats.chi2_contingency(table).pvalue > 1e-4


VARIETY = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0, repetition_penalty=1.2),
    SamplingParams(),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.9),
    SamplingParams(top_p=0.8, logprobs=3),
    SamplingParams(min_p=0.05, frequency_penalty=0.3),
    SamplingParams(typical_p=0.7, presence_penalty=0.4, logprobs=0),
    SamplingParams(top_k=1500, logit_bias={5: 2.0}, banned_token_ids=[7, 8], bad_word_ids=[[3], [1, 2]], min_tokens=3),
]


def lines_of(result: Sampled, line: int, width: int) -> list[torch.Tensor]:
    nothing = torch.tensor(torch.nan)  # no row of the batch has logprobs
    out = [result.tokens[line], nothing if result.logprobs is None else result.logprobs[line]]
    if width:
        assert result.top_ids is not None and result.top_logprobs is not None
        out += [result.top_ids[line, :width], result.top_logprobs[line, :width]]
    return out


@pytest.mark.parametrize("vocab", [2999, 40])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_rows_result_is_bitwise_the_same_alone_and_among_31_others(vocab: int, threads: int) -> None:
    generator = torch.Generator().manual_seed(4)
    all_params = VARIETY * 4
    said = [torch.randint(0, vocab, (9,), generator=generator).tolist() for _ in all_params]
    logits = torch.randn(32, vocab, generator=generator) * 3
    usual = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        made = batch(all_params, vocab, prompts=[s[:4] for s in said], outputs=[s[4:] for s in said], stop_ids=[0])
        together, processed = made.sample(logits), made.process(logits)
        untold = made.sample(logits, told=False)
        assert torch.equal(together.tokens, untold.tokens)
        torch.testing.assert_close(together.logprobs, untold.logprobs, rtol=0, atol=0, equal_nan=True)
        for line, params in enumerate(all_params):
            at = slice(line, line + 1)
            made.rows, made.host_rows, made.length = torch.tensor([line + 2]), [line + 2], torch.tensor([9])
            alone = made.sample(logits[at].clone())
            width = params.logprobs or 0
            for whole, single in zip(lines_of(together, line, width), lines_of(alone, 0, width), strict=True):
                assert whole.dtype == single.dtype
                torch.testing.assert_close(whole, single, rtol=0, atol=0, equal_nan=True)
            assert torch.equal(processed[at], made.process(logits[at].clone()))
    finally:
        torch.set_num_threads(usual)


def test_sampling_leaves_the_logits_as_they_were() -> None:
    made = batch(VARIETY, 2000, prompts=[[1, 2]] * len(VARIETY))
    logits = torch.randn(len(VARIETY), 2000)
    before = logits.clone()
    made.sample(logits)
    assert torch.equal(logits, before)


def test_greedy_rows_take_the_lowest_id_among_equals_beside_random_rows() -> None:
    logits = torch.tensor([[0.0, 7.0, 7.0, 1.0]] * 3)
    made = batch([SamplingParams(temperature=0), SamplingParams(), SamplingParams(temperature=0)], 4)
    assert made.sample(logits).tokens[[0, 2]].tolist() == [1, 1]
    vocab = 4096 + 17
    flat = torch.zeros(1, vocab)
    flat[0, [300, 301, 4100]] = 1.0
    assert batch([SamplingParams(temperature=0)], vocab).sample(flat).tokens.tolist() == [300]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0),
        SamplingParams(top_k=3, top_p=0.5),
        SamplingParams(top_p=0.5),
        SamplingParams(min_p=0.5),
        SamplingParams(typical_p=0.5),
        SamplingParams(logprobs=2),
    ],
    ids=str,
)
@pytest.mark.parametrize("vocab", [33, 3000])
def test_a_row_that_has_nothing_to_choose_from_fails_and_spares_the_others(params: SamplingParams, vocab: int) -> None:
    logits = torch.randn(6, vocab, generator=torch.Generator().manual_seed(2))
    alone = batch([params], vocab, seed=11 + 5).sample(logits[5:]).tokens
    logits[1] = -torch.inf
    logits[2] = torch.nan
    logits[3, 5] = torch.nan
    logits[4, 5] = torch.inf
    mask = torch.full((6, (vocab + 31) // 32), -1, dtype=torch.int32)
    mask[0] = 0
    got = batch([params] * 6, vocab).sample(logits, mask)
    assert got.tokens[:5].tolist() == [NO_TOKEN] * 5
    assert got.tokens[5:].tolist() == alone.tolist()
    if params.logprobs:
        assert got.logprobs[:5].isnan().all() and got.logprobs[5].isfinite()


def test_a_banned_token_never_comes_however_likely_the_model_finds_it() -> None:
    logits = torch.zeros(64)
    logits[[3, 40]] = 500.0
    params = SamplingParams(temperature=100, banned_token_ids=[3], bad_word_ids=[[40]])
    drawn = set(draws_of(params, logits, 1).tolist())
    assert drawn == set(range(64)) - {3, 40}


def test_the_smallest_temperature_is_finite_arithmetic() -> None:
    logits = torch.randn(1, 50) * 1e4
    got = batch([SamplingParams(temperature=1e-4)], 50).sample(logits)
    assert got.tokens.tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_logprobs_are_the_log_softmax_of_the_raw_logits(dtype: torch.dtype) -> None:
    vocab = 500
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(6)).to(dtype)
    all_params = [
        SamplingParams(logprobs=4, temperature=0.2, top_k=3, repetition_penalty=3.0),
        SamplingParams(),
        SamplingParams(logprobs=0, banned_token_ids=list(range(400))),
        SamplingParams(logprobs=9, temperature=0),
    ]
    got = batch(all_params, vocab, prompts=[[1, 2, 3]] * 4).sample(logits)
    work = torch.float64 if dtype == torch.float64 else torch.float32
    want = logits.to(work).log_softmax(-1)
    assert got.logprobs.dtype == work and got.logprobs[1].isnan()
    for line in (0, 2, 3):
        torch.testing.assert_close(got.logprobs[line], want[line, got.tokens[line]])
    assert got.top_ids is not None and got.top_logprobs is not None and got.top_ids.shape == (4, 9)
    for line, width in ((0, 4), (3, 9)):
        order = oracle.by_rank(want[line].double().numpy())[:width]
        assert got.top_ids[line, :width].tolist() == order
        torch.testing.assert_close(got.top_logprobs[line, :width], want[line, order])
    for line, width in ((0, 4), (1, 0), (2, 0)):
        assert (got.top_ids[line, width:] == NO_TOKEN).all() and got.top_logprobs[line, width:].isnan().all()


def test_work_that_no_row_asks_for_is_not_done() -> None:
    vocab = 3000
    made = batch([SamplingParams(temperature=0), SamplingParams()], vocab)
    with torch.autograd.profiler.profile() as seen:
        made.sample(torch.randn(2, vocab))
    names = {event.name for event in seen.function_events}
    assert "aten::log1p" in names, "the race"
    assert not names & {"aten::sort", "aten::cumsum", "aten::scatter_add_", "aten::_log_softmax", "aten::item"}
    assert sum(event.name == "aten::topk" for event in seen.function_events) == 1, "the race's own"
    made = batch([SamplingParams(temperature=0)] * 2, vocab)
    with torch.autograd.profiler.profile() as seen:
        made.sample(torch.randn(2, vocab))
    assert not {event.name for event in seen.function_events} & {
        "aten::log1p",
        "aten::topk",
        "aten::cumsum",
        "aten::sort",
    }
