"""Which samples of a completion a client gets, as docs/sampling.md says: those of the highest mean log-probability."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from tests.trial.case import Ask
from tests.trial.plain import Expected


def made(ask: Ask) -> int:
    """Samples that are generated."""
    return int(ask.get("best_of", ask.get("n", 1)))


def shown(ask: Ask, expected: Sequence[Expected], slack: float) -> list[Expected]:
    """The samples of the answer in its order; all in doubt where rounding, up to `slack` of a mean, could change it."""
    count = ask.get("n", 1)
    if len(expected) <= count:
        return list(expected)
    order = sorted(range(len(expected)), key=lambda child: -_mean(expected[child]))
    means = [_mean(expected[child]) for child in order]
    near = any(a - b < slack for a, b in pairwise(means))
    near |= any(one.doubtful <= len(one.tokens) for one in expected)
    best = [expected[child] for child in order[:count]]
    return [replace(one, doubtful=0) for one in best] if near else best


def _mean(one: Expected) -> float:
    values = [float(line[token]) for line, token in zip(one.logprobs, one.tokens, strict=True)]
    return sum(values) / len(values) if values and one.finish != "error" else -math.inf
