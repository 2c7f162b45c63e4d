"""Best of n: ranks the samples of a request by a verifier, or by their log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from bankfull.errors import RequestError
from bankfull.outputs import CompletionOutput, RequestOutput
from bankfull.sample.params import SamplingParams

LOGPROB = "logprob"
Verifier = Callable[[CompletionOutput, RequestOutput], float]
"""The score of a sample of a request; the highest one is the best."""
Choose = Verifier | Literal["logprob"]


def ranked_params(params: SamplingParams, choose: Choose) -> SamplingParams:
    """The parameters under which samples can be ranked."""
    if not callable(choose) and choose != LOGPROB:
        raise RequestError(f"choose={choose!r} is unknown; use {LOGPROB!r}, or a function of a sample and its request.")
    if params.n < 2:
        raise RequestError(f"choose needs several samples, but n is {params.n}; give n of at least 2.")
    return replace(params, logprobs=0) if choose == LOGPROB and params.logprobs is None else params


def rank(result: RequestOutput, choose: Choose, *, shows_logprobs: bool) -> None:
    """Sort the samples, the best one first; equal ones keep their order, failed ones are last. `shows_logprobs`:
    whether the caller asked for the log-probabilities."""
    score = mean_logprob if choose == LOGPROB else choose
    assert callable(score)
    scores = {sample.index: _score(score, sample, result) for sample in result.outputs}
    result.outputs.sort(key=lambda sample: -scores[sample.index])
    if not shows_logprobs:
        for sample in result.outputs:
            sample.logprobs = sample.cumulative_logprob = None


def mean_logprob(sample: CompletionOutput, request: RequestOutput) -> float:
    """Mean over the tokens: a sum would prefer short samples."""
    if sample.cumulative_logprob is None or not sample.token_ids:
        return -math.inf
    return sample.cumulative_logprob / len(sample.token_ids)


def _score(score: Verifier, sample: CompletionOutput, request: RequestOutput) -> float:
    if sample.error is not None:
        return -math.inf
    value = score(sample, request)
    if not isinstance(value, int | float) or math.isnan(value):
        raise RequestError(
            f"choose returned {value!r} for sample {sample.index}; return a number, the higher the better."
        )
    return value
