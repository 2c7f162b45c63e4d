"""Best of n: the samples of a request ranked by a verifier or by their log-probabilities."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import pytest

from bankfull import LLM, SamplingParams
from bankfull.best_of import mean_logprob, rank
from bankfull.errors import RequestError
from bankfull.outputs import CompletionOutput, RequestOutput
from tests.tiny import speaking_folder

PROMPT = list(range(40, 60))
SAMPLED = SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True)


@lru_cache
def tiny() -> LLM:
    return LLM(str(speaking_folder()), dtype="float32", memory="8MiB")


def test_the_most_likely_sample_comes_first_and_its_logprobs_stay_hidden() -> None:
    seen = tiny().generate([PROMPT, PROMPT[3:]], SAMPLED, n=6, choose="logprob")
    shown = tiny().generate(
        [PROMPT, PROMPT[3:]], SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True, logprobs=0, n=6)
    )
    for found, expected in zip(seen, shown, strict=True):
        means = {one.index: (one.cumulative_logprob or 0.0) / len(one.token_ids) for one in expected.outputs}
        assert [one.index for one in found.outputs] == sorted(means, key=lambda index: -means[index])
        assert len(set(means.values())) > 1
        by_index = {one.index: one.token_ids for one in expected.outputs}
        assert all(one.token_ids == by_index[one.index] for one in found.outputs), "the same samples, in another order"
        assert all(one.logprobs is None and one.cumulative_logprob is None for one in found.outputs)
        assert found.metrics.output_tokens == 72, "all samples count"


def test_logprobs_that_were_asked_for_stay() -> None:
    wanted = SamplingParams(temperature=1.0, seed=3, max_tokens=4, ignore_eos=True, logprobs=2, n=3)
    (found,) = tiny().generate([PROMPT], wanted, choose="logprob")
    assert all(one.logprobs is not None and len(one.logprobs) == 4 for one in found.outputs)
    assert [one.cumulative_logprob for one in found.outputs] == sorted(
        (one.cumulative_logprob for one in found.outputs), reverse=True
    )  # equal lengths: the sums are in the order of the means


def test_a_verifier_scores_each_sample_of_its_request() -> None:
    called: list[tuple[int, list[int]]] = []

    def verifier(sample: CompletionOutput, request: RequestOutput) -> float:
        called.append((sample.index, request.prompt_token_ids))
        return sum(sample.token_ids)

    found = tiny().generate([PROMPT, PROMPT[3:]], SAMPLED, n=4, choose=verifier)
    for one, prompt in zip(found, (PROMPT, PROMPT[3:]), strict=True):
        sums = [sum(sample.token_ids) for sample in one.outputs]
        assert sums == sorted(sums, reverse=True)
        assert sorted(index for index, asked in called if asked == prompt) == [0, 1, 2, 3]
    assert all(sample.logprobs is None for one in found for sample in one.outputs)


def test_a_chat_can_be_ranked_too() -> None:
    messages = [{"role": "user", "content": "hello"}]
    (found,) = tiny().chat(messages, SAMPLED, n=3, choose=lambda sample, request: -sample.index)
    assert [sample.index for sample in found.outputs] == [0, 1, 2]


def result_of(*samples: CompletionOutput) -> RequestOutput:
    return RequestOutput(1, None, [1], list(samples), finished=True)


def test_failed_and_empty_samples_come_last_and_equal_ones_keep_their_order() -> None:
    failed = CompletionOutput(0, token_ids=[1], cumulative_logprob=-0.1, error="broken", finish_reason="error")
    empty = CompletionOutput(1, cumulative_logprob=0.0)
    long = CompletionOutput(2, token_ids=[1, 2, 3, 4], cumulative_logprob=-2.0)
    short = CompletionOutput(3, token_ids=[1], cumulative_logprob=-1.0)
    alike = CompletionOutput(4, token_ids=[1, 2], cumulative_logprob=-1.0)
    result = result_of(failed, empty, long, short, alike)
    rank(result, "logprob", shows_logprobs=True)
    assert [one.index for one in result.outputs] == [2, 4, 3, 0, 1], "by the mean, not by the sum"
    assert mean_logprob(empty, result) == -math.inf


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"choose": "logprob"}, "n is 1; give n of at least 2"),
        ({"choose": "longest", "n": 2}, "choose='longest' is unknown"),
        ({"choose": lambda sample, request: math.nan, "n": 2}, "choose returned nan for sample 0"),
        ({"choose": lambda sample, request: "good", "n": 2}, "choose returned 'good'"),
        ({"n": 0}, "n "),
    ],
)
def test_what_cannot_be_ranked_is_one_sentence(how: dict[str, Any], reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        tiny().generate([PROMPT], SAMPLED, **how)
    assert not tiny().loaded.frontend.pending
