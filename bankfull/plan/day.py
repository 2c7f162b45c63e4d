"""A day of traffic for a simulated fleet: conversations whose turns share prefixes, synthetic or recorded.

The synthetic day has a diurnal curve, short bursts, conversations of a few turns, and lengths and pauses with heavy
tails. A day with fewer requests than its rate gives in 24 hours is shorter: the curve is compressed, while pauses and
token times stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from bankfull.bench.load.workloads import Prompt, RecordedTrace
from bankfull.errors import ConfigError
from bankfull.plan.traffic import TrafficSpec, UniformLengths

MOST_REQUESTS = 10_000_000
SWING = 0.6
"""Amplitude of the diurnal curve, relative to the mean rate."""
BURSTS, BURST_FACTOR, BURST_SHARE = 6, 2.5, 0.005
"""Bursts in a day, their rate relative to the curve, and the fraction of the day that each takes."""
TURNS = 4.0
"""Mean number of requests of a conversation."""
PAUSE_SECONDS, PAUSE_SPREAD = 20.0, 1.0
"""Median pause between an answer and the next turn, and its standard deviation as a logarithm."""
LATER_SHARE = 8
"""A later turn adds one token for this many of a first prompt."""
SYSTEM_PROMPTS = 16
"""Different prefixes that conversations share; a few of them are much more frequent than the others."""
_CONVERSATION, _SYSTEM = 1 << 62, 1 << 61
"""Numbers from which the tokens of users and of system prompts count; generated ones are far below."""


@dataclass(slots=True)
class DayTurn:
    pause: float
    """Seconds after the answer before."""
    new: Sequence[int]
    """Tokens that the user adds."""
    output: int


@dataclass(slots=True)
class DayConversation:
    begins: float
    opening: Sequence[int]
    """Tokens before the first turn: a system prompt."""
    turns: list[DayTurn]


class SyntheticDay:
    def __init__(self, traffic: TrafficSpec, requests: int, context: int, seed: int = 0) -> None:
        """`context`: tokens that a prompt and its output may have together."""
        if not 1 <= requests <= MOST_REQUESTS:
            raise ConfigError(f"--requests {requests} is out of range; give 1 to {MOST_REQUESTS} with --simulate.")
        self.traffic, self.requests, self.context = traffic, requests, context
        self.seconds = requests / traffic.rate
        self._random = np.random.default_rng(seed)
        self._seed = seed
        self._turns = self._turn_counts()
        self._begins = self._begin_times(len(self._turns))
        weights = 1 / np.arange(1, SYSTEM_PROMPTS + 1)
        self._systems = self._random.choice(SYSTEM_PROMPTS, len(self._turns), p=weights / weights.sum())

    def conversations(self) -> Iterator[DayConversation]:
        """In the order of their first turns."""
        shared = self.traffic.shared
        for number, (begins, turns, system) in enumerate(
            zip(self._begins.tolist(), self._turns.tolist(), self._systems.tolist(), strict=True)
        ):
            random = Random(self._seed << 40 | number)
            at = _CONVERSATION + (number << 24)
            parts = []
            for turn in range(turns):
                first = max(1, _drawn(self.traffic.prompt, random) - shared)
                new = first if not turn else max(1, first // LATER_SHARE)
                pause = random.lognormvariate(np.log(PAUSE_SECONDS), PAUSE_SPREAD) if turn else 0.0
                parts.append(DayTurn(pause, range(at, at + new), _drawn(self.traffic.output, random)))
                at += new
            opening = range(_SYSTEM + (system << 24), _SYSTEM + (system << 24) + shared)
            yield DayConversation(begins, opening, parts)

    def rate_at(self, times: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Relative rate of conversations, at times from 0 to 1."""
        curve = 1 - SWING * np.cos(2 * np.pi * times)
        random = np.random.default_rng((self._seed, 1))
        for begin in random.uniform(0, 1 - BURST_SHARE, BURSTS):
            curve = np.where((times >= begin) & (times < begin + BURST_SHARE), BURST_FACTOR * curve, curve)
        return np.asarray(curve)

    def _turn_counts(self) -> np.ndarray[Any, Any]:
        counts = self._random.geometric(1 / TURNS, int(1.2 * self.requests / TURNS) + 64)
        while counts.sum() < self.requests:
            counts = np.concatenate((counts, self._random.geometric(1 / TURNS, len(counts))))
        sums = counts.cumsum()
        last = int(np.searchsorted(sums, self.requests))
        counts = counts[: last + 1]
        counts[-1] -= int(sums[last]) - self.requests
        return np.asarray(counts)

    def _begin_times(self, count: int) -> np.ndarray[Any, Any]:
        grid = np.linspace(0, 1, 20_001)
        share = np.concatenate(([0.0], self.rate_at((grid[1:] + grid[:-1]) / 2).cumsum()))
        drawn = np.sort(self._random.uniform(0, 1, count))
        return np.asarray(np.interp(drawn, share / share[-1], grid) * self.seconds)


def _drawn(lengths: UniformLengths, random: Random) -> int:
    """Log-normal between the ends of the range, which are two standard deviations from the median."""
    if lengths.low == lengths.high:
        return lengths.low
    low, high = np.log(lengths.low), np.log(lengths.high)
    drawn = int(random.lognormvariate((low + high) / 2, (high - low) / 4))
    return min(max(drawn, lengths.low), lengths.high)


class _NumberedPrompts:
    """Prompts of a recorded trace as token ids: equal seeds give equal tokens."""

    def take(self, numbers: Random, tokens: int) -> Prompt:
        first = _CONVERSATION + (numbers.getrandbits(40) << 20)
        return list(range(first, first + tokens))

    def join(self, first: Prompt, second: Prompt) -> Prompt:
        assert isinstance(first, list) and isinstance(second, list)
        return first + second

    def count(self, text: str) -> int:
        raise NotImplementedError("a recorded trace has lengths, not texts")


class RecordedDay:
    """A recorded trace: the formats of `bankfull bench serve --trace`."""

    def __init__(self, path: Path, requests: int, context: int, seed: int = 0) -> None:
        found = RecordedTrace(path).make(requests, seed, _NumberedPrompts())
        self._found = []
        for one in found:
            [turn] = one.turns
            assert isinstance(turn.prompt, list)
            if len(turn.prompt) + turn.max_tokens > context:
                raise ConfigError(
                    f"The trace {path} has a request of {len(turn.prompt)} + {turn.max_tokens} tokens, but a replica "
                    f"holds {context}; leave it out, or choose a device with more memory."
                )
            self._found.append((one.at or 0.0, turn.prompt, turn.max_tokens))
        self.requests = len(self._found)
        self.context = context
        self.seconds = max(self._found[-1][0], 1e-3)

    def conversations(self) -> Iterator[DayConversation]:
        for begins, prompt, output in self._found:
            yield DayConversation(begins, (), [DayTurn(0.0, prompt, output)])


Day = SyntheticDay | RecordedDay
