from __future__ import annotations

import pytest
import torch

from bankfull.sample.logits import SamplingTable, process, sample
from bankfull.sample.params import SamplingParams
from bankfull.sample.race import gumbel
from bankfull.sample.random import NumberKey, Purpose, high_words, uniform
from tests.sample.batch import entering

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

VOCAB = 50_021
COUNT = 32
PARAMS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0, repetition_penalty=1.2),
    SamplingParams(),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.9),
    SamplingParams(top_p=0.8, logprobs=3),
    SamplingParams(min_p=0.05, frequency_penalty=0.3),
    SamplingParams(typical_p=0.7, presence_penalty=0.4, logprobs=0),
    SamplingParams(top_k=1500, logit_bias={5: 2.0}, banned_token_ids=[7], bad_word_ids=[[3], [1, 2]], min_tokens=30),
] * 4


def table_on(device: str) -> SamplingTable:
    table = SamplingTable(COUNT, VOCAB, device)
    for row, params in enumerate(PARAMS):
        table.set([entering(row, params, prompt_len=4, child=0, seed=row, stop_ids=[0])])
    return table


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(COUNT, VOCAB, generator=generator) * 3
    tokens = torch.randint(0, VOCAB, (COUNT, 64), generator=generator)
    return logits, torch.arange(COUNT), tokens, torch.full((COUNT,), 20)


def test_nothing_waits_for_the_device_and_a_row_does_not_depend_on_its_mates() -> None:
    table = table_on("cuda")
    logits, rows, tokens, length = (tensor.cuda() for tensor in inputs())
    host_rows = list(range(COUNT))
    sample(logits, rows, table, tokens, length, host_rows=host_rows)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        table.set([entering(0, PARAMS[0], prompt_len=4, child=0, seed=0, stop_ids=[0])])
        together = sample(logits, rows, table, tokens, length, host_rows=host_rows)
        shaped = process(logits, rows, table, tokens, length, None, host_rows)
        untold = sample(logits, rows, table, tokens, length, host_rows=None)
        single = []
        for row in host_rows:
            at = slice(row, row + 1)
            line = logits[at].clone()
            single.append(
                (
                    sample(line, rows[at], table, tokens, length[at], host_rows=[row]),
                    process(line, rows[at], table, tokens, length[at], None, [row]),
                )
            )
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(together.tokens, untold.tokens)
    for row, (alone, line) in enumerate(single):
        assert torch.equal(alone.tokens[0], together.tokens[row]), row
        assert torch.equal(line[0], shaped[row]), row
        if alone.logprobs is None:  # no row has logprobs
            assert together.logprobs[row].isnan()
        else:
            torch.testing.assert_close(alone.logprobs[0], together.logprobs[row], rtol=0, atol=0)


def test_tokens_are_those_of_the_cpu() -> None:
    """exp may differ in its last bit between devices, so a single draw may fall on the other side of a border."""
    logits, rows, tokens, length = inputs()
    here = sample(logits, rows, table_on("cpu"), tokens, length, host_rows=list(range(COUNT))).tokens
    there = sample(
        logits.cuda(), rows.cuda(), table_on("cuda"), tokens.cuda(), length.cuda(), host_rows=list(range(COUNT))
    ).tokens
    assert int((here == there.cpu()).sum()) >= COUNT - 1


def test_random_numbers_have_the_same_bits_on_every_device() -> None:
    steps = torch.arange(5000)
    there = uniform(steps.cuda(), steps.cuda() * 3, steps.cuda() * 2**33, 1)
    assert torch.equal(uniform(steps, steps * 3, steps * 2**33, 1), there.cpu())
    key = NumberKey(steps, steps * 3, steps * 2**33)
    words = high_words(key, Purpose.TOKEN, 40)
    there = high_words(NumberKey(*(part.cuda() for part in key)), Purpose.TOKEN, 40)
    assert torch.equal(words, there.cpu())
    assert torch.equal(gumbel(words, words.flip(0)), gumbel(there, there.flip(0)).cpu())


def test_equal_scores_go_to_the_lowest_id() -> None:
    table = SamplingTable(1, VOCAB, "cuda")
    logits = torch.zeros(3, VOCAB, device="cuda")
    logits[:, [300, 301, VOCAB - 1]] = 1.0
    rows = torch.zeros(3, dtype=torch.int64, device="cuda")
    tokens = torch.zeros(1, 4, dtype=torch.int64, device="cuda")
    got = sample(logits, rows, table, tokens, rows + 1, host_rows=[0] * 3)
    assert got.tokens.tolist() == [300] * 3
