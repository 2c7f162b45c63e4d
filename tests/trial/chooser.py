"""One token from one line of logits, as docs/sampling.md says it, and whether the decision was a near tie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tests.trial import vocabulary
from tests.trial.case import Ask
from tests.trial.random_numbers import gumbel_of

Scores = NDArray[np.float64]
FARTHEST = 27.5
"""Distance from the best score, after temperature, beyond which no token is drawn."""


@dataclass(frozen=True)
class Choice:
    token: int | None
    """None: the constraints leave no token."""
    doubtful: bool
    """Rounding could have decided otherwise."""


def choose(
    logits: Scores,
    ask: Ask,
    output: Sequence[int],
    child: int,
    allowed: NDArray[np.bool_] | None,
    tolerance: float,
    position: int | None = None,
) -> Choice:
    """`output`: the tokens so far. `allowed`: by the grammar. `tolerance`: how far logits may be off. `position`: of
    the random numbers, if it is not that of the token."""
    scores = adjusted(logits, ask, output, allowed)
    if not np.isfinite(scores).any():
        return Choice(None, False)
    strength = ask.get("repetition_penalty", 1.0)
    tolerance *= max(strength, 1 / strength)
    if ask.get("temperature", 0.0) == 0.0:
        order = np.argsort(-scores, kind="stable")
        gap = scores[order[0]] - scores[order[1]]
        return Choice(int(order[0]), bool(gap < tolerance))
    temperature = ask.get("temperature")
    slack = tolerance / temperature
    scores = (scores - scores.max()) / temperature
    position = len(ask.prompt) + len(output) if position is None else position
    keys = scores + gumbel_of(ask.get("seed", 0), child, position, len(scores))
    winners = []
    for moved in (0.0, slack, -slack):
        kept = survivors(scores, ask, moved) & (scores > -FARTHEST + (slack if moved < 0 else -slack if moved else 0))
        winners.append(int(np.where(kept, keys, -np.inf).argmax()))
        if moved > 0:
            best = np.sort(np.where(kept, keys, -np.inf))[-2:]
            near = bool(best[1] - best[0] < slack + 1e-8)
    return Choice(winners[0], near or len(set(winners)) > 1)


def possible(
    logits: Scores, ask: Ask, output: Sequence[int], allowed: NDArray[np.bool_] | None, tolerance: float
) -> NDArray[np.bool_]:
    """The tokens that some random number draws, those at the border of a filter included."""
    scores, slack = adjusted(logits, ask, output, allowed), tolerance / ask.get("temperature")
    if not np.isfinite(scores).any():
        return np.zeros(len(scores), dtype=bool)
    scores = (scores - scores.max()) / ask.get("temperature")
    return survivors(scores, ask, slack) & (scores > -FARTHEST - slack)


def adjusted(logits: Scores, ask: Ask, output: Sequence[int], allowed: NDArray[np.bool_] | None) -> Scores:
    scores = logits.astype(np.float64).copy()
    strength = ask.get("repetition_penalty", 1.0)
    for token in {*ask.prompt, *output}:
        scores[token] = scores[token] / strength if scores[token] > 0 else scores[token] * strength
    for token in set(output):
        scores[token] -= ask.get("presence_penalty", 0.0)
        scores[token] -= ask.get("frequency_penalty", 0.0) * list(output).count(token)
    for token, bias in ask.get("logit_bias", {}).items():
        scores[int(token)] += bias
    banned = np.zeros(len(scores), dtype=bool)
    if (only := ask.get("allowed_token_ids")) is not None:
        banned |= ~np.isin(np.arange(len(scores)), only)
    banned[list(ask.get("banned_token_ids", ()))] = True
    if len(output) < ask.get("min_tokens", 0):
        banned[list(stop_ids(ask))] = True
    if allowed is not None:
        banned |= ~allowed
    said = [*ask.prompt, *output]
    for *before, last in spellings(ask, len(scores)):
        if not before or said[-len(before) :] == before:
            banned[last] = True
    return np.where(banned, -np.inf, scores)


def stop_ids(ask: Ask) -> set[int]:
    return {*ask.get("stop_token_ids", ()), *(() if ask.get("ignore_eos") else (vocabulary.END,))}


def spellings(ask: Ask, vocab: int) -> list[list[int]]:
    """Bad words as tokens, with and without a space before them."""
    texts = (text for word in ask.get("bad_words", ()) for text in (word, " " + word.lstrip()))
    return [ids for text in texts if (ids := vocabulary.encode(text, vocab))]


def survivors(scores: Scores, ask: Ask, slack: float) -> NDArray[np.bool_]:
    """The tokens that the filters keep, one filter after the other; with slack those that might be kept (above 0), or
    that are kept for certain (below 0)."""
    kept = np.isfinite(scores)
    if 0 < ask.get("top_k", 0) < kept.sum():
        order = np.argsort(np.where(kept, -scores, np.inf), kind="stable")
        kept = _settled(kept, order[: ask.get("top_k")], scores, slack)
    if ask.get("top_p", 1.0) < 1.0:
        order = np.argsort(np.where(kept, -scores, np.inf), kind="stable")[: kept.sum()]
        kept = _settled(kept, _reaching(order, scores, ask.get("top_p"), slack), scores, slack)
    if (floor := ask.get("min_p", 0.0)) > 0.0:
        kept &= np.exp(scores) >= floor * (1 - slack)
    if ask.get("typical_p", 1.0) < 1.0:
        masses = np.where(kept, np.exp(scores), 0.0)
        shares = masses / masses.sum()
        entropy = -float((shares[kept] * np.log(shares[kept])).sum())
        distance = np.where(kept, np.abs(-np.log(np.where(kept, shares, 1.0)) - entropy), np.inf)
        order = np.argsort(distance, kind="stable")[: kept.sum()]
        kept = _settled(
            kept, _reaching(order, np.where(kept, scores, -np.inf), ask.get("typical_p"), slack), -distance, slack
        )
    return kept


def _reaching(order: NDArray[np.int64], scores: Scores, mass: float, slack: float) -> NDArray[np.int64]:
    """The shortest start of `order` whose share reaches `mass`."""
    masses = np.exp(scores[order])
    before = (masses.cumsum() - masses) / masses.sum()
    return order[: max(1, int((before < mass + slack).sum()))]


def _settled(alive: NDArray[np.bool_], chosen: NDArray[np.int64], rank: Scores, slack: float) -> NDArray[np.bool_]:
    """The chosen tokens; with slack, also those that rank as high as the last of them within it, or without those that
    the first one left out might replace."""
    kept = np.zeros_like(alive)
    kept[chosen] = True
    if slack > 0:
        kept = alive & (rank >= rank[chosen].min() - slack)
    elif slack < 0 and (left := alive & ~kept).any():
        kept &= (rank > rank[left].max() - slack) | (rank == rank[chosen].max())
    return kept
