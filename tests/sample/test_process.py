from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from bankfull.errors import RequestError
from bankfull.sample.adjust import unpacked
from bankfull.sample.logits import SamplingTable, process
from bankfull.sample.params import SamplingParams
from tests.quick import examples
from tests.sample import oracle
from tests.sample.batch import batch, entering

VOCAB = 37
token = st.integers(0, VOCAB - 1)
ids = st.lists(token, max_size=6)
strength = st.floats(-2, 2, allow_subnormal=False)


@st.composite
def logit_lines(draw: st.DrawFn, count: int) -> torch.Tensor:
    """Random lines; some are rounded, so that equal scores occur."""
    seed, coarse = draw(st.integers(0, 2**31)), draw(st.booleans())
    values = np.random.default_rng(seed).normal(scale=draw(st.sampled_from([0.5, 3.0])), size=(count, VOCAB))
    return torch.tensor(np.round(values) if coarse else values, dtype=torch.float64)


adjusting = st.builds(
    SamplingParams,
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.3]),
    presence_penalty=st.one_of(st.just(0.0), strength),
    frequency_penalty=st.one_of(st.just(0.0), strength),
    logit_bias=st.one_of(st.none(), st.dictionaries(token, st.floats(-9, 9, allow_subnormal=False), max_size=5)),
    banned_token_ids=ids,
    bad_word_ids=st.lists(st.lists(token, min_size=1, max_size=4), max_size=4),
    min_tokens=st.integers(0, 4),
)
filtering = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, -1, 1, 3, 10, 36, 37, 50]),
    top_p=st.sampled_from([1.0, 0.05, 0.51, 0.93]),
    min_p=st.sampled_from([0.0, 0.03, 0.4]),
    typical_p=st.sampled_from([1.0, 0.2, 0.77]),
)


@examples(120, deadline=None)
@given(st.data())
def test_penalties_biases_and_bans_equal_a_plain_loop(data: st.DataObject) -> None:
    all_params = data.draw(st.lists(adjusting, min_size=1, max_size=4))
    prompts = [data.draw(st.lists(token, min_size=1, max_size=6)) for _ in all_params]
    outputs = [data.draw(ids) for _ in all_params]
    # Endings that complete a bad word are made likely.
    for params, output in zip(all_params, outputs, strict=True):
        for word in params.bad_word_ids:
            if data.draw(st.booleans()):
                output.extend(word[:-1])
    logits = data.draw(logit_lines(len(all_params)))
    made = batch(all_params, VOCAB, prompts=prompts, outputs=outputs, stop_ids=[4, 9])
    got = made.process(logits).numpy()
    for line, params in enumerate(all_params):
        want = oracle.adjusted(logits[line].numpy(), params, prompts[line], outputs[line], [4, 9])
        np.testing.assert_allclose(got[line], want - want.max(), atol=1e-12)
    assert torch.equal(made.process(logits, told=False), torch.from_numpy(got))


@examples(150, deadline=None)
@given(st.data())
def test_temperature_and_filters_equal_a_plain_loop(data: st.DataObject) -> None:
    all_params = data.draw(st.lists(filtering, min_size=1, max_size=4))
    logits = data.draw(logit_lines(len(all_params)))
    expected = [oracle.truncated(logits[line].numpy(), params) for line, params in enumerate(all_params)]
    assume(all(margin > 1e-9 for _, margin in expected))
    made = batch(all_params, VOCAB)
    got = made.process(logits).numpy()
    for line, (want, _) in enumerate(expected):
        top = logits[line].max().item() / all_params[line].temperature
        np.testing.assert_allclose(got[line], want - top, atol=1e-9)
    assert torch.equal(made.process(logits, told=False), torch.from_numpy(got))


@pytest.mark.parametrize("scale", [0.01, 1.0, 6.0])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_k=40, top_p=0.8),
        SamplingParams(top_p=0.6),
        SamplingParams(top_k=3000, top_p=0.9),
        SamplingParams(top_k=2000),
        SamplingParams(top_p=0.999),
    ],
)
def test_a_head_selected_from_a_large_vocabulary_is_the_head_of_a_full_sort(
    params: SamplingParams, scale: float
) -> None:
    vocab = 5000
    logits = torch.randn(1, vocab, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) * scale
    want, margin = oracle.truncated(logits[0].numpy(), params)
    assert margin > 1e-9
    got = batch([params], vocab).process(logits)[0].numpy()
    assert (np.isfinite(got) == np.isfinite(want)).all()


def test_equal_scores_at_a_cut_are_kept_lowest_id_first() -> None:
    logits = torch.zeros(2, 8)
    got = batch([SamplingParams(top_k=3), SamplingParams(top_p=0.5)], 8).process(logits)
    assert torch.isfinite(got).tolist() == [[True] * 3 + [False] * 5, [True] * 4 + [False] * 4]


def test_a_bad_word_is_banned_only_where_it_would_be_completed() -> None:
    params = SamplingParams(bad_word_ids=[[5, 6, 7], [3]])
    endings = [[5, 6], [6], [6, 5], [5, 6, 1], [5, 5, 6]]
    made = batch([params] * 5, 10, prompts=[[1]] * 5, outputs=endings)
    got = torch.isneginf(made.process(torch.zeros(5, 10)))
    assert got[:, 3].all() and got[:, 7].tolist() == [True, False, False, False, True]
    assert int(got.sum()) == 5 + 2


