"""The plain meaning of every stage, one row at a time, in numpy float64: what the batched code is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from bankfull.sample.params import SamplingParams

Scores = NDArray[np.float64]


def softmax(scores: Scores) -> Scores:
    weight = np.exp(scores - scores.max())
    return weight / weight.sum()


def adjusted(
    logits: Scores, params: SamplingParams, prompt: Sequence[int], output: Sequence[int], stop_ids: Sequence[int] = ()
) -> Scores:
    scores = logits.astype(np.float64).copy()
    for token in set(prompt) | set(output):
        strength = params.repetition_penalty
        scores[token] = scores[token] / strength if scores[token] > 0 else scores[token] * strength
    for token in set(output):
        scores[token] -= params.presence_penalty + params.frequency_penalty * list(output).count(token)
    for token, bias in (params.logit_bias or {}).items():
        scores[token] += bias
    for token in range(len(scores)):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            scores[token] = -np.inf
        if token in params.banned_token_ids:
            scores[token] = -np.inf
        if token in stop_ids and len(output) < params.min_tokens:
            scores[token] = -np.inf
    said = [*prompt, *output]
    for *before, last in params.bad_word_ids:
        if not before or said[-len(before) :] == before:
            scores[last] = -np.inf
    return scores


def by_rank(scores: Scores) -> list[int]:
    return sorted(range(len(scores)), key=lambda token: (-scores[token], token))


def fewest_reaching(order: Sequence[int], probs: Scores, mass: float) -> tuple[list[int], float]:
    """The shortest start of `order` whose probability reaches `mass`, and how near a cut came to a tie."""
    kept: list[int] = []
    total, margin = 0.0, 1.0
    for token in order:
        if total >= mass:
            break
        kept.append(token)
        total += float(probs[token])
        margin = min(margin, abs(total - mass))
    return kept, margin


def only(scores: Scores, kept: Sequence[int]) -> Scores:
    out = np.full_like(scores, -np.inf)
    out[list(kept)] = scores[list(kept)]
    return out


def truncated(scores: Scores, params: SamplingParams) -> tuple[Scores, float]:
    """Scores after temperature and filters, and how near the nearest decision came to falling the other way."""
    scores = scores / params.temperature
    margin = 1.0
    if params.top_k > 0:
        scores = only(scores, by_rank(scores)[: params.top_k])
    if params.top_p < 1.0:
        kept, near = fewest_reaching(by_rank(scores), softmax(scores), params.top_p)
        scores, margin = only(scores, kept), min(margin, near)
    if params.min_p > 0.0:
        ratio = np.exp(scores - scores.max())
        margin = min(margin, float(np.abs(ratio - params.min_p).min()))
        scores = np.where(ratio < params.min_p, -np.inf, scores)
    if params.typical_p < 1.0:
        probs = softmax(scores)
        alive = probs > 0
        surprise = -np.log(probs, where=alive, out=np.full_like(probs, -np.inf))
        entropy = float((probs[alive] * surprise[alive]).sum())
        distance = np.where(alive, np.abs(surprise - entropy), np.inf)
        order = sorted(np.flatnonzero(alive).tolist(), key=lambda token: (distance[token], token))
        kept, near = fewest_reaching(order, probs, params.typical_p)
        # Two tokens of unequal score at nearly equal distance may swap places by rounding: as near as it gets.
        margin = min(margin, near, 1.0 if _harmless(distance, scores) else 0.0)
        scores = only(scores, kept)
    return scores, margin


def _harmless(distance: Scores, scores: Scores) -> bool:
    """Whether tokens at nearly equal distance all have equal scores, so that ids order them for certain."""
    order = np.argsort(distance, kind="stable")
    pairs = pairwise(order)
    return all(distance[b] - distance[a] > 1e-7 or scores[a] == scores[b] for a, b in pairs if np.isfinite(distance[b]))