def test_stop_ids_are_banned_exactly_until_min_tokens_are_out() -> None:
    made = batch(
        [SamplingParams(min_tokens=2)] * 4,
        10,
        prompts=[[1, 1, 1]] * 4,
        outputs=[[], [1], [1, 1], [1] * 3],
        stop_ids=[0, 9],
    )
    got = torch.isneginf(made.process(torch.zeros(4, 10)))
    assert got[:, [0, 9]].tolist() == [[True, True]] * 2 + [[False, False]] * 2
    assert not got[:, 1:9].any()


def test_a_packed_mask_of_a_grammar_is_applied_bit_by_bit() -> None:
    vocab = 70
    allowed = torch.rand(3, vocab, generator=torch.Generator().manual_seed(5)) < 0.3
    words = torch.zeros(3, 3, dtype=torch.int64)
    for line, place in allowed.nonzero().tolist():
        words[line, place // 32] |= 1 << (place % 32)
    mask = words.to(torch.int32)
    assert torch.equal(unpacked(mask, vocab), allowed)
    got = batch([SamplingParams(), SamplingParams(temperature=0), SamplingParams(top_k=5)], vocab).process(
        torch.randn(3, vocab), mask
    )
    assert not torch.isfinite(got)[~allowed].any()
    assert torch.equal(torch.isfinite(got[0]), allowed[0])


def test_a_greedy_row_is_processed_into_its_one_token() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0]] * 2)
    all_params = [SamplingParams(temperature=0, top_p=0.5), SamplingParams(temperature=0, banned_token_ids=[1])]
    made = batch(all_params, 4)
    assert made.process(logits).softmax(-1).tolist() == [[0, 1, 0, 0], [0, 0, 1, 0]]


def test_one_row_can_be_processed_at_several_lengths_at_once() -> None:
    params = SamplingParams(frequency_penalty=0.5, bad_word_ids=[[2, 3]], min_tokens=2)
    table = SamplingTable(2, 6)
    table.set([entering(1, params, prompt_len=1, child=0, seed=0, stop_ids=[5])])
    tokens = torch.tensor([[0] * 4, [1, 2, 2, 4]])
    lengths = [1, 2, 3, 4]
    got = process(torch.zeros(4, 6, dtype=torch.float64), torch.full((4,), 1), table, tokens, torch.tensor(lengths))
    for line, length in enumerate(lengths):
        want = oracle.adjusted(np.zeros(6), params, [1], tokens[1, 1:length].tolist(), [5])
        np.testing.assert_allclose(got[line].numpy(), want - want.max())


def test_a_cleared_row_keeps_nothing_of_the_request_before() -> None:
    heavy = SamplingParams(
        repetition_penalty=2.0,
        presence_penalty=1.0,
        logit_bias={1: 9.0},
        banned_token_ids=[2],
        bad_word_ids=[[3]],
        min_tokens=9,
        top_k=2,
        top_p=0.5,
        min_p=0.2,
        typical_p=0.5,
        temperature=0.5,
    )
    made = batch([heavy, heavy], 8, prompts=[[1, 2]] * 2, stop_ids=[0])
    made.table.set([entering(2, SamplingParams(), prompt_len=2, child=0, seed=0, stop_ids=[0])])
    made.table.clear([3])
    logits = torch.randn(2, 8, dtype=torch.float64)
    for told in (True, False):
        got = made.process(logits, told=told)
        torch.testing.assert_close(got[0], logits[0] - logits[0].max())
        assert torch.isfinite(got[1]).nonzero().tolist() == [[int(logits[1].argmax())]]


def test_wider_parameters_of_a_later_request_leave_earlier_rows_as_they_are() -> None:
    first = SamplingParams(bad_word_ids=[[1, 2]], logit_bias={3: 1.0})
    wide = SamplingParams(bad_word_ids=[[4, 5, 6, 7, 0], [3], [2]], logit_bias=dict.fromkeys(range(8), 0.5))
    made = batch([first, wide], 8, prompts=[[1], [4, 5, 6, 7]])
    got = made.process(torch.zeros(2, 8, dtype=torch.float64))
    assert torch.isneginf(got).nonzero().tolist() == [[0, 2], [1, 0], [1, 2], [1, 3]]
    assert got[0, 3] == 0 and got[0, 0] == -1


@pytest.mark.parametrize(
    "params",
    [
        {"logit_bias": {10: 1.0}},
        {"allowed_token_ids": [3, 10]},
        {"banned_token_ids": [10]},
        {"bad_word_ids": [[1, 10]]},
    ],
)
def test_an_id_outside_the_models_vocabulary_is_refused_by_name(params: dict[str, object]) -> None:
    table = SamplingTable(1, 10)
    with pytest.raises(RequestError, match=r"token 10, but the model's ids go from 0 to 9"):
        table.set([entering(0, SamplingParams(**params), prompt_len=1, child=0, seed=0, stop_ids=[])])  # type: ignore[arg-type]


def test_bad_words_without_token_ids_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="bad_words"):
        SamplingTable(1, 10).set(
            [entering(0, SamplingParams(bad_words=["x"]), prompt_len=1, child=0, seed=0, stop_ids=[])]
        )
